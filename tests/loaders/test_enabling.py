import pytest
import torch

from packhouse import PackedCollator, check_packing, enable_packing
from packhouse.errors import ContractError
from tests.loaders.models import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

IDS = torch.tensor([[5, 6, 7, 8, 9]])
ARANGE = torch.arange(5)[None]
RESTARTS = torch.tensor([[0, 1, 2, 0, 1]])
NUMBERS = torch.tensor([[1, 1, 1, 2, 2]])
BOUNDS = torch.tensor([0, 3, 5])
WITH_A_GAP = torch.tensor([[1, 1, 0, 1, 1]])


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa").eval()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"position_ids": ARANGE, "attention_mask": NUMBERS}, "position_ids do not separate"),
        (
            {"position_ids": torch.tensor([[0, 1, 0, 0, 1]]), "attention_mask": WITH_A_GAP},
            "padding between tokens",
        ),
        ({"attention_mask": WITH_A_GAP}, "padding between tokens"),
        ({"cu_seq_lens_q": BOUNDS}, "has cu_seq_lens_q without position_ids"),
        ({"seq_idx": NUMBERS - 1}, "has seq_idx without position_ids"),
        ({"position_ids": ARANGE, "cu_seq_lens_q": BOUNDS}, "cu_seq_lens_q and position_ids disa"),
        ({"position_ids": ARANGE, "seq_idx": NUMBERS - 1}, "seq_idx and position_ids disagree"),
    ],
)
def test_boundaries_that_the_model_would_not_see_are_refused(model, batch, message):
    with enable_packing(model), pytest.raises(ContractError, match=message):
        model(input_ids=IDS, **batch)


@pytest.mark.parametrize(
    "marks",
    [
        {"position_ids": RESTARTS},
        {"position_ids": RESTARTS, "attention_mask": torch.ones(1, 5, dtype=torch.int64)},
        {"attention_mask": NUMBERS},
    ],
)
def test_a_packed_batch_with_a_cache_is_refused(model, marks):
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with enable_packing(model), pytest.raises(ContractError, match="has past_key_values"):
        model(input_ids=IDS, past_key_values=cache, **marks)


def test_left_padded_prompts_are_generated_from_as_before(model):
    ids, mask = torch.tensor([[5, 6, 7], [0, 8, 9]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    settings = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    plain = model.generate(ids, **settings)
    for use_cache in (True, False):
        with enable_packing(model):
            assert torch.equal(model.generate(ids, use_cache=use_cache, **settings), plain)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_follows_the_longest_record_is_refused_over_its_window(kind):
    from transformers import AutoModelForCausalLM, LlamaConfig

    factors = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8} if kind == "longrope" else {}
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, **factors}
    if kind == "longrope":
        rope["original_max_position_embeddings"] = 16
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        max_position_embeddings=16, rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    def batch(*lengths):
        rows = [{"input_ids": list(range(3, 3 + n)), "seq_lengths": [n]} for n in lengths]
        return PackedCollator()(rows)

    assert not check_packing(model, batch(20, 6)).is_safe
    with enable_packing(model):
        check_packing(model, batch(15, 6)).require_safe()
        with pytest.raises(ContractError, match=f"RoPE of type '{kind}'"):
            model(**batch(20, 6))


def test_handles_may_be_disabled_in_any_order():
    from transformers import LlamaConfig, LlamaModel

    plain = LlamaModel.forward
    for first, second in ((0, 1), (1, 0)):
        handles = [enable_packing(LlamaConfig()), enable_packing("llama")]
        handles[first].disable()
        assert LlamaModel.forward is not plain
        handles[second].disable()
        assert LlamaModel.forward is plain


def test_bounds_that_merge_records_are_refused_where_the_kernel_reads_them(model):
    packed = {"input_ids": IDS, "position_ids": RESTARTS, "use_cache": False}
    whole = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), BOUNDS)
    whole |= dict.fromkeys(("max_length_q", "max_length_k"), 3)
    merged = whole | {"cu_seq_lens_q": torch.tensor([0, 5]), "max_length_q": 5}
    with enable_packing(model):
        plain = model(**packed, **whole).logits
        # sdpa separates records only by positions, and dispatchers shorten the boundaries
        assert torch.equal(model(**packed, **merged).logits, plain)
        model.config._attn_implementation = "flash_attention_2"
        for wrong in (
            merged,
            whole | {"cu_seq_lens_k": torch.tensor([0, 5])},
            whole | {"cu_seq_lens_q": torch.tensor([0, 3])},
            whole | {"max_length_q": 2},
        ):
            with pytest.raises(ContractError, match="and position_ids disagree on where"):
                model(**packed, **wrong)


def test_a_model_that_was_compiled_before_is_guarded_and_freed(model):
    """Compiled code does not look for hooks that were added later."""
    model.config.use_cache = False  # nothing else that the code looks at changes
    del model.model.layers[1:]  # compiling takes a second for each
    compiled = torch.compile(model, backend="eager")
    batch = {"input_ids": IDS, "position_ids": RESTARTS, "attention_mask": torch.ones_like(IDS)}

    def logits():
        with torch.no_grad():
            return compiled(**batch).logits[:, 3:]

    with torch.no_grad():
        alone = model(input_ids=IDS[:, 3:]).logits
    plain = logits()
    assert (plain - alone).abs().max() > 1  # the second record sees the first
    with enable_packing(compiled):
        torch.testing.assert_close(logits(), alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits(), plain)
    torch._dynamo.reset()


def test_a_pack_that_is_called_one_record_is_refused(model):
    from packhouse import PackedDataset

    pack = {"input_ids": [*range(3, 40)], "labels": [*range(3, 40)], "seq_lengths": [5, 20, 12]}
    ids = PackedDataset([pack])[0]["input_ids"][None]
    whole = torch.arange(ids.shape[1])[None]
    pads = torch.zeros(1, 2, dtype=torch.int64)
    padded = {"input_ids": torch.cat([pads, ids], 1)}
    padded["attention_mask"] = torch.cat([pads, torch.ones_like(ids)], 1)
    cut = {"input_ids": torch.cat([IDS, ids[:, :22]], 1)}
    cut["position_ids"] = torch.cat([ARANGE, whole[:, :22]], 1)
    with enable_packing(model):
        for batch in ({"input_ids": ids}, {"input_ids": ids, "position_ids": whole}, padded, cut):
            with pytest.raises(ContractError, match="several records of a pack as one"):
                model(**batch)
        model(**PackedCollator()([pack]))
        model(input_ids=ids[:, :5])
        with pytest.warns(UserWarning, match="no position_ids, so each row is trained as one"):
            model.train()(input_ids=IDS)


# `check_packing`: results that prove nothing, and all forms of boundaries.


def test_logits_that_are_not_numbers_prove_nothing(model):
    batch = PackedCollator()([{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}])
    with enable_packing(model):
        model.lm_head.weight.data[3] = torch.nan
        report = check_packing(model, batch)

    assert not report.is_safe
    assert "logits are not finite" in str(report)
    with pytest.raises(ContractError, match="INCONCLUSIVE"):
        report.require_safe()


@pytest.mark.parametrize(
    "mark",
    [
        {"attention_mask": NUMBERS},
        {"cu_seq_lens_q": BOUNDS},
        {"seq_idx": NUMBERS - 1},
        {"seq_lengths": [torch.tensor([3, 2])]},
    ],
)
def test_records_are_found_by_any_form_of_boundaries(model, mark):
    if "seq_lengths" in mark:
        mark = {"seq_lengths": mark["seq_lengths"][0]}
    batch = {"input_ids": IDS, "position_ids": ARANGE, "use_cache": False} | mark
    report = check_packing(model, batch)

    assert report.num_records == 2
    assert report.max_leak > 1.0
    assert not report.is_safe


def test_batches_without_two_records_in_a_row_prove_nothing(model):
    with enable_packing(model):
        for ids in (IDS, IDS.repeat(2, 1)):
            report = check_packing(model, {"input_ids": ids, "position_ids": ARANGE.expand_as(ids)})
            assert not report.is_safe
            with pytest.raises(ContractError, match="no row contains two records"):
                report.require_safe()


@pytest.mark.parametrize("part", ["o_proj", "lm_head"])
def test_weights_that_begin_as_zeros_prove_nothing(model, part):
    """The mask of ones leaks as soon as these weights have learned something."""
    batch = PackedCollator()([{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}])
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    assert check_packing(model, batch).max_leak > 1.0

    for name, weight in model.named_parameters():
        if part in name:
            torch.nn.init.zeros_(weight)
    report = check_packing(model, batch)

    assert report.max_leak == report.max_response == 0.0
    assert not report.is_safe
    with pytest.raises(ContractError, match=r"INCONCLUSIVE, no token affects .* are zero"):
        report.require_safe()


def test_frozen_parts_stay_in_eval(model):
    model.train()
    model.model.layers[0].eval()
    check_packing(model, {"input_ids": IDS, "position_ids": ARANGE})

    assert model.training
    assert not model.model.layers[0].training
    assert not model.model.layers[0].mlp.training
    assert model.model.layers[1].mlp.training

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


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa")


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
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2]])},
        {"cu_seq_lens_q": torch.tensor([0, 3, 5])},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1]])},
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

"""Packed logits, losses and gradients equal those of each record alone, on real model code."""

from typing import Any

import numpy as np
import pytest
import torch

from packhouse import (
    PackedCollator,
    check_packing,
    count_targets,
    enable_packing,
    token_loss,
)
from packhouse.addons.torch.enable_packing import FAMILIES
from packhouse.errors import ConfigError, ContractError
from tests.loaders.models import tiny_model

# transformers and torch's compiler use deprecated torch functions; flex attention warns to compile.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
]


@pytest.fixture(autouse=True)
def _quick():
    """Run flex attention as plain torch code: compiling CPU kernels takes a minute per model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    lengths = (7, 13, 1, 23)
    return [{"input_ids": rng.integers(3, 97, n), "seq_lengths": [n]} for n in lengths]


@pytest.fixture
def batch(rows):
    return PackedCollator()(rows)


# transformers has no sdpa for gemma2, because it caps attention scores.
COMBINATIONS = [(family, "eager" if family == "gemma2" else "sdpa") for family in FAMILIES]
COMBINATIONS += [("llama", "eager")]
COMBINATIONS += [(family, "flex_attention") for family in ("llama", "mistral", "gemma2")]


@pytest.mark.parametrize(("family", "attention"), COMBINATIONS)
def test_every_family_leaks_by_default_and_is_safe_when_enabled(family, attention, batch):
    model = tiny_model(family, attention)

    before = check_packing(model, batch)
    with enable_packing(model):
        after = check_packing(model, batch)
    undone = check_packing(model, batch)

    assert not before.is_safe
    assert before.max_leak > 1.0
    assert after.is_safe
    # Experts process all their tokens as one matrix, which rounds differently.
    assert after.max_leak <= (2e-6 if "moe" in family or family == "mixtral" else 0.0)
    assert after.max_difference < 2e-5
    assert undone == before


@pytest.mark.parametrize(
    ("family", "attention"),
    [("gemma2", "eager"), ("mixtral", "sdpa"), ("mistral", "flex_attention")],
)
def test_packed_loss_and_gradients_are_those_of_the_records(family, attention, rows, monkeypatch):
    if attention == "flex_attention":
        # Uncompiled flex attention is differentiable on CPUs too; torch forbids it for its kernels.
        import torch.nn.attention.flex_attention as flex

        monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    model = tiny_model(family, attention, scale=0.05)
    whole = PackedCollator()(rows)
    total = count_targets(whole)

    with enable_packing(model):
        packed_loss, packed = _gradients(model, [whole], total)
        loss = model(**whole).loss.item()  # transformers' own
    alone_loss, alone = _gradients(model, [PackedCollator()([row]) for row in rows], total)

    assert packed_loss == pytest.approx(alone_loss, abs=1e-5)
    assert loss == pytest.approx(alone_loss, abs=1e-5)
    assert max(float(abs(g - a).max()) for g, a in zip(packed, alone, strict=True)) <= 1e-5
    assert max(float(abs(g).max()) for g in packed) > 1e-2  # gradients that are not negligible

    _, leaky = _gradients(model, [whole], total, use_cache=True)
    assert max(float(abs(g - a).max()) for g, a in zip(leaky, alone, strict=True)) > 1e-3


def _gradients(model: Any, batches: Any, total: int, **settings: Any) -> Any:
    model.zero_grad()
    loss = torch.tensor(0.0)
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        loss = loss + token_loss(model(**inputs, **settings).logits, batch["labels"], total)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_an_all_ones_mask_leaks_and_check_packing_reports_it(attention, batch):
    model = tiny_model("llama", attention)
    model.config.use_cache = False
    masked = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}

    report = check_packing(model, masked)

    assert report.max_leak > 1.0
    assert not report.is_safe
    assert str(report).startswith("RECORDS SEE EACH OTHER")
    with pytest.raises(ContractError, match="Call enable_packing"):
        report.require_safe()
    with enable_packing(model):
        check_packing(model, masked).require_safe()


def test_padding_on_the_right_is_dropped_and_on_the_left_refused(rows):
    model = tiny_model("llama", "sdpa")
    batch = PackedCollator(pad_to_multiple_of=64)(rows)
    mask = torch.ones_like(batch["input_ids"])
    mask[:, 44:] = 0
    with enable_packing(model):
        check_packing(model, batch | {"attention_mask": mask}).require_safe()
        with pytest.raises(ContractError, match="padded on the left"):
            model(**batch | {"attention_mask": mask.flip(-1)})
        with pytest.raises(ContractError, match="its own attention_mask"):
            model(**batch | {"attention_mask": torch.ones(1, 1, 64, 64)})
        with pytest.raises(
            ContractError, match="numbers records that position_ids do not separate"
        ):
            model(**batch | {"attention_mask": torch.arange(64)[None]})


def test_a_config_or_a_name_guards_models_made_later_until_disabled(batch, tmp_path):
    from transformers import LlamaConfig

    masked = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    config = LlamaConfig(use_cache=True)
    config.save_pretrained(tmp_path)
    for target in ("llama", config, str(tmp_path)):
        handle = enable_packing(target)
        assert check_packing(tiny_model("llama", "sdpa"), masked).is_safe
        handle.disable()
        handle.disable()
        assert not check_packing(tiny_model("llama", "sdpa"), masked).is_safe


def test_models_that_cannot_separate_records_are_refused(batch):
    from transformers import GPT2Config, Llama4TextConfig, MambaConfig

    for config in (GPT2Config(), MambaConfig(), Llama4TextConfig()):
        with pytest.raises(ConfigError, match=f"does not support model type '{config.model_type}'"):
            enable_packing(config)
    with pytest.raises(ConfigError, match="does not support model type 'None'"):
        enable_packing(torch.nn.Linear(1, 1))
    model = tiny_model("llama", "sdpa")
    model.config._attn_implementation = "paged|eager"
    with pytest.raises(ConfigError, match=r"attention 'paged\|eager' is not known"):
        enable_packing(model)
    model.config._attn_implementation = "sdpa"
    with enable_packing(model):
        model.config._attn_implementation = "flash_attention_2"
        two = {key: batch[key].expand(2, -1) for key in ("input_ids", "position_ids")}
        with pytest.raises(ContractError, match="a batch of one row, got 2 rows"):
            model(**two)
    with pytest.raises(ContractError, match="needs position_ids"):
        check_packing(model, {"input_ids": batch["input_ids"]})


def test_gradient_checkpointing_stays_safe(batch):
    model = tiny_model("llama", "sdpa")
    with enable_packing(model):
        plain = model(**batch).loss
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        torch.testing.assert_close(model(**batch).loss, plain)

"""On an accelerator: the same safety, and what packing saves there. Skipped where there is none."""

import itertools
import time
from typing import Any

import pytest
import torch

from packhouse.loaders import (
    PackedCollator,
    PackedDataset,
    PaddedCollator,
    check_packing,
    enable_packing,
    make_supervised_dataset,
)
from tests.loaders.models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def _attentions() -> list[str]:
    from transformers.utils import is_flash_attn_2_available

    flash = ["flash_attention_2"] if is_flash_attn_2_available() else []
    return ["eager", "sdpa", "flex_attention", *flash]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention", "flash_attention_2"])
def test_records_are_kept_apart_in_half_precision(attention):
    if attention not in _attentions():
        pytest.skip("flash-attn is not installed")
    model = tiny_model("llama", attention).to("cuda", torch.bfloat16)
    rows = [{"input_ids": torch.randint(3, 97, (n,)), "seq_lengths": [n]} for n in (7, 13, 1, 23)]
    batch = PackedCollator()(rows)

    assert not check_packing(model, batch).is_safe
    with enable_packing(model):
        check_packing(model, batch).require_safe()


def test_packing_trains_on_many_times_the_tokens_a_second(shared, tmp_path, record_property):
    records = make_supervised_dataset(
        str(shared / "tokenizers" / "qwen2.5-instruct"),
        str(shared / "data" / "alpaca_data.json"),
        query_field="instruction",
        resp_field="output",
        cache=tmp_path,
    )
    packs = PackedDataset([records[i] for i in range(4000)], seq_len=4096)
    model = _model().to("cuda", torch.bfloat16)
    collate = PaddedCollator(pad_token_id=0, padding="max_length", max_length=4096)
    padded = useful_tokens_per_s(model, [collate([records[i]]) for i in range(40)])
    with enable_packing(model):
        packed = useful_tokens_per_s(model, [PackedCollator()([packs[i]]) for i in range(40)])
    start = time.perf_counter()
    num_loaded = sum(len(PackedCollator()([packs[i]])["input_ids"][0]) for i in range(40))
    loaded = num_loaded / (time.perf_counter() - start)

    for name, rate in (("packed", packed), ("padded", padded), ("loaded", loaded)):
        record_property(f"{name} useful tokens/s", round(rate))
    assert packed >= 6 * padded
    assert loaded >= 2 * packed


def _model() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=151_680,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def useful_tokens_per_s(model: Any, batches: list[dict[str, Any]]) -> float:
    """Tokens of records, pads not counted, that forward and backward take in a second."""
    device = next(model.parameters()).device

    def step(batch: dict[str, Any]) -> int:
        inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
        model(**inputs).loss.backward()
        model.zero_grad()
        mask = batch.get("attention_mask")
        return batch["input_ids"].numel() if mask is None else int(mask.sum())

    for batch in itertools.islice(batches, 3):
        step(batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    tokens = sum(step(batch) for batch in batches)
    torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start)

"""The same guarantees on an accelerator, and the savings of packing there. Skipped without one.

`make gpu` runs these tests and prints their measurements. They use no network and no files outside
the repository: models are made from configs, and records have the lengths of the real Alpaca data.
"""

import itertools
import logging
import time
from typing import Any

import numpy as np
import pytest
import torch

from packhouse import (
    PackedCollator,
    PackedDataset,
    PaddedCollator,
    block_causal_mask,
    block_mask,
    check_packing,
    cu_seqlens,
    enable_packing,
    segment_ids,
)
from tests.loaders.models import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def on_gpu(test: Any) -> Any:
    needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
    return pytest.mark.gpu(pytest.mark.timeout(900)(needs_one(test)))


log = logging.getLogger("packhouse.gpu")

# Tokens per row of alpaca_data.json with Alpaca's template and Qwen 2.5's tokenizer, at these
# quantiles.
SHARES = [*(n / 20 for n in range(20)), 0.99, 0.999, 1.0]
TOKENS = [
    32, 47, 52, 57, 61, 64, 68, 72, 77, 82, 88, 96, 103, 111, 119, 128, 138, 150, 166, 197, 303,
    478, 1120,
]  # fmt: skip


def alpaca_records(num_records: int, vocabulary: int) -> list[dict[str, Any]]:
    """Random tokens in records of real lengths, the second half of each trained."""
    rng = np.random.default_rng(0)
    lengths = np.interp(rng.random(num_records), SHARES, TOKENS).astype(int)
    records = []
    for length in lengths.tolist():
        ids = rng.integers(3, vocabulary, length)
        labels = np.where(np.arange(length) < length // 2, -100, ids)
        records.append({"input_ids": ids, "labels": labels})
    return records


def _is_missing(attention: str) -> bool:
    from transformers.utils import is_flash_attn_2_available

    return attention == "flash_attention_2" and not is_flash_attn_2_available()


@on_gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention", "flash_attention_2"])
def test_records_are_kept_apart_in_half_precision(family, attention):
    if _is_missing(attention):
        pytest.skip("flash-attn is not installed")
    if (family, attention) == ("gemma2", "sdpa"):
        pytest.skip("transformers has no sdpa for gemma2: it caps attention scores")
    model = tiny_model(family, attention).to("cuda", torch.bfloat16)
    rows = [{"input_ids": torch.randint(3, 97, (n,)), "seq_lengths": [n]} for n in (7, 13, 1, 23)]
    batch = PackedCollator()(rows)

    if attention != "flash_attention_2":  # which reads cu_seq_lens, whatever the cache
        assert not check_packing(model, batch).is_safe
    with enable_packing(model):
        check_packing(model, batch).require_safe()


def kernels(device: str) -> dict[str, Any]:
    """Attention of random heads by each kernel with each of our masks, [tokens, heads, size]."""
    from torch.nn.attention.flex_attention import flex_attention

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    lengths = [130, 7, 1, 118]
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    query, key, value = torch.randn(3, 1, 4, sum(lengths), 64, device=device).to(dtype)
    segments = segment_ids(positions)
    dense = block_causal_mask(segments, dtype)
    sdpa = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)
    flex = torch.compile(flex_attention) if device == "cuda" else flex_attention
    found = {"sdpa": sdpa, "flex": flex(query, key, value, block_mask=block_mask(segments))}
    found = {name: each[0].transpose(0, 1) for name, each in found.items()}
    if device == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        bounds = cu_seqlens(positions)
        flat = [each[0].transpose(0, 1).contiguous() for each in (query, key, value)]
        found["varlen"] = varlen_attn(
            *flat, bounds, bounds, max(lengths), max(lengths), window_size=(-1, 0)
        )
    alone = [
        torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1)
        for part in zip(*(each.split(lengths, dim=2) for each in (query, key, value)), strict=True)
    ]
    return found | {"alone": torch.cat(alone)}


@on_gpu
def test_every_mask_gives_each_kernel_the_attention_of_each_record_alone():
    found = kernels("cuda")
    for name, each in found.items():
        difference = float((each.float() - found["alone"].float()).abs().max())
        log.info("%s against alone: %.2g", name, difference)
        assert difference < 3e-2, name


def test_masks_agree_on_a_processor_too():
    torch.compiler.set_stance("force_eager")
    try:
        found = kernels("cpu")
    finally:
        torch.compiler.set_stance("default")
    torch.testing.assert_close(found["sdpa"], found["alone"])
    torch.testing.assert_close(found["flex"], found["alone"])


@on_gpu
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention", "flash_attention_2"])
def test_packing_trains_on_many_times_the_tokens_a_second(attention, record_property):
    if _is_missing(attention):
        pytest.skip("flash-attn is not installed")
    sizes = {
        "vocab_size": 151_680,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    rates = measure("cuda", attention, sizes, seq_len=4096, num_batches=30)

    for name, rate in rates.items():
        record_property(f"{attention}: {name} tokens/s", round(rate))
        log.info("%s: %s %s tokens/s", attention, name, f"{rate:,.0f}")
    log.info("%s: packed %.1f times padded", attention, rates["packed"] / rates["padded"])
    assert rates["packed"] >= 6 * rates["padded"]
    assert rates["loaded"] >= 2 * rates["packed"]


def test_the_measurement_runs_on_a_processor_too():
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    rates = measure("cpu", "sdpa", sizes, seq_len=1200, num_batches=4)

    assert rates.keys() == {"loaded", "padded", "packed"}
    assert min(rates.values()) > 0


def measure(
    device: str, attention: str, sizes: dict[str, int], seq_len: int, num_batches: int
) -> dict[str, float]:
    """Useful tokens per second: packed, padded to `seq_len`, and loaded one by one."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    records = alpaca_records(num_batches * seq_len // 80, sizes["vocab_size"])
    packs = PackedDataset(records, seq_len=seq_len)
    num_batches = min(num_batches, len(packs))
    config = LlamaConfig(max_position_embeddings=seq_len, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    collate = PaddedCollator(pad_token_id=0, padding="max_length", max_length=seq_len)
    padded = [collate([records[i]]) for i in range(num_batches)]
    start = time.perf_counter()
    packed = [PackedCollator()([packs[i]]) for i in range(num_batches)]
    seconds = time.perf_counter() - start
    rates = {"loaded": sum(batch["input_ids"].numel() for batch in packed) / seconds}
    # Padded to one length, so that the model is not compiled for the shape of each pack.
    same = PackedCollator(pad_to_multiple_of=seq_len)
    packed = [same([packs[i]]) for i in range(num_batches)]
    useful = [len(packs[i]["input_ids"]) for i in range(num_batches)]
    rates["padded"] = tokens_per_s(model, padded, [int(b["attention_mask"].sum()) for b in padded])
    with enable_packing(model):
        rates["packed"] = tokens_per_s(model, packed, useful)
    return rates


def tokens_per_s(model: Any, batches: list[dict[str, Any]], useful: list[int]) -> float:
    """Tokens of records, without padding, that forward and backward process per second."""
    device = next(model.parameters()).device

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def step(batch: dict[str, Any]) -> None:
        inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
        model(**inputs).loss.backward()
        model.zero_grad()

    for batch in itertools.islice(batches, 3):
        step(batch)
    wait()
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    wait()
    return sum(useful) / (time.perf_counter() - start)

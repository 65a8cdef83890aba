"""The same guarantees on an accelerator. Skipped without one; `make gpu` runs these tests.

They use no network and no files outside the repository: models are made from configs.
"""

import logging
from typing import Any

import pytest
import torch

from packhouse import (
    PackedCollator,
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

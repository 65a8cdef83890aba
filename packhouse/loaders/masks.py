"""Masks that keep packed records apart, for attention that does not read `position_ids` itself.

transformers 5 cuts at position restarts by itself if it is given no mask and no cache
(`enable_packing` sees to that), so most trainers need nothing from here. These are for models of
your own. Records are the runs in which `position_ids` rise by one.

| form | memory at T tokens | for |
|---|---|---|
| `cu_seqlens` | 4 bytes a record | flash-attention's varlen functions |
| `block_mask` | T^2 / 128^2 blocks | flex attention |
| `block_causal_mask` | 4 T^2 bytes (float32) | eager and sdpa; never a boolean: eager adds masks |

A mask given to a transformers model **replaces** its own, so it must hold the sliding window too.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["block_causal_mask", "block_mask", "cu_seqlens", "packed_mask_mod", "segment_ids"]


def segment_ids(position_ids: torch.Tensor) -> torch.Tensor:
    """Number of the record that each token belongs to, int64 [batch, T], from 0 in each row.

    Example:
        >>> segment_ids(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [[0, 0, 0, 1, 1]]
    """
    steps = torch.diff(position_ids, dim=-1, prepend=position_ids[..., :1] - 1)
    return (steps != 1).cumsum(-1)


def cu_seqlens(position_ids: torch.Tensor) -> torch.Tensor:
    """Boundaries of the records of all rows laid behind one another, int32 [num_records + 1].

    Example:
        >>> cu_seqlens(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [0, 3, 5]
    """
    first = torch.zeros_like(position_ids, dtype=torch.bool)
    first[..., 0] = True
    first[..., 1:] = torch.diff(position_ids, dim=-1) != 1
    starts = first.flatten().nonzero().flatten()
    end = torch.tensor([position_ids.numel()], device=starts.device)
    return torch.cat([starts, end]).to(torch.int32)


def packed_mask_mod(
    segments: torch.Tensor, sliding_window: int | None = None
) -> Callable[[Any, Any, Any, Any], Any]:
    """`mask_mod` for flex attention: causal, within a record, within the window.

    Args:
        segments: record number per token, int [batch, T] (`segment_ids`).
        sliding_window: a token sees itself and the `sliding_window - 1` before it; None: all.
    """

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = (key <= query) & (segments[batch, query] == segments[batch, key])
        return seen if sliding_window is None else seen & (query - key < sliding_window)

    return mask_mod


def block_mask(segments: torch.Tensor, sliding_window: int | None = None) -> Any:
    """BlockMask for flex attention; blocks that no record crosses are skipped.

    Args:
        segments: record number per token, int [batch, T].
        sliding_window: as in `packed_mask_mod`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    batch, length = segments.shape
    mask_mod = packed_mask_mod(segments, sliding_window)
    return create_block_mask(mask_mod, batch, None, length, length, device=segments.device)


def block_causal_mask(
    segments: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Additive mask [batch, 1, T, T]: 0 where a token (dim 2) sees another (dim 3), else the least.

    Args:
        segments: record number per token, int [batch, T].
        dtype: a floating type, that of the attention scores.
        sliding_window: as in `packed_mask_mod`.

    Example:
        >>> mask = block_causal_mask(torch.tensor([[0, 0, 1]]))
        >>> (mask == 0).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    place = torch.arange(segments.shape[-1], device=segments.device)
    apart = place[:, None] - place[None, :]
    seen = (segments[:, :, None] == segments[:, None, :]) & (apart >= 0)
    if sliding_window is not None:
        seen = seen & (apart < sliding_window)
    mask = torch.zeros(seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None]

"""Masks that keep packed records apart, for attention that does not read `position_ids` itself.

transformers 5 cuts attention where `position_ids` restart if it gets no mask and no cache
(`enable_packing` sees to that), so most trainers need nothing from here. These are for models of
your own. A record is a run in which `position_ids` rise by one.

| form | memory at T tokens | for |
|---|---|---|
| `cu_seqlens` | 4 bytes a record | flash-attention's varlen functions |
| `block_mask` | T^2 / 128^2 blocks | flex attention |
| `block_causal_mask` | 4 T^2 bytes (float32) | eager and sdpa; never a boolean: eager adds masks |

A mask given to a transformers model **replaces** its own, so it must hold the sliding window too.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def record_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Return a mask of the first token of each record, bool [batch, T].

    Example:
        >>> record_starts(torch.tensor([[0, 1, 2, 0, 1]])).int().tolist()
        [[1, 0, 0, 1, 0]]
    """
    # The first difference of a row is 0, so a record starts there wherever positions begin.
    return torch.diff(position_ids, dim=-1, prepend=position_ids[..., :1]) != 1


def segment_ids(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of the record that each token belongs to, int64 [batch, T], from 0 a row.

    Example:
        >>> segment_ids(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [[0, 0, 0, 1, 1]]
    """
    return record_starts(position_ids).cumsum(-1) - 1


def cu_seqlens(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the bounds of the records of all rows, one row after another, int32 [num_records + 1].

    Example:
        >>> cu_seqlens(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [0, 3, 5]
    """
    starts = record_starts(position_ids).flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=position_ids.numel()).to(torch.int32)


MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of flex attention: numbers of row, head, query and key -> whether the query sees the key."""


def packed_mask_mod(segments: torch.Tensor, sliding_window: int | None = None) -> MaskMod:
    """Return a `mask_mod` for flex attention: causal, within a record, within the window.

    Args:
        segments: record number per token, int [batch, T] (`segment_ids`).
        sliding_window: a token sees itself and the `sliding_window - 1` before it; None: all.

    Example:
        >>> sees = packed_mask_mod(torch.tensor([[0, 0, 1]]))
        >>> query, key = torch.arange(3)[:, None], torch.arange(3)
        >>> sees(torch.tensor(0), torch.tensor(0), query, key).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """

    def mask_mod(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        seen = (key <= query) & (segments[batch, query] == segments[batch, key])
        return seen if sliding_window is None else seen & (query - key < sliding_window)

    return mask_mod


def block_mask(segments: torch.Tensor, sliding_window: int | None = None) -> "BlockMask":
    """Return a BlockMask for flex attention, which skips blocks that no record crosses.

    Args:
        segments: record number per token, int [batch, T].
        sliding_window: as in `packed_mask_mod`.

    Example:
        >>> mask = block_mask(torch.tensor([[0] * 128 + [1] * 128]))
        >>> mask.shape, round(mask.sparsity())
        ((1, 1, 256, 256), 50)
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
    """Return an additive mask [batch, 1, T, T]: 0 where dim 2 sees dim 3, else the least number.

    Args:
        segments: record number per token, int [batch, T].
        dtype: a floating type, that of the attention scores.
        sliding_window: as in `packed_mask_mod`.

    Example:
        >>> mask = block_causal_mask(torch.tensor([[0, 0, 1]]))
        >>> (mask == 0).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    token = torch.arange(segments.shape[-1], device=segments.device)
    row = torch.arange(len(segments), device=segments.device)[:, None, None]
    seen = packed_mask_mod(segments, sliding_window)(row, None, token[:, None], token)
    mask = torch.zeros(seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None]

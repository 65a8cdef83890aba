"""From trained byte spans of the text to trained ranges of tokens.

A token is trained if and only if it *begins* inside a trained span: the model predicts a token
from what is before it, so a token that begins in the prompt is the prompt's to give. Two binary
searches per span; nothing is done per token.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["TrainedRanges", "train_ranges"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRanges:
    """Trained tokens of each row, as half-open ranges of its tokens."""

    starts: Int64s
    """First token of each range, counted from its row's first. Ranges are never empty."""

    ends: Int64s
    """Token behind each range."""

    offsets: Int64s
    """Where each row's ranges begin, shape [num_rows + 1]."""

    num_trained: Int64s
    """Trained tokens per row."""

    straddles_start: int
    """Spans whose first bytes lie in a token that begins before: that token is not trained."""

    straddles_end: int
    """Spans whose last token, which is trained, ends behind them."""


def train_ranges(
    starts: Int64s,
    ends: Int64s,
    token_offsets: Int64s,
    span_starts: Int64s,
    span_ends: Int64s,
    span_offsets: Int64s,
) -> TrainedRanges:
    """Find the tokens that begin inside each trained span.

    Args:
        starts: first byte of each token, never falling; shape [num_tokens].
        ends: byte behind each token.
        token_offsets: where each row's tokens begin, shape [num_rows + 1].
        span_starts: first byte of each trained span, in the same count of bytes as `starts`.
        span_ends: byte behind each span.
        span_offsets: where each row's spans begin, shape [num_rows + 1].

    Returns:
        One range per span that holds the beginning of a token, even if ranges touch.

    Example:
        >>> tokens = np.array([0, 2, 3, 7, 9])  # five tokens of one row, edges 0 2 3 7 9
        >>> ranges = train_ranges(tokens[:-1], tokens[1:], np.array([0, 4]),
        ...                       np.array([1]), np.array([8]), np.array([0, 1]))
        >>> ranges.starts.tolist(), ranges.ends.tolist()  # [0, 2) begins before byte 1
        ([1], [4])
        >>> ranges.straddles_start, ranges.straddles_end
        (1, 1)
    """
    rows = np.repeat(np.arange(len(span_offsets) - 1), np.diff(span_offsets))
    lower, upper = token_offsets[rows], token_offsets[rows + 1]
    first = np.clip(np.searchsorted(starts, span_starts, "left"), lower, upper)
    last = np.clip(np.searchsorted(starts, span_ends, "left"), lower, upper)
    last = np.maximum(last, first)
    is_filled = last > first
    before = first > lower
    straddles_start = int((ends[first[before] - 1] > span_starts[before]).sum())
    straddles_end = int((ends[last[is_filled] - 1] > span_ends[is_filled]).sum())
    num_rows = len(span_offsets) - 1
    counts = np.bincount(rows[is_filled], minlength=num_rows)
    trained = np.bincount(rows, weights=(last - first).astype(np.float64), minlength=num_rows)
    return TrainedRanges(
        starts=(first - lower)[is_filled],
        ends=(last - lower)[is_filled],
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        num_trained=trained.astype(np.int64),
        straddles_start=straddles_start,
        straddles_end=straddles_end,
    )

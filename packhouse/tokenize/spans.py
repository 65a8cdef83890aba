"""From trained byte spans of the text to trained ranges of tokens.

A token is trained if and only if it *begins* inside a trained span: the model predicts a token
from what is before it, so a token that begins in the prompt is the prompt's to give. Two binary
searches per span; nothing is done per token.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from packhouse.records.lists import list_items
from packhouse.system.arrays import Bools, Int64s
from packhouse.tokenize.encoders import text_bases
from packhouse.tokenize.offsets import EncodedRows

_BLOCK = 512  # spans


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Byte spans of all rows, counted over the texts of all rows."""

    starts: Int64s
    """First byte of each span."""

    ends: Int64s
    """Byte behind each span."""

    offsets: Int64s
    """Where each row's spans begin, shape [num_rows + 1]."""

    @staticmethod
    def of(column: pa.ListArray, texts: pa.StringArray) -> "Spans":
        """Flatten a column of spans that count from the beginning of each text."""
        values, offsets = list_items(column)
        shift = np.repeat(text_bases(texts)[:-1], np.diff(offsets))
        starts = values.field("start").to_numpy() + shift
        ends = values.field("end").to_numpy() + shift
        assert (starts <= ends).all(), "a span ends before it starts"
        return Spans(starts, ends, offsets)

    def of_row(self, row: int, base: int) -> list[tuple[int, int]]:
        """Spans of one row, counted from `base`."""
        place = slice(self.offsets[row], self.offsets[row + 1])
        starts, ends = self.starts[place] - base, self.ends[place] - base
        return list(zip(starts.tolist(), ends.tolist(), strict=True))


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

    is_kept: Bools
    """Which spans have a range: those in which a token begins."""

    straddles_start: int
    """Spans whose first bytes lie in a token that begins before: that token is not trained."""

    straddles_end: int
    """Spans whose last token, which is trained, ends behind them."""


def train_ranges(encoded: EncodedRows, spans: Spans) -> TrainedRanges:
    """Find the tokens that begin inside each trained span.

    Returns:
        One range per span that holds the beginning of a token, even if ranges touch.

    Example:
        >>> edges, row = np.array([0, 2, 3, 7, 9]), np.array([0, 4])  # four tokens of one row
        >>> encoded = EncodedRows(np.zeros(4, np.int32), row, edges[:-1], edges[1:], row == row)
        >>> ranges = train_ranges(encoded, Spans(np.array([1]), np.array([8]), np.array([0, 1])))
        >>> ranges.starts.tolist(), ranges.ends.tolist()  # [0, 2) begins before byte 1
        ([1], [4])
        >>> ranges.straddles_start, ranges.straddles_end
        (1, 1)
    """
    num_rows = len(spans.offsets) - 1
    rows = np.repeat(np.arange(num_rows), np.diff(spans.offsets))
    lower, upper = encoded.offsets[rows], encoded.offsets[rows + 1]
    first = np.clip(_tokens_before(spans.starts, rows, encoded), lower, upper)
    last = np.clip(_tokens_before(spans.ends, rows, encoded), first, upper)
    is_filled = last > first
    straddles_start = int(_is_crossed(spans.starts, first, lower, encoded).sum())
    straddles_end = int((encoded.ends[last[is_filled] - 1] > spans.ends[is_filled]).sum())
    counts = np.bincount(rows[is_filled], minlength=num_rows)
    trained = np.bincount(rows, weights=(last - first).astype(np.float64), minlength=num_rows)
    return TrainedRanges(
        starts=(first - lower)[is_filled],
        ends=(last - lower)[is_filled],
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        num_trained=trained.astype(np.int64),
        is_kept=np.asarray(is_filled),
        straddles_start=straddles_start,
        straddles_end=straddles_end,
    )


def prompt_ends(spans: Spans) -> Int64s:
    """Return the numbers of the spans that follow text which is not trained, rising.

    Example:
        >>> spans = Spans(np.array([1, 3, 5]), np.array([2, 5, 7]), np.array([0, 3]))
        >>> prompt_ends(spans).tolist()  # [5, 7) goes on where [3, 5) ends
        [0, 1]
    """
    rows = np.repeat(np.arange(len(spans.offsets) - 1), np.diff(spans.offsets))
    is_end = spans.ends > spans.starts
    is_end[1:] &= (spans.starts[1:] != spans.ends[:-1]) | (rows[1:] != rows[:-1])
    return np.flatnonzero(is_end)


def are_crossed(encoded: EncodedRows, spans: Spans) -> Bools:
    """Return, for each span, if a token begins before it and ends after its start.

    Example:
        >>> edges, row = np.array([0, 2, 3, 7]), np.array([0, 3])  # three tokens of one row
        >>> encoded = EncodedRows(np.zeros(3, np.int32), row, edges[:-1], edges[1:], row == row)
        >>> spans = Spans(np.array([1, 3, 5]), np.array([2, 5, 7]), np.array([0, 3]))
        >>> are_crossed(encoded, spans).tolist()
        [True, False, True]
    """
    rows = np.repeat(np.arange(len(spans.offsets) - 1), np.diff(spans.offsets))
    lower, upper = encoded.offsets[rows], encoded.offsets[rows + 1]
    first = np.clip(_tokens_before(spans.starts, rows, encoded), lower, upper)
    return _is_crossed(spans.starts, first, lower, encoded)


def _is_crossed(places: Int64s, first: Int64s, lower: Int64s, encoded: EncodedRows) -> Bools:
    """Return, for each place, if the token before its first token (of its row) ends after it."""
    is_crossed = first > lower
    is_crossed[is_crossed] = encoded.ends[first[is_crossed] - 1] > places[is_crossed]
    return is_crossed


def _tokens_before(places: Int64s, rows: Int64s, encoded: EncodedRows) -> Int64s:
    """How many tokens begin before each place, those of earlier rows included.

    Looked for among the tokens of some hundred rows at a time, which fit the processor's cache.
    """
    found = np.empty(len(places), np.int64)
    for start in range(0, len(places), _BLOCK):
        block = slice(start, start + _BLOCK)
        own = slice(encoded.offsets[rows[start]], encoded.offsets[rows[block][-1] + 1])
        found[block] = np.searchsorted(encoded.starts[own], places[block], "left") + own.start
    return found

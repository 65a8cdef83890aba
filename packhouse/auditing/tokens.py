"""Tokens of many rows behind one another, where they lie in the texts, and where contents do."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from packhouse.records.lists import Ranges, flat_list, one_chunk, read_ranges, zero_based
from packhouse.system.arrays import Bools, Bytes, Int32s, Int64s
from packhouse.tokenize.offsets import (
    EncodedRows,
    Spans,
    flat_texts,
    locate_by_widths,
    train_ranges,
)
from packhouse.tokenize.pipeline import Pipeline


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """All rows' tokens and trained ranges behind one another, and where they lie in the texts."""

    ids: Int32s
    offsets: Int64s
    starts: Int64s
    ends: Int64s
    is_exact: Bools
    """Rows whose tokens spell their text; of the others, bytes are not known."""
    control: Int64s
    """Places of control tokens."""
    range_starts: Int64s
    range_ends: Int64s
    range_rows: Int64s
    is_misplaced: Bools
    """Rows whose trained ranges are not the tokens that begin in their text's trained spans."""
    content: "Intervals"
    content_starts: Int64s
    content_ends: Int64s
    content_offsets: Int64s
    data: Bytes
    """Bytes of the texts of all rows."""
    bases: Int64s
    """Where each row's text begins in `data`, shape [num_rows + 1]."""
    pipeline: Pipeline

    @property
    def ranges_per_row(self) -> Int64s:
        """How many trained ranges each row has."""
        return np.bincount(self.range_rows, minlength=len(self.offsets) - 1)

    @classmethod
    def of(cls, formatted: pa.Table, tokenized: pa.Table, pipeline: Pipeline) -> "Tokens":
        """Place the tokens of rows in their texts."""
        ids, narrow = zero_based(*flat_list(tokenized["input_ids"]))
        offsets: Int64s = narrow.astype(np.int64)
        placed = locate_by_widths(*flat_texts(formatted["text"]), ids, offsets, pipeline)
        ranges = read_ranges(tokenized["trained_ranges"])
        rows = ranges.row_of_each()
        spans = Spans.of(one_chunk(formatted["content_spans"]), placed.bases)
        return cls(
            ids=ids,
            offsets=offsets,
            starts=placed.starts,
            ends=placed.ends,
            is_exact=placed.is_exact,
            control=np.flatnonzero(pipeline.is_control.take(ids)),
            range_starts=ranges.starts + offsets[rows],
            range_ends=ranges.ends + offsets[rows],
            range_rows=rows,
            is_misplaced=_are_misplaced(ranges, placed, formatted),
            content=Intervals.of(spans.starts, spans.ends),
            content_starts=spans.starts,
            content_ends=spans.ends,
            content_offsets=spans.offsets,
            data=placed.text,
            bases=placed.bases,
            pipeline=pipeline,
        )

    def row_of(self, places: Int64s) -> Int64s:
        """Row of the tokens at some places."""
        return np.searchsorted(self.offsets, places, "right") - 1

    def holds_content(self, first: Int64s, last: Int64s) -> Bools:
        """Return, for each range of tokens (`last` included), if content lies in its bytes."""
        return np.asarray(self.content.within(self.starts[first], self.ends[last]) > 0)

    def are_content(self, first: Int64s, last: Int64s) -> Bools:
        """Return, for each range of tokens (`last` included), if it is known to hold content."""
        return self.holds_content(first, last) & self.is_exact[self.row_of(first)]


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Disjoint half-open byte ranges, rising."""

    starts: Int64s
    ends: Int64s
    before: Int64s
    """Bytes in the ranges before each."""

    @classmethod
    def of(cls, starts: Int64s, ends: Int64s) -> "Intervals":
        """Sort ranges, and take out what overlaps."""
        # [2, 8) and [5, 10) become [2, 8) and [8, 10).
        if (starts[1:] < ends[:-1]).any():  # templates may write a content twice, or out of order
            order = np.argsort(starts, kind="stable")
            ends = np.maximum.accumulate(ends[order])
            starts = np.maximum(starts[order], np.append(0, ends[:-1]))
            ends = np.maximum(starts, ends)
        return cls(starts, ends, np.append(0, np.cumsum(ends - starts)))

    def within(self, starts: Int64s, ends: Int64s) -> Int64s:
        """Bytes of each of [start, end) that lie in the ranges.

        Example:
            >>> held = Intervals.of(np.array([2, 10]), np.array([5, 20]))
            >>> held.within(np.array([0, 4, 5]), np.array([3, 12, 10])).tolist()
            [1, 3, 0]
        """
        return self._up_to(ends) - self._up_to(starts)

    def _up_to(self, place: Int64s) -> Int64s:
        if not len(self.starts):
            return np.zeros(len(place), np.int64)
        index = np.searchsorted(self.starts, place, "right") - 1
        at = np.maximum(index, 0)
        inside = np.clip(place - self.starts[at], 0, self.ends[at] - self.starts[at])
        return np.where(index < 0, 0, self.before[at] + inside)


def _are_misplaced(ranges: Ranges, placed: EncodedRows, formatted: pa.Table) -> Bools:
    spans = Spans.of(one_chunk(formatted["trained_spans"]), placed.bases)
    due = train_ranges(placed, spans)
    differs = np.diff(ranges.offsets) != np.diff(due.offsets)
    rows = np.repeat(np.arange(len(differs)), np.diff(due.offsets))
    rows = rows[~differs[rows]]
    kept = [
        values[np.repeat(~differs, np.diff(offsets))]
        for values, offsets in (
            (ranges.starts, ranges.offsets),
            (ranges.ends, ranges.offsets),
            (due.starts, due.offsets),
            (due.ends, due.offsets),
        )
    ]
    differs[rows[(kept[0] != kept[2]) | (kept[1] != kept[3])]] = True
    return np.asarray(differs & placed.is_exact)

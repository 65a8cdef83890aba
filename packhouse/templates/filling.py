"""Write all rows of all ways at once: one gather of texts, and sums of their lengths.

A row's text is a run of pieces: constants of its way, and texts of columns. The pieces of all rows
are numbers into one pool, so that the texts are one Arrow `take`, and spans are differences of its
offsets. There is no Python per row, and some 100 us a way, however few its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.span_weights import weights_column
from packhouse.templates.columns import Column
from packhouse.templates.conversations import Conversations
from packhouse.templates.leaf_texts import LeafTexts
from packhouse.templates.segments import Filled, concat_filled, span_lists
from packhouse.templates.shapes import Way
from packhouse.templates.tracing import Hole

__all__ = ["Filling"]

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Pool:
    """Texts by number: columns one behind the other, constants behind them."""

    arrays: list[pa.Array] = field(default_factory=list)
    bases: dict[int, int] = field(default_factory=dict)
    size: int = 0
    constants: dict[str, int] = field(default_factory=dict)

    def base(self, column: Column) -> int:
        """Number of the column's first text."""
        if id(column) not in self.bases:
            self.bases[id(column)] = self.size
            self.arrays.append(column.texts.cast(pa.large_string()))
            self.size += len(column.texts)
        return self.bases[id(column)]

    def constant(self, text: str) -> int:
        """Number of a constant: -1, -2, ... until `take` knows better."""
        return -1 - self.constants.setdefault(text, len(self.constants))

    def take(self, numbers: Ints) -> pa.Array:
        """The texts behind one another; changes `numbers`."""
        is_constant = numbers < 0
        numbers[is_constant] = self.size - 1 - numbers[is_constant]
        constants = pa.array(list(self.constants), pa.large_string())
        pool = pa.concat_arrays([*self.arrays, constants])
        return pool.take(pa.array(numbers))


class Filling:
    """Rows to be written.

    Args:
        conversations: the part.
        texts: of it.
    """

    def __init__(self, conversations: Conversations, texts: LeafTexts) -> None:
        self._all, self._texts = conversations, texts
        self._pool = _Pool()
        self._ways: list[tuple[Way, Ints]] = []
        self._pieces: list[Ints] = []

    def add(self, way: Way, rows: Ints) -> None:
        """Rows that go a way."""
        pieces = np.empty((len(rows), len(way.items)), np.int64)
        for at, item in enumerate(way.items):
            if isinstance(item, Hole):
                place = way.place(item.leaf)
                base = self._pool.base(self._texts.column(place, item))
                pieces[:, at] = self._texts.rows_of(place, rows) + base
            else:
                pieces[:, at] = self._pool.constant(item)
        self._ways.append((way, rows))
        self._pieces.append(pieces)

    def filled(self) -> Filled:
        """All rows, ascending."""
        if not self._ways:
            return concat_filled([])
        rows = np.concatenate([rows for _, rows in self._ways])
        order = np.argsort(rows)
        rank = np.empty(len(rows), np.int64)
        rank[order] = np.arange(len(rows))
        ranks = np.split(rank, np.cumsum([len(rows) for _, rows in self._ways])[:-1])
        numbers, starts = _scattered(ranks, self._pieces, len(rows))
        pieces = self._pool.take(numbers)
        offsets = np.frombuffer(pieces.buffers()[1], np.int64)[pieces.offset :][: len(pieces) + 1]
        bounds = offsets[starts]
        assert bounds[-1] < 2**31, "parts are of bounded size"
        text = pa.StringArray.from_buffers(
            len(rows), pa.py_buffer(bounds.astype(np.int32)), pieces.buffers()[2]
        )
        trained, weights = self._trained(ranks, starts, offsets, bounds)
        content = self._content(ranks, starts, offsets, bounds)
        return Filled(rows[order], text, content, trained, weights)

    def _trained(
        self, ranks: Sequence[Ints], starts: Ints, offsets: Ints, bounds: Ints
    ) -> tuple[pa.Array, pa.Array]:
        begins, ends, weights = [], [], []
        for (way, rows), own in zip(self._ways, ranks, strict=True):
            first = starts[own][:, None]
            begins.append(first + np.array([span.start for span in way.trained], np.int64))
            ends.append(first + np.array([span.end for span in way.trained], np.int64))
            weights.append(self._weights(way, rows))
        flat_begins, spans = _scattered(ranks, begins, len(starts) - 1)
        flat_ends, _ = _scattered(ranks, ends, len(starts) - 1)
        flat_weights, _ = _scattered(ranks, weights, len(starts) - 1)
        counts = np.diff(spans)
        shift = np.repeat(bounds[:-1], counts)
        begin, end = offsets[flat_begins] - shift, offsets[flat_ends] - shift
        kept = end > begin
        total = np.append(0, np.cumsum(kept))
        column = weights_column(flat_weights[kept], np.diff(total[spans]))
        return span_lists(begin, end, counts), column

    def _weights(self, way: Way, rows: Ints) -> npt.NDArray[np.float32]:
        weights = np.ones((len(rows), len(way.trained)), np.float32)
        weight_of = self._all.weight_of(rows)
        for at, span in enumerate(way.trained):
            if span.message >= 0:
                weights[:, at] = weight_of(span.message)
        return weights

    def _content(
        self, ranks: Sequence[Ints], starts: Ints, offsets: Ints, bounds: Ints
    ) -> pa.Array:
        items = [
            starts[own][:, None] + np.array(way.content, np.int64)
            for (way, _), own in zip(self._ways, ranks, strict=True)
        ]
        flat, spans = _scattered(ranks, items, len(starts) - 1)
        counts = np.diff(spans)
        shift = np.repeat(bounds[:-1], counts)
        begins, ends = offsets[flat] - shift, offsets[flat + 1] - shift
        if not any(way.strings for way, _ in self._ways):
            return span_lists(begins, ends, counts)
        owners = [np.repeat(np.arange(len(counts)), counts)]
        all_begins, all_ends = [begins], [ends]
        for (way, rows), own in zip(self._ways, ranks, strict=True):
            for at in way.strings:
                row, begin, end = self._strings(way, at, rows)
                base = offsets[starts[own] + at] - bounds[own]
                owners.append(own[row])
                all_begins.append(base[row] + begin)
                all_ends.append(base[row] + end)
        owner, begins, ends = map(np.concatenate, (owners, all_begins, all_ends))
        order = np.lexsort((begins, owner))
        counts = np.bincount(owner, minlength=len(counts))
        return span_lists(begins[order], ends[order], counts)

    def _strings(self, way: Way, at: int, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """Strings within an item: number among `rows`, begin and end in the item."""
        hole = way.items[at]
        assert isinstance(hole, Hole)
        place = way.place(hole.leaf)
        strings = self._texts.strings(place, hole)
        texts = self._texts.rows_of(place, rows)
        counts = strings.starts[texts + 1] - strings.starts[texts]
        row = np.repeat(np.arange(len(rows)), counts)
        shift = strings.starts[texts] - (np.cumsum(counts) - counts)
        flat = np.arange(len(row)) + shift[row]
        return row, strings.begins[flat], strings.ends[flat]


def _scattered(
    ranks: Sequence[Ints], parts: Sequence[npt.NDArray[Any]], num_rows: int
) -> tuple[npt.NDArray[Any], Ints]:
    """Rows of matrices of several widths behind one another, in the order of `ranks`.

    Example:
        >>> flat, starts = _scattered(
        ...     [np.array([2, 0]), np.array([1])], [np.array([[5, 6], [1, 2]]), np.array([[3]])], 3)
        >>> flat.tolist(), starts.tolist()
        ([1, 2, 3, 5, 6], [0, 2, 3, 5])
    """
    counts = np.zeros(num_rows, np.int64)
    for own, part in zip(ranks, parts, strict=True):
        counts[own] = part.shape[1]
    starts = np.append(0, np.cumsum(counts))
    flat = np.empty(int(starts[-1]), parts[0].dtype)
    for own, part in zip(ranks, parts, strict=True):
        flat[(starts[own][:, None] + np.arange(part.shape[1])).ravel()] = part.ravel()
    return flat, starts

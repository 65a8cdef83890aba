"""Compile a template for one shape of conversation, and fill all its rows at once.

One row of the shape is rendered by Jinja, which shows where its fields end up and what the template
asks about them. All rows with the same answers are written with the same constants, 20 to 80 times
faster than with Jinja.

A row's text is a sequence of items: constants and texts of columns. Items are indices into one pool
of texts, so all texts come from one Arrow `take`, and spans from differences of its offsets. No
Python code runs per row. A compiled template costs about 100 us, however few its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.conversations import Conversations
from packhouse.records.identity import Extent
from packhouse.records.lists import weights_column
from packhouse.render.field_columns import Column, FieldColumns
from packhouse.render.provenance import JsonForm, Path, Piece, Predicate
from packhouse.render.results import TEXTS, Filled, Trained, concat_filled, span_lists
from packhouse.render.rows import RenderedRow
from packhouse.system.arrays import Bools, Float32s, Int64s

_IDS = ("name", "tool_call_id", "call_id")
_CONTENT, _BEGINS, _ENDS = 1, 2, 4
"""Bits of an item: it is content; a trained range begins with it; a trained range ends with it."""


class Hole(NamedTuple):
    """Placeholder for a text of the row."""

    path: Path
    form: JsonForm | None = None
    cut: int = 0
    """Number of characters to omit at the end of the JSON."""


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """One record of all rows of a shape."""

    items: tuple[str | Hole, ...] = ()
    """In rendering order."""
    trained: tuple[Trained, ...] = ()
    """Half-open ranges of items."""
    extent: Extent | None = None
    """Part of the row in the record; None for all of it."""


@dataclass(frozen=True, slots=True)
class CompiledRow:
    """The records of all rows of a shape that give certain answers."""

    records: tuple[CompiledTemplate, ...] = ()
    predicates: tuple[tuple[Path, Predicate], ...] = ()
    differing: tuple[tuple[Path, Path], ...] = ()
    """Pairs of texts that must differ."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """Counts for each row."""

    def fits(self, rows: Int64s, columns: FieldColumns, control: str) -> Bools:
        """Return which rows give these answers and write no control-token text in an id."""
        fitting = np.ones(len(rows), np.bool_)
        items = [item for record in self.records for item in record.items]
        ids = [item.path for item in items if isinstance(item, Hole) and item.path[0] in _IDS]
        is_quiet = Predicate("matches", control, False)
        for path, predicate in (*self.predicates, *((own, is_quiet) for own in ids)):
            fitting &= columns.column(path).agrees(predicate)[columns.rows_of(path, rows)]
        for pair in self.differing:
            one, other = (
                columns.column(path).texts.take(columns.rows_of(path, rows)) for path in pair
            )
            fitting &= pc.not_equal(one, other).to_numpy(zero_copy_only=False)
        return fitting


def compile_row(row: RenderedRow) -> CompiledRow | None:
    """Compile the template for the shape of this row; None if only Jinja can render it.

    Questions that were asked while rendering prompts count too, because spans begin where prompts
    end.
    """
    trace = row.talk.trace
    if trace.unrecorded:  # rows with equal answers may still be written differently
        return None
    compiled: list[CompiledTemplate] = []
    for rendering, spans, extent, _ in row.records:
        # "<u>Hi<e><a>Yo<e>" with "Yo<e>" trained: cuts [0, 3, 5, 11, 13, 16], items
        # ["<u>", Hole(Hi), "<e><a>", Hole(Yo), "<e>"], of which [3, 5) are trained.
        holes = dict[int, tuple[int, Hole]]()
        for start, part in zip(rendering.starts, rendering.parts, strict=True):
            if not isinstance(part, Piece):
                continue
            path, form = part.field.path, part.form
            size = len(part.field.value) if form is None else 1
            is_whole = part.end - part.start == size and part.cut >= 0
            if not path or not part.text or not is_whole or isinstance(form, str):
                return None
            holes[start] = start + len(part.text.encode()), Hole(path, form, part.cut)
        cuts = {0, len(rendering.text), *holes, *(end for end, _ in holes.values())}
        cuts |= {edge for span in spans for edge in span[:2]}
        items: list[str | Hole] = []
        for begin, end in pairwise(sorted(cuts)):
            if begin not in holes:
                items.append(rendering.text[begin:end].decode())
            elif holes[begin][0] == end:
                items.append(holes[begin][1])
            else:
                return None  # a span begins or ends inside a text
        place = {cut: number for number, cut in enumerate(sorted(cuts))}
        trained = tuple(Trained(place[s.start], place[s.end], s.message) for s in spans)
        compiled.append(CompiledTemplate(tuple(items), trained, extent))
    paths = {item.path for record in compiled for item in record.items if isinstance(item, Hole)}
    for number, tool in enumerate(row.talk.given.tools or ()):
        ways = ("tool", number), ("tool_function", number), ("function_item", number, "name")
        if isinstance(tool, dict) and paths.isdisjoint(ways):
            return None  # the name of an unwritten tool decides whether it counts as lost
    return CompiledRow(
        tuple(compiled),
        tuple(sorted(trace.predicates, key=repr)),
        tuple(sorted(trace.differing, key=repr)),
        dict(row.notes),
    )


class Filling:
    """Collect rows of a part and fill them all at once.

    Args:
        conversations: conversations of the part.
        columns: their fields as columns.
    """

    def __init__(self, conversations: Conversations, columns: FieldColumns) -> None:
        self._all, self._columns = conversations, columns
        # One pool of texts: those of the used columns, one column after the other, then constants.
        self._texts: list[pa.Array] = []
        self._first: dict[Column, int] = {}  # index of its first text
        self._num_texts = 0
        self._constants: dict[str, int] = {}
        self._compiled: list[tuple[CompiledTemplate, Int64s]] = []
        self._pieces: list[Int64s] = []

    def add(self, compiled: CompiledTemplate, rows: Int64s) -> None:
        """Add rows for a compiled template to fill. Add the records of a row in order."""
        pieces = np.empty((len(rows), len(compiled.items)), np.int64)
        first = {span.start for span in compiled.trained}
        last = {span.end - 1 for span in compiled.trained}
        for at, item in enumerate(compiled.items):
            marks = _BEGINS * (at in first) | _ENDS * (at in last)
            if isinstance(item, Hole):
                column = self._columns.column(*item)
                if column not in self._first:
                    self._first[column] = self._num_texts
                    self._num_texts += len(column.texts)
                    self._texts.append(column.texts.cast(pa.large_string()))
                numbers: Int64s | int = self._columns.rows_of(item.path, rows) + self._first[column]
                marks |= _CONTENT * (item.path[0] not in _IDS)
            else:  # -1, -2, ... until `filled` knows how many texts of columns are before them
                numbers = -1 - self._constants.setdefault(item, len(self._constants))
            pieces[:, at] = numbers << 3 | marks
        self._compiled.append((compiled, rows))
        self._pieces.append(pieces)

    def filled(self) -> Filled:
        """Return all records, in the order of their rows."""
        if not any(len(rows) for _, rows in self._compiled):
            return concat_filled([])
        rows = np.concatenate([rows for _, rows in self._compiled])
        order = np.argsort(rows, kind="stable")
        marked, counts = _in_order(self._pieces, order)
        marks, numbers = (marked & 7).astype(np.int8), marked >> 3
        # With 5 texts in all columns, constants -1, -2, ... are at 5, 6, ...
        is_constant = numbers < 0
        numbers[is_constant] = self._num_texts - 1 - numbers[is_constant]
        pool = pa.concat_arrays([*self._texts, pa.array([*self._constants], pa.large_string())])
        pieces = pool.take(pa.array(numbers))
        offsets = np.frombuffer(pieces.buffers()[1], np.int64)[pieces.offset :][: len(pieces) + 1]
        starts = np.append(0, np.cumsum(counts))
        bounds = offsets[starts]
        assert bounds[-1] < 2**31, "parts are of bounded size"
        edges = pa.py_buffer(bounds.astype(np.int32))
        columns = [pa.StringArray.from_buffers(len(counts), edges, pieces.buffers()[2])]
        for begin, end in ((_CONTENT, _CONTENT), (_BEGINS, _ENDS)):
            first, last = (np.flatnonzero(marks & mark != 0) for mark in (begin, end))
            own = np.diff(np.searchsorted(first, starts))
            shift = np.repeat(bounds[:-1], own)  # spans count from the start of their row
            begins, ends = offsets[first] - shift, offsets[last + 1] - shift
            columns.append(span_lists(begins, ends, own))
        # The last spans are the trained ones; those that have no text were left out.
        parts = list[Float32s]()
        for compiled, of_rows in self._compiled:
            first = self._all.messages.offsets[of_rows]
            each = [  # message -1 is a label's text
                self._all.row_weights[of_rows] if m < 0 else self._all.weights[first + m]
                for m in (span.message for span in compiled.trained)
            ]
            parts.append(np.array(each, np.float32).reshape(len(each), len(of_rows)).T)
        weights = None
        if any((part != 1).any() for part in parts):
            weights = _in_order(parts, order)[0][ends > begins]
        columns.append(weights_column(weights, columns[-1].value_lengths().to_numpy()))
        extents = np.fromiter((each.extent for each, _ in self._compiled), np.object_)
        extents = np.repeat(extents, [len(rows) for _, rows in self._compiled])[order]
        return Filled(rows[order], extents, pa.table(columns, schema=TEXTS))


def _in_order(parts: Sequence[np.ndarray], order: Int64s) -> tuple[np.ndarray, Int64s]:
    """Concatenate rows of matrices of different widths in this order; return the widths too.

    Example:
        >>> flat, counts = _in_order([np.array([[5, 6], [1, 2]]), np.array([[3]])], [1, 2, 0])
        >>> flat.tolist(), counts.tolist()
        ([1, 2, 3, 5, 6], [2, 1, 2])
    """
    counts = np.concatenate([np.full(*part.shape) for part in parts])
    flat = np.concatenate([part.ravel() for part in parts])
    if len(parts) > 1:  # a single part is already in order
        offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
        lists = pa.ListArray.from_arrays(offsets, flat).take(pa.array(order))
        flat, counts = np.asarray(lists.flatten()), counts[order]
    return flat, counts

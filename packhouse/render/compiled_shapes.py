"""Group conversations by shape, compile a template for each shape, and fill all its rows at once.

Rows of a shape have the same roles, keys and kinds of fields in every message, call, tool
definition and document, the same arguments other than documents, and the same trained messages.
They differ only in the texts of their fields, so a template may write them all in the same way.
Columns of texts are built on demand: contents and thoughts are columns of all messages, names and
arguments columns of all calls.

One row of the shape is rendered by Jinja, which shows where its fields end up and what the template
asks about them. All rows with the same answers are written with the same constants, 20 to 80 times
faster than with Jinja.

A row's text is a sequence of items: constants and texts of columns. Items are indices into one pool
of texts, so all texts come from one Arrow `take`, and spans from differences of its offsets. No
Python code runs per row. A compiled template costs about 100 us, however few its rows.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.arrays import Bools, Float32s, Int64s, weights_column
from packhouse.records.conversation_shapes import Conversations
from packhouse.records.message_rules import TOOL, num_bytes
from packhouse.records.record_ids import Extent
from packhouse.render.provenance import JsonForm, Path, Piece, Predicate, answers, encoder
from packhouse.render.rendered_texts import TEXTS, Filled, Trained, concat_filled, span_lists
from packhouse.render.row_renderer import RenderedRow
from packhouse.render.template_arguments import (
    MessageForm,
    function_of,
    is_field,
    parsed_call,
    with_call_ids,
)

_OF_CALLS = ("function", "call_name", "call_arguments", "call_id")
_OF_TOOLS = ("tool", "tool_function", "tool_item", "function_item")


class Column:
    """Texts (strings without nulls), with cached answers of predicates."""

    def __init__(self, texts: pa.Array) -> None:
        self.texts = pc.fill_null(texts, "") if texts.null_count else texts
        self._answers: dict[Predicate, Bools] = {}

    def agrees(self, predicate: Predicate) -> Bools:
        """Return which texts give the answer in the predicate."""
        if predicate not in self._answers:
            self._answers[predicate] = answers(predicate, self.texts) == predicate.answer
        return self._answers[predicate]


Numbers = defaultdict[Hashable, int]


def new_numbers() -> Numbers:
    """Return numbers of shapes, from 1 in order of first appearance."""
    return Numbers(count(1).__next__)


class FieldColumns:
    """Shapes and texts of a part.

    Args:
        conversations: conversations of the part.
        numbers: numbers of the shapes of calls and definitions.
        form: returns the form in which the template gets messages with tool calls.
        labels: text of each row's label.
    """

    def __init__(
        self,
        conversations: Conversations,
        numbers: Numbers,
        *,
        form: Callable[[], MessageForm] = MessageForm,
        labels: pa.Array | None = None,
    ) -> None:
        self._all, self._form, self._labels = conversations, form, labels
        self._columns: dict[Hashable, Column] = {}

        # Calls. Shapes are one per message; 0 for messages without calls.
        texts = conversations.messages.tool_calls
        self._calls: list[object] = []
        self._functions: list[dict[str, object]] = []  # of each call
        self._call_shapes: Int64s = np.zeros(len(texts), np.int64)
        self._call_starts: Int64s = np.zeros(len(texts) + 1, np.int64)
        if texts.null_count < len(texts):
            has_text_arguments = form().has_text_arguments
            counts, holders = np.zeros(len(texts), np.int64), np.flatnonzero(texts.is_valid())
            for at, parsed in zip(holders.tolist(), _parsed(texts.drop_null()), strict=True):
                calls = [parsed_call(call, has_text_arguments) for call in parsed]
                functions = [function_of(call) for call in calls]
                self._calls += calls
                self._functions += functions
                counts[at] = len(calls)
                shapes = map(_shape, calls, functions, repeat(_is_call_field))
                self._call_shapes[at] = numbers[tuple(shapes)]
            np.cumsum(counts, out=self._call_starts[1:])

        # Tool definitions; rows with equal ones share them. Two definitions of 1 and 3 tools have
        # starts [0 1 4]. Rows without any have code 2, and nothing begins after it.
        encoded = pc.dictionary_encode(conversations.tools)
        definitions = _parsed(encoded.dictionary)
        owned = [[function_of(tool) for tool in tools] for tools in definitions]
        pairs = zip(definitions, owned, strict=True)
        of_tools = [numbers[("tools", *map(_shape, *pair, repeat(is_field)))] for pair in pairs]
        codes = encoded.indices.fill_null(len(definitions)).to_numpy()
        starts = np.append(0, np.cumsum([len(tools) for tools in definitions], dtype=np.int64))
        self._tools: list[object] = [tool for tools in definitions for tool in tools]
        self._tool_functions = [function for functions in owned for function in functions]
        self._tool_starts: Int64s = starts[codes]
        self._tool_shapes: Int64s = np.array([*of_tools, 0], np.int64)[codes]

        # Arguments; rows of a shape share everything but the texts of documents.
        encoded = pc.dictionary_encode(conversations.arguments)
        self._arguments: list[Any] = [json.loads(t) for t in encoded.dictionary.to_pylist()]
        of_arguments = [
            numbers[
                "arguments",
                json.dumps({key: value for key, value in own.items() if key != "documents"}),
                _argument_shape(own.get("documents")),
            ]
            for own in self._arguments
        ]
        self._arguments.append({})
        self._argument_of: Int64s = encoded.indices.fill_null(len(of_arguments)).to_numpy()
        self._argument_shapes: Int64s = np.array([*of_arguments, 0], np.int64)[self._argument_of]

    def shapes(self, wanted: Bools) -> Iterator[tuple[bytes, Int64s]]:
        """Yield each shape with the indices of its wanted rows, ascending."""
        messages = self._all.messages
        flags = [num_bytes(self._joined_content) > 0, num_bytes(messages.reasoning) > 0]
        flags += map(messages.has, ("reasoning", "tool_call_id", "name", "tool_calls"))
        # One integer per message: bits 0 to 5 are role and training, 6 to 11 the fields that it
        # has, 16 and up the number of its calls' shape.
        codes = self._call_shapes << 16
        for bit, flag in enumerate(flags):
            codes |= flag.astype(np.int64) << (6 + bit)
        of_rows = self._tool_shapes | self._argument_shapes << 32
        # Shapes are whole conversations and not steps from message to message, because a template
        # may look at any part of the conversation.
        yield from self._all.group(wanted, of_messages=codes, of_rows=of_rows)

    def rows_of(self, path: Path, rows: Int64s) -> Int64s:
        """Return the index of a field's text in its column, for each row."""
        # ("call_name", 2, 0) is the name of the first call of message 2. If the row's messages
        # begin at 5, that is message 7 of all, and its calls begin at _call_starts[7].
        kind, number = path[:2] if len(path) > 1 else (path[0], 0)
        if kind == "label":
            return rows
        if kind == "argument":
            return self._argument_of[rows]
        if kind in _OF_TOOLS:
            return np.asarray(self._tool_starts[rows] + number)
        messages = self._all.messages.offsets[rows] + number
        if kind in _OF_CALLS:
            return np.asarray(self._call_starts[messages] + path[2])
        return np.asarray(messages)

    def column(self, path: Path, form: JsonForm | None = None, cut: int = 0) -> Column:
        """Return the column of a field; with a form, as JSON without its last `cut` characters."""
        kind, messages = path[0], self._all.messages
        which = path[1:] if kind == "argument" else path[2:] if kind in _OF_TOOLS else ()
        key = kind, which, form, cut
        if key in self._columns:
            return self._columns[key]
        name = "reasoning" if kind == "thought" else "content" if kind == "text" else kind
        if form is not None:
            write = encoder(form)
            # Calls of other shapes may have no object here; their texts are never used.
            written = [write(v if isinstance(v, dict) else {}) for v in self._values(kind, *which)]
            texts = pa.array([text[: len(text) - cut] for text in written], pa.string())
        elif kind == "content":
            texts = self._joined_content
        elif kind == "label":
            texts = self._labels
        elif kind in ("call_id", "tool_call_id") and self._form().makes_ids:
            texts = self._made_ids[kind == "call_id"]
        elif name in messages.values.type.names:  # ids and names; contexts by themselves
            texts = messages.values.field(name)
        else:
            found = self._values(kind, *which)
            texts = pa.array([v if isinstance(v, str) else "" for v in found], pa.string())
        return self._columns.setdefault(key, Column(texts))

    def _values(self, kind: str, *key: Any) -> list[Any]:
        """Return the values of all calls or tool definitions of the part."""
        if kind == "argument":
            return [_item_at(own, key) for own in self._arguments]
        owners: list[Any] = self._functions if kind in _OF_CALLS else self._tool_functions
        if kind in ("call_id", "tool", "tool_item"):
            owners = self._calls if kind == "call_id" else self._tools
        if kind in ("function", "tool", "tool_function"):
            return owners
        name = key[0] if key else kind.removeprefix("call_")
        return [own.get(name) if isinstance(own, dict) else None for own in owners]

    @cached_property
    def _joined_content(self) -> pa.Array:
        r"""Contents; where a message has a context, content + "\\n" + context."""
        content, context = self._all.messages.content, self._all.context
        if context.null_count == len(context):
            return content
        return pc.coalesce(pc.binary_join_element_wise(content, context, "\n"), content)

    @cached_property
    def _made_ids(self) -> tuple[pa.Array, pa.Array]:
        """Ids of tool results, one per message, and of calls, one per call."""
        flat = self._all.messages
        has_calls, given = flat.has("tool_calls"), flat.tool_call_id.to_pylist()
        of_results = [text or "" for text in given]
        of_calls: list[str] = [""] * len(self._calls)
        for row in np.flatnonzero(flat.sums(has_calls | (flat.roles == TOOL))).tolist():
            start, end = flat.offsets[row : row + 2].tolist()
            roles = flat.role[start:end].to_pylist()
            contents = self._joined_content[start:end].to_pylist()
            messages: list[dict[str, object]] = [
                {"role": role, "content": content, "tool_call_id": own}
                for role, content, own in zip(roles, contents, given[start:end], strict=True)
            ]
            bounds = self._call_starts[start : end + 1].tolist()
            for at in np.flatnonzero(has_calls[start:end]).tolist():
                messages[at]["tool_calls"] = self._calls[bounds[at] : bounds[at + 1]]
            for at, message in enumerate(with_call_ids(messages, self._form())):
                of_results[start + at] = message["tool_call_id"] or ""
                for number, call in enumerate(message.get("tool_calls", ()), bounds[at]):
                    of_calls[number] = call["id"] if isinstance(call, dict) else ""
        return pa.array(of_results, pa.string()), pa.array(of_calls, pa.string())


def _parsed(texts: pa.Array) -> list[Any]:
    """Parse each text like `json.loads`, but with orjson, which is four times as fast.

    Example:
        >>> _parsed(pa.array(['{"a": 1}', "[-12345678901234567890]", "[NaN]"]))
        [{'a': 1}, [-12345678901234567890], [nan]]
    """
    given = texts.to_pylist()
    # orjson turns integers over 64 bits (19 digits or more) into floats.
    if not any(pc.match_substring_regex(texts, "[0-9]{19}").to_pylist()):
        with suppress(orjson.JSONDecodeError):  # NaN, half a surrogate pair, nested over 1,024 deep
            return list(orjson.loads(f"[{','.join(given)}]"))
    return [json.loads(text) for text in given]


def _item_at(value: Any, path: Iterable[object]) -> object:
    """Return an item of a JSON value; None if it does not exist."""
    for key in path:
        try:
            value = value[key]
        except (LookupError, TypeError):
            return None
    return value


def _argument_shape(value: object) -> Hashable:
    """Return a value with its texts replaced by a flag: empty or not."""
    if isinstance(value, str):
        return bool(value)
    if isinstance(value, dict):
        return "{", *((key, _argument_shape(item)) for key, item in value.items())
    if isinstance(value, list):
        return "[", *map(_argument_shape, value)
    return json.dumps(value)


def _is_call_field(key: str, value: object, is_function: bool) -> bool:
    """Return True for the id of a call, and the name and arguments of its function."""
    if not is_function:
        return key == "id" and type(value) is str
    return key in ("name", "arguments") and bool(value) and isinstance(value, str | dict)


def _shape(
    whole: object, function: Mapping[str, object], is_own: Callable[[str, object, bool], bool]
) -> Hashable:
    """Return the keys of a call or definition, the types of their values, and shared values.

    {"id": "a", "function": {"name": "f"}}  ->  ("id", "function", 0, "name", str, dict, str)
    """
    if not isinstance(whole, dict):
        return json.dumps(whole)
    found: list[object] = [*whole, 0, *function]
    for owner, is_function in ((whole, False), (function, True)):
        for key, value in owner.items():
            # Templates test whether a value is empty (`if tool.description`), so empty values are
            # shapes of their own.
            found.append(type(value) if value else repr(value))
            if value is not function and not is_own(key, value, is_function):
                found.append(value if isinstance(value, str) else json.dumps(value))
    return tuple(found)


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
            one, other = (columns.column(p).texts.take(columns.rows_of(p, rows)) for p in pair)
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
            # The three low bits hold the marks: 5 << 3 | _CONTENT is text 5, which is content.
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
            # Rows of items [0, 3) and [3, 7), spans that begin at items [1 4 5]: 1 and 2 spans.
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

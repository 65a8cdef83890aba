"""A part's conversations by shape, and the texts of their leaves.

Rows of a shape have the same roles, keys and kinds of leaves in every message, calls and tool
definitions of the same shapes, and are trained in the same messages: they differ in the texts of
their leaves (and ids) alone, and a template may treat them all alike.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.templates.call_ids import CallIds
from packhouse.templates.columns import Column, filled
from packhouse.templates.conversations import Conversations
from packhouse.templates.json_strings import Strings, strings_of, written_strings
from packhouse.templates.json_texts import json_texts
from packhouse.templates.leaves import JsonForm
from packhouse.templates.losses import EXCERPT, Loss
from packhouse.templates.renderer import Refusal
from packhouse.templates.tool_tables import CallTable, Registry, ToolTable
from packhouse.templates.tracing import Hole
from packhouse.templates.weighing import ROLES

__all__ = ["LeafTexts", "Place", "layout_of"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Place(NamedTuple):
    """What a leaf is: `content` of message 2, `arguments` of its call 0, `tool` 1 of the row."""

    kind: str
    message: int
    number: int = 0


Layout = dict[Hashable, Place]


def layout_of(messages: list[dict[str, Any]], tools: list[Any] | None) -> Layout:
    """What each leaf and id of a conversation is, by its number (see `replace_leaves`)."""
    leaves: list[Place] = []
    ids: list[Place] = []
    for at, message in enumerate(messages):
        if message["content"]:
            leaves.append(Place("content", at))
        if message.get("reasoning_content"):
            leaves.append(Place("thought", at))
        ids += [Place(key, at) for key in ("tool_call_id", "name") if key in message]
        for number, call in enumerate(message.get("tool_calls", ())):
            if not isinstance(call, dict):
                continue
            ids += [Place("call_id", at, number)] if "id" in call else []
            leaves += _leaves_of(call, at, number)
    leaves += [Place("tool", -1, n) for n, t in enumerate(tools or ()) if isinstance(t, dict)]
    named: Layout = {("id", number): place for number, place in enumerate(ids)}
    return named | dict(enumerate(leaves))


def _leaves_of(call: dict[str, Any], at: int, number: int) -> Iterator[Place]:
    function = call.get("function")
    if not isinstance(function, dict):
        return
    for key in ("name", "arguments"):
        value = function.get(key)
        if isinstance(value, dict) or (isinstance(value, str) and value):
            yield Place(f"call_{key}", at, number)
    yield Place("function", at, number)


class LeafTexts:
    """Shapes and texts of a part.

    Args:
        conversations: the part.
        registry: of shapes of calls and definitions.
        makes_ids: whether calls get ids (see call_ids.py).
        opens_tools: whether tool definitions may be taken to pieces.
    """

    def __init__(
        self,
        conversations: Conversations,
        registry: Registry,
        *,
        makes_ids: bool,
        opens_tools: bool,
    ) -> None:
        self._all = conversations
        self._makes_ids = makes_ids
        self._columns: dict[Hashable, Column] = {}
        self._strings: dict[Hashable, Strings] = {}
        self._calls = CallTable(conversations.values.field("tool_calls"), registry)
        self._tools = ToolTable(conversations.tools, registry, is_open=opens_tools)

    def shapes(self, wanted: Bools) -> Iterator[tuple[bytes, Ints]]:
        """Yield each shape with the (ascending) numbers of its rows that are wanted."""
        starts = self._all.starts
        codes = np.insert(self._codes(), starts[1:], self._tools.shapes)
        bounds = (starts + np.arange(len(starts))) * 8
        keys = pa.Array.from_buffers(
            pa.large_binary(), self._all.num_rows, [None, pa.py_buffer(bounds), pa.py_buffer(codes)]
        )
        rows = np.flatnonzero(wanted)
        encoded = pc.dictionary_encode(keys.take(pa.array(rows)))
        of_row = encoded.indices.to_numpy()
        order = rows[np.argsort(of_row, kind="stable")]
        ends = np.cumsum(np.bincount(of_row, minlength=len(encoded.dictionary)))
        for number, key in enumerate(encoded.dictionary.to_pylist()):
            yield key, order[ends[number - 1] if number else 0 : ends[number]]

    def _codes(self) -> Ints:
        """One number a message: all of it but its texts."""
        values, weights = self._all.values, self._all.weights
        roles = pc.index_in(values.field("role"), value_set=pa.array(ROLES))
        codes = pc.fill_null(roles, 7).to_numpy().astype(np.int64)
        flags = [weights > 0, (weights > 0) & (weights != 1), _is_filled(self._content)]
        thoughts = values.field("reasoning")
        flags += [_is_filled(thoughts), *(_is_given(values.field(n)) for n in _OPTIONAL)]
        for bit, flag in enumerate(flags):
            codes |= flag.astype(np.int64) << (3 + bit)
        return np.asarray(codes | (self._calls.shapes << 16))

    @cached_property
    def _content(self) -> pa.Array:
        return filled(self._all.joined_content())

    def rows_of(self, place: Place, rows: Ints) -> Ints:
        """Where the texts of a leaf are in its column, for each of the rows."""
        if place.kind == "tool":
            return np.asarray(self._tools.starts[rows] + place.number)
        messages = self._all.starts[rows] + place.message
        if place.kind in _OF_CALLS:
            return np.asarray(self._calls.starts[messages] + place.number)
        return messages

    def column(self, place: Place, hole: Hole) -> Column:
        """Column of a leaf, as it is written."""
        key = place.kind, _item_of(hole), hole.form, hole.cut
        if key not in self._columns:
            self._columns[key] = Column(lambda: self._make(place.kind, hole))
        return self._columns[key]

    def _make(self, kind: str, hole: Hole) -> pa.Array:
        values = self._all.values
        if kind == "content":
            return self._content
        if kind == "thought":
            return filled(values.field("reasoning"))
        if kind in ("call_id", "tool_call_id") and self._makes_ids:
            return self._made_ids[kind == "call_id"]
        if kind in ("tool_call_id", "name"):
            return filled(values.field(kind))
        if kind == "call_id":
            return _texts(_get(call, "id") for call in self._calls.calls)
        if hole.cut:
            whole = self.column(Place(kind, 0), hole._replace(cut=0)).texts
            return pc.utf8_slice_codeunits(whole, 0, -hole.cut)
        items = self._items(kind, hole)
        if hole.form is None:
            return _texts(items)
        objects = (i if isinstance(i, dict) else {} for i in items)
        return json_texts(objects, hole.form, is_finite=kind == "tool" and self._tools.is_finite)

    def _items(self, kind: str, hole: Hole) -> list[Any]:
        """Values of a leaf of calls or tool definitions."""
        if kind == "function":
            return self._calls.functions
        if kind.startswith("call_"):
            return [f.get(kind.removeprefix("call_")) for f in self._calls.functions]
        group, item = _item_of(hole)
        if group is None:
            return self._tools.tools
        if group == "tool" and item == "function":
            return self._tools.functions
        owners = self._tools.tools if group == "tool" else self._tools.functions
        return [_get(owner, item) for owner in owners]

    @cached_property
    def _made_ids(self) -> tuple[pa.Array, pa.Array]:
        """Ids of tool results, one a message, and of calls, one a call."""
        starts, values = self._all.starts, self._all.values
        is_tool = pc.equal(values.field("role"), "tool").to_numpy(zero_copy_only=False)
        concerned = np.flatnonzero(is_tool | (self._calls.shapes > 0))
        owners = np.searchsorted(starts, concerned, side="right") - 1
        given = values.field("tool_call_id").to_pylist()
        content = values.field("content").take(pa.array(concerned)).to_pylist()
        calls, bounds = self._calls.calls, self._calls.starts.tolist()
        texts = json_texts(calls, JsonForm(ensure_ascii=True)).to_pylist()
        of_results, of_calls = [""] * len(values), [""] * len(calls)
        row, first, ids = -1, 0, CallIds()
        for at, owner, told in zip(concerned.tolist(), owners.tolist(), content, strict=True):
            if owner != row:
                row, first, ids = owner, int(starts[owner]), CallIds()
            if self._calls.shapes[at]:
                begin, end = bounds[at], bounds[at + 1]
                own = ids.of_calls(at - first, calls[begin:end], texts[begin:end])
                of_calls[begin:end] = [text or "" for text in own]
            else:
                of_results[at] = ids.of_result(at - first, given[at], told)
        return pa.array(of_results, pa.string()), pa.array(of_calls, pa.string())

    def strings(self, place: Place, hole: Hole) -> Strings:
        """Spans of the strings within the texts of a leaf that is written as JSON."""
        key = place.kind, hole.form, hole.cut
        if key not in self._strings:
            texts = self.column(place, hole).texts
            if place.kind == "function":
                own = written_strings(texts, self._calls.functions)
            else:
                own = strings_of(texts)
            self._strings[key] = own
        return self._strings[key]

    def refusals(self, loss: Loss, rows: Ints) -> dict[int, Refusal]:
        """Rows that lose a content, each in the words that it would be refused with alone."""
        contents = self._content.take(pa.array(self._all.starts[rows] + loss.message))
        seen = pc.utf8_slice_codeunits(contents, 0, EXCERPT + 1).to_pylist()
        return {row: loss.of(text).refusal for row, text in zip(rows.tolist(), seen, strict=True)}

    def quiet(self, layout: Layout, rows: Ints, noisy: Callable[[Column], Bools]) -> Bools:
        """Which rows hold no control-token text."""
        quiet = np.ones(len(rows), np.bool_)
        for leaf, place in layout.items():
            at = self.rows_of(place, rows)
            for form in _FORMS.get(place.kind, (None,)):
                quiet &= ~noisy(self.column(place, Hole(leaf, form)))[at]
        return quiet


_FORMS: dict[str, tuple[JsonForm | None, ...]] = {
    "function": (JsonForm(),),  # holds the JSON of its arguments
    "tool": (JsonForm(),),
}
_OPTIONAL = ("reasoning", "tool_call_id", "name", "tool_calls")
_OF_CALLS = ("call_name", "call_arguments", "function", "call_id")


def _item_of(hole: Hole) -> tuple[str | None, str | None]:
    """Of a tool definition: `tool` or `function`, and the key; none where it is whole."""
    leaf = hole.leaf
    return (leaf[0], leaf[2]) if isinstance(leaf, tuple) and leaf[0] != "id" else (None, None)


def _get(owner: Any, key: str | None) -> Any:
    return owner.get(key) if isinstance(owner, dict) else None


def _texts(values: Any) -> pa.Array:
    return pa.array([v if isinstance(v, str) else "" for v in values], pa.string())


def _is_filled(column: pa.Array) -> Bools:
    return np.asarray(pc.fill_null(pc.binary_length(column), 0).to_numpy() > 0)


def _is_given(column: pa.Array) -> Bools:
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))

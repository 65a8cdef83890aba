"""Group the conversations of a part by shape, with the texts of their fields as columns.

Rows of a shape have the same roles, keys and kinds of fields in every message, call, tool
definition and document, the same arguments other than documents, and the same trained messages.
They differ only in the texts of their fields, so a template may write them all in the same way.
Columns are built on demand: contents and thoughts are columns of all messages, names and arguments
columns of all calls.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import count, repeat
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.conversations import Conversations
from packhouse.records.messages import TOOL, num_bytes
from packhouse.render.provenance import JsonForm, Path, Predicate, answers, encoder
from packhouse.render.template_messages import (
    MessageForm,
    function_of,
    is_field,
    parsed_call,
    with_call_ids,
)
from packhouse.system.arrays import Bools, Int64s

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
        texts = conversations.messages["tool_calls"]
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
        of_tools = [
            numbers[("tools", *map(_shape, tools, functions, repeat(is_field)))]
            for tools, functions in zip(definitions, owned, strict=True)
        ]
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
        flags = [num_bytes(self._joined_content) > 0, num_bytes(messages["reasoning"]) > 0]
        flags += map(messages.has, ("reasoning", "tool_call_id", "name", "tool_calls"))
        # One integer per message: bits 0 to 5 are role and training, 6 to 11 the fields that it
        # has, 16 and up the number of its calls' shape.
        codes = self._call_shapes << 16
        for bit, flag in enumerate(flags):
            codes |= flag.astype(np.int64) << (6 + bit)
        of_rows = self._tool_shapes | self._argument_shapes << 32
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
            texts = messages[name]
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
        content, context = self._all.messages["content"], self._all.context
        if context.null_count == len(context):
            return content
        return pc.coalesce(pc.binary_join_element_wise(content, context, "\n"), content)

    @cached_property
    def _made_ids(self) -> tuple[pa.Array, pa.Array]:
        """Ids of tool results, one per message, and of calls, one per call."""
        flat = self._all.messages
        has_calls, given = flat.has("tool_calls"), flat["tool_call_id"].to_pylist()
        of_results = [text or "" for text in given]
        of_calls: list[str] = [""] * len(self._calls)
        for row in np.flatnonzero(flat.sums(has_calls | (flat.roles == TOOL))).tolist():
            start, end = flat.offsets[row : row + 2].tolist()
            roles = flat["role"][start:end].to_pylist()
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
            found.append(type(value) if value else repr(value))
            if value is not function and not is_own(key, value, is_function):
                found.append(value if isinstance(value, str) else json.dumps(value))
    return tuple(found)

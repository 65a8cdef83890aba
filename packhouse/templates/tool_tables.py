"""Tool calls and tool definitions of a part, parsed in bulk, and what shape each is of.

A shape is all of a call but its name, arguments and id: rows of equal shapes differ in leaves
alone (see leaves.py). Shapes are numbered by a registry that lives as long as the template.
"""

import json
from collections.abc import Hashable
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.templates.chat_messages import parsed_call
from packhouse.templates.json_texts import parse_known, parse_texts
from packhouse.templates.leaves import skeleton

__all__ = ["CallTable", "Registry", "ToolTable"]

Ints = npt.NDArray[np.int64]


class Registry:
    """Numbers shapes from 1 on, first seen first."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._lock = Lock()

    def number(self, shape: Hashable) -> int:
        """Of a shape, new or seen before."""
        known = self._numbers.get(shape)
        if known is not None:
            return known
        with self._lock:  # parts may be rendered by several threads
            return self._numbers.setdefault(shape, len(self._numbers) + 1)


class CallTable:
    """The tool calls of all messages behind one another.

    Args:
        texts: of `tool_calls`, null in messages without.
        registry: of the shapes.
    """

    def __init__(self, texts: pa.Array, registry: Registry) -> None:
        self.starts: Ints = np.zeros(len(texts) + 1, np.int64)
        """Where each message's calls begin in `calls`."""
        self.shapes: Ints = np.zeros(len(texts), np.int64)
        """Number of the shape of each message's calls; 0 where there are none."""
        self.calls: list[Any] = []
        holders = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
        counts, shapes = [], []
        for parsed in parse_texts(texts.drop_null().to_pylist()):
            calls = [parsed_call(call) for call in parsed]
            self.calls += calls
            counts.append(len(calls))
            shapes.append(registry.number(tuple(map(_call_shape, calls))))
        self.shapes[holders] = shapes
        self.starts[holders + 1] = counts
        np.cumsum(self.starts, out=self.starts)

    @cached_property
    def functions(self) -> list[dict[str, Any]]:
        """Function of each call, empty where it has none."""
        return [_function(call) for call in self.calls]


def _function(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def _call_shape(call: Any) -> Hashable:
    shape = _usual_shape(call) if type(call) is dict else None
    if shape is not None:
        return shape
    bare, values = skeleton([{"role": "assistant", "content": "", "tool_calls": [call]}], None)
    kinds = [type(value).__name__ for value in values]
    own = call.get("id") if isinstance(call, dict) else None
    return bare, str(kinds), None if isinstance(own, str) else json.dumps(own)


def _usual_shape(call: dict[str, Any]) -> Hashable:
    """Shape of a call of a type, a function and perhaps an id; None for others."""
    function, kind = call.get("function"), call.get("type")
    if type(function) is not dict or type(kind) is not str or len(function) != 2:
        return None
    given, name = function.get("arguments"), function.get("name")
    has_name = type(name) is str and name
    is_object = type(given) is dict
    if not has_name or not (is_object or (type(given) is str and given)):
        return None
    if len(call) == 2 or (len(call) == 3 and type(call.get("id")) is str):
        return *call, kind, *function, is_object
    return None


class ToolTable:
    """The tool definitions of all rows; rows of equal definitions share them.

    Args:
        texts: of `tools`, null in rows without.
        registry: of the shapes.
        is_open: whether the shape holds the keys of definitions, too.
    """

    def __init__(self, texts: pa.Array, registry: Registry, *, is_open: bool) -> None:
        encoded = pc.dictionary_encode(texts)
        codes = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy()
        parsed, self.is_finite = parse_known(encoded.dictionary.to_pylist())
        shape_of = _open_shape if is_open else _whole_shape
        numbers = [registry.number(tuple(map(shape_of, tools))) for tools in parsed]
        starts = np.cumsum([0, *(len(tools) for tools in parsed)])
        self.tools: list[Any] = [tool for tools in parsed for tool in tools]
        self.starts: Ints = starts[codes].astype(np.int64)
        """Where each row's definitions begin in `tools`."""
        self.shapes: Ints = np.array([*numbers, 0], np.int64)[codes]
        """Number of the shape of each row's definitions; 0 where there are none."""

    @cached_property
    def functions(self) -> list[dict[str, Any]]:
        """Function of each definition, empty where it has none."""
        return [_function(tool) for tool in self.tools]


def _whole_shape(tool: Any) -> Hashable:
    return 0 if isinstance(tool, dict) else json.dumps(tool)


def _open_shape(tool: Any) -> Hashable:
    """All of a definition but its items' values, which `tool_items` and `function_items` name."""
    if not isinstance(tool, dict):
        return json.dumps(tool)
    return tuple(
        [
            (key, *[_item_shape(name, item) for name, item in value.items()])
            if key == "function" and isinstance(value, dict)
            else _item_shape(key, value, is_leaf=key not in ("type", "function"))
            for key, value in tool.items()
        ]
    )


def _item_shape(key: str, value: Any, is_leaf: bool = True) -> Hashable:
    if is_leaf and isinstance(value, str | dict):
        return key, isinstance(value, str)
    return (key, "text", value) if isinstance(value, str) else (key, "json", json.dumps(value))

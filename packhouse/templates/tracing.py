"""A rendering that knows where its texts come from, and what the template asked of them.

A chat template's path through its code depends on roles and on what it asks of contents
(`'</think>' in content`, `content.strip()`). `TracedText` is a string that takes down each question
and its answer, and that stays traced when it is joined to others. So one rendering gives the text
(it is the very string that Jinja makes of plain texts), where each leaf stands in it, and what
another row has to answer to be written by the same constants.

Whatever is not understood makes the trace opaque: the row is rendered by marks (see marks.py).
Tracing counts only for templates that `is_traceable` finds free of uses that it does not see.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias

from packhouse.templates.leaves import JsonForm, Leaf, WholeJson
from packhouse.templates.questions import Check

__all__ = ["Hole", "OpaqueError", "Trace", "TracedText", "concat_traced", "parts_of"]


class Hole(NamedTuple):
    """Where a text of the row goes."""

    leaf: Hashable
    """Number of a leaf (see leaves.py), or a tuple: ("id", number)."""
    form: JsonForm | None = None
    """How it is written: as it is, or as JSON."""
    cut: int = 0
    """Characters of the JSON that are left out at its end."""


Part: TypeAlias = "str | TracedText"


class OpaqueError(Exception):
    """The template did something with a text that is not understood."""


class Trace:
    """What one rendering asked of its texts."""

    def __init__(self, *, opens_tools: bool = False) -> None:
        self.checks: dict[Hashable, set[Check]] = {}
        self.differing: set[tuple[Hashable, Hashable]] = set()
        """Pairs of leaves that were compared and are not equal."""
        self.is_opaque = False
        self.num_leaves = 0
        self._num_ids = 0
        self._opens_tools = opens_tools

    def leaf(self, leaf: Leaf, copy: Any) -> Any:
        """The next leaf, traced; for `replace_leaves`."""
        number = self.num_leaves
        self.num_leaves += 1
        if leaf.kind == "function":
            return OpenJson.make(self, number, leaf.value, copy)
        if leaf.kind == "tools" and self._opens_tools:
            return _opened(self, number, leaf.value)
        if leaf.is_json:
            return TracedJson.make(self, number, leaf.value, leaf.value)
        return self.text(leaf.value, Hole(number))

    def text(self, text: str, hole: Hole | None, parts: tuple[Part, ...] = ()) -> "TracedText":
        """A traced text: a leaf, or one put together of parts."""
        traced = TracedText(text)
        traced.trace, traced.hole = self, hole
        traced.parts = parts or (traced,)
        return traced

    def id(self, value: Any) -> Any:
        """The next id or name, traced; for `replace_ids`."""
        number = self._num_ids
        self._num_ids += 1
        return self.text(value, Hole(("id", number))) if isinstance(value, str) else value

    def copy(self) -> "Trace":
        """What was asked so far; further renderings of the same texts do not change it."""
        other = Trace()
        other.checks = {leaf: set(asked) for leaf, asked in self.checks.items()}
        other.differing = set(self.differing)
        other.num_leaves = self.num_leaves
        return other

    def refuse(self) -> NoReturn:
        """Note that the trace is worth nothing, and end the rendering."""
        self.is_opaque = True  # a template's test may swallow the exception
        raise OpaqueError


class TracedText(str):
    """A text that records what is asked of it, and refuses what is not understood."""

    trace: Trace
    hole: Hole | None
    parts: tuple[Part, ...]

    def _ask(self, kind: str, argument: Any, answer: bool | int) -> Any:
        is_text = self.hole is not None and self.hole.form is None
        if not is_text or not (argument is None or type(argument) is str):
            self.trace.refuse()
        assert self.hole is not None
        self.trace.checks.setdefault(self.hole.leaf, set()).add(Check(kind, argument, answer))
        return answer

    def __contains__(self, item: Any) -> bool:
        if type(item) is not str:
            self.trace.refuse()
        return bool(self._ask("contains", item, str.__contains__(self, item)))

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, str):
            return self is other
        if isinstance(other, TracedText):
            return self._equals(other)
        if type(other) is not str:
            self.trace.refuse()
        return bool(self._ask("equals", other, str.__eq__(self, other)))

    def _equals(self, other: "TracedText") -> bool:
        """Recorded for two leaves that differ."""
        mine, its = self.hole, other.hole
        if mine is None or its is None or mine.form or its.form or str.__eq__(self, other):
            self.trace.refuse()
        self.trace.differing.add((mine.leaf, its.leaf))
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return bool(self._ask("filled", None, str.__len__(self) > 0))

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> "TracedText":
        return self.trace.text(str.__add__(self, other), None, (*self.parts, *parts_of(other)))

    def __radd__(self, other: str) -> "TracedText":
        return self.trace.text(str.__add__(other, self), None, (*parts_of(other), *self.parts))

    def __hash__(self) -> int:
        self.trace.refuse()

    def __iter__(self) -> Iterator[str]:
        # `is iterable` asks for an iterator and does not use it.
        return map(_refuse, (self,))

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, str):
            raise TypeError("string indices must be integers")  # as any text: no such attribute
        hole = self.hole
        if hole is None or hole.form is None or hole.cut or key != slice(None, -1):
            self.trace.refuse()
        return self.trace.text(str.__getitem__(self, key), hole._replace(cut=1))

    def length(self) -> int:
        """Recorded for ids; contents are of too many lengths."""
        if self.hole is None or not isinstance(self.hole.leaf, tuple):
            self.trace.refuse()
        return int(self._ask("length", None, str.__len__(self)))

    def startswith(self, prefix: Any, *rest: Any) -> bool:
        """Recorded."""
        return bool(self._ask("startswith", rest or prefix, str.startswith(self, prefix, *rest)))

    def endswith(self, suffix: Any, *rest: Any) -> bool:
        """Recorded."""
        return bool(self._ask("endswith", rest or suffix, str.endswith(self, suffix, *rest)))

    def strip(self, chars: Any = None) -> "TracedText":
        """Recorded if it changes nothing."""
        return self._stripped("strip", chars, str.strip(self, chars))

    def lstrip(self, chars: Any = None) -> "TracedText":
        """Recorded if it changes nothing."""
        return self._stripped("lstrip", chars, str.lstrip(self, chars))

    def rstrip(self, chars: Any = None) -> "TracedText":
        """Recorded if it changes nothing."""
        return self._stripped("rstrip", chars, str.rstrip(self, chars))

    def _stripped(self, kind: str, chars: Any, result: str) -> "TracedText":
        if str.__len__(result) != str.__len__(self):
            self.trace.refuse()
        self._ask(kind, chars, False)
        return self

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list["TracedText"]:  # type: ignore[override]
        """Recorded if there is nothing to split at."""
        return [self._without(sep)]

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> list["TracedText"]:  # type: ignore[override]
        """Recorded if there is nothing to split at."""
        return [self._without(sep)]

    def partition(self, sep: Any) -> tuple["TracedText", str, str]:
        """Recorded if there is nothing to split at."""
        return self._without(sep), "", ""

    def replace(self, old: Any, new: Any, count: Any = -1) -> "TracedText":
        """Recorded if there is nothing to replace."""
        return self._without(old)

    def _without(self, part: Any) -> "TracedText":
        if type(part) is not str or not part or part in self:
            self.trace.refuse()
        return self


def parts_of(text: str) -> tuple[Part, ...]:
    """Constants and leaves that a text is made of, in order."""
    return text.parts if isinstance(text, TracedText) else (text,)


def _refuse(text: "TracedText | TracedJson", *args: Any, **kwargs: Any) -> NoReturn:
    text.trace.refuse()


_KEPT = {
    *("__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__"),
    *("__init_subclass__", "__subclasshook__", "__doc__", "__getstate__"),
    *("__reduce__", "__reduce_ex__", "__getnewargs__", "__dir__", "__sizeof__"),
}
for _name in set(dir(str)) - set(vars(TracedText)) - _KEPT:
    setattr(TracedText, _name, _refuse)


class TracedJson(WholeJson):
    """A JSON leaf that can be written whole and nothing else."""

    trace: Trace
    leaf: Hashable
    value: dict[str, Any]

    @classmethod
    def make(cls, trace: Trace, leaf: Hashable, value: dict[str, Any], copy: Any) -> Self:
        """The object, traced."""
        traced = cls(copy)
        traced.trace, traced.leaf, traced.value = trace, leaf, value
        return traced

    def write(self, dumps: Callable[[Any], str], form: JsonForm) -> str:
        """The leaf's JSON as a traced text."""
        return self.trace.text(dumps(self.value), Hole(self.leaf, form))


class OpenJson(TracedJson):
    """An object that is written whole or by its items, which are traced: a call's function."""


for _name in set(dir(dict)) - {"__class_getitem__", *_KEPT}:
    setattr(TracedJson, _name, _refuse)
    if _name != "__repr__":
        setattr(OpenJson, _name, getattr(dict, _name))


def _opened(trace: Trace, number: int, tool: dict[str, Any]) -> OpenJson:
    """A tool definition that may be taken to pieces: its items, and those of its function."""
    function = tool.get("function")
    copy = {**tool, **_items(trace, ("tool", number), tool_items(tool))}
    if isinstance(function, dict):
        own = {**function, **_items(trace, ("function", number), function_items(function))}
        copy["function"] = OpenJson.make(trace, ("tool", number, "function"), function, own)
    return OpenJson.make(trace, number, tool, copy)


def tool_items(tool: dict[str, Any]) -> dict[str, Any]:
    """Items of a tool definition that differ from one to the next; the others are its shape."""
    return {
        key: value
        for key, value in tool.items()
        if key != "type" and isinstance(value, str | dict) and key != "function"
    }


def function_items(function: dict[str, Any]) -> dict[str, Any]:
    """The same of its function."""
    return {key: value for key, value in function.items() if isinstance(value, str | dict)}


def _items(trace: Trace, path: tuple[Hashable, ...], items: dict[str, Any]) -> dict[str, Any]:
    return {
        key: trace.text(value, Hole((*path, key)))
        if isinstance(value, str)
        else TracedJson.make(trace, (*path, key), value, value)
        for key, value in items.items()
    }


def concat_traced(pieces: Iterable[str]) -> str:
    """Jinja's `concat`, for macros and block assignments: traced texts stay traced."""
    parts = list(pieces)
    traced = [part for part in parts if isinstance(part, TracedText)]
    if not traced:
        return "".join(parts)
    filled = [part for part in parts if str.__len__(part)]
    if len(traced) == len(filled) == 1 and filled[0] is traced[0]:
        return traced[0]
    joined = tuple(own for part in parts for own in parts_of(part))
    return traced[0].trace.text("".join(parts), None, joined)

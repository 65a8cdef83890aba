r"""Strings that know which of their characters come from the row, and from which text of it.

A chat template cuts, strips, joins and writes as JSON whatever it is given. `TracedText` is a
string that does all of that as `str` does, and keeps for each character the field it came from:

    field "hi <b>", template {{ '[' + content.split('<')[0] | trim + ']' }}
    ->  '[' of the template, 'hi' (characters 0 to 2 of the field), ']' of the template

So one rendering gives the text and every span. The trace also records what the template asked of
the texts (`'</think>' in content`): rows that answer alike are written alike, and filled in bulk.

Operations that make other characters (`upper`, `center`, `%`) keep the field, and are marked as
rewritten. Conversations are refused where such a text of a message is written.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from packhouse.templates.predicates import Predicate
from packhouse.templates.results import RefusedError

__all__ = [
    "BLOCK_EDGES",
    "REWRITTEN",
    "UNPROVEN",
    "DataObject",
    "Field",
    "JsonForm",
    "Part",
    "Path",
    "Piece",
    "Trace",
    "TracedText",
    "as_text",
    "encoder",
    "forget",
    "is_traced",
    "join_texts",
    "parts_of",
    "plain",
    "rewritten",
    "text_of",
    "to_json",
    "traced",
]

UNPROVEN = RefusedError(
    "template", "the template writes other text when contents are marked: no spans can be proven"
)
REWRITTEN = "rewritten"
"""Form of a piece whose characters are not those of its field."""

Path: TypeAlias = tuple[Any, ...]


class JsonForm(NamedTuple):
    """How a template writes JSON: the arguments of `tojson`."""

    ensure_ascii: bool = False
    indent: int | str | None = None
    separators: tuple[str, str] | None = None
    sort_keys: bool = False


@lru_cache(maxsize=64)
def encoder(form: JsonForm) -> Callable[[Any], str]:
    """The function that writes JSON in a form."""
    return json.JSONEncoder(**form._asdict()).encode


_HALF = re.compile("[\ud800-\udfff]")  # half of a character: columns hold none


class Trace:
    """The fields of one conversation, and what a template asked of them."""

    def __init__(self) -> None:
        self.fields: list[Field] = []
        """Fields that are no part of an object which is a field, in order of appearance."""
        self.predicates: set[tuple[Path, Predicate]] = set()
        self.differing: set[tuple[Path, Path]] = set()
        """Pairs of texts that were compared and are not equal."""
        self.unrecorded: set[tuple[int, Any]] = set()
        """(message, question): what was asked that columns of texts cannot answer."""

    @property
    def is_simple(self) -> bool:
        """Return True if rows that answer alike are sure to be written by the same constants."""
        return not self.unrecorded

    @property
    def num_questions(self) -> int:
        """Number of different questions that were asked."""
        return len(self.predicates) + len(self.differing) + len(self.unrecorded)


class Field:
    """One text or JSON object of a row.

    Args:
        trace: of the conversation.
        message: number of its message; -1: tool definitions and arguments of the row.
        kind: `content`; `thought` (reasoning); `call`: a name or arguments; `function`: a whole
            call; `tool`: a tool definition; `argument`: a text among the row's arguments; `id`:
            ids and names of messages and calls.
        value: the text or object.
        path: where columns have it, such as ("content", 2); None within objects.
        parent: the object that it is in.
    """

    __slots__ = (
        *("_written", "children", "is_stripped", "kind", "literals", "message", "parent", "path"),
        *("trace", "value"),
    )

    def __init__(
        self,
        trace: Trace,
        message: int,
        kind: str,
        value: Any,
        path: Path | None = None,
        parent: "Field | None" = None,
    ) -> None:
        self.trace, self.message, self.kind, self.value = trace, message, kind, value
        self.path, self.parent = path, parent
        self.children: list[Field] = []
        self.literals: set[str] = set()
        """What the template looked for in it."""
        self.is_stripped = False
        """True if the template stripped characters from its ends."""
        self._written: tuple[JsonForm | None, str] = None, ""
        (trace.fields if parent is None else parent.children).append(self)

    def to_json(self, form: JsonForm) -> str:
        """The value as JSON; prompts write the same again."""
        if self._written[0] != form:
            self._written = form, encoder(form)(self.value)
        return self._written[1]


class Piece(NamedTuple):
    """Characters that come from a field."""

    text: str
    field: Field
    start: int
    end: int
    """Range of the field's own characters; for JSON all of the field, or nothing."""
    form: JsonForm | str | None = None
    """None: as they are."""
    cut: int = 0
    """Characters that are left out at the end of JSON."""


class _Edge(str):
    """An empty constant at an end of a `{% generation %}` block."""


BLOCK_EDGES = (_Edge(), _Edge())
Part: TypeAlias = str | Piece


class TracedText(str):
    """A string and the parts it is made of.

    Its own attributes have an underscore: to a template `content.parts` is undefined.
    """

    _parts: tuple[Part, ...]

    @property
    def _pieces(self) -> list[Piece]:
        return [part for part in self._parts if isinstance(part, Piece)]

    @property
    def _path(self) -> Path | None:
        """Of the field, if this is one, whole and as it is."""
        if len(self._parts) != 1 or not isinstance(self._parts[0], Piece):
            return None
        _, field, start, end, form, _ = self._parts[0]
        return field.path if form is None and end - start == len(field.value) else None

    def _ask(self, kind: str, argument: Any, answer: Any) -> Any:
        """Record a question about a whole field; about anything else, only that there was one."""
        path = self._path
        is_plain = argument is None or (type(argument) is str and not _HALF.search(argument))
        if path is not None and is_plain:
            self._pieces[0].field.trace.predicates.add((path, Predicate(kind, argument, answer)))
        else:
            forget((self, argument), kind, argument if is_plain else None, answer)
        return answer

    def _cuts(self, ranges: Iterable[tuple[int, int]]) -> Iterator["TracedText"]:
        """The characters of each range; ranges ascend and do not overlap."""
        number = at = 0  # the part that a range may begin in, and where it begins
        for start, end in ranges:
            kept: list[Part] = []
            while number < len(self._parts):
                part = self._parts[number]
                text = plain(part)
                first, last = max(start - at, 0), min(end - at, len(text))
                if (first, last) == (0, len(text)):
                    kept.append(part)
                elif first < last:
                    own = _cut_piece(part, first, last) if isinstance(part, Piece) else None
                    kept.append(own or text[first:last])
                if at + len(text) > end:
                    break
                number, at = number + 1, at + len(text)
            yield traced(kept)

    def _cut(self, start: int, end: int) -> "TracedText":
        """The characters from `start` to `end`."""
        return next(self._cuts([(start, end)]))

    def _located(self, texts: Iterable[str], gap: int = 0) -> list["TracedText"]:
        """Texts that follow one another in this one, at least `gap` characters apart."""
        ranges, at = [], 0
        for text in texts:
            at = str.find(self, text, at)
            ranges.append((at, at + len(text)))
            at += len(text) + gap
        return list(self._cuts(ranges))

    def __str__(self) -> str:
        return self

    def __contains__(self, item: Any) -> bool:
        answer = str.__contains__(self, item)
        if len(str.strip(item)) > 1:
            for piece in self._pieces:
                piece.field.literals.add(str.__str__(item))
        return bool(self._ask("contains", item, answer))

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, str):
            return self is other
        is_equal = str.__eq__(self, other)
        if not isinstance(other, TracedText):
            return bool(self._ask("equals", other, is_equal))
        mine, its = self._path, other._path
        if mine is not None and its is not None and not is_equal:
            self._pieces[0].field.trace.differing.add((mine, its))
        else:
            forget((self, other), "equals", is_equal)
        return is_equal

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        forget(self, "hash")
        return str.__hash__(self)

    def __bool__(self) -> bool:
        return bool(self._ask("filled", None, str.__len__(self) > 0))

    def __len__(self) -> int:
        if all(piece.field.kind == "id" for piece in self._pieces):
            return int(self._ask("length", None, str.__len__(self)))
        forget(self, "length", str.__len__(self))
        return str.__len__(self)

    def __add__(self, other: str) -> "TracedText":
        return (
            traced((*self._parts, *parts_of(other))) if isinstance(other, str) else NotImplemented
        )

    def __radd__(self, other: str) -> "TracedText":
        return (
            traced((*parts_of(other), *self._parts)) if isinstance(other, str) else NotImplemented
        )

    def __mul__(self, count: Any) -> "TracedText":
        return traced(self._parts * count)

    __rmul__ = __mul__

    def __iter__(self) -> Iterator[str]:
        length = str.__len__(self)
        if length:  # nothing is asked before the first character is
            forget(self, "characters")
        yield from self._cuts((at, at + 1) for at in range(length))

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, str):
            raise TypeError("string indices must be integers")  # as any text: no such attribute
        last = self._parts[-1] if self._parts else None
        if key != slice(None, -1) or not isinstance(last, Piece) or last.form is None:
            forget(self, "item", str(key))
        if not isinstance(key, slice):
            at = range(str.__len__(self))[key]
            return self._cut(at, at + 1)
        if key.step not in (None, 1):
            return as_text(rewritten(str.__getitem__(self, key), self))
        return self._cut(*key.indices(str.__len__(self))[:2])

    def startswith(self, prefix: Any, *rest: Any) -> bool:
        """Recorded."""
        return bool(
            self._ask(
                "startswith",
                (prefix, *rest) if rest else prefix,
                str.startswith(self, prefix, *rest),
            )
        )

    def endswith(self, suffix: Any, *rest: Any) -> bool:
        """Recorded."""
        return bool(
            self._ask(
                "endswith", (suffix, *rest) if rest else suffix, str.endswith(self, suffix, *rest)
            )
        )

    def strip(self, chars: Any = None) -> "TracedText":
        """Recorded if it changes nothing."""
        return self._stripped("strip", chars)

    def lstrip(self, chars: Any = None) -> "TracedText":
        """Recorded if it changes nothing."""
        return self._stripped("lstrip", chars)

    def rstrip(self, chars: Any = None) -> "TracedText":
        """Recorded if it changes nothing."""
        return self._stripped("rstrip", chars)

    def _stripped(self, kind: str, chars: Any) -> "TracedText":
        size = str.__len__(self)
        start = 0 if kind == "rstrip" else size - len(str.lstrip(self, chars))
        end = size if kind == "lstrip" else max(len(str.rstrip(self, chars)), start)
        if end - start == size:
            self._ask(kind, chars, False)
            return self
        forget((self, chars), kind, True)
        for piece in self._pieces:
            piece.field.is_stripped = True
        return self._cut(start, end)

    # To mypy a list of a subclass is another type, hence the three `ignore[override]`.
    def split(self, sep: Any = None, maxsplit: Any = -1) -> list["TracedText"]:  # type: ignore[override]
        """Recorded if there is nothing to split at."""
        return self._parted(sep, str.split(self, sep, maxsplit))

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> list["TracedText"]:  # type: ignore[override]
        """Recorded if there is nothing to split at."""
        return self._parted(sep, str.rsplit(self, sep, maxsplit))

    def _parted(self, sep: Any, texts: list[str]) -> list["TracedText"]:
        if sep is not None and sep not in self:
            return [self]
        forget(self, "split", len(texts))
        return self._located(texts, len(sep) if sep is not None else 0)

    def splitlines(self, keepends: bool = False) -> list["TracedText"]:  # type: ignore[override]
        """Lines, each with its provenance."""
        lines = str.splitlines(self, keepends)
        forget(self, "splitlines", len(lines))
        return self._located(lines)

    def partition(self, sep: Any) -> tuple[str, str, str]:
        """Recorded if there is nothing to split at."""
        if sep not in self:
            return self, traced(()), traced(())
        forget(self, "partition")
        before, found, after = self._located(str.partition(self, sep))
        return before, found, after

    def rpartition(self, sep: Any) -> tuple[str, str, str]:
        """Recorded if there is nothing to split at."""
        if sep not in self:
            return traced(()), traced(()), self
        forget(self, "rpartition")
        before, found, after = self._located(str.rpartition(self, sep))
        return before, found, after

    def replace(self, old: Any, new: Any, count: Any = -1) -> str:
        """Recorded if there is nothing to replace."""
        if not old:
            return as_text(rewritten(str.replace(self, old, new, count), self, new))
        parted = self.split(old, count)
        return self if len(parted) == 1 else join_texts(new, parted)

    def removeprefix(self, prefix: Any) -> "TracedText":
        """Recorded if there is no such prefix."""
        kept = str.removeprefix(self, prefix)  # refuses what is no text
        if not self.startswith(prefix):
            return self
        forget(self, "removeprefix")
        return self._cut(str.__len__(self) - len(kept), str.__len__(self))

    def removesuffix(self, suffix: Any) -> "TracedText":
        """Recorded if there is no such suffix."""
        kept = str.removesuffix(self, suffix)  # refuses what is no text
        if not self.endswith(suffix):
            return self
        forget(self, "removesuffix")
        return self._cut(0, len(kept))

    def join(self, items: Iterable[Any]) -> str:
        """Every item keeps its provenance."""
        items = list(items)
        str.join(self, items)  # refuses what is no text
        return join_texts(self, items)


_OWN = {
    *("__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__"),
    *("__init_subclass__", "__subclasshook__", "__doc__", "__getstate__", "__repr__"),
    *("__reduce__", "__reduce_ex__", "__getnewargs__", "__dir__", "__sizeof__"),
}


def _rewriting(name: str) -> Callable[..., Any]:
    def method(self: TracedText, *args: Any, **kwargs: Any) -> Any:
        return rewritten(getattr(str, name)(self, *args, **kwargs), self, *args, *kwargs.values())

    method.__name__ = name
    return method


for _name in set(dir(str)) - set(vars(TracedText)) - _OWN:
    setattr(TracedText, _name, _rewriting(_name))


def forget(value: Any, *question: Any) -> None:
    """Note that what follows depends on more of the texts in a value than is recorded."""
    for field in _fields_in(value):
        field.trace.unrecorded.add((field.message, question))


def text_of(field: Field) -> TracedText:
    """A field that is a text, as a template gets it."""
    return traced((Piece(field.value, field, 0, len(field.value)),))


def traced(parts: Iterable[Part]) -> TracedText:
    """The text of parts in their order."""
    own = tuple(part for part in parts if part or type(part) is not str)
    made = TracedText("".join(map(plain, own)))
    made._parts = own
    return made


def plain(part: Part) -> str:
    """The text of a part."""
    return part.text if isinstance(part, Piece) else str.__str__(part)


def parts_of(text: str) -> tuple[Part, ...]:
    """Constants and pieces that a text is made of."""
    return text._parts if isinstance(text, TracedText) else (text,)


def _cut_piece(piece: Piece, first: int, last: int) -> Piece:
    text = piece.text[first:last]
    if piece.form is None:
        return piece._replace(text=text, start=piece.start + first, end=piece.start + last)
    left_out = piece.text[:first] + piece.text[last:]
    if left_out.strip('{}[]", :\n'):
        return piece._replace(text=text, start=0, end=0, cut=-1)
    is_last = first == 0 and not piece.cut
    return piece._replace(text=text, cut=len(left_out) if is_last else -1)


def _fields_in(value: Any) -> Iterator[Field]:
    if isinstance(value, TracedText):
        yield from (part.field for part in value._parts if isinstance(part, Piece))
    elif isinstance(value, DataObject):
        yield value._field
    elif isinstance(value, dict):
        yield from _fields_in([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _fields_in(item)


def is_traced(value: Any) -> bool:
    """Return True if a value is or holds text of the row."""
    return any(True for _ in _fields_in(value))


def rewritten(result: Any, *sources: Any) -> Any:
    """What an operation made of values: text of it is text of their fields.

    Raises:
        RefusedError: the result is of a kind that has no provenance, such as bytes.
    """
    fields = list(_fields_in(sources))
    is_text = not (result is None or isinstance(result, bool | int | float))
    forget(sources, "rewritten", None if is_text else result)
    if not fields or not is_text:
        return result
    if result is NotImplemented:
        return result
    if isinstance(result, str):
        texts = [str.__str__(result), *[""] * (len(fields) - 1)]
        return traced(
            Piece(text, field, 0, 0, REWRITTEN) for text, field in zip(texts, fields, strict=True)
        )
    if isinstance(result, list | tuple):
        return [rewritten(item, *sources) for item in result]
    raise UNPROVEN


def as_text(value: Any) -> str:
    """What Jinja writes for a value."""
    if isinstance(value, str):
        return value
    text = str(value)
    return rewritten(text, value) if isinstance(value, list | dict | tuple) else text


def join_texts(separator: str, items: Iterable[Any]) -> str:
    """`separator.join(items)`; items become texts."""
    parts: list[Part] = []
    for number, item in enumerate(items):
        if number and str.__len__(separator):
            parts += parts_of(separator)
        parts += parts_of(as_text(item))
    if not any(type(part) in (Piece, _Edge) for part in parts):
        return "".join(map(plain, parts))
    return traced(parts)


class DataObject(dict[Any, Any]):
    """A JSON object of the row, which can be written whole, or taken apart.

    Args:
        field: of the object as a whole.
        items: its items where they are fields of their own. None: it is opened at the first look
            into it, and the row is none that others are filled like.
    """

    def __init__(self, field: Field, items: dict[Any, Any] | None = None) -> None:
        super().__init__(field.value if items is None else items)
        self._field, self._is_open = field, items is not None

    def _open(self) -> None:
        forget(self, "open")
        self._is_open = True
        items = list(dict.items(self))
        dict.clear(self)
        for key, value in items:
            own = _opened(key, self._field)
            dict.__setitem__(self, own, _opened(value, self._field))


def _opened(value: Any, parent: Field) -> Any:
    """A value within an object, with its strings traced."""
    if isinstance(value, list):
        return [_opened(item, parent) for item in value]
    if not isinstance(value, str | dict) or not value:
        return value
    field = Field(parent.trace, parent.message, parent.kind, value, None, parent)
    return text_of(field) if isinstance(value, str) else DataObject(field)


def _looking(name: str) -> Callable[..., Any]:
    def method(self: DataObject, *args: Any) -> Any:
        if not self._is_open:
            self._open()
        return getattr(dict, name)(self, *args)

    return method


for _name in (
    *("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__or__"),
    *("__ror__", "__reversed__", "get", "items", "keys", "values", "copy"),
):
    setattr(DataObject, _name, _looking(_name))


_HIDDEN = re.compile(r'"\\u0000([0-9]+)\\u0000"')


def to_json(value: Any, form: JsonForm) -> str:
    """A value as JSON, in which each text keeps its provenance."""
    if isinstance(value, DataObject):
        return traced((Piece(value._field.to_json(form), value._field, 0, 1, form),))
    if not is_traced(value):
        return encoder(form)(value)
    found: list[str | DataObject] = []
    text = encoder(form._replace(sort_keys=False))(_hidden(value, form, found))
    parts: list[Part] = []
    for number, constant in enumerate(_HIDDEN.split(text)):
        if number % 2 == 0:
            parts.append(constant)
            continue
        own, write = found[int(constant)], encoder(form)
        if not isinstance(own, TracedText):
            parts += parts_of(to_json(own, form))
            continue
        forget(own, "to_json")
        parts += ['"', *(_in_json(part, write) for part in own._parts), '"']
    return traced(parts)


def _in_json(part: Part, write: Callable[[Any], str]) -> Part:
    if not isinstance(part, Piece):
        return write(str.__str__(part))[1:-1]
    return part._replace(text=write(part.text)[1:-1], form=part.form or "string")


def _hidden(value: Any, form: JsonForm, found: list[Any]) -> Any:
    r"""A value in which `\0number\0` stands for each text and object of the row, and each `\0`."""
    is_hidden = isinstance(value, TracedText) or (isinstance(value, str) and "\0" in value)
    if is_hidden or (isinstance(value, DataObject) and form.indent is None):
        found.append(value)
        return f"\0{len(found) - 1}\0"
    if isinstance(value, dict):
        items = list(value.items())
        if form.sort_keys:
            items.sort(key=lambda item: str.__str__(item[0]))
        return {_hidden(k, form, found): _hidden(v, form, found) for k, v in items}
    if isinstance(value, list | tuple):
        return [_hidden(item, form, found) for item in value]
    return value

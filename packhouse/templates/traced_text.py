r"""Strings that know which of their characters come from the row, and from which text of it.

A chat template cuts, strips, joins and writes as JSON whatever it is given. `TracedText` is a
string that does all of that as `str` does, and keeps for each character the field it came from. So
one rendering gives the text and every span.

Operations that make other characters (`upper`, `center`, `%`) keep the field, and are marked as
rewritten. Conversations are refused where such a text of a message is written.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from packhouse.templates.predicates import Predicate
from packhouse.templates.provenance import (
    BLOCK_EDGES,
    REWRITTEN,
    UNPROVEN,
    Field,
    Part,
    Path,
    Piece,
    plain,
)

_HALF = re.compile("[\ud800-\udfff]")  # half of a character: columns hold none
Method: TypeAlias = Callable[..., Any]


def _asking(kind: str) -> Method:
    """`startswith` or `endswith`: recorded."""

    def method(self: "TracedText", argument: object, *rest: object) -> bool:
        answer = getattr(str, kind)(self, argument, *rest)
        return bool(self._ask(kind, (argument, *rest) if rest else argument, answer))

    return method


def _stripping(kind: str) -> Method:
    """`strip`, `lstrip` or `rstrip`: recorded if it changes nothing."""

    def method(self: "TracedText", chars: Any = None) -> "TracedText":
        # " hi ", size 4: what lstrip leaves, "hi ", begins at 4 - 3; what rstrip leaves ends at 3.
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

    return method


def _splitting(kind: str) -> Method:
    """`split` or `rsplit`: recorded if there is nothing to split at."""

    def method(self: "TracedText", sep: Any = None, maxsplit: object = -1) -> list["TracedText"]:
        # "a--b" at "--": "a" and "b" lie at [0, 1) and, at least 2 characters behind, [3, 4).
        texts = getattr(str, kind)(self, sep, maxsplit)
        if sep is not None and sep not in self:
            return [self]
        forget(self, "split", len(texts))
        return self._located(texts, len(sep) if sep is not None else 0)

    return method


def _partitioning(kind: str) -> Method:
    """`partition` or `rpartition`: recorded if there is nothing to split at."""

    def method(self: "TracedText", sep: object) -> tuple["TracedText", ...]:
        if sep not in self:
            empty = traced(())
            return (self, empty, empty) if kind == "partition" else (empty, empty, self)
        forget(self, kind)
        return tuple(self._located(getattr(str, kind)(self, sep)))

    return method


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
        # Parts "ab" of the row and "-cd" of the template: [1, 3) is "b" of the one, "-" of the
        # other. The next range may begin in the second part, so that is where it is looked for.
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
                    kept.append(
                        part.between(first, last) if isinstance(part, Piece) else text[first:last]
                    )
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
        # Tags, such as `</think>`: a template that looks for one may write the pieces between.
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
        # `(arguments | tojson)[:-1]` cuts a brace off, whatever the row: that asks nothing of it.
        last = self._parts[-1] if self._parts else None
        if key != slice(None, -1) or not isinstance(last, Piece) or last.form is None:
            forget(self, "item", str(key))
        if not isinstance(key, slice):
            at = range(str.__len__(self))[key]
            return self._cut(at, at + 1)
        if key.step not in (None, 1):
            return as_text(rewritten(str.__getitem__(self, key), self))
        return self._cut(*key.indices(str.__len__(self))[:2])

    startswith, endswith = _asking("startswith"), _asking("endswith")
    strip, lstrip, rstrip = _stripping("strip"), _stripping("lstrip"), _stripping("rstrip")
    split, rsplit = _splitting("split"), _splitting("rsplit")
    partition, rpartition = _partitioning("partition"), _partitioning("rpartition")

    def splitlines(self, keepends: Any = False) -> list[Any]:
        """Lines, each with its provenance."""
        lines = str.splitlines(self, keepends)
        forget(self, "splitlines", len(lines))
        return self._located(lines)

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


def _rewriting(name: str) -> Method:
    def method(self: TracedText, *args: object, **kwargs: object) -> object:
        return rewritten(getattr(str, name)(self, *args, **kwargs), self, *args, *kwargs.values())

    method.__name__ = name
    return method


for _name in set(dir(str)) - set(vars(TracedText)) - _OWN:
    setattr(TracedText, _name, _rewriting(_name))


def forget(value: object, *question: object) -> None:
    """Note that what follows depends on more of the texts in a value than is recorded."""
    for field in _fields_in(value):
        field.trace.unrecorded.add((field.message, question))


def text_of(field: Field) -> TracedText:
    """A field that is a text, as a template gets it."""
    return traced((Piece(field.value, field, 0, len(field.value)),))


def traced(parts: Iterable[Part]) -> TracedText:
    """The text of parts in their order."""
    own = tuple(part for part in parts if part or type(part) is not str)  # edges of blocks are ""
    made = TracedText("".join(map(plain, own)))
    made._parts = own
    return made


def parts_of(text: str) -> tuple[Part, ...]:
    """Constants and pieces that a text is made of."""
    return text._parts if isinstance(text, TracedText) else (text,)


def _fields_in(value: object) -> Iterator[Field]:
    if isinstance(value, TracedText):
        yield from (part.field for part in value._parts if isinstance(part, Piece))
    elif isinstance(value, dict):
        own: Field | None = getattr(value, "_field", None)  # of a `DataObject`
        yield from [own] if own else _fields_in([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _fields_in(item)


def is_traced(value: object) -> bool:
    """Return True if a value is or holds text of the row."""
    return any(True for _ in _fields_in(value))


def rewritten(result: object, *sources: object) -> Any:
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
        # "%s, %s" of two fields: all of the text is said to be of the first one, and nothing of
        # the second, so that both are known to be in it.
        texts = [str.__str__(result), *[""] * (len(fields) - 1)]
        return traced(
            Piece(text, field, 0, 0, REWRITTEN) for text, field in zip(texts, fields, strict=True)
        )
    if isinstance(result, list | tuple):
        return [rewritten(item, *sources) for item in result]
    raise UNPROVEN


def as_text(value: object) -> str:
    """What Jinja writes for a value."""
    if isinstance(value, str):
        return value
    text = str(value)
    return rewritten(text, value) if isinstance(value, list | dict | tuple) else text


def join_texts(separator: str, items: Iterable[object]) -> str:
    """`separator.join(items)`; items become texts."""
    parts: list[Part] = []
    for number, item in enumerate(items):
        if number and str.__len__(separator):
            parts += parts_of(separator)
        parts += parts_of(as_text(item))
    if not any(type(part) in (Piece, type(BLOCK_EDGES[0])) for part in parts):
        return "".join(map(plain, parts))
    return traced(parts)

r"""Trace every character that a template writes back to the field of the row it comes from.

    field "hi <b>", template {{ '[' + content.split('<')[0] | trim + ']' }}
    ->  '[' of the template, 'hi' (characters 0 to 2 of the field), ']' of the template

A chat template may cut, strip and join its inputs, or write them as JSON. `TracedText` is a string
that supports all of this like `str` and remembers the field of each character, so one rendering
gives the text and every span. `DataObject` is a JSON object that a template writes whole or reads
key by key. Operations that produce other characters (`upper`, `center`, `%`) keep the field but
mark the text as rewritten; a conversation is refused if such text of a message is written.

A `Trace` records the questions that the template asks about texts (`'</think>' in content`). Rows
with the same answers are written in the same way, so they can be filled in bulk. `answers` asks
whole columns, at about 5 ns per text and question.

JSON is written by the standard library. Texts and objects of the row appear in its output as
placeholders `\0number\0`, which are then replaced by their parts:

    {"name": "hi"}  ->  {"name": "\00\0"}  ->  '{"name": "', 'hi' of the field, '"}'
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.render.rendered_texts import RefusedError

UNPROVEN = RefusedError(
    "template",
    "the template writes different text when contents are marked, so spans cannot be determined. "
    "Set format.template to a Jinja file that writes texts unchanged",
)
REWRITTEN = "rewritten"
"""Form of a piece whose characters differ from those of its field."""

Path: TypeAlias = tuple[Any, ...]


class JsonForm(NamedTuple):
    """Arguments of a template's `tojson`."""

    ensure_ascii: bool = False
    indent: int | str | None = None
    separators: tuple[str, str] | None = None
    sort_keys: bool = False


@lru_cache(maxsize=64)
def encoder(form: JsonForm) -> Callable[[object], str]:
    """Return the function that writes JSON in this form."""
    # `json.dumps` with settings makes an encoder for each call: 7.1 us for a short object, not 4.6.
    return json.JSONEncoder(**form._asdict()).encode


class Predicate(NamedTuple):
    """One question about a text and the answer it got."""

    kind: str
    """`contains`, `equals`, `startswith`, `endswith`, `filled`, `length`; `strip`, `lstrip` or
    `rstrip` (true if it removes anything); `matches` (a pattern of RE2)."""
    argument: str | None
    answer: bool | int


# All characters that str.strip() removes; the last one is U+3000.
_WHITESPACE = "".join(chr(point) for point in range(0x3001) if chr(point).isspace())


def answers(predicate: Predicate, texts: pa.Array) -> np.ndarray:
    """Return each text's answer to the question.

    Example:
        >>> answers(Predicate("contains", "a", True), pa.array(["ab", "b"])).tolist()
        [True, False]
    """
    kind, argument = predicate.kind, predicate.argument
    chars = _WHITESPACE if argument is None else argument
    asked: dict[str, Callable[[], pa.Array]] = {
        "filled": lambda: pc.greater(pc.binary_length(texts), 0),
        "length": lambda: pc.utf8_length(texts),
        "strip": lambda: pc.utf8_trim(texts, chars),
        "lstrip": lambda: pc.utf8_ltrim(texts, chars),
        "rstrip": lambda: pc.utf8_rtrim(texts, chars),
        "contains": lambda: pc.match_substring_regex(texts, literally(argument or "")),
        "matches": lambda: pc.match_substring_regex(texts, argument),
        "equals": lambda: pc.equal(texts, argument),
        "startswith": lambda: pc.starts_with(texts, argument),
        "endswith": lambda: pc.ends_with(texts, argument),
    }
    found = asked[kind]()
    if kind in ("strip", "lstrip", "rstrip"):
        found = pc.not_equal(pc.binary_length(found), pc.binary_length(texts))
    return np.asarray(found.to_numpy(zero_copy_only=False))


def literally(argument: str) -> str:
    """Return an RE2 pattern for exactly this text, ten times as fast as Arrow's text search."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in argument)


@dataclass(eq=False, slots=True)
class Trace:
    """Fields of one conversation, and the questions that a template asked about them."""

    fields: "list[Field]" = field(default_factory=list)
    """Top-level fields, in order of appearance. Fields inside an object are its children."""
    predicates: set[tuple[Path, Predicate]] = field(default_factory=set)
    differing: set[tuple[Path, Path]] = field(default_factory=set)
    """Pairs of texts that were compared and differ."""
    unrecorded: set[tuple[int, object]] = field(default_factory=set)
    """(message, question) for questions that columns of texts cannot answer. If there are none,
    rows with the same answers are certain to be written with the same constants."""

    @property
    def num_questions(self) -> int:
        """Return the number of questions so far."""
        return len(self.predicates) + len(self.differing) + len(self.unrecorded)


@dataclass(eq=False, repr=False, slots=True)
class Field:
    """One text or JSON object of a row."""

    trace: Trace
    message: int
    """Index of its message; -1 for tool definitions and arguments of the row."""
    kind: str
    """`content`; `thought` (reasoning); `call` (name or arguments of a call); `function` (a whole
    call); `tool` (a tool definition); `argument` (a text in the row's arguments); `id` (ids and
    names of messages and calls)."""
    value: Any
    path: Path = ()
    """Location in the columns, such as ("content", 2); empty inside objects."""
    parent: "Field | None" = None
    """The object that contains it."""
    children: "list[Field]" = field(default_factory=list)
    literals: set[str] = field(default_factory=set)
    """Strings that the template searched for in it."""
    is_stripped: bool = False
    """True if the template stripped characters from either end."""
    written: dict[JsonForm, str] = field(default_factory=dict)
    """Its JSON text by form, kept because prompts write the same field again."""

    def __post_init__(self) -> None:
        (self.trace.fields if self.parent is None else self.parent.children).append(self)


class Piece(NamedTuple):
    """Characters that come from a field."""

    text: str
    field: Field
    start: int
    end: int
    """Range of the field's own characters; for JSON the whole field or nothing."""
    form: JsonForm | str | None = None
    """None if the characters are unchanged."""
    cut: int = 0
    """Number of characters left out at the end of the JSON; -1 if others are missing."""

    def between(self, first: int, last: int) -> "Piece":
        """Return the characters from `first` to `last`; JSON can only be cut at its end.

        '{"a": "b"}' without its last character, as in `(x | tojson)[:-1]`, has `cut` 1.
        """
        text = self.text[first:last]
        if self.form is None:
            return self._replace(text=text, start=self.start + first, end=self.start + last)
        left_out = self.text[:first] + self.text[last:]
        if left_out.strip('{}[]", :\n'):
            return self._replace(text=text, start=0, end=0, cut=-1)
        is_last = first == 0 and not self.cut
        return self._replace(text=text, cut=len(left_out) if is_last else -1)


class _Edge(str):
    """Empty constant that marks the start or end of a `{% generation %}` block."""


BLOCK_EDGES = (_Edge(), _Edge())
Part: TypeAlias = str | Piece


def plain(part: Part) -> str:
    """Return the text of a part."""
    return part.text if isinstance(part, Piece) else str.__str__(part)


_HALF = re.compile("[\ud800-\udfff]")  # surrogates, which columns cannot hold
_HIDDEN = re.compile(r'"\\u0000([0-9]+)\\u0000"')
Method: TypeAlias = Callable[..., Any]


def _asking(kind: str) -> Method:
    """Make `startswith` or `endswith`, which record their answer."""

    def method(self: "TracedText", argument: object, *rest: object) -> bool:
        answer = getattr(str, kind)(self, argument, *rest)
        return bool(self._ask(kind, (argument, *rest) if rest else argument, answer))

    return method


def _stripping(kind: str) -> Method:
    """Make `strip`, `lstrip` or `rstrip`, which record the question if nothing changes."""

    def method(self: "TracedText", chars: Any = None) -> "TracedText":
        text = getattr(str, kind)(self, chars)
        if len(text) == str.__len__(self):
            self._ask(kind, chars, False)
            return self
        forget((self, chars), kind, True)
        for own in fields_in(self):
            own.is_stripped = True
        return self._located([text])[0]

    return method


def _dividing(kind: str) -> Method:
    """Make `split`, `partition` and the like, which record the question if nothing is split."""

    def method(self: "TracedText", sep: Any = None, *limit: Any, **named: Any) -> Any:
        # "a--b" split at "--": "a" is at [0, 1), and "b", at least 2 characters later, at [3, 4).
        texts = getattr(str, kind)(self, sep, *limit, **named)
        if sep is None or sep in self:
            forget(self, kind, len(texts))
        is_split = kind in ("split", "rsplit") and sep is not None
        return type(texts)(self._located(texts, len(sep) if is_split else 0))

    return method


def _removing(kind: str, asking: str) -> Method:
    """Make `removeprefix` or `removesuffix`, which record the question if nothing is removed."""

    def method(self: "TracedText", text: Any) -> "TracedText":
        kept = len(getattr(str, kind)(self, text))
        if not getattr(self, asking)(text):
            return self
        forget(self, kind)
        size = str.__len__(self)
        return self._cuts([(size - kept, size) if kind == "removeprefix" else (0, kept)])[0]

    return method


# Not marks around the contents (private-use characters): with marks, spans were guessed wrong in
# rows with hostile control text, and rows that a template escapes had to be rejected.
class TracedText(str):
    """A string and the parts it is made of.

    Its attributes start with an underscore, so that `content.parts` is undefined in a template.
    """

    _parts: tuple[Part, ...]

    @property
    def _whole(self) -> Field | None:
        """Its field, if this is one whole, unchanged field of the columns."""
        if len(self._parts) != 1 or not isinstance(self._parts[0], Piece):
            return None
        _, own, start, end, form, _ = self._parts[0]
        is_whole = form is None and end - start == len(own.value)
        return own if own.path and is_whole else None

    def _ask(self, kind: str, argument: Any, answer: Any) -> Any:
        """Record a question about a whole field; for any other text, only that one was asked."""
        own = self._whole
        is_plain = argument is None or (type(argument) is str and not _HALF.search(argument))
        if own is not None and is_plain:
            own.trace.predicates.add((own.path, Predicate(kind, argument, answer)))
        else:
            forget((self, argument), kind, argument if is_plain else None, answer)
        return answer

    def _cuts(self, ranges: Iterable[tuple[int, int]]) -> list["TracedText"]:
        """Return the characters of each range. Ranges must ascend and not overlap."""
        # Parts "ab" of the row and "-cd" of the template: [1, 3) is "b" of the first and "-" of the
        # second. The next range may begin in the second part, so the search continues there.
        cuts = list[TracedText]()
        number = at = 0  # first part in which the range may begin, and the start of that part
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
            cuts.append(traced(kept))
        return cuts

    def _located(self, texts: Iterable[str], gap: int = 0) -> list["TracedText"]:
        """Trace texts that occur in this one in order, at least `gap` characters apart."""
        ranges, at = [], 0
        for text in texts:
            at = str.find(self, text, at)
            ranges.append((at, at + len(text)))
            at += len(text) + gap
        return self._cuts(ranges)

    def __str__(self) -> str:
        return self

    def __contains__(self, item: Any) -> bool:
        answer = str.__contains__(self, item)
        # Tags such as `</think>`: a template that searches for one may write the text between them.
        if len(str.strip(item)) > 1:
            for own in fields_in(self):
                own.literals.add(str.__str__(item))
        return bool(self._ask("contains", item, answer))

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, str):
            return self is other
        is_equal = str.__eq__(self, other)
        if not isinstance(other, TracedText):
            return bool(self._ask("equals", other, is_equal))
        mine, its = self._whole, other._whole
        if mine is not None and its is not None and not is_equal:
            mine.trace.differing.add((mine.path, its.path))
        else:
            forget((self, other), "equals", is_equal)
        return is_equal

    def __ne__(self, other: object) -> bool:
        return not self == other

    # A look-up in a dict or set asks about all of the text.
    def __hash__(self) -> int:
        forget(self, "hash")
        return str.__hash__(self)

    def __bool__(self) -> bool:
        return bool(self._ask("filled", None, str.__len__(self) > 0))

    def __len__(self) -> int:
        # Mistral's template asks whether an id has nine characters. If lengths of contents were
        # recorded, each length would need a compiled template of its own.
        if all(own.kind == "id" for own in fields_in(self)):
            return int(self._ask("length", None, str.__len__(self)))
        forget(self, "length", str.__len__(self))
        return str.__len__(self)

    def __add__(self, other: str) -> "TracedText":
        is_text = isinstance(other, str)
        return traced((*self._parts, *parts_of(other))) if is_text else NotImplemented

    def __radd__(self, other: str) -> "TracedText":
        is_text = isinstance(other, str)
        return traced((*parts_of(other), *self._parts)) if is_text else NotImplemented

    def __iter__(self) -> Iterator[str]:
        length = str.__len__(self)
        if length:  # an empty text has no characters to ask about
            forget(self, "characters")
        yield from self._cuts((at, at + 1) for at in range(length))

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, str):
            raise TypeError("string indices must be integers")  # like `str`: no such attribute
        # `(arguments | tojson)[:-1]` cuts off a brace in every row, so no question is recorded.
        last = self._parts[-1] if self._parts else None
        if key != slice(None, -1) or not isinstance(last, Piece) or last.form is None:
            forget(self, "item", str(key))
        if not isinstance(key, slice):
            at = range(str.__len__(self))[key]
            return self._cuts([(at, at + 1)])[0]
        if key.step not in (None, 1):
            return as_text(rewritten(str.__getitem__(self, key), self))
        start, end, _ = key.indices(str.__len__(self))
        return self._cuts([(start, end)])[0]

    startswith, endswith = _asking("startswith"), _asking("endswith")
    strip, lstrip, rstrip = _stripping("strip"), _stripping("lstrip"), _stripping("rstrip")
    split, rsplit = _dividing("split"), _dividing("rsplit")
    partition, rpartition = _dividing("partition"), _dividing("rpartition")
    removeprefix = _removing("removeprefix", "startswith")
    removesuffix = _removing("removesuffix", "endswith")

    def splitlines(self, keepends: Any = False) -> list[Any]:
        """Return the lines, each with its provenance."""
        lines = str.splitlines(self, keepends)
        forget(self, "splitlines", len(lines))
        return self._located(lines)

    def replace(self, old: Any, new: Any, count: Any = -1) -> str:
        """Replace like `str.replace`; record the question if nothing is replaced."""
        if not old:
            return as_text(rewritten(str.replace(self, old, new, count), self, new))
        parted = self.split(old, count)
        return self if len(parted) == 1 else join_texts(new, parted)

    def join(self, items: Iterable[Any]) -> str:
        """Join like `str.join`; every item keeps its provenance."""
        items = list(items)
        str.join(self, items)  # raises TypeError for items other than text
        return join_texts(self, items)


def rewriting(function: Method, *owners: object) -> Method:
    """Wrap a function so that its results have the provenance of all owners and arguments."""

    @wraps(function)
    def method(*args: object, **kwargs: object) -> object:
        # An iterator is read once by the function, and its items are needed for their fields.
        given = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        return rewritten(function(*given, **kwargs), *owners, *given, *kwargs.values())

    return method


# Whatever is not defined above marks its result as rewritten, and so do methods that a later Python
# adds. A row is then refused, and no character of it is taken for the template's own.
_OPERATORS = set("__lt__ __le__ __gt__ __ge__ __mul__ __rmul__ __mod__ __rmod__ __format__".split())
for _name in {name for name in dir(str) if name[0] != "_"} | _OPERATORS:
    if _name not in vars(TracedText):
        setattr(TracedText, _name, rewriting(getattr(str, _name)))


def forget(value: object, *question: object) -> None:
    """Note that the output depends on more of the texts in a value than the trace records."""
    for own in fields_in(value):
        own.trace.unrecorded.add((own.message, question))


def value_of(field: Field) -> Any:
    """Return a field as the template gets it."""
    if not isinstance(field.value, str):
        return DataObject(field)
    return traced((Piece(field.value, field, 0, len(field.value)),))


def traced(parts: Iterable[Part]) -> TracedText:
    """Return the text made of these parts, in order."""
    own = tuple(part for part in parts if part or type(part) is not str)  # edges of blocks are ""
    made = TracedText("".join(map(plain, own)))
    made._parts = own
    return made


def parts_of(text: str) -> tuple[Part, ...]:
    """Return the constants and pieces that a text is made of."""
    return text._parts if isinstance(text, TracedText) else (text,)


def fields_in(value: object) -> Iterator[Field]:
    """Yield the fields whose text is in a value. An object of the row is a field itself."""
    if isinstance(value, TracedText):
        yield from (part.field for part in value._parts if isinstance(part, Piece))
    elif isinstance(value, DataObject):
        yield value._field
    elif isinstance(value, dict):
        yield from fields_in([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from fields_in(item)


def is_traced(value: object) -> bool:
    """Return True if a value is or contains text of the row."""
    return any(True for _ in fields_in(value))


def rewritten(result: object, *sources: object) -> Any:
    """Attribute text in the result of an operation to the fields of its sources.

    Raises:
        RefusedError: the result is of a type that cannot be traced, such as bytes.
    """
    fields = list(fields_in(sources))
    is_text = not (result is None or isinstance(result, bool | int | float))
    forget(sources, "rewritten", None if is_text else result)
    if not fields or not is_text or result is NotImplemented:
        return result
    if isinstance(result, str):
        # "%s, %s" of two fields: the whole text is attributed to the first one, and an empty text
        # to the second, so that both are known to be in it.
        texts = [str.__str__(result), *[""] * (len(fields) - 1)]
        pairs = zip(texts, fields, strict=True)
        return traced(Piece(text, field, 0, 0, REWRITTEN) for text, field in pairs)
    if isinstance(result, list | tuple):
        return [rewritten(item, *sources) for item in result]
    raise UNPROVEN


def as_text(value: object) -> str:
    """Return the text that Jinja writes for a value."""
    if isinstance(value, str):
        return value
    text = str(value)
    return rewritten(text, value) if isinstance(value, list | dict | tuple) else text


def join_texts(separator: str, items: Iterable[object]) -> str:
    """Return `separator.join(items)`, with items converted to text."""
    parts: list[Part] = []
    for number, item in enumerate(items):
        if number and str.__len__(separator):
            parts += parts_of(separator)
        parts += parts_of(as_text(item))
    if not any(type(part) in (Piece, type(BLOCK_EDGES[0])) for part in parts):
        return "".join(map(plain, parts))
    return traced(parts)


class DataObject(dict[Any, Any]):
    """A JSON object of the row, which a template may write whole or read key by key.

    Args:
        field: field of the whole object.
        items: its items, if they are separate fields. If None, it is opened on first access, and
            the row cannot serve as the pattern for others.
    """

    _is_open = True  # for a debugger that inspects it before __init__ has run

    def __init__(self, field: Field, items: dict[Any, Any] | None = None) -> None:
        super().__init__(field.value if items is None else items)
        self._field, self._is_open = field, items is not None

    def _open(self) -> None:
        forget(self, "open")
        self._is_open = True
        items = list(dict.items(self))
        dict.clear(self)
        for item in items:
            dict.__setitem__(self, *(_opened(each, self._field) for each in item))


def _opened(value: object, parent: Field) -> object:
    """Return a value inside an object, with its strings traced."""
    if isinstance(value, list):
        return [_opened(item, parent) for item in value]
    if not isinstance(value, str | dict) or not value:
        return value
    return value_of(Field(parent.trace, parent.message, parent.kind, value, (), parent))


def _looking(name: str) -> Method:
    def method(self: DataObject, *args: object) -> object:
        if not self._is_open:
            self._open()
        return getattr(dict, name)(self, *args)

    return method


for _name in (
    *("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__or__"),
    *("__ror__", "__reversed__", "get", "items", "keys", "values", "copy"),
):
    setattr(DataObject, _name, _looking(_name))


def to_json(value: object, form: JsonForm) -> str:
    """Write a value as JSON in which each text keeps its provenance."""
    if isinstance(value, DataObject):
        whole = value._field
        if form not in whole.written:
            whole.written[form] = encoder(form)(whole.value)
        return traced((Piece(whole.written[form], whole, 0, 1, form),))
    if not is_traced(value):
        return encoder(form)(value)
    found: list[str | DataObject] = []
    # `_hidden` has sorted the keys, since a placeholder sorts differently from its text.
    text = encoder(form._replace(sort_keys=False))(_hidden(value, form, found))
    parts: list[Part] = []
    # '{"a": "\\u00000\\u0000"}' splits into '{"a": ', '0', '}': every second item is a number.
    for number, constant in enumerate(_HIDDEN.split(text)):
        if number % 2 == 0:
            parts.append(constant)
        elif not isinstance(own := found[int(constant)], TracedText):
            parts += parts_of(to_json(own, form))
        else:
            forget(own, "to_json")
            parts += ['"', *(_in_json(part, encoder(form)) for part in own._parts), '"']
    return traced(parts)


def _in_json(part: Part, write: Callable[[Any], str]) -> Part:
    if not isinstance(part, Piece):
        return write(str.__str__(part))[1:-1]
    return part._replace(text=write(part.text)[1:-1], form=part.form or "string")


def _hidden(value: Any, form: JsonForm, found: list[Any]) -> object:
    r"""Replace texts and objects of the row, and strings with `\0`, by `\0number\0`."""
    # With an indent, the JSON of an object depends on its depth, so it is not hidden as a whole.
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

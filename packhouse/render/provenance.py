r"""Texts and JSON objects of a row that know which of their characters come from which field.

    field "hi <b>", template {{ '[' + content.split('<')[0] | trim + ']' }}
    ->  '[' of the template, 'hi' (characters 0 to 2 of the field), ']' of the template

A chat template cuts, strips, joins and writes as JSON whatever it is given. `TracedText` is a
string that does all of that as `str` does, and keeps for each character the field it came from. So
one rendering gives the text and every span. `DataObject` is a JSON object that a template writes
whole, or splits. Operations that make other characters (`upper`, `center`, `%`) keep the
field, and are marked as rewritten; a conversation is refused where such a text of a message is
written.

A `Trace` records what the template asked of the texts (`'</think>' in content`): rows that answer
alike are written alike, and filled in bulk.

The library writes JSON. Texts and objects of the row are in it as `\0number\0`, and their own
parts take these places:

    {"name": "hi"}  ->  {"name": "\00\0"}  ->  '{"name": "', 'hi' of the field, '"}'
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeAlias

from packhouse.render.predicates import Predicate
from packhouse.render.results import RefusedError

UNPROVEN = RefusedError(
    "template",
    "the template writes other text when contents are marked: no spans can be proven. Give"
    " format.template a Jinja file that writes texts as they are",
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
def encoder(form: JsonForm) -> Callable[[object], str]:
    """The function that writes JSON in a form."""
    return json.JSONEncoder(**form._asdict()).encode


@dataclass(eq=False, slots=True)
class Trace:
    """The fields of one conversation, and what a template asked of them."""

    fields: "list[Field]" = field(default_factory=list)
    """Fields that are no part of an object which is a field, in order of appearance."""
    predicates: set[tuple[Path, Predicate]] = field(default_factory=set)
    differing: set[tuple[Path, Path]] = field(default_factory=set)
    """Pairs of texts that were compared and are not equal."""
    unrecorded: set[tuple[int, object]] = field(default_factory=set)
    """(message, question): what was asked that columns of texts cannot answer. Where there is
    none, rows that answer alike are sure to be written by the same constants."""

    @property
    def num_questions(self) -> int:
        """Number of different questions that were asked."""
        return len(self.predicates) + len(self.differing) + len(self.unrecorded)


@dataclass(eq=False, repr=False, slots=True)
class Field:
    """One text or JSON object of a row."""

    trace: Trace
    message: int
    """Number of its message; -1: tool definitions and arguments of the row."""
    kind: str
    """`content`; `thought` (reasoning); `call`: a name or arguments; `function`: a whole call;
    `tool`: a tool definition; `argument`: a text among the row's arguments; `id`: ids and names of
    messages and calls."""
    value: Any
    path: Path | None = None
    """Location in the columns, such as ("content", 2); None within objects."""
    parent: "Field | None" = None
    """The object that it is in."""
    children: "list[Field]" = field(default_factory=list)
    literals: set[str] = field(default_factory=set)
    """Strings that the template searched for in it."""
    is_stripped: bool = False
    """True if the template stripped characters from its ends."""
    written: dict[JsonForm, str] = field(default_factory=dict)
    """As JSON: prompts write the same again."""

    def __post_init__(self) -> None:
        (self.trace.fields if self.parent is None else self.parent.children).append(self)


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

    def between(self, first: int, last: int) -> "Piece":
        """The characters from `first` to `last`; of JSON a range is known for its beginning alone.

        '{"a": "b"}' without its last character, as `(x | tojson)[:-1]`, has `cut` 1.
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
    """An empty constant at an end of a `{% generation %}` block."""


BLOCK_EDGES = (_Edge(), _Edge())
Part: TypeAlias = str | Piece


def plain(part: Part) -> str:
    """The text of a part."""
    return part.text if isinstance(part, Piece) else str.__str__(part)


_HALF = re.compile("[\ud800-\udfff]")  # half of a character: columns hold none
_HIDDEN = re.compile(r'"\\u0000([0-9]+)\\u0000"')
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
        text = getattr(str, kind)(self, chars)
        if len(text) == str.__len__(self):
            self._ask(kind, chars, False)
            return self
        forget((self, chars), kind, True)
        for piece in self._pieces:
            piece.field.is_stripped = True
        return self._located([text])[0]

    return method


def _dividing(kind: str) -> Method:
    """`split`, `partition` and the like: recorded if there is nothing to divide at."""

    def method(self: "TracedText", sep: Any = None, *limit: Any, **named: Any) -> Any:
        # "a--b" split at "--": "a" and "b" lie at [0, 1) and, at least 2 characters later, [3, 4).
        texts = getattr(str, kind)(self, sep, *limit, **named)
        if sep is None or sep in self:
            forget(self, kind, len(texts))
        is_split = kind in ("split", "rsplit") and sep is not None
        return type(texts)(self._located(texts, len(sep) if is_split else 0))

    return method


def _removing(kind: str, asking: str) -> Method:
    """`removeprefix` or `removesuffix`: recorded if there is no such text."""

    def method(self: "TracedText", text: Any) -> "TracedText":
        kept = len(getattr(str, kind)(self, text))
        if not getattr(self, asking)(text):
            return self
        forget(self, kind)
        size = str.__len__(self)
        return self._cut(size - kept, size) if kind == "removeprefix" else self._cut(0, kept)

    return method


class TracedText(str):
    """A string and the parts it is made of.

    Its own attributes have an underscore: to a template `content.parts` is undefined.
    """

    _parts: tuple[Part, ...]

    def __new__(cls, text: str) -> "TracedText":
        """Make a constant; `traced` makes a text of other parts."""
        made = super().__new__(cls, text)
        made._parts = (text,)
        return made

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
    split, rsplit = _dividing("split"), _dividing("rsplit")
    partition, rpartition = _dividing("partition"), _dividing("rpartition")
    removeprefix = _removing("removeprefix", "startswith")
    removesuffix = _removing("removesuffix", "endswith")

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

    def join(self, items: Iterable[Any]) -> str:
        """Every item keeps its provenance."""
        items = list(items)
        str.join(self, items)  # refuses values other than text
        return join_texts(self, items)


def rewriting(function: Method, *owners: object) -> Method:
    """A function whose results have the provenance of its owners and arguments as a whole."""

    @wraps(function)
    def method(*args: object, **kwargs: object) -> object:
        given = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        return rewritten(function(*given, **kwargs), *owners, *given, *kwargs.values())

    return method


_OPERATORS = set("__lt__ __le__ __gt__ __ge__ __mul__ __rmul__ __mod__ __rmod__ __format__".split())
for _name in {name for name in dir(str) if name[0] != "_"} | _OPERATORS:
    if _name not in vars(TracedText):
        setattr(TracedText, _name, rewriting(getattr(str, _name)))


def forget(value: object, *question: object) -> None:
    """Note that what follows depends on more of the texts in a value than is recorded."""
    for own in fields_in(value):
        own.trace.unrecorded.add((own.message, question))


def value_of(field: Field) -> Any:
    """A field as a template gets it."""
    if not isinstance(field.value, str):
        return DataObject(field)
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


def fields_in(value: object) -> Iterator[Field]:
    """Fields whose text is in a value; an object of the row is one."""
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
    """Return True if a value is or holds text of the row."""
    return any(True for _ in fields_in(value))


def rewritten(result: object, *sources: object) -> Any:
    """Result of an operation on values: text of it is text of their fields.

    Raises:
        RefusedError: the result is of a kind that has no provenance, such as bytes.
    """
    fields = list(fields_in(sources))
    is_text = not (result is None or isinstance(result, bool | int | float))
    forget(sources, "rewritten", None if is_text else result)
    if not fields or not is_text or result is NotImplemented:
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
    """Return the text that Jinja writes for a value."""
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


class DataObject(dict[Any, Any]):
    """A JSON object of the row, which can be written whole, or taken apart.

    Args:
        field: of the object as a whole.
        items: its items where they are fields of their own. None: it is opened at the first look
            into it, and the row is none that others are filled like.
    """

    _is_open = True  # for a debugger that looks into it before it is made

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
    """A value within an object, with its strings traced."""
    if isinstance(value, list):
        return [_opened(item, parent) for item in value]
    if not isinstance(value, str | dict) or not value:
        return value
    return value_of(Field(parent.trace, parent.message, parent.kind, value, None, parent))


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
    """A value as JSON, in which each text keeps its provenance."""
    if isinstance(value, DataObject):
        whole = value._field
        if form not in whole.written:
            whole.written[form] = encoder(form)(whole.value)
        return traced((Piece(whole.written[form], whole, 0, 1, form),))
    if not is_traced(value):
        return encoder(form)(value)
    found: list[str | DataObject] = []
    text = encoder(form._replace(sort_keys=False))(_hidden(value, form, found))
    parts: list[Part] = []
    # '{"a": "\\u00000\\u0000"}' splits to '{"a": ', '0', '}': every second one is a number.
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

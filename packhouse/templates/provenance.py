r"""Where the characters of a rendering come from: fields of the row, pieces of them, constants.

    field "hi <b>", template {{ '[' + content.split('<')[0] | trim + ']' }}
    ->  '[' of the template, 'hi' (characters 0 to 2 of the field), ']' of the template

`traced_text.py` has the strings that keep their parts through all that a template does. A `Trace`
also records what the template asked of the texts (`'</think>' in content`): rows that answer alike
are written alike, and filled in bulk.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from packhouse.templates.predicates import Predicate
from packhouse.templates.results import RefusedError

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
    """Where columns have it, such as ("content", 2); None within objects."""
    parent: "Field | None" = None
    """The object that it is in."""
    children: "list[Field]" = field(default_factory=list)
    literals: set[str] = field(default_factory=set)
    """What the template looked for in it."""
    is_stripped: bool = False
    """True if the template stripped characters from its ends."""

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

r"""Where the characters of a rendering come from: fields of the row, pieces of them, constants.

    field "hi <b>", template {{ '[' + content.split('<')[0] | trim + ']' }}
    ->  '[' of the template, 'hi' (characters 0 to 2 of the field), ']' of the template

`traced_text.py` has the strings that keep their parts through all that a template does. A `Trace`
also records what the template asked of the texts (`'</think>' in content`): rows that answer alike
are written alike, and filled in bulk.
"""

import json
from collections.abc import Callable
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


class Trace:
    """The fields of one conversation, and what a template asked of them."""

    def __init__(self) -> None:
        self.fields: list[Field] = []
        """Fields that are no part of an object which is a field, in order of appearance."""
        self.predicates: set[tuple[Path, Predicate]] = set()
        self.differing: set[tuple[Path, Path]] = set()
        """Pairs of texts that were compared and are not equal."""
        self.unrecorded: set[tuple[int, object]] = set()
        """(message, question): what was asked that columns of texts cannot answer. Where there is
        none, rows that answer alike are sure to be written by the same constants."""

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

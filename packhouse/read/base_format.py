"""What a row format is: its fields, and how a row of it becomes conversations."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from packhouse.read.chat_messages import Conversation, kind_of
from packhouse.read.records import Ints
from packhouse.recipe import SourceConfig
from packhouse.records.messages import Answers
from packhouse.system.plugins import BadRowError

MESSAGE_FIELDS = frozenset(("messages", "conversations", "conversation"))
"""Names of fields that hold messages; what these say, not their names, tells chat from ShareGPT."""


@dataclass(slots=True)
class Adapted:
    """Conversations of a shard's good rows."""

    messages: pa.Array
    """Array of `list<MESSAGE>`."""
    tools: pa.Array
    """Canonical JSON text or null, per conversation."""
    labels: pa.Array
    """Class index or null, per conversation."""
    origin: Ints
    """Index of each conversation's row, rising."""
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """(index of the row, reason, detail) of rows that gave none."""
    unread_fields: Counter[str] = field(default_factory=Counter)
    """Field of messages that holds something and that nobody reads -> rows with it."""
    num_unanswered: int = 0
    """Questions of the rows that have no answer, and so no conversation."""
    dropped: list[tuple[int, str, str]] = field(default_factory=list)
    """(index of the row, reason, detail) of rows that are part of another row's conversation."""

    def take(self, places: Ints) -> "Adapted":
        """Some of the conversations."""
        at = pa.array(places)
        messages, tools, labels = (x.take(at) for x in (self.messages, self.tools, self.labels))
        return Adapted(messages, tools, labels, self.origin[places])


def aliases(text: str) -> dict[str, tuple[str, ...]]:
    """Read `"text|sentence label"` as fields with the names that files give them."""
    return {item.split("|")[0]: tuple(item.split("|")) for item in text.split()}


@dataclass(frozen=True, kw_only=True)
class RowFormat(ABC):
    """A format: its fields, each with the names that files give it; the first one present counts.

    A row is of a format when it has all of its required fields.
    """

    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict)
    answers: Answers = "required"
    needs_all_rows: ClassVar[bool] = False
    """True if a row means nothing without others of its file."""

    def names(self, keys: Collection[str], renamed: Mapping[str, str]) -> dict[str, str]:
        """Our field -> the file's field, for the fields that are among `keys`.

        What `renamed` gives to one field is not read a second time as another one.

        Example:
            >>> from packhouse.read.row_formats import ROW_FORMATS
            >>> ROW_FORMATS["alpaca"].names(["id", "instruction", "context"], {})
            {'instruction': 'instruction', 'input': 'context'}
            >>> ROW_FORMATS["question_answer"].names(["input", "answer"], {"question": "input"})
            {'question': 'input', 'answer': 'answer'}
        """
        found = {}
        known = self.required | self.optional
        taken = {theirs for ours, theirs in renamed.items() if ours in known}
        for ours, aliases in known.items():
            for name in (renamed[ours],) if ours in renamed else aliases:
                if name in keys and (ours in renamed or name not in taken):
                    found[ours] = name
                    break
        return found

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Those of `keys` that the format does not read."""
        read = set(self.names(keys, renamed).values())
        return [key for key in keys if key not in read]

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Return True if a row is of this format."""
        return isinstance(row, dict) and self.required.keys() <= self.names(row, renamed).keys()

    @abstractmethod
    def read(self, row: Any, names: dict[str, str], config: SourceConfig) -> list[Conversation]:
        """Return the conversations of a row, one or more.

        Args:
            row: an object; what its fields hold is not checked yet.
            names: our field -> the row's field, for the fields that it has.
            config: its source.

        Raises:
            BadRowError: it holds none.
        """


def check_present(
    row: dict[str, object], fields: Iterable[str], names: dict[str, str], config: SourceConfig
) -> None:
    """Refuse a row that lacks one of `fields`.

    Raises:
        BadRowError: names the field, and those that the row has.
    """
    for ours in fields:
        if ours not in names:
            has = ", ".join(repr(key[:40]) for key in list(row)[:12]) or "none"
            wanted = config.fields.get(ours, ours)
            raise BadRowError("fields", f"no field {wanted!r}; the row has {has}")


def optional(row: dict[str, Any], names: dict[str, str], ours: str) -> Any:
    """Return what a row has in a field, None without it."""
    return row[names[ours]] if ours in names else None


def optional_text(row: dict[str, Any], names: dict[str, str], ours: str) -> str | None:
    """Return the text that a row has in a field, None without it.

    Raises:
        BadRowError: it is no text.
    """
    value = optional(row, names, ours)
    if not isinstance(value, str | None):
        raise BadRowError("type", f"{names[ours]} is {kind_of(value)}, not text")
    return value


@dataclass(slots=True)
class Found:
    """What a format finds in rows that are read together."""

    conversations: list[tuple[int, Conversation]] = field(default_factory=list)
    """With the index of their row, rising."""
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    dropped: list[tuple[int, str, str]] = field(default_factory=list)
    """(index, reason, detail) of rows that are part of another row's conversation, or of none."""

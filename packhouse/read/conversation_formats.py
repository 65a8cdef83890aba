"""Formats whose rows hold conversations: messages, trees of messages, transcripts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from packhouse.read.base_format import (
    Found,
    RowFormat,
    aliases,
    check_present,
    optional,
    optional_text,
)
from packhouse.read.chat_messages import (
    Conversation,
    kind_of,
    read_messages,
    rename_messages,
    speaker_key,
    text_turn,
)
from packhouse.read.message_trees import Said, build_trees, tree_paths
from packhouse.read.preference_formats import PREFERENCE_FORMATS
from packhouse.read.records import Rows
from packhouse.read.strict import parse_text
from packhouse.read.transcripts import is_transcript, read_transcript
from packhouse.recipe import SourceConfig
from packhouse.system.plugins import BadRowError


@dataclass(frozen=True, kw_only=True)
class Messages(RowFormat):
    """Rows with a field of messages, which name their speakers by `role` or by `from`."""

    speaker: Literal["role", "from"]

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Return True if the first message that names its speaker does so by the format's key."""
        if not isinstance(row, dict):
            return False
        names = self.names(row, renamed)
        messages = optional(row, names, next(iter(self.required)))
        if isinstance(messages, str) and messages.lstrip()[:1] == "[":
            messages, _ = parse_text(messages)
        return speaker_key(messages) == self.speaker

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the messages, after the row's system prompt."""
        check_present(row, self.required, names, config)
        system = optional_text(row, names, "system")
        messages = row[names[next(iter(self.required))]]
        if config.roles or not {"role", "content"}.isdisjoint(config.fields):
            messages = rename_messages(messages, self.speaker, config.fields, config.roles)
        return [read_messages(messages, optional(row, names, "tools"), system)]


@dataclass(frozen=True, kw_only=True)
class BareMessages(RowFormat):
    """Rows that are themselves a list of messages."""

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Return True if the row is a list in which a message names its speaker."""
        return speaker_key(row) is not None

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Nothing: a row that has keys is no list."""
        return []

    def read(self, row: object, names: dict[str, str], config: SourceConfig) -> list[Conversation]:
        """Read the messages."""
        return [read_messages(row, None, None)]


@dataclass(frozen=True, kw_only=True)
class MessageTree(RowFormat):
    """Message trees (OpenAssistant): one path, or every path, from the prompt to an answer."""

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """All but the fields of every message of a tree."""
        return [key for key in super().unread(keys, renamed) if key not in ("deleted", "rank")]

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the best path, or all paths, best first."""
        check_present(row, self.required, names, config)
        root = {ours: row[name] for ours, name in names.items()} | {"deleted": row.get("deleted")}
        return [_spoken(path) for path in tree_paths(root, config.oasst_paths)]


def _spoken(path: list[Said]) -> Conversation:
    return Conversation([text_turn(said.role, said.text) for said in path])


@dataclass(frozen=True, kw_only=True)
class FlatMessages(RowFormat):
    """Message trees with a row for each message, which names its parent (OpenAssistant's OASST1).

    A conversation stands at the row of its first message. The other rows of its tree are dropped:
    as `joined` where they are part of a conversation, else as `other_path`.
    """

    needs_all_rows: ClassVar[bool] = True

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Not by itself: see `read_all`."""
        raise BadRowError("tree", "the row is one message of a tree; set format: oasst_flat")

    def read_all(
        self, rows: Rows, naming: Mapping[tuple[str, ...], dict[str, str]], config: SourceConfig
    ) -> "Found":
        """Read the trees of a whole file, in the order of their first messages."""
        roots, failures = build_trees(rows, lambda row: naming[tuple(row)])
        found = Found(failures=failures)
        for root in roots:
            conversations: list[Conversation] = []
            joined: set[int] = set()
            try:
                paths = tree_paths(root, config.oasst_paths)
                joined = {said.message["row"] for path in paths for said in path}
                conversations = [_spoken(path) for path in paths]
            except BadRowError as bad:
                found.failures.append((root["row"], bad.reason, bad.detail))
            found.conversations += ((root["row"], each) for each in conversations)
            detail = f"in the tree of message {root['message_id'][:60]!r}"
            stack = list(root["replies"])
            while stack:
                message = stack.pop()
                reason = "joined" if message["row"] in joined else "other_path"
                found.dropped.append((message["row"], reason, detail))
                stack += message["replies"]
        found.dropped.sort()
        return found


@dataclass(frozen=True, kw_only=True)
class Transcript(RowFormat):
    """Rows with a conversation in one text; see `packhouse.read.transcripts`."""

    def fits(self, row: object, renamed: Mapping[str, str]) -> bool:
        """Return True if a field that is named for it holds one.

        A plain `text` may be meant as it is, and beside a `prompt` it is a preference.
        """
        if not isinstance(row, dict) or "prompt" in row:
            return False
        name = self.names(row, renamed).get("transcript")
        is_named = name in ("chosen", "transcript") or "transcript" in renamed
        return is_named and is_transcript(row.get(name))

    def read(
        self, row: dict[str, Any], names: dict[str, str], config: SourceConfig
    ) -> list[Conversation]:
        """Read the turns, after the row's system prompt."""
        check_present(row, self.required, names, config)
        text = row[names["transcript"]]
        if not isinstance(text, str):
            raise BadRowError("type", f"{names['transcript']} is {kind_of(text)}, not text")
        system = optional_text(row, names, "system")
        turns = [("system", system)] if system else []
        return [Conversation([text_turn(*turn) for turn in turns + read_transcript(text)])]


_TALK = "tools|functions system|system_prompt"
CONVERSATION_FORMATS: dict[str, RowFormat] = {
    "messages": BareMessages(required={}),
    "chat": Messages(
        required=aliases("messages|conversations|conversation"),
        optional=aliases(_TALK),
        speaker="role",
    ),
    "sharegpt": Messages(
        required=aliases("conversations|messages|conversation"),
        optional=aliases(_TALK),
        speaker="from",
    ),
    "transcript": Transcript(
        required=aliases("transcript|chosen|text|conversation"),
        optional=aliases("rejected system|system_prompt"),
    ),
    **PREFERENCE_FORMATS,
    "oasst": MessageTree(required=aliases("text role replies")),
    "oasst_flat": FlatMessages(
        required=aliases("message_id parent_id text role"),
        optional=aliases("rank deleted"),
    ),
}
"""In the order of trial."""

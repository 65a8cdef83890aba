"""Formats whose rows hold conversations: messages, trees of messages, transcripts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

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
from packhouse.read.preference_formats import PREFERENCE_FORMATS
from packhouse.read.records import Rows
from packhouse.read.strict import parse_text
from packhouse.read.transcripts import is_transcript, read_transcript
from packhouse.recipe import SourceConfig
from packhouse.system.plugins import BadRowError


class Said(NamedTuple):
    """A message on a path."""

    role: str
    text: str
    message: dict[str, Any]


def tree_paths(root: dict[str, Any], which: Literal["best", "all"]) -> list[list[Said]]:
    """Return the best path from the prompt to an answer, or all, best first.

    A path ends at an assistant's message. Siblings are ordered by `rank` (0 is best; unranked ones
    come after, in the file's order); deleted messages are left out with all that answers them.

    Args:
        root: a message with `role`, `text` and maybe `rank`, `deleted` and `replies`.
        which: of the paths.

    Raises:
        BadRowError: a message is none, or no answer is left.

    Example:
        >>> def say(role, text, *replies):
        ...     return {"role": role, "text": text, "replies": [*replies]}
        >>> unanswered = say("assistant", "2", say("prompter", "And 2+2?"))
        >>> root = say("prompter", "1+1?", unanswered, say("assistant", "Two."))
        >>> [[said.text for said in path] for path in tree_paths(root, "all")]
        [['1+1?', '2'], ['1+1?', 'Two.']]
    """
    found: list[list[Said]] = []
    stack: list[tuple[dict[str, Any], list[Said]]] = [(root, [])]
    while stack and not (found and which == "best"):
        message, path = stack.pop()
        if message.get("deleted"):
            continue
        role, text = message.get("role"), message.get("text")
        if not isinstance(role, str) or not isinstance(text, str):
            raise BadRowError("type", "role or text of a message in the tree is not text")
        path = [*path, Said("user" if role == "prompter" else role, text, message)]
        replies = [reply for reply in _replies(message) if not reply.get("deleted")]
        if not replies:
            path = path if path[-1].role == "assistant" else path[:-1]
            if path and (not found or _turns(path) != _turns(found[-1])):
                found.append(path)
        stack += [(reply, path) for reply in reversed(replies)]
    if not found:
        raise BadRowError("no_assistant", "the tree holds no answer that is not deleted")
    return found


def _turns(path: Sequence[Said]) -> list[tuple[str, str]]:
    return [(said.role, said.text) for said in path]


def _replies(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Replies to a message, best first."""
    replies = message.get("replies")
    if replies is None:
        return []
    if isinstance(replies, str):  # a column of text that holds JSON
        replies, _ = parse_text(replies)
    if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
        raise BadRowError("type", "replies is not a list of objects")

    def rank(reply: dict[str, Any]) -> float:
        value = reply.get("rank")
        return value if isinstance(value, int | float) else float("inf")

    return sorted(replies, key=rank)


def build_trees(
    rows: Sequence[Any], names_of: Callable[[Any], Mapping[str, str]]
) -> tuple[list[dict[str, Any]], list[tuple[int, str, str]]]:
    """Put trees together from rows that name the message which they answer.

    Rows may come in any order. A message whose parent is no row of the file is an orphan, as is
    what answers it.

    Args:
        rows: parsed rows of a whole file.
        names_of: our field -> the row's field, of a row.

    Returns:
        The roots, with `row`, the index of their row, in every message; and (index, reason, detail)
        of rows that are no messages, or of no tree.

    Example:
        >>> rows = [
        ...     {"id": "b", "parent": "a", "text": "Hi", "role": "assistant"},
        ...     {"id": "a", "parent": None, "text": "Hello", "role": "prompter"},
        ... ]
        >>> names = {"message_id": "id", "parent_id": "parent", "text": "text", "role": "role"}
        >>> (root,), _ = build_trees(rows, lambda row: names)
        >>> root["text"], root["replies"][0]["text"]
        ('Hello', 'Hi')
    """
    roots: list[dict[str, Any]] = []
    failures: list[tuple[int, str, str]] = []
    messages: dict[str, dict[str, Any]] = {}
    for index, row in enumerate(rows):
        try:
            if not isinstance(row, dict):
                raise BadRowError("not_an_object", f"the row is {kind_of(row)}, not an object")
            message = _message(row, names_of(row), index)
            if message["message_id"] in messages:
                shown = repr(message["message_id"][:60])
                raise BadRowError("tree", f"a row before it has {shown} as message_id, too")
        except BadRowError as bad:
            failures.append((index, bad.reason, bad.detail))
            continue
        messages[message["message_id"]] = message
    for message in messages.values():
        parent = message["parent_id"]
        if not parent:
            roots.append(message)
        elif parent in messages:
            messages[parent]["replies"].append(message)
    # What is not reached from a root is an orphan, answers one, or answers itself in a circle.
    reached: set[str] = set()
    stack = list(roots)
    while stack:
        message = stack.pop()
        reached.add(message["message_id"])
        stack += message["replies"]
    for name, message in messages.items():
        if name not in reached:
            is_there = message["parent_id"] in messages
            why = "an orphan, or itself" if is_there else "no row of the file"
            failures.append((message["row"], "orphan", f"its parent is {why}"))
    return roots, failures


def _message(row: dict[str, Any], names: Mapping[str, str], index: int) -> dict[str, Any]:
    for ours in ("message_id", "parent_id", "text", "role"):
        if ours not in names:
            raise BadRowError("fields", f"no field {ours!r}")
    message = {ours: row[name] for ours, name in names.items()}
    for ours in ("message_id", "text", "role"):
        if not isinstance(message[ours], str):
            raise BadRowError("type", f"{names[ours]} is {kind_of(message[ours])}, not text")
    if not isinstance(message["parent_id"], str | None):
        raise BadRowError("type", f"{names['parent_id']} is neither text nor null")
    if message["role"] not in ("prompter", "assistant", "user", "system"):
        raise BadRowError("unknown_role", f"role {message['role'][:40]!r}")
    if isinstance(message.get("deleted"), str):  # of CSV
        message["deleted"] = message["deleted"].lower() in ("true", "1")
    if isinstance(rank := message.get("rank"), str):
        message["rank"] = float(rank) if rank.replace(".", "", 1).isdecimal() else None
    return message | {"replies": [], "row": index}


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
    """Rows with a conversation in one text; see `packhouse.read.conversation_formats`."""

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

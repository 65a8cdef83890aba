"""Row formats `oasst` and `oasst_flat`: message trees, as OpenAssistant publishes them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from packhouse.read.chat_messages import Conversation, kind_of, text_turn
from packhouse.read.json_parsing import Rows, value_of
from packhouse.read.row_formats import Adapted, Names, Row, RowFormat, aliases, check_present
from packhouse.recipe import SourceConfig
from packhouse.system.plugins import BadRowError


@dataclass(slots=True, eq=False)
class TreeMessage:
    """A message of a tree. Its values are checked when a path reaches it."""

    role: Any = None
    text: Any = None
    rank: Any = None
    """0 is the best answer."""
    deleted: Any = None
    replies: Any = None
    """A list of messages, or its JSON text; null is empty."""
    row: int = 0
    """Index of its row, in files with one row per message."""
    message_id: Any = ""
    parent_id: Any = None


class Said(NamedTuple):
    """A message on a path."""

    role: str
    text: str
    message: TreeMessage


_IN_TREES = ("role", "text", "rank", "deleted", "replies")


def tree_paths(root: TreeMessage, which: Literal["best", "all"]) -> list[list[Said]]:
    """Return the best path from the prompt to an answer, or all paths, best first.

    A path ends with an assistant message. Siblings are ordered by `rank` (0 is best; unranked ones
    come last, in file order). Deleted messages are left out with all replies to them.

    Args:
        root: the prompt; replies in it may be objects of the file.
        which: `best` or `all`.

    Raises:
        BadRowError: a message is malformed, or no answer is left.

    Example:
        >>> def say(role, text, *replies):
        ...     return TreeMessage(role, text, replies=[*replies])
        >>> unanswered = say("assistant", "2", say("prompter", "And 2+2?"))
        >>> root = say("prompter", "1+1?", unanswered, say("assistant", "Two."))
        >>> [[said.text for said in path] for path in tree_paths(root, "all")]
        [['1+1?', '2'], ['1+1?', 'Two.']]
    """
    found: list[list[Said]] = []
    # A stack, because rows of `oasst_flat` form trees of any depth, and Python allows 1,000 calls.
    stack: list[tuple[TreeMessage, list[Said]]] = [(root, [])]
    while stack and not (found and which == "best"):
        message, path = stack.pop()
        if message.deleted:
            continue
        role, text = message.role, message.text
        if not isinstance(role, str) or not isinstance(text, str):
            raise BadRowError("type", "role or text of a message in the tree is not text")
        path = [*path, Said("user" if role == "prompter" else role, text, message)]
        replies = [] if message.replies is None else value_of(message.replies)
        if not isinstance(replies, list) or not all(
            isinstance(each, dict | TreeMessage) for each in replies
        ):
            raise BadRowError("type", "replies is not a list of objects")
        replies = [
            each if isinstance(each, TreeMessage) else TreeMessage(*map(each.get, _IN_TREES))
            for each in replies
        ]
        replies = [each for each in replies if not each.deleted]
        replies.sort(key=lambda r: r.rank if isinstance(r.rank, int | float) else math.inf)
        if not replies:
            path = path if path[-1].role == "assistant" else path[:-1]
            # Without its last question, the path of a second unanswered question after the same
            # answer is the path of the first one again.
            if path and (
                not found or [each[:2] for each in path] != [each[:2] for each in found[-1]]
            ):
                found.append(path)
        stack += [(reply, path) for reply in reversed(replies)]
    if not found:
        raise BadRowError("no_assistant", "the tree has no answer that is not deleted")
    return found


def build_trees(
    rows: Sequence[Any], naming: Mapping[tuple[str, ...], Names]
) -> tuple[list[TreeMessage], list[tuple[int, str, str]]]:
    """Build trees from rows that name the message they reply to.

    Rows may come in any order. A message whose parent is not in the file is an orphan, and so are
    the replies to it.

    Args:
        rows: parsed rows of a whole file.
        naming: keys of rows -> our field -> the row's field.

    Returns:
        The roots; and (index, reason, detail) of rows that are not messages or belong to no tree.

    Example:
        >>> rows = [
        ...     {"id": "b", "parent": "a", "text": "Hi", "role": "assistant"},
        ...     {"id": "a", "parent": None, "text": "Hello", "role": "prompter"},
        ... ]
        >>> names = {"message_id": "id", "parent_id": "parent", "text": "text", "role": "role"}
        >>> (root,), _ = build_trees(rows, {("id", "parent", "text", "role"): names})
        >>> root.text, root.replies[0].text
        ('Hello', 'Hi')
    """
    roots: list[TreeMessage] = []
    failures: list[tuple[int, str, str]] = []
    messages: dict[str, TreeMessage] = {}
    for index, row in enumerate(rows):
        try:
            if not isinstance(row, dict):
                raise BadRowError("not_an_object", f"the row is {kind_of(row)}, not an object")
            message = _message(row, naming[tuple(row)], index)
            if message.message_id in messages:
                shown = repr(message.message_id[:60])
                raise BadRowError("tree", f"message_id {shown} is already used by an earlier row")
        except BadRowError as bad:
            failures.append((index, bad.reason, bad.detail))
            continue
        messages[message.message_id] = message
    for message in messages.values():
        parent = message.parent_id
        if not parent:
            roots.append(message)
        elif parent in messages:
            messages[parent].replies.append(message)
    # A message not reached from a root is an orphan, replies to one, or is part of a cycle.
    reached = {message.message_id for root in roots for message in _all_of(root)}
    for name, message in messages.items():
        if name not in reached:
            is_there = message.parent_id in messages
            why = "is an orphan or a reply to it" if is_there else "is not in the file"
            failures.append((message.row, "orphan", f"its parent {why}"))
    return roots, failures


def _all_of(root: TreeMessage) -> Iterator[TreeMessage]:
    """Yield the messages of a tree."""
    stack = [root]
    while stack:
        message = stack.pop()
        yield message
        stack += message.replies


def _message(row: dict[str, Any], names: Mapping[str, str], index: int) -> TreeMessage:
    for ours in ("message_id", "parent_id", "text", "role"):
        if ours not in names:
            raise BadRowError(
                "fields",
                f"no field {ours!r}; if it has another name, set `fields: {{{ours}: FIELD}}`",
            )
    message = TreeMessage(**{ours: row[name] for ours, name in names.items()}, row=index)
    message.replies = []  # `build_trees` adds them
    for ours in ("message_id", "text", "role", "parent_id"):
        value, or_null = getattr(message, ours), " or null" * (ours == "parent_id")
        if not isinstance(value, str) and not (or_null and value is None):
            raise BadRowError("type", f"{names[ours]} is {kind_of(value)}, not text{or_null}")
    if message.role not in ("prompter", "assistant", "user", "system"):
        raise BadRowError("unknown_role", f"role {message.role[:40]!r}")
    if isinstance(message.deleted, str):  # in CSV
        message.deleted = message.deleted.lower() in ("true", "1")
    if isinstance(rank := message.rank, str):  # in CSV
        message.rank = float(rank) if rank.replace(".", "", 1).isdecimal() else None
    return message


@dataclass(frozen=True, kw_only=True)
class MessageTree(RowFormat):
    """Message trees (OpenAssistant): one path, or every path, from the prompt to an answer."""

    ignored: ClassVar[tuple[str, ...]] = ("deleted", "rank")

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read the best path, or all paths, best first."""
        check_present(row, self.required, names, config)
        own = {ours: row[name] for ours, name in names.items()}
        root = TreeMessage(**own, deleted=row.get("deleted"))
        return [_spoken(path) for path in tree_paths(root, config.oasst_paths)]


def _spoken(path: list[Said]) -> Conversation:
    return Conversation([text_turn(said.role, said.text) for said in path])


@dataclass(frozen=True, kw_only=True)
class MessageRows(RowFormat):
    """Message trees with one row per message, which names its parent (OpenAssistant's OASST1).

    A conversation belongs to the row of its first message. The other rows of its tree are dropped:
    as `joined` if they are part of a conversation, else as `other_path`.
    """

    needs_all_rows: ClassVar[bool] = True

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Refuse a single row; see `read_all`."""
        raise BadRowError("tree", "the row is one message of a tree; set format: oasst_flat")

    def read_all(self, rows: Rows, config: SourceConfig) -> Adapted:
        """Read the trees of a whole file, in the order of their first messages."""
        naming = {keys: self.names_read(keys, config) for keys in rows.layouts}
        roots, failures = build_trees(rows, naming)
        found: list[tuple[int, Conversation]] = []
        dropped: list[tuple[int, str, str]] = []
        for root in roots:
            joined: set[int] = set()
            try:
                paths = tree_paths(root, config.oasst_paths)
                joined = {said.message.row for path in paths for said in path}
                found += [(root.row, _spoken(path)) for path in paths]
            except BadRowError as bad:
                failures.append((root.row, bad.reason, bad.detail))
            detail = f"in the tree of message {root.message_id[:60]!r}"
            for message in _all_of(root):
                if message is not root:
                    reason = "joined" if message.row in joined else "other_path"
                    dropped.append((message.row, reason, detail))
        return Adapted.of(found, failures, sorted(dropped))


FORMATS = {
    "oasst": MessageTree(required=aliases("text role replies")),
    "oasst_flat": MessageRows(
        required=aliases("message_id parent_id text role"),
        optional=aliases("rank deleted"),
    ),
}

"""Message trees (OpenAssistant): their paths, and trees made of a row for each message."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from packhouse.read.chat_messages import kind_of
from packhouse.read.strict import parse_text
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

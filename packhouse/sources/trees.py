"""Adapter of message trees (OpenAssistant): one path, or every path, from prompt to answer.

A path ends at an assistant message. Siblings are ordered by `rank` (0 is best; unranked ones come
after, in the file's order); deleted messages are left out with all that answers them.
"""

from typing import Any, Literal, Protocol

from packhouse.messages import MessageColumns
from packhouse.sources.conversations import BadRowError
from packhouse.sources.records import parse_text

__all__ = ["add_tree"]

_ROLES = {"prompter": "user", "user": "user", "assistant": "assistant", "system": "system"}


class _Output(Protocol):
    columns: MessageColumns
    tools: list[str | None]


def add_tree(row: Any, names: dict[str, str], paths: Literal["best", "all"], out: _Output) -> int:
    """Append the conversations of a tree; returns how many.

    Raises:
        BadRowError: not a tree, or no answer in it.
    """
    if not isinstance(row, dict):
        raise BadRowError("not_an_object", "the row is not an object")
    fields = ("text", "role", "replies")
    root = {field: row.get(names.get(field, field)) for field in fields}
    missing = [field for field in fields if names.get(field, field) not in row]
    if missing:
        raise BadRowError("fields", f"no field {missing[0]!r}")
    found = _paths(root | {"deleted": row.get("deleted")}, paths)
    if not found:
        raise BadRowError("no_assistant", "the tree holds no answer that is not deleted")
    for path in found:
        out.columns.role += [role for role, _ in path]
        out.columns.content += [text for _, text in path]
        out.columns.count.append(len(path))
        out.tools.append(None)
    return len(found)


def _paths(root: dict[str, Any], paths: str) -> list[list[tuple[str, str]]]:
    """Paths that end on an assistant's message; the best one only, or all, best first."""
    found: list[list[tuple[str, str]]] = []
    stack: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [(root, [])]
    while stack:
        node, path = stack.pop()
        if not isinstance(node, dict):
            raise BadRowError("type", "a reply is not an object")
        if node.get("deleted"):
            continue
        path = [*path, _message(node)]
        replies = _ordered(node.get("replies"))
        alive = [reply for reply in replies if not reply.get("deleted")]
        if not alive:
            path = path if path[-1][0] == "assistant" else path[:-1]
            if path and (not found or path != found[-1]):
                found.append(path)
            if paths == "best" and found:
                break
        stack += [(reply, path) for reply in reversed(alive)]
    return found


def _message(node: dict[str, Any]) -> tuple[str, str]:
    role, text = node.get("role"), node.get("text")
    if not isinstance(role, str) or not isinstance(text, str):
        raise BadRowError("type", "role or text of a message in the tree is not text")
    return _ROLES.get(role, role), text


def _ordered(replies: Any) -> list[dict[str, Any]]:
    if replies is None:
        return []
    if isinstance(replies, str):  # a column of text that holds JSON
        replies, _ = parse_text(replies)
    if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
        raise BadRowError("type", "replies is not a list of objects")
    return sorted(replies, key=_rank)


def _rank(reply: dict[str, Any]) -> float:
    rank = reply.get("rank")
    return rank if isinstance(rank, int | float) else float("inf")

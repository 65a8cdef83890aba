"""Chat conversations as a template gets them, grouped by what they have in common.

Rows of a group differ in the texts of their leaves alone (and in ids): plain ones have the same
roles, and are grouped without a look at a single row; those with tools, calls or reasoning have the
same skeleton, which costs some 20 us of Python each.
"""

import json
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.templates.conversations import Conversations
from packhouse.templates.leaves import skeleton
from packhouse.templates.segments import Slot

__all__ = ["Group", "chat_messages", "groups", "parse_tools"]

Messages = list[dict[str, Any]]
Example = tuple[Messages, Messages, list[Any] | None]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that differ in their leaves alone."""

    key: Hashable
    rows: np.ndarray
    """Ascending row numbers."""
    column: Callable[[int, np.ndarray], pa.Array]
    """(leaf, some of the rows) -> the leaf's text in each."""
    example: Callable[[int], Example]
    """Row -> canonical messages, messages as the template gets them, tools."""
    weight_of: Callable[[np.ndarray], Callable[[int], np.ndarray]]
    """Some of the rows -> (message -> its weight in each)."""
    needs_filled: bool
    """Whether rows may have an empty leaf (which is none)."""

    def slots_of(self, rows: np.ndarray) -> Callable[[Slot], pa.Array]:
        """Texts of the slots of a program, for some of the rows."""
        return lambda slot: self.column(slot.number, rows)


def groups(
    conversations: Conversations,
    min_rows: int,
    wanted: np.ndarray,
    chat: Callable[[Messages], Messages],
) -> Iterator[Group]:
    """Groups of at least `min_rows` rows; plain ones first, then those with tools.

    Args:
        conversations: the rows.
        min_rows: of a group.
        wanted: bool [num_rows]; other rows are in no group.
        chat: canonical messages -> messages as the template gets them.
    """
    content = conversations.joined_content()

    def example(row: int) -> Example:
        raw, tools = next(conversations.messages_of(np.array([row])))
        return raw, chat(raw), parse_tools(tools)

    def column(leaf: int, rows: np.ndarray) -> pa.Array:
        return content.take(pa.array(conversations.starts[rows] + leaf))

    for shape, rows in conversations.shapes(with_context=False):
        plain = rows[(conversations.is_plain & wanted)[rows]]
        if len(plain) >= min_rows:
            yield Group(shape, plain, column, example, conversations.weight_of, True)
    rich = np.flatnonzero(~conversations.is_plain & wanted)
    if len(rich) >= min_rows:
        yield from _rich_groups(conversations, rich, min_rows, example, chat)


def _rich_groups(
    conversations: Conversations,
    rows: np.ndarray,
    min_rows: int,
    example: Callable[[int], Example],
    chat: Callable[[Messages], Messages],
) -> Iterator[Group]:
    found: dict[str, list[int]] = {}
    values: dict[int, list[Any]] = {}
    for row, (raw, tools) in zip(rows.tolist(), conversations.messages_of(rows), strict=True):
        key, values[row] = skeleton(chat(raw), parse_tools(tools))
        trained = [(message["weight"] > 0) + (message["weight"] not in (0, 1)) for message in raw]
        found.setdefault(f"{trained}{key}", []).append(row)

    def column(leaf: int, some: np.ndarray) -> pa.Array:
        texts = (values[row][leaf] for row in some.tolist())
        return pa.array([t if isinstance(t, str) else _dumps(t) for t in texts], pa.string())

    for key, members in found.items():
        if len(members) >= min_rows:
            rows_of = np.array(members)
            yield Group(key, rows_of, column, example, conversations.weight_of, False)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=256)
def parse_tools(text: str | None) -> list[Any] | None:
    """Tool definitions of a row; many rows share theirs. Not to be changed."""
    if text is None:
        return None
    tools = json.loads(text)
    assert isinstance(tools, list)
    return tools


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    r"""Canonical messages as transformers hands them to a template.

    Example:
        >>> chat_messages([{"role": "user", "content": "Sum up:", "context": "Long text"}])
        [{'role': 'user', 'content': 'Sum up:\nLong text'}]
    """
    return [_chat_message(message) for message in messages]


def _chat_message(message: dict[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if "reasoning" in message:
        chat["thinking"] = message["reasoning"]
    content = message["content"]
    if message.get("context"):
        content = f"{content}\n{message['context']}"
    chat |= {"role": message["role"], "content": content}
    if "tool_calls" in message:
        chat["tool_calls"] = [_tool_call(call) for call in json.loads(message["tool_calls"])]
    chat |= {key: message[key] for key in ("tool_call_id", "name") if key in message}
    if "reasoning" in message:
        chat["reasoning_content"] = message["reasoning"]
    return chat


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if "function" not in call and "name" in call:
        function = {key: call[key] for key in ("name", "arguments") if key in call}
        rest = {key: value for key, value in call.items() if key not in function}
        call = {"type": "function", **rest, "function": function}
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        call = {**call, "function": {**function, "arguments": _parsed(function["arguments"])}}
    return call


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

"""The texts that data brings into a conversation, in one fixed order.

Marks, traces and columns all walk a conversation the same way; `replace_leaves` is that walk. A
leaf is a content, a thought, or a part of a tool call or tool definition. Objects of tool calls and
definitions are leaves as well, since templates write them whole (`arguments | tojson`).
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["JsonForm", "Leaf", "WholeJson", "ids_of", "replace_ids", "replace_leaves", "skeleton"]


class Leaf(NamedTuple):
    """A text or JSON object of the row, and the message it belongs to (-1: tool definitions)."""

    message: int
    kind: str
    """`content`; `thought`: reasoning, or content before `</think>`; `call`: name or arguments;
    `function`: a whole call; `tools`: a tool definition."""
    value: Any
    is_json: bool = False
    """An object that templates may write whole, not a text."""


Replace = Callable[[Leaf, Any], Any]
"""(leaf, the leaf with its own leaves replaced) -> what stands in its place."""


def replace_leaves(
    messages: list[dict[str, Any]], tools: list[Any] | None, replace: Replace
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Copy a conversation with every leaf replaced, in order of appearance.

    Example:
        >>> shout = lambda leaf, value: value.upper()
        >>> replace_leaves([{"role": "user", "content": "hi"}], None, shout)
        ([{'role': 'user', 'content': 'HI'}], None)
    """
    replaced = [_message(number, message, replace) for number, message in enumerate(messages)]
    if tools is not None:
        tools = [_whole(-1, "tools", tool, tool, replace) for tool in tools]
    return replaced, tools


def _message(number: int, message: dict[str, Any], replace: Replace) -> dict[str, Any]:
    copy = dict(message)
    if message["content"]:
        copy["content"] = replace(Leaf(number, "content", message["content"]), message["content"])
    if message.get("reasoning_content"):
        thought = message["reasoning_content"]
        thought = replace(Leaf(number, "thought", thought), thought)
        copy["thinking"] = copy["reasoning_content"] = thought
    if "tool_calls" in message:
        copy["tool_calls"] = [_call(number, call, replace) for call in message["tool_calls"]]
    return copy


def _call(number: int, call: Any, replace: Replace) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return dict(call) if isinstance(call, dict) else call
    copy = dict(function)
    for key in ("name", "arguments"):
        value = function.get(key)
        if isinstance(value, str) and value:
            copy[key] = replace(Leaf(number, "call", value), value)
        elif isinstance(value, dict):
            copy[key] = _whole(number, "call", value, value, replace)
    return {**call, "function": _whole(number, "function", function, copy, replace)}


def _whole(number: int, kind: str, value: Any, copy: Any, replace: Replace) -> Any:
    return replace(Leaf(number, kind, value, True), copy) if isinstance(value, dict) else copy


def skeleton(messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[str, list[Any]]:
    """All of a conversation but its leaves, as JSON; and the leaves' values.

    Conversations of equal skeletons differ in their leaves, and in ids and names of messages and
    calls, and in nothing else.
    """
    values: list[Any] = []

    def note(leaf: Leaf, copy: Any) -> Any:
        values.append(leaf.value)
        if leaf.kind == "function":
            return copy
        return 0 if leaf.is_json else 1

    bare, bare_tools = replace_leaves(messages, tools, note)
    replace_ids(bare, lambda _: 0)
    return json.dumps([bare, bare_tools], ensure_ascii=False), values


def replace_ids(messages: list[dict[str, Any]], replace: Callable[[Any], Any]) -> None:
    """Replace ids and names, in place, in a copy that `replace_leaves` made."""
    for message in messages:
        for key in ("tool_call_id", "name"):
            if key in message:
                message[key] = replace(message[key])
        for call in message.get("tool_calls", ()):
            if isinstance(call, dict) and "id" in call:
                call["id"] = replace(call["id"])


def ids_of(messages: list[dict[str, Any]]) -> list[str]:
    """Ids and names of messages and calls, as far as they are texts."""
    found: list[Any] = []
    copy, _ = replace_leaves(messages, None, lambda _, value: value)
    replace_ids(copy, found.append)
    return [value for value in found if isinstance(value, str)]


class JsonForm(NamedTuple):
    """How a template writes JSON: the arguments of `tojson`."""

    ensure_ascii: bool = False
    indent: int | str | None = None
    separators: tuple[str, str] | None = None
    sort_keys: bool = False

    def encoder(self) -> json.JSONEncoder:
        """Of this form."""
        return json.JSONEncoder(**self._asdict())


class WholeJson(dict[str, Any]):
    """A JSON leaf in a template's hands: `tojson` asks it to write itself."""

    def write(self, dumps: Callable[[Any], str], form: JsonForm) -> str:
        """The leaf as JSON, in the form that the template asked for."""
        raise NotImplementedError

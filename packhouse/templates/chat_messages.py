r"""Conversations as a template is given them: what transformers makes of canonical messages.

Dicts with the keys that the row has. A context is part of its turn: content + "\n" + context. Tool
calls are parsed, arguments that are JSON texts as well; reasoning is `reasoning_content`.
"""

import json
from functools import lru_cache
from typing import Any

__all__ = ["chat_messages", "parse_tools", "parsed_call"]


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
        chat["tool_calls"] = [parsed_call(call) for call in json.loads(message["tool_calls"])]
    chat |= {key: message[key] for key in ("tool_call_id", "name") if key in message}
    if "reasoning" in message:
        chat["reasoning_content"] = message["reasoning"]
    return chat


def parsed_call(call: Any) -> Any:
    """A tool call with its function in a dict of its own, and that function's arguments parsed."""
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

"""Ids of tool calls, for templates that refuse calls without one (Mistral: nine letters or digits).

Most data has no ids, or another API's. An id that fits is kept; else it is made from the old id, or
from the call and its place, so that the same row always has the same ids.
"""

import hashlib
import json
import re
from typing import Any

__all__ = ["with_call_ids"]

_FITS = re.compile(r"[A-Za-z0-9]{9}")


def with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which each call and each tool result has an id; results follow their calls.

    Example:
        >>> call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        >>> asked, told = with_call_ids([
        ...     {"role": "assistant", "content": "", "tool_calls": [call]},
        ...     {"role": "tool", "content": "1"}])
        >>> asked["tool_calls"][0]["id"] == told["tool_call_id"], len(told["tool_call_id"])
        (True, 9)
    """
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        if "tool_calls" in message:
            calls = [_with_id(call, number, at) for at, call in enumerate(message["tool_calls"])]
            message = {**message, "tool_calls": calls}
            waiting = [call["id"] for call in calls if isinstance(call, dict)]
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": _result_id(message, waiting, number)}
        made.append(message)
    return made


def _with_id(call: Any, number: int, at: int) -> Any:
    if not isinstance(call, dict):
        return call
    given = call.get("id")
    seed = given if isinstance(given, str) else f"{number}.{at}.{json.dumps(call)}"
    return {**call, "id": _fitting(seed)}


def _result_id(message: dict[str, Any], waiting: list[str], number: int) -> str:
    given = message.get("tool_call_id")
    if isinstance(given, str):
        own = _fitting(given)
        if own in waiting:
            waiting.remove(own)
        return own
    return waiting.pop(0) if waiting else _fitting(f"{number}.{message['content']}")


def _fitting(text: str) -> str:
    if _FITS.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:9]

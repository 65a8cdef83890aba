"""Ids of tool calls, for templates that refuse calls without one (Mistral: nine letters or digits).

Most data has no ids, or another API's. An id that fits is kept; else it is made from the old id, or
from the call and its place, so that the same row always has the same ids.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

__all__ = ["CallIds", "with_call_ids"]

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
    ids = CallIds()
    for number, message in enumerate(messages):
        if "tool_calls" in message:
            calls = message["tool_calls"]
            new = ids.of_calls(number, calls, map(json.dumps, calls))
            calls = [
                {**call, "id": own} if own is not None else call
                for call, own in zip(calls, new, strict=True)
            ]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            own = ids.of_result(number, message.get("tool_call_id"), message["content"])
            message = {**message, "tool_call_id": own}
        made.append(message)
    return made


class CallIds:
    """Makes the ids of one conversation, message by message."""

    def __init__(self) -> None:
        self._waiting: list[str] = []

    def of_calls(self, number: int, calls: list[Any], texts: Iterable[str]) -> list[str | None]:
        """Ids of the calls of message `number`, whose JSON is `texts`; None for no object."""
        ids = [
            _call_id(call, f"{number}.{at}.{text}")
            for at, (call, text) in enumerate(zip(calls, texts, strict=True))
        ]
        self._waiting = [own for own in ids if own is not None]
        return ids

    def of_result(self, number: int, given: Any, content: str) -> str:
        """Id of the tool result that is message `number`."""
        if isinstance(given, str):
            own = _fitting(given)
            if own in self._waiting:
                self._waiting.remove(own)
            return own
        return self._waiting.pop(0) if self._waiting else _fitting(f"{number}.{content}")


def _call_id(call: Any, seed: str) -> str | None:
    if not isinstance(call, dict):
        return None
    given = call.get("id")
    return _fitting(given if isinstance(given, str) else seed)


def _fitting(text: str) -> str:
    if _FITS.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:9]

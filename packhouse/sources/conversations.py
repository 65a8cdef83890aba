"""Adapters of rows that hold messages: chat, ShareGPT, bare lists and preference pairs.

Tool calls and tool definitions become JSON text in one canonical form: compact, keys in the file's
order (templates print them in that order), call arguments as objects whether the file wrote them
as objects or as text, bare definitions (`{"name": ..., "parameters": ...}`) in OpenAI's wrapping.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from packhouse.messages import MessageColumns
from packhouse.sources.records import parse_text
from packhouse.sources.shapes import SHAPES

__all__ = ["BadRowError", "talk_adapter"]

# What files call a role -> the role. A name that is not here is kept, and refused by the rules.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "tool_response": "tool",
}
_MOST_WEIGHT = 1e6  # far below what float32 holds
_CALL_ROLES = ("function_call", "tool_call")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_WEIGHTS = ("weight", "loss_weight", "train")
_READ = {"tool_calls", "function_call", "tool_call_id", "name", *_REASONING, *_WEIGHTS}
_READ_WITH = (_READ | {"role", "content"}, _READ | {"from", "value"})
_NOTHING: tuple[Any, ...] = (None, "", [], {})


class BadRowError(Exception):
    """A row cannot be adapted; caught by the adapters, never seen by users."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class _Output(Protocol):
    columns: MessageColumns
    tools: list[str | None]
    extra: Counter[str]


def talk_adapter(row_format: str, renamed: dict[str, str]) -> Callable[[Any, _Output], int]:
    """Function that appends one row's conversation to the output and returns 1.

    It raises `BadRowError` and then leaves the output as it was.
    """

    def add(row: Any, out: _Output) -> int:
        if row_format == "messages":
            messages, tools, system = row, None, None
        elif row_format == "preference":
            messages, tools, system = _read_preference(row, renamed)
        else:
            messages, tools, system = _read_talk(row, row_format, renamed)
        messages = _listed(messages)
        turns = [_read_message(message, at) for at, message in enumerate(messages)]
        if system and not (turns and turns[0][:2] == ("system", system)):
            turns.insert(0, ("system", system, None, None, None, None, None))
        tools = _read_tools(tools)
        _append(turns, out.columns)
        out.tools.append(tools)
        out.extra.update(_unread(messages))
        return 1

    return add


def _unread(messages: list[dict[str, Any]]) -> set[str]:
    """Fields of messages that hold something and are not read.

    Example:
        >>> _unread([{"role": "user", "content": "Hi", "loss": False, "audio": None}])
        {'loss'}
    """
    found: set[str] = set()
    for message in messages:
        if len(message) > 2:
            known = _READ_WITH["role" not in message]
            found |= {n for n in message if n not in known and message[n] not in _NOTHING}
    return found


def _append(turns: list[tuple[Any, ...]], columns: MessageColumns) -> None:
    for role, content, reasoning, calls, call_id, name, weight in turns:
        columns.role.append(role)
        columns.content.append(content)
        columns.reasoning.append(reasoning)
        columns.tool_calls.append(calls)
        columns.tool_call_id.append(call_id)
        columns.name.append(name)
        columns.weight.append(weight)
    columns.count.append(len(turns))


def _read_talk(row: Any, row_format: str, renamed: dict[str, str]) -> tuple[Any, Any, str | None]:
    if not isinstance(row, dict):
        raise BadRowError("not_an_object", f"the row is {_kind(row)}, not an object")
    shape = SHAPES[row_format]
    names = shape.names(row, renamed)
    field = next(iter(shape.required))
    if field not in names:
        has = ", ".join(repr(key[:40]) for key in list(row)[:12]) or "none"
        raise BadRowError("fields", f"no field {field!r}; the row has {has}")
    system = row.get(names.get("system", ""))
    if not isinstance(system, str | None):
        raise BadRowError("type", f"system is {_kind(system)}, not text")
    return row[names[field]], row.get(names.get("tools", "")), system


def _read_preference(row: Any, renamed: dict[str, str]) -> tuple[Any, Any, str | None]:
    """The chosen answer as the conversation; `rejected` has no place in supervised data."""
    if not isinstance(row, dict):
        raise BadRowError("not_an_object", f"the row is {_kind(row)}, not an object")
    names = SHAPES["preference"].names(row, renamed)
    if "chosen" not in names:
        raise BadRowError("fields", "no field 'chosen'")
    chosen = _as_messages(row[names["chosen"]])
    prompt = _as_messages(row.get(names.get("prompt", "")))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list | None):
        raise BadRowError("type", f"prompt is {_kind(prompt)}, neither text nor messages")
    if isinstance(chosen, str):
        chosen = [{"role": "assistant", "content": chosen}]
    if not isinstance(chosen, list):
        raise BadRowError("type", f"chosen is {_kind(chosen)}, neither text nor messages")
    if prompt and chosen[: len(prompt)] != prompt:
        chosen = [*prompt, *chosen]
    system = row.get(names.get("system", ""))
    if not isinstance(system, str | None):
        raise BadRowError("type", f"system is {_kind(system)}, not text")
    return chosen, row.get(names.get("tools", "")), system


def _listed(messages: Any) -> list[Any]:
    if isinstance(messages, str):
        messages = _list_of_text(messages, "the messages")
    if not isinstance(messages, list):
        raise BadRowError("type", f"the messages are {_kind(messages)}, not a list")
    return messages


def _read_message(message: Any, at: int) -> tuple[Any, ...]:
    """(role, content, reasoning, tool_calls, tool_call_id, name, weight)."""
    if not isinstance(message, dict):
        raise BadRowError("type", f"message {at} is {_kind(message)}, not an object")
    raw_role, value = _speaker(message, at)
    role = _ROLES.get(raw_role, raw_role)
    # The common case first: text, and nothing but role and content.
    if type(value) is str and len(message) == 2 and raw_role not in _CALL_ROLES:
        return role, value, None, None, None, None, None
    calls = _read_calls(message.get("tool_calls"), at)
    if message.get("function_call"):  # OpenAI's older form: one call, no list
        calls = [*(calls or []), *_parse_calls(message["function_call"], at)]
    if raw_role in _CALL_ROLES:
        calls, value = _parse_calls(value, at), ""
    content, reasoning, part_calls = _read_content(value, calls, at)
    calls = [*(calls or []), *part_calls] or None
    fields = [_text(message, name, at) for name in _REASONING]
    reasoning = next(filter(None, fields), reasoning)
    return (
        role,
        content,
        reasoning or None,
        orjson.dumps(calls).decode() if calls else None,
        _text(message, "tool_call_id", at),
        _text(message, "name", at),
        _read_weight(message, at),
    )


def _speaker(message: dict[str, Any], at: int) -> tuple[str, Any]:
    if "role" in message:
        role, value = message["role"], message.get("content")
    elif "from" in message:
        role, value = message["from"], message.get("value")
    else:
        raise BadRowError("fields", f"message {at} says neither 'role' nor 'from'")
    if type(role) is not str:
        raise BadRowError("type", f"message {at}: role is {_kind(role)}, not text")
    return role, value


def _read_content(value: Any, calls: Any, at: int) -> tuple[str, str | None, list[Any]]:
    """Text, reasoning and tool calls of a message's content."""
    if type(value) is str:
        return value, None, []
    if value is None and calls:
        return "", None, []
    if not isinstance(value, list):
        what = "content is null without tool calls" if value is None else ""
        raise BadRowError("type", f"message {at}: {what or f'content is {_kind(value)}, not text'}")
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    part_calls: list[Any] = []
    for part in value:
        kind, text = _read_part(part, at)
        if kind == "tool_call":
            part_calls += _parse_calls(text, at)
        else:
            texts[kind].append(text)
    return "".join(texts["text"]), "".join(texts["reasoning"]) or None, part_calls


_PART_KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "tool_call": "tool_call",
}


def _read_part(part: Any, at: int) -> tuple[str, Any]:
    if type(part) is str:
        return "text", part
    if not isinstance(part, dict):
        raise BadRowError("type", f"message {at}: a content part is {_kind(part)}, not an object")
    kind = _PART_KINDS.get(str(part.get("type", "text")))
    if kind is None:
        what = str(part.get("type"))[:40]
        raise BadRowError("type", f"message {at}: content part of type {what!r}, not text")
    keys = ("text", "value", "content", part.get("type"))
    value = next((part[key] for key in keys if isinstance(key, str) and key in part), None)
    if kind != "tool_call" and type(value) is not str:
        raise BadRowError("type", f"message {at}: a text part holds {_kind(value)}, not text")
    return kind, value


def _read_calls(value: Any, at: int) -> list[Any] | None:
    if value is None or value == []:
        return None
    return _parse_calls(value, at)


def _parse_calls(value: Any, at: int) -> list[Any]:
    """Calls in OpenAI's form from JSON text, one call or a list of calls, in any known form."""
    if isinstance(value, str):
        value = _parse_json(value, f"message {at}: the tool call")
    calls = value if isinstance(value, list) else [value]
    return [_read_call(call, at) for call in calls]


def _read_call(call: Any, at: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRowError("tool_calls", f"message {at}: a tool call names no function")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _parse_json(arguments or "{}", f"message {at}: the arguments of a tool call")
    if not isinstance(arguments, dict):
        raise BadRowError(
            "tool_calls", f"message {at}: the arguments of a tool call are {_kind(arguments)}"
        )
    read: dict[str, Any] = {}
    if isinstance(call.get("id"), str):
        read["id"] = call["id"]
    read["type"] = "function"
    read["function"] = {"name": function["name"], "arguments": arguments}
    return read


def _read_tools(tools: Any) -> str | None:
    if tools is None or tools in ("", []):
        return None
    if isinstance(tools, str):
        tools = _parse_json(tools, "tools", reason="tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError("tools", "tools is not a list of objects")
    return orjson.dumps([_definition(tool) for tool in tools]).decode() if tools else None


def _definition(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool definition in OpenAI's form, which is what chat templates are written for.

    Example:
        >>> _definition({"name": "add", "parameters": {}})
        {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}
    """
    if isinstance(tool.get("function"), dict):
        return tool if "type" in tool else {"type": "function", **tool}
    if not isinstance(tool.get("name"), str):
        return tool
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _parse_json(text: str, what: str, reason: str = "tool_calls") -> Any:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRowError(reason, f"{what}: not JSON ({error.msg})") from None
    _, bad = parse_text(text)  # a key twice, or a number that no float holds, would change
    if bad is not None:
        raise BadRowError(bad[0], f"{what}: {bad[1]}")
    return value


def _read_weight(message: dict[str, Any], at: int) -> float | None:
    """Loss weight: `weight`, `loss_weight` (a number) or `train` (true or false).

    Of several, those must agree; beside a weight, `train` says whether it may be 0.
    """
    given: dict[str, float] = {}
    for key in _WEIGHTS:
        value = message.get(key)
        if value is None:
            continue
        number = type(value) is bool if key == "train" else type(value) in (int, float)
        if not number or not math.isfinite(value) or not 0 <= value <= _MOST_WEIGHT:
            raise BadRowError("type", f"message {at}: {key} is {str(value)[:40]!r}, not a weight")
        given[key] = float(value)
    weights = [number for key, number in given.items() if key != "train"]
    is_trained = {number > 0 for number in given.values()}
    if len(set(weights)) > 1 or len(is_trained) > 1:
        says = ", ".join(f"{key} is {message[key]}" for key in given)
        raise BadRowError("type", f"message {at}: {says}, which contradict each other")
    return next(iter(given.values()), None)


def _text(message: dict[str, Any], key: str, at: int) -> str | None:
    value = message.get(key)
    if not isinstance(value, str | None):
        raise BadRowError("type", f"message {at}: {key} is {_kind(value)}, not text")
    return value or None


def _list_of_text(text: str, what: str) -> Any:
    """The list that a column of text holds as JSON: CSV knows no other way."""
    if text.lstrip()[:1] != "[":
        raise BadRowError("type", f"{what} are text, and no JSON list")
    value, bad = parse_text(text)
    if bad is not None:
        raise BadRowError(bad[0], f"{what}, given as JSON text: {bad[1]}")
    return value


def _as_messages(value: Any) -> Any:
    """The messages that JSON text holds; other text, and anything else, as it is."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        parsed, bad = parse_text(value)
        if bad is None and parsed and all(_is_message(item) for item in parsed):
            return parsed
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", str: "text", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else "a number")

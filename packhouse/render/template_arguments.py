r"""Convert canonical messages to the form in which transformers passes them to a template.

Messages are dicts with the keys that the row has. A context is part of its turn: content + "\n" +
context. Tool calls and arguments in JSON text are parsed, and reasoning is `reasoning_content`.

`trace_conversation` replaces the texts of a conversation by traced strings. Fields are traced in a
fixed order: content, reasoning, then for each call its name, its arguments and the whole function;
last come the tool definitions and the arguments that the row gives the template.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import count, product
from typing import Any, NamedTuple

from packhouse.render.provenance import DataObject, Field, Path, Trace, value_of

Messages = list[dict[str, Any]]
_FITS = re.compile(r"[A-Za-z0-9]{9}")


class MessageForm(NamedTuple):
    """Requirements of a template on messages, in addition to transformers' conventions."""

    has_ids: bool = False
    """Calls and results need IDs; Mistral's template refuses messages without."""
    has_function_ids: bool = False
    """IDs are `functions.NAME:N`, numbered through the conversation; see `format.call_ids`."""
    has_text_arguments: bool = False
    """Arguments of calls are JSON text, because DeepSeek's template concatenates them."""
    has_content_parts: bool = False
    """Contents are lists, `[{"type": "text", "text": "Hi"}]`, as templates of vision models
    expect."""

    @property
    def makes_ids(self) -> bool:
        """Return True if missing or unsuitable IDs are replaced."""
        return self.has_ids or self.has_function_ids


PLAIN = MessageForm()


class TemplateArguments(NamedTuple):
    """Arguments of a template in addition to messages."""

    tools: list[object] | None = None
    arguments: Mapping[str, Any] = {}
    """Arguments of the row, such as `enable_thinking` and `documents`."""


@lru_cache(maxsize=256)
def parse_template_arguments(tools: str | None, arguments: str | None) -> TemplateArguments:
    """Parse tool definitions and arguments of a row. Rows share the result, so do not mutate it."""
    return TemplateArguments(json.loads(tools or "null"), json.loads(arguments or "{}"))


def chat_messages(messages: Messages, form: MessageForm = PLAIN) -> Messages:
    r"""Return canonical messages in the form in which transformers passes them to a template.

    Args:
        messages: canonical messages, with a separate `context` and tool calls as JSON text.
        form: requirements of the template.

    Example:
        >>> chat_messages([{"role": "user", "content": "Sum up:", "context": "Long text"}])
        [{'role': 'user', 'content': 'Sum up:\nLong text'}]
    """
    made: Messages = []
    for message in messages:
        names = ("role", "content", "context", "reasoning", "tool_calls")
        role, content, context, thought, calls = map(message.get, names)
        # gpt-oss's template reads reasoning as `thinking`, others under one of the other names.
        chat: dict[str, object] = {} if thought is None else {"thinking": thought}
        chat |= {"role": role, "content": f"{content}\n{context}" if context else content}
        if calls is not None:
            has_text = form.has_text_arguments
            chat["tool_calls"] = [parsed_call(call, has_text) for call in json.loads(calls)]
        chat |= {key: message[key] for key in ("tool_call_id", "name") if key in message}
        if thought is not None:
            chat |= {"reasoning_content": thought, "reasoning": thought}
        made.append(chat)
    if form.makes_ids:
        made = with_call_ids(made, form)
    if form.has_content_parts:
        made = [{**message, "content": in_parts(message["content"])} for message in made]
    return made


def in_parts(content: str | None) -> list[dict[str, str]]:
    """Return a content as a list of parts, as templates of vision models expect."""
    return [{"type": "text", "text": content}] if content else []


def best_form(
    writes: Callable[[MessageForm], bool | None], *, has_function_ids: bool, has_content_parts: bool
) -> MessageForm:
    """Return the first form of messages with tool calls in which a template loses no text.

    Most templates accept the first form. If all lose text, it is the first that is not refused.

    Args:
        writes: True if the template writes all texts in a form; None if it refuses the messages.
        has_function_ids: see `MessageForm`.
        has_content_parts: see `MessageForm`.
    """
    # Objects are tried before text, and no ids before ids, because most templates take these.
    forms = [
        MessageForm(ids and not has_function_ids, has_function_ids, text, has_content_parts)
        for text, ids in product((False, True), repeat=2)
    ]
    return min(forms, key=lambda form: (True, False, None).index(writes(form)))


def parsed_call(call: Any, has_text_arguments: bool = False) -> object:
    """Return a tool call with its function in a nested dict and the arguments parsed.

    With `has_text_arguments`, the arguments become JSON text: {"a": 1} -> '{"a": 1}'.
    """
    if not isinstance(call, dict):
        return call
    if "function" not in call and "name" in call:
        function = {key: call[key] for key in ("name", "arguments") if key in call}
        rest = {key: value for key, value in call.items() if key not in function}
        call = {"type": "function", **rest, "function": function}
    function = function_of(call)
    given = function.get("arguments")
    arguments: object = None
    if has_text_arguments and isinstance(given, dict):
        # The reader parses arguments only if they are in this form
        # (`chat_messages._read_arguments`), so this is the text of the row again.
        arguments = json.dumps(given, ensure_ascii=False)
    elif not has_text_arguments and isinstance(given, str):
        arguments = parsed_arguments(given)
    new = {"function": {**function, "arguments": arguments}}
    return call if arguments is None else call | new


def parsed_arguments(text: str) -> dict[str, object] | None:
    """Parse arguments as a JSON object; None if they are other text."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def function_of(call: object) -> dict[str, object]:
    """Return the function of a call or tool definition; empty if it has none."""
    function = call.get("function") if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def with_call_ids(messages: Messages, form: MessageForm) -> Messages:
    """Return messages in which every call and tool result has an ID, for a form that needs them.

    A valid id is kept. A result without an id belongs to the first call that has no result yet.

    Example:
        >>> call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        >>> talk = [{"role": "assistant", "content": "", "tool_calls": [call]},
        ...     {"role": "tool", "content": "1"}]
        >>> asked, told = with_call_ids(talk, MessageForm(has_ids=True))
        >>> asked["tool_calls"][0]["id"] == told["tool_call_id"], len(told["tool_call_id"])
        (True, 9)
        >>> with_call_ids(talk, MessageForm(has_function_ids=True))[1]["tool_call_id"]
        'functions.f:0'
    """
    made: Messages = []
    waiting: list[tuple[object, str]] = []  # old and new id of calls without a result so far
    numbers = count()
    for at, message in enumerate(messages):
        if "tool_calls" in message:
            calls, waiting = list(message["tool_calls"]), []
            for place, call in enumerate(calls):
                if not isinstance(call, dict):
                    continue
                given = call.get("id")
                if form.has_function_ids:
                    own = f"functions.{function_of(call).get('name')}:{next(numbers)}"
                else:
                    # Mistral's template refuses calls without an id of nine letters or digits. Most
                    # data has none, or those of another API. They are derived, so that the same row
                    # always gets the same ids.
                    seed = f"{at}.{place}.{json.dumps(call)}"
                    own = _fitting(given if isinstance(given, str) else seed)
                calls[place] = {**call, "id": own}
                waiting.append((given, own))
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            is_known = isinstance(given, str) and not form.has_function_ids
            of_given = [pair for pair in waiting if given is not None and pair[0] == given]
            answered = next(iter(of_given or ([] if is_known else waiting)), None)
            if answered is None:
                own = _fitting(str(given) if is_known else f"{at}.{message['content']}")
            else:
                waiting.remove(answered)
                own = answered[1]
            message = {**message, "tool_call_id": own}
        made.append(message)
    return made


def _fitting(text: str) -> str:
    return text if _FITS.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def trace_conversation(
    messages: Messages, given: TemplateArguments, control: re.Pattern[str], has_content_parts: bool
) -> tuple[Messages, TemplateArguments, Trace]:
    """Return a conversation with traced texts.

    Args:
        messages: messages in the form for templates.
        given: tools and arguments.
        control: matches control tokens. Keys and lists of a tool definition are traced only if they
            contain some; all rows of a shape share them, so this is the same for all rows.
        has_content_parts: convert contents to lists of one part.
    """
    trace, copies = Trace(), list[dict[str, Any]]()
    for at, message in enumerate(messages):
        copy = dict(message)
        for key, kind in (("content", "content"), ("reasoning_content", "thought")):
            if message.get(key):
                copy[key] = value_of(Field(trace, at, kind, message[key], (kind, at)))
        if "reasoning_content" in message:
            copy["thinking"] = copy["reasoning"] = copy["reasoning_content"]
        for key in ("tool_call_id", "name"):
            if isinstance(message.get(key), str):
                copy[key] = value_of(Field(trace, at, "id", message[key], (key, at)))
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            copy["tool_calls"] = [_traced_call(trace, at, number, call) for number, call in calls]
        if has_content_parts:
            copy["content"] = in_parts(copy["content"])
        copies.append(copy)
    tools = given.tools
    if tools is not None:
        tools = [_traced_tool(trace, at, tool, control) for at, tool in enumerate(tools)]
    arguments = {k: _traced_argument(trace, v, ("argument", k)) for k, v in given.arguments.items()}
    return copies, TemplateArguments(tools, arguments), trace


def _traced_argument(trace: Trace, value: object, path: Path) -> Any:
    """Return an argument with its texts traced; keys, numbers and flags belong to its shape."""
    if isinstance(value, str) and value:
        return value_of(Field(trace, -1, "argument", value, path))
    if isinstance(value, dict):
        return {key: _traced_argument(trace, item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_traced_argument(trace, item, (*path, at)) for at, item in enumerate(value)]
    return value


def _traced_call(trace: Trace, at: int, number: int, call: object) -> object:
    if not isinstance(call, dict):
        return call
    copy = dict(call)
    if isinstance(call.get("id"), str):
        copy["id"] = value_of(Field(trace, at, "id", call["id"], ("call_id", at, number)))
    function = call.get("function")
    if isinstance(function, dict):
        whole = Field(trace, at, "function", function, ("function", at, number))
        own = dict(function)
        for key in ("name", "arguments"):
            value = function.get(key)
            if isinstance(value, dict) or (isinstance(value, str) and value):
                path = (f"call_{key}", at, number)
                own[key] = value_of(Field(trace, at, "call", value, path, whole))
        copy["function"] = DataObject(whole, own)
    return copy


def _traced_tool(trace: Trace, at: int, tool: Any, control: re.Pattern[str]) -> object:
    if not isinstance(tool, dict):
        return tool
    whole, function = Field(trace, -1, "tool", tool, ("tool", at)), function_of(tool)
    # Keys, lists and the like, which are the same in all rows of a shape.
    shared = [v for k, v in tool.items() if v is not function and not is_field(k, v, False)]
    shared += [v for k, v in function.items() if not is_field(k, v, True)]
    if control.search("\0".join([*tool, *function, *strings_in(shared)])):
        return DataObject(whole)
    own = _traced_items(tool, whole, ("tool_item", at))
    if function:
        part = Field(trace, -1, "tool", function, ("tool_function", at), whole)
        own["function"] = DataObject(part, _traced_items(function, part, ("function_item", at)))
    return DataObject(whole, own)


def is_field(key: str, value: object, is_function: bool) -> bool:
    """Return True if rows of a shape may have different values here."""
    return isinstance(value, str | dict) and (is_function or key not in ("type", "function"))


def _traced_items(tool: Mapping[str, object], parent: Field, path: Path) -> dict[str, object]:
    return {
        key: value_of(Field(parent.trace, -1, "tool", value, (*path, key), parent))
        if is_field(key, value, path[0] == "function_item")
        else value
        for key, value in tool.items()
    }


def strings_in(value: object) -> Iterator[str]:
    """Yield keys and texts of a JSON value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)

"""Read messages in the forms that occur in files, as turns of a conversation.

Tool calls and tool definitions become compact JSON text in one form. Keys keep the file's order,
because templates print them in that order. Call arguments are objects if the file has objects, or
text in the usual form (`{"a": 1}`); any other text stays text. Bare definitions
(`{"name": ..., "parameters": ...}`) get OpenAI's wrapping.

Everything that a message says about its training is read or refused, never ignored.
"""

import json
import math
import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

import orjson

from packhouse.read.json_parsing import hidden_fault, parse_text, value_of
from packhouse.system.plugins import BadRowError

_Text = str | None
Turn = tuple[str, str, _Text, _Text, _Text, _Text, _Text, float | None, _Text]
"""The fields of `table_schemas.MESSAGE`: role, content, context, reasoning, tool_calls,
tool_call_id, name, weight, part_weights."""


def text_turn(role: str, content: str, context: str | None = None) -> Turn:
    """Return a turn that has only text."""
    return role, content, context, None, None, None, None, None, None


# Role in the file -> role. Other names are kept, and the rules will refuse the conversation.
# `developer` is OpenAI's; `human`, `gpt`, `function_call` and `observation` are ShareGPT's,
# `prompter` is OpenAssistant's.
SPEAKERS = {
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
"""Known names of speakers, and their roles."""

WEIGHTS = ("weight", "loss_weight", "loss_scale", "train", "training", "loss")
"""Fields with a weight: `loss_scale` is from ms-swift, `train` and `training` from Axolotl and
others, `loss` from xtuner and ms-swift."""

SPANS = ("train_detail", "training_detail")
"""Axolotl's fields for spans of a content."""

Pieces = list[tuple[str, float | None]]
"""Text and weight of each part of a message; None stands for the turn's weight."""

_FLAGS = ("train", "training", "loss")
MAX_WEIGHT = 1e6
"""Largest weight of a message, part, row or token; far below the limit of float32."""

_CALL_ROLES = ("function_call", "tool_call")
# Reasoning, as in DeepSeek's API, in OpenRouter's, and in gpt-oss's template.
_REASONING = ("reasoning_content", "reasoning", "thinking")
_READ = {"tool_calls", "function_call", "tool_call_id", "name", *_REASONING, *WEIGHTS, *SPANS}
_READ_BY_SPEAKER = {"role": _READ | {"role", "content"}, "from": _READ | {"from", "value"}}
_EMPTY: tuple[object, ...] = (None, "", [], {})


class Conversation(NamedTuple):
    """One conversation of a row."""

    turns: list[Turn]
    tools: str | None = None
    """Canonical JSON text."""
    label: int | None = None
    unread_fields: frozenset[str] = frozenset()
    """Non-empty fields of messages that nothing reads."""
    num_unanswered: int = 0
    """Questions of the row without an answer, which give no conversation."""


def read_messages(messages: object, tools: object, system: str | None) -> Conversation:
    """Read a list of messages, or a list as JSON text.

    Args:
        messages: value of the row's field of messages.
        tools: tool definitions: a list, its JSON text, or nothing.
        system: the row's system prompt outside the messages.

    Raises:
        BadRowError: a message is malformed; the detail tells which one and why.
    """
    if isinstance(messages, str):
        if messages.lstrip()[:1] != "[":
            raise BadRowError("type", "the messages are text that is not a JSON list")
        messages, bad = parse_text(messages)
        if bad is not None:
            raise BadRowError(bad[0], f"the messages are JSON text with an error: {bad[1]}")
    if not isinstance(messages, list):
        raise BadRowError("type", f"the messages are {kind_of(messages)}, not a list")
    turns: list[Turn] = []
    unread: frozenset[str] = frozenset()
    is_joint = False
    for number, message in enumerate(messages):
        if type(message) is dict and len(message) == 2:  # most messages: only a role and text
            role, value = message.get("role"), message.get("content")
            if role is None:
                role, value = message.get("from"), message.get("value")
            if (
                type(role) is str
                and type(value) is str
                and role not in _CALL_ROLES
                and "</img>" not in value
            ):
                turns.append(
                    (SPEAKERS.get(role, role), value, None, None, None, None, None, None, None)
                )
                continue
        if not isinstance(message, dict):
            raise BadRowError("type", f"message {number} is {kind_of(message)}, not an object")
        if (speaker := speaker_key([message])) is None:
            what = f"message {number} has neither 'role' nor 'from'"
            fix = "if another field has the role, set `fields: {role: FIELD}`"
            raise BadRowError("fields", f"{what}; {fix}")
        try:
            turn = _read_message(message, speaker)
        except BadRowError as bad:
            raise BadRowError(bad.reason, f"message {number}: {bad.detail}") from None
        is_joint = is_joint or (turn[4] is not None and bool(turns) and turns[-1][4] is not None)
        turns.append(turn)
        known = _READ_BY_SPEAKER[speaker]
        if not known >= message.keys():
            unread |= {n for n in message if n not in known and message[n] not in _EMPTY}
    if is_joint:
        turns = _join_calls(turns)
    if system and not (turns and turns[0][:2] == ("system", system)):
        turns.insert(0, text_turn("system", system))
    return Conversation(turns, read_tools(tools), None, unread)


def rename_messages(
    messages: object, speaker: str, fields: Mapping[str, str], roles: Mapping[str, str]
) -> object:
    """Rename keys and roles of messages to those that `read_messages` knows.

    Args:
        messages: a list of messages, or its JSON text; anything else is returned unchanged.
        speaker: `role` or `from`, the form of the result.
        fields: the file's keys for `role` and `content`, if they differ.
        roles: the file's name of a speaker -> role.

    Example:
        >>> message = {"speaker": "Agent", "text": "Hi"}
        >>> fields = {"role": "speaker", "content": "text"}
        >>> rename_messages([message], "role", fields, {"Agent": "assistant"})
        [{'role': 'assistant', 'content': 'Hi'}]

    If a message also has a key with our name, the one that `fields` names replaces it.
    """
    messages = value_of(messages)
    if not isinstance(messages, list):
        return messages
    content = "content" if speaker == "role" else "value"
    ours = {fields.get("role", speaker): speaker, fields.get("content", content): content}
    renamed: list[object] = []
    for message in messages:
        if isinstance(message, dict):
            named = {ours[key]: value for key, value in message.items() if key in ours}
            message = {k: v for k, v in message.items() if k not in ours} | named
            if isinstance(role := message.get(speaker), str):
                message[speaker] = roles.get(role, role)
        renamed.append(message)
    return renamed


def speaker_key(messages: object) -> str | None:
    """Return the key that names the speaker in a list of messages, None if there is none.

    Example:
        >>> speaker_key([{"from": "human", "value": "Hi"}])
        'from'
    """
    given = messages if isinstance(messages, list) else []
    objects = (each for each in given if isinstance(each, dict))
    return next((key for each in objects for key in ("role", "from") if key in each), None)


def kind_of(value: object) -> str:
    """Describe the type of a value, as in `a list`."""
    kinds = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), type(value).__name__)


def _join_calls(turns: list[Turn]) -> list[Turn]:
    """Join parallel calls that have a turn each, before as many results, as ShareGPT writes them.

    Example:
        >>> call = lambda n: ("assistant", "", None, None, f'[{n}]', None, None, None, None)
        >>> turns = [call(1), call(2), text_turn("tool", "a"), text_turn("tool", "b")]
        >>> [(turn[0], turn[4]) for turn in _join_calls(turns)]
        [('assistant', '[1,2]'), ('tool', None), ('tool', None)]
    """
    runs = [
        (kind, list(run))
        for kind, run in groupby(turns, lambda turn: "call" if turn[4] and not turn[1] else turn[0])
    ]
    joined: list[Turn] = []
    for (kind, run), (after, results) in zip(runs, [*runs[1:], ("", [])], strict=True):
        are_alike = len({(turn[:4], turn[5:]) for turn in run}) == 1
        if kind == "call" and after == "tool" and len(run) == len(results) and are_alike:
            calls = [call for turn in run for call in orjson.loads(turn[4] or "[]")]
            run = [(*run[0][:4], orjson.dumps(calls).decode(), *run[0][5:])]
        joined += run
    return joined


def _read_message(message: dict[str, Any], speaker: str) -> Turn:
    raw_role, value = message[speaker], message.get("content" if speaker == "role" else "value")
    if type(raw_role) is not str:
        raise BadRowError("type", f"role is {kind_of(raw_role)}, not text")
    role = SPEAKERS.get(raw_role, raw_role)
    calls: list[object] = []
    if message.get("tool_calls") is not None:
        calls += _read_calls(message["tool_calls"])
    if message.get("function_call"):  # OpenAI's older form: one call, not a list
        calls += _read_calls(message["function_call"])
    # ShareGPT has the call as the text of a turn of its own: `{"from": "function_call", "value":
    # "{\"name\": ...}"}`. So the value is a call, and the turn has no text.
    if raw_role in _CALL_ROLES:
        calls, value = _read_calls(value), ""
    said, thought = _read_content(value, calls)
    fields = [_read_reasoning(message, name) for name in _REASONING]
    thought = next(filter(None, fields), thought)
    is_text = not calls and not isinstance(value, list)
    weight, part_weights = weigh_message(message, role, said, thought, is_text=is_text)
    return (
        role,
        "".join(text for text, _ in said),
        None,
        "".join(text for text, _ in thought) or None,
        orjson.dumps(calls).decode() if calls else None,
        optional_text(message, "tool_call_id"),
        optional_text(message, "name"),
        weight,
        part_weights,
    )


def _read_content(value: object, calls: list[object]) -> tuple[Pieces, Pieces]:
    """Return text and reasoning; tool calls among the content's parts are added to `calls`."""
    if type(value) is str:
        if IMAGE_PATHS.search(value):
            raise BadRowError("media", "the text contains an image in <img>")
        return [(value, None)], []
    if value is None and calls:
        return [], []
    if not isinstance(value, list):
        what = "null without tool calls" if value is None else f"{kind_of(value)}, not text"
        raise BadRowError("type", f"content is {what}")
    pieces: dict[str, Pieces] = {"text": [], "reasoning": []}
    for part in value:
        kind, text = _read_part(part)
        weight = read_weight(part)
        if kind != "tool_call":
            pieces[kind].append((text, weight))
        elif weight is None:
            calls += _read_calls(text)
        else:
            raise BadRowError("type", "a part that is not text has a weight")
    return pieces["text"], pieces["reasoning"]


def _read_reasoning(message: dict[str, Any], name: str) -> Pieces:
    """Return the reasoning in a field of the message, as text or in parts."""
    if not isinstance(message.get(name), list):
        text = optional_text(message, name)
        return [(text, None)] if text else []
    calls: list[object] = []
    said, thought = _read_content(message[name], calls)
    if calls or (said and thought):
        raise BadRowError("type", f"a part of {name} is not text")
    return said or thought


# OpenAI's Responses API has `input_text` and `output_text`, Anthropic's API has `thinking`.
_PART_KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "tool_call": "tool_call",
}


def _read_part(part: object) -> tuple[str, Any]:
    """Return the kind of a content part, and its text or its tool call."""
    if type(part) is str:
        return "text", part
    if not isinstance(part, dict):
        raise BadRowError("type", f"a content part is {kind_of(part)}, not an object")
    part_type = part.get("type", "text")
    kind = _PART_KINDS.get(str(part_type))
    if kind is None or is_media_part(part):
        reason = "media" if is_media_part(part) else "type"
        what = str(part.get("type", next(iter(part))))[:40]
        raise BadRowError(reason, f"a content part has type {what!r}, not text")
    keys = ("text", "value", "content", part_type)
    value = next((part[key] for key in keys if isinstance(key, str) and key in part), None)
    if kind != "tool_call" and type(value) is not str:
        raise BadRowError("type", f"a text part contains {kind_of(value)}, not text")
    return kind, value


def is_media_part(part: object) -> bool:
    """Return True for a content part that is an image, audio, video or file.

    Example:
        >>> is_media_part({"type": "image_url", "image_url": {"url": "a.jpg"}})
        True
        >>> is_media_part({"type": "text", "text": "an image"})
        False
    """
    if not isinstance(part, dict):
        return False
    stated = part.get("type", next(iter(part), None) if len(part) == 1 else None)
    return isinstance(stated, str) and _MEDIA_PART.fullmatch(stated) is not None


IMAGE_PATHS = re.compile(r"^(?:(?:Picture \d+: ?)?<img>[^<>\n]+</img>\s*)+", re.MULTILINE)
"""Images at the start of a line of text, in the form of Qwen-VL. HTML has no `</img>`."""

_MEDIA_PART = re.compile("(input_|output_)?(image|audio|video|file)(_url|_file|_path)?")


_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names of the arguments of a call: OpenAI's, Llama's, LangChain's and Anthropic's."""
_CALL_KEYS = {"name", "id", "type", "index", "description", "function", *_ARGUMENTS}
_CALL_KEYS |= {"call_id", "tool_call_id", "status", "strict"}
_OF_CALL = "the arguments of a tool call"


def _read_calls(value: object) -> list[object]:
    """Return calls in OpenAI's form, given one call, a list or JSON text in any known form."""
    if isinstance(value, str):
        value = parse_field(value, "the tool call")
    calls: list[object] = []
    for call in value if isinstance(value, list) else [value]:
        call = call if isinstance(call, dict) else {}
        function, call_id = call.get("function", call), call.get("id")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise BadRowError("tool_calls", "a tool call has no function name")
        parts = (function,) if function is call else (function, call)
        values = [part[key] for part in parts for key in _ARGUMENTS if key in part]
        given = [value for value in values if value not in (*_EMPTY, "{}")]
        if any(value != given[0] for value in given):
            wrong = f"{_OF_CALL} have several names, with different values"
            raise BadRowError("tool_calls", wrong)
        # `{}` in place of arguments under another name would be trained, as in file 1534.
        rest = [n for part in parts for n in part if n not in _CALL_KEYS and part[n] not in _EMPTY]
        if rest and not given:
            wrong = f"{_OF_CALL} are missing; it has {', '.join(map(repr, rest))}"
            raise BadRowError("tool_calls", wrong)
        values = given or [each for each in values if each is not None] or [*values, {}]
        arguments = values[0]
        if isinstance(arguments, str):
            arguments = _read_arguments(arguments)
        elif not isinstance(arguments, dict):
            wrong = f"{_OF_CALL} are {kind_of(arguments)}, not an object"
            raise BadRowError("tool_calls", wrong)
        whole = {"type": "function", "function": {"name": name, "arguments": arguments}}
        calls.append({"id": call_id, **whole} if isinstance(call_id, str) else whole)
    return calls


def _read_arguments(text: str) -> object:
    """Parse call arguments; text that is not an object in the usual form is returned unchanged.

    Example:
        >>> [_read_arguments(text) for text in ('{"a": 1}', '{"a":1}', '{"a": ')]
        [{'a': 1}, '{"a":1}', '{"a": ']
    """
    try:
        value = parse_field(text or "{}", _OF_CALL)
    except BadRowError as error:
        if error.reason != "tool_calls":  # it is JSON with a fault, such as a duplicate key
            raise
        return text
    # A template that concatenates strings then writes the row's text; others get the parsed object.
    is_usual = isinstance(value, dict) and json.dumps(value, ensure_ascii=False) == (text or "{}")
    return value if is_usual else text


def read_tools(tools: object) -> str | None:
    """Return tool definitions in OpenAI's form, which chat templates expect.

    Example:
        >>> read_tools([{"name": "add", "parameters": {}}])
        '[{"type":"function","function":{"name":"add","parameters":{}}}]'
    """
    if tools is None or tools in ("", []):
        return None
    if isinstance(tools, str):
        tools = parse_field(tools, "tools", reason="tools")
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        tools = [each for tool in tools for each in _declared(tool)]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError("tools", "tools is not a list of objects")
    return orjson.dumps([_definition(tool) for tool in tools]).decode() if tools else None


def _declared(tool: dict[str, Any]) -> list[Any]:
    """Return the functions of a tool of Gemini with nothing else, or the tool itself."""
    ((key, value), *more) = [item for item in tool.items() if item[1] is not None] or [("", None)]
    is_gemini = key in ("functionDeclarations", "function_declarations") and not more
    return value if is_gemini and isinstance(value, list) else [tool]


def _definition(tool: Any) -> Any:
    """Return a function in OpenAI's form; other tools unchanged, such as a web search."""
    is_wrapped = isinstance(tool.get("function"), dict)
    function = tool["function"] if is_wrapped else tool
    if not is_wrapped and not isinstance(function.get("name"), str):
        return tool
    # Anthropic's and MCP's names. Templates would write them, or miss the parameters.
    names = {"parameters", "input_schema", "inputSchema"}
    schemas = {key for key in names & function.keys() if function[key] is not None}
    if len(schemas) == 1:
        held = {k: value for k, value in function.items() if k in schemas or k not in names}
        function = {"parameters" if k in schemas else k: value for k, value in held.items()}
    if is_wrapped:  # with the order of its keys
        return ({} if "type" in tool else {"type": "function"}) | tool | {"function": function}
    return {"type": "function", "function": {k: v for k, v in function.items() if k != "type"}}


def parse_field(text: str, what: str, reason: str = "tool_calls") -> object:
    """Parse JSON text of a tool call or of tools, as strictly as a row.

    Raises:
        BadRowError: with `reason` if it is not JSON, else with a reason such as `duplicate_key`.
    """
    try:
        value: object = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRowError(reason, f"{what}: not JSON ({error.msg})") from None
    bad = hidden_fault(text.encode(), value)
    if bad is not None:
        raise BadRowError(bad[0], f"{what}: {bad[1]}")
    return value


def optional_text(owner: Mapping[Any, object], key: str | None) -> str | None:
    """Return the text of a field of a row or message; None if it is missing or empty.

    Raises:
        BadRowError: the value is not text.
    """
    value = owner.get(key)
    if not isinstance(value, str | None):
        raise BadRowError("type", f"{key} is {kind_of(value)}, not text")
    return value or None


# Loss weights of messages, parts and spans, in the forms of several tools.


def read_weight(message: object, *, is_answer: bool = True) -> float | None:
    """Return the loss weight from `weight`, `loss_weight`, `loss_scale`, or a true/false flag.

    Several of them must agree: a weight is above 0 exactly if the flag is true.

    Args:
        message: a message, or a part of its content; a part that is a string has no weight.
        is_answer: True for an answer and for a part of any message. In other messages, a
            `loss_scale` of 0 or 1 has no meaning, as in ms-swift; other values are refused.

    Example:
        >>> read_weight({"role": "assistant", "content": "No.", "train": False})
        0.0
    """
    stated: dict[str, float] = {}
    if not isinstance(message, dict):
        return None
    for key in WEIGHTS:
        value = message.get(key)
        # A number in `loss` is the loss of some model, not a weight.
        if value is None or (key == "loss" and type(value) in (int, float)):
            continue
        is_number = type(value) is bool if key in _FLAGS else type(value) in (int, float)
        if not is_number or not math.isfinite(value) or not 0 <= value <= MAX_WEIGHT:
            raise BadRowError("type", f"{key} is {str(value)[:40]!r}, not a weight")
        if is_answer or key != "loss_scale":
            stated[key] = float(value)
        elif value not in (0, 1):
            raise BadRowError("type", "only answers can have a loss_scale")
    weights = {weight for key, weight in stated.items() if key not in _FLAGS}
    is_trained = {weight > 0 for weight in stated.values()}
    if len(weights) > 1 or len(is_trained) > 1:
        says = ", ".join(f"{key} is {message[key]}" for key in stated)
        raise BadRowError("type", f"{says}, which contradict each other")
    return next(iter(stated.values()), None)


def weigh_message(
    message: dict[str, object], role: str, said: Pieces, thought: Pieces, *, is_text: bool
) -> tuple[float | None, str | None]:
    """Return the weight of a message, and the weights of its parts, as factors, if these differ.

    Args:
        message: the row's message.
        role: of the message.
        said: its content.
        thought: its reasoning.
        is_text: True if the content is one text and the message has no tool calls.

    Raises:
        BadRowError: a weight is invalid, or two contradict each other.

    Example:
        >>> said = [("Hm. ", 0.0), ("Four.", None)]
        >>> weigh_message({}, "assistant", said, [], is_text=False)
        (None, '[[3,0.0],[6,null]]')
        >>> weigh_message({}, "assistant", [("Hm.", 0.0)], [], is_text=False)
        (0.0, None)
    """
    weight = read_weight(message, is_answer=role == "assistant")
    is_weighed = any(own is not None for _, own in thought)
    spans = _read_spans(message, "".join(text for text, _ in said))
    if spans == [] and weight is None:  # Axolotl trains no part of it
        weight = 0.0
    elif spans:
        if not is_text or is_weighed:
            detail = "spans cannot be combined with tool calls or parts; set `train` on each part"
            raise BadRowError("type", detail)
        said, weight, is_weighed = spans, 1.0 if weight is None else weight, bool(thought)
        thought = [("".join(text for text, _ in thought), 0.0)]
    sizes = [*(_part_sizes(thought) if is_weighed else ()), *_part_sizes(said)]
    own_weights = {own for _, own in sizes}
    if own_weights <= {None}:
        return weight, None
    if len(own_weights) == 1:
        (own,) = own_weights
        return own if weight is None or own is None else own * weight, None
    # Weights of parts are factors of the turn's own weight, and `train_on` gives a user turn 0: the
    # part would not be trained, without a word.
    if weight is None and role != "assistant" and any(own_weights - {None}):
        detail = f"a part of a {role} turn is trained; set a weight on the turn itself"
        raise BadRowError("type", detail)
    return weight, orjson.dumps(sizes).decode()


def _part_sizes(pieces: Pieces) -> list[tuple[int, float | None]]:
    """Return the number of characters and the weight of each part of one text.

    Example:
        >>> _part_sizes([("Hm. ", 0.0), ("Four.", None)])
        [(3, 0.0), (6, None)]
    """
    sizes = [(len(text), own) for text, own in pieces if text]
    texts = [text for text, _ in pieces if text]
    # A boundary after a space moves before it, because tokens begin with the space before a word:
    # either the whole word is trained or none of it.
    for at in range(1, len(sizes)):
        (before, own), (size, next_own) = sizes[at - 1 : at + 1]
        if own != next_own and texts[at - 1].endswith(" "):
            sizes[at - 1 : at + 1] = (before - 1, own), (size + 1, next_own)
    return [(size, own) for size, own in sizes if size]


def _read_spans(message: dict[str, object], content: str) -> Pieces | None:
    """Split a content into parts by Axolotl's spans; return None without the field.

    An empty list has no parts. Offsets count characters, and a span includes its last character.
    Text outside of trained spans is not trained.

    Raises:
        BadRowError: the spans do not fit this content.

    Example:
        >>> spans = [{"begin_offset": 0, "end_offset": 3, "train": False},
        ...          {"begin_offset": 4, "end_offset": 8, "train": True}]
        >>> _read_spans({"train_detail": spans}, "Hm. Four.")
        [('Hm. ', 0.0), ('Four.', 1.0), ('', 0.0)]
    """
    given = [name for name in SPANS if message.get(name) is not None]
    if not given:
        return None
    where, spans = given[0], message[given[0]]
    if any(message[name] != spans for name in given):
        raise BadRowError("type", f"{where} and {given[1]} contradict each other")
    if spans == []:
        return []
    if not isinstance(spans, list):
        raise BadRowError("type", f"{where} is {str(spans)[:40]!r}, not a list of spans")
    trained: list[tuple[int, int]] = []
    for span in spans:
        stated = span if isinstance(span, dict) else {}
        begin, end, train = map(stated.get, ("begin_offset", "end_offset", "train"))
        # Not `isinstance`, for which `true` is an int.
        if type(begin) is not int or type(end) is not int or train not in (True, False):
            what = f"{where} has {str(span)[:60]!r}, not {{begin_offset, end_offset, train}}"
            raise BadRowError("type", what)
        if not 0 <= begin <= end <= len(content):
            what = (
                f"{where}: characters {begin} to {end} are not within the content, which has "
                f"{len(content)}"
            )
            raise BadRowError("type", f"{what}; offsets count from 0 and include the last one")
        if train:
            trained.append((begin, min(end + 1, len(content))))
    parts, at = Pieces(), 0
    for begin, stop in sorted(trained):
        begin = max(begin, at)
        if begin < stop:
            parts += [(content[at:begin], 0.0), (content[begin:stop], 1.0)]
            at = stop
    return [*parts, (content[at:], 0.0)]

"""Check that a rendering has all text of its row, and no control token forged by the row.

Contents, calls, documents and tool definitions have to be written; reasoning that the template
leaves out is counted. Control-token text outside of contents (IDs, names, numbers, keys) is
refused, too.
"""

import json
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from packhouse.render.chat_messages import function_of, parsed_arguments, strings_in
from packhouse.render.provenance import UNPROVEN, Field, Piece
from packhouse.render.rendering import Conversation, Occurrence, Rendering
from packhouse.render.results import RefusedError

EXCERPT = 60  # characters of a lost text that messages show
_Ranges = dict[Field, list[tuple[int, int]]]
_OTHER_TEMPLATE = "Give format.template a Jinja file that writes it (docs/masks.md)"


def _excerpt(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= EXCERPT else f"{text[:EXCERPT]}...")


def check_answer(talk: Conversation, message: int, completion: Rendering) -> list[str]:
    """Refuse a completion that leaves out text of its answer.

    Args:
        talk: the conversation.
        message: number of the answer.
        completion: text that the model should generate.

    Returns:
        Reasoning of the answer that is missing from it.

    Raises:
        RefusedError: the content, a call or a part of a text is missing.
    """
    thoughts: list[str] = []
    ranges = _ranges([completion])
    for field in talk.trace.fields:
        if field.message == message and field.kind in ("content", "thought", "call", "function"):
            thoughts += _check_field(talk, field, ranges)
    return thoughts


def check_row(
    talk: Conversation, records: Sequence[Rendering], num_messages: int, trained: Container[int]
) -> Counter[str]:
    """Refuse a row whose records lack some of its text, or that forges a control token.

    Answers that are not trained are history: text of them that the template leaves out is not sent
    at inference either.

    Args:
        talk: the conversation.
        records: all records of the row.
        num_messages: number of messages that the records contain.
        trained: indices of the trained messages.

    Returns:
        How many trained thoughts and how many untrained texts are in no record.

    Raises:
        RefusedError: a content, call, document or tool is missing or incomplete, or a text other
            than content contains control tokens.
    """
    notes = Counter[str]()
    ranges = _ranges(records)
    for field in reversed(talk.trace.fields):
        number = field.message
        if field.kind in ("id", "tool", "argument") or number >= num_messages:
            continue
        is_history = talk.roles[number] == "assistant" and number not in trained
        try:
            unwritten = _check_field(talk, field, ranges)
        except RefusedError as error:
            if error.refusal.reason != "content_lost" or not is_history:
                raise
            notes["history_not_rendered"] += 1
        else:
            notes["reasoning_not_rendered"] += 0 if is_history else len(unwritten)
        _check_arguments(field, records)
    _check_documents(talk, ranges)
    for name in [function_of(tool).get("name") for tool in talk.given.tools or ()]:
        forms = [json.dumps(name, ensure_ascii=way)[1:-1] for way in (False, True)]
        if isinstance(name, str) and not any(
            form.encode() in record.text for form in (name, *forms) for record in records
        ):
            what = f"tool '{name}' is not in the rendering. {_OTHER_TEMPLATE}"
            raise RefusedError("content_lost", what)
    written = talk.messages[:num_messages]
    others = [_without_fields(m["tool_calls"]) for m in written if "tool_calls" in m]
    others += _keys(talk.given.arguments)
    for part in (part for record in records for part in record.parts):
        if isinstance(part, Piece) and part.field.kind == "id":
            others += [part.text, part.field.value]
    noise = talk.control.search("\0".join(others))
    if noise is not None:
        raise RefusedError(
            "template", f"control-token text {noise.group()!r} in an id, name or number. Remove it"
        )
    return notes


def _ranges(renderings: Sequence[Rendering]) -> _Ranges:
    """Return the written characters of each field."""
    ranges: _Ranges = {}
    for rendering in renderings:
        for occurrence in rendering.occurrences:
            ranges.setdefault(occurrence.field, []).append((occurrence.first, occurrence.last))
        for part in rendering.parts:
            if isinstance(part, Piece) and part.field.kind == "id":
                ranges.setdefault(part.field, []).append((part.start, part.end))
    return ranges


def _check_field(talk: Conversation, field: Field, ranges: _Ranges) -> list[str]:
    """Return the thoughts of a field that are not written; refuse any other missing text."""
    own = f"message {field.message} ({talk.messages[field.message]['role']})"
    thoughts: list[str] = []
    if field.kind != "function":
        for text, is_thinking in _unwritten(field, ranges.get(field, []), talk.control):
            if not is_thinking:
                what = f"text of {own} is not in the rendering"
                remedy = _remedy(talk, field, ranges)
                raise RefusedError("content_lost", f"{what}: {_excerpt(text)}{remedy}")
            thoughts.append(text)
    for text in _unwritten_strings(field, ranges, talk.control):
        what = f"a tool call of {own} is not in the rendering"
        path = ("call_id", *field.path[1:])
        given = next((own.value for own in ranges if own.kind == "id" and own.path == path), None)
        if given is not None and field.value.get("name") == text:
            # Kimi's templates write only the ID `functions.NAME:N`, without the name.
            if text in given:
                field.trace.unrecorded.add((field.message, "name in id"))
                continue
            remedy = (
                f": the template writes its id alone ({given[:EXCERPT]!r}), which does not hold the"
                " name. Set format.call_ids: functions"
            )
        else:
            remedy = _remedy(talk, field, ranges)
        raise RefusedError("content_lost", f"{what}: {_excerpt(text)}{remedy}")
    return thoughts


def _remedy(talk: Conversation, field: Field, ranges: _Ranges) -> str:
    message = talk.messages[field.message]
    is_tagged = message["role"] == "assistant" and "<think>" in str(message.get("content"))
    setting = "Set format.reasoning: strip. Or: " if is_tagged and not talk.is_stripped else ""
    kinds = {each.kind for each in ranges if each.message == field.message}
    if kinds & {"call", "function"}:  # some write one call, or no text with it
        is_call = field.kind in ("call", "function")
        part = "each call, followed by its result," if is_call else "the text"
        setting += f"Put {part} into a separate message. Or: "
    return f". {setting}{_OTHER_TEMPLATE}"


_TEXT_KEYS = ("text", "content", "contents")
"""Keys that templates use for the text of a document (Granite, Command R, RAG guides of
transformers)."""


def _check_documents(talk: Conversation, ranges: Mapping[Field, object]) -> None:
    """Refuse a rendering without the text of a document, or without any text of it."""
    own = [field for field in talk.trace.fields if field.kind == "argument"]
    own = [
        field for field in own if field in ranges or (field.is_stripped and not field.value.strip())
    ]
    written = {field.path[1:] for field in own if field.path}
    for at, document in enumerate(talk.given.arguments.get("documents") or ()):
        keys = [key for key, text in document.items() if isinstance(text, str) and text]
        found = [key for key in keys if ("documents", at, key) in written]
        lost = [key for key in keys if key in _TEXT_KEYS and key not in found]
        if lost or (keys and not found):
            key = (lost or keys)[0]
            raise RefusedError(
                "content_lost",
                f"the {key} of document {at} is not in the rendering: {_excerpt(document[key])}. "
                "Take a template that writes documents, or name the field in ignored_fields, "
                "which leaves it out",
            )


def _keys(value: Any) -> Iterator[str]:
    """Yield the keys of all objects in a JSON value."""
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _keys(inner)


def _check_arguments(function: Field, records: Sequence[Rendering]) -> None:
    """Refuse a call whose arguments are not a JSON object where the template writes them as JSON.

    It would write the arguments `oops` as `"oops"`: a call that the model never made.
    """
    for own in function.children:
        if not isinstance(own.value, str) or own.path[:1] != ("call_arguments",):
            continue
        parts = [part for record in records for part in record.parts]
        forms = [p.form for p in parts if isinstance(p, Piece) and p.field is own]
        if None not in forms and parsed_arguments(own.value) is None:
            raise RefusedError(
                "template",
                f"arguments of a call of message {function.message} are not a JSON object, and the"
                f" template writes them as JSON: {_excerpt(own.value)}. Write them as an object",
            )


def _without_fields(calls: list[Any]) -> str:
    """Return calls as JSON, without ids and values that are fields."""
    bare = []
    for call in calls:
        function = function_of(call)
        left = {
            key: value
            for key, value in function.items()
            if key not in ("name", "arguments") or not isinstance(value, str | dict)
        }
        bare.append({**call, "id": "", "function": left} if function else call)
    return json.dumps(bare, ensure_ascii=False)


def _pieces(field: Field) -> Iterator[tuple[int, int, bool]]:
    """Split a text at the strings that the template searched for; flag the pieces with reasoning.

    "<think>hm</think> hi", searched for "<think>" and "</think>"
    ->  (0, 0, False), (7, 9, True), (17, 20, False)
    """
    text: str = field.value
    at, literals = 0, sorted(field.literals, key=len, reverse=True)
    if field.kind == "content" and literals:
        thought_end = text.rfind("</think>")
        thought_start = text.rfind("<think>", 0, max(thought_end, 0))
        for match in re.finditer("|".join(map(re.escape, literals)), text):
            yield at, match.start(), thought_start < match.start() <= thought_end
            at = match.end()
    yield at, len(text), field.kind == "thought"


def is_thought(occurrence: Occurrence) -> bool:
    """Return True if it is reasoning, or a thought that the template took out of a content."""
    field = occurrence.field
    return field.kind in ("content", "thought") and any(
        is_thinking and start <= occurrence.first and occurrence.last <= end
        for start, end, is_thinking in _pieces(field)
    )


def _unwritten(
    field: Field, ranges: list[tuple[int, int]], control: re.Pattern[str]
) -> Iterator[tuple[str, bool]]:
    """Pieces of a text that are not written, and whether they are thoughts.

    Raises:
        RefusedError: a piece is written in part.
    """
    if field.kind == "call" and isinstance(field.value, dict):
        return
    if (0, len(field.value)) in ranges:
        return
    ranges, pieces = sorted(ranges), list(_pieces(field))
    is_thought_out = field.kind == "content" and any(is_thinking for _, _, is_thinking in pieces)
    if not ranges and not is_thought_out:
        if field.value.strip() or (field.kind == "thought" and not field.is_stripped):
            yield field.value, field.kind == "thought"
        elif not field.is_stripped:  # Llama 3.1 leaves out a line break next to a call
            field.trace.unrecorded.add((field.message, "blank"))
        return
    # In rows that answer alike, something else may be left out.
    field.trace.unrecorded.add((field.message, "written in part"))
    for start, end, is_thinking in reversed(pieces):
        text = field.value[start:end]
        is_all = end - start == len(field.value)
        end = start + len(text.rstrip())
        start = at = end - len(text.strip())
        for first, last in ranges:
            if first <= at < last:
                at = last
        if at < end:
            if any(first < end and start < last for first, last in ranges):
                if field.kind == "call" and control.search(text) is None:
                    continue  # escaped, say
                raise UNPROVEN
            yield text if is_all else text.strip(), is_thinking


def _unwritten_strings(field: Field, ranges: _Ranges, control: re.Pattern[str]) -> Iterator[str]:
    """Strings of a call that are not written, last first."""
    if not isinstance(field.value, dict) or (0, 1) in ranges.get(field, []):
        return
    if not field.children:
        field.trace.unrecorded.add((field.message, "not written"))
        yield from reversed(list(filter(None, strings_in(field.value))))
    for child in reversed(field.children):
        if isinstance(child.value, str):
            yield from (text for text, _ in _unwritten(child, ranges.get(child, []), control))
        else:
            yield from _unwritten_strings(child, ranges, control)

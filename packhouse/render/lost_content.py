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

from packhouse.render.provenance import UNPROVEN, Field, Piece
from packhouse.render.rendered_texts import RefusedError
from packhouse.render.template_arguments import function_of, parsed_arguments, strings_in
from packhouse.render.text_positions import Occurrence, Rendering, TracedRow

EXCERPT = 60  # characters of a lost text that messages show
_Ranges = dict[Field, list[tuple[int, int]]]
_OTHER_TEMPLATE = "Set format.template to a Jinja file that writes it (docs/masks.md)"


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= EXCERPT else f"{text[:EXCERPT]}...")


def check_answer(talk: TracedRow, message: int, completion: Rendering) -> list[str]:
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
        if field.message == message and field.kind in ("content", "thought", "function"):
            thoughts += _check_field(talk, field, ranges)
    return thoughts


def check_row(
    talk: TracedRow, records: Sequence[Rendering], num_messages: int, trained: Container[int]
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
    notes, ranges = Counter[str](), _ranges(records)
    pieces = [part for record in records for part in record.parts if isinstance(part, Piece)]
    unchanged = {piece.field for piece in pieces if piece.form is None}
    for field in reversed(talk.trace.fields):
        number = field.message
        # Qwen3's template writes an empty turn for a content that it cannot read, and most
        # templates drop roles that they do not know: nothing fails, so each text is looked for.
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
        for own in field.children:
            is_text = isinstance(own.value, str) and own.path[:1] == ("call_arguments",)
            if is_text and own not in unchanged and parsed_arguments(own.value) is None:
                # It would write the arguments `oops` as `"oops"`: a call that the model never made.
                raise RefusedError(
                    "template",
                    f"the arguments of a tool call in message {number} are not a JSON object, but "
                    f"the template writes them as JSON: {_excerpt(own.value)}. Write them as an "
                    "object",
                )
    _check_documents(talk, ranges)
    for name in [function_of(tool).get("name") for tool in talk.given.tools or ()]:
        # A template may write the name as JSON, in ASCII or not.
        # Templates of Llama 3 and Phi-3 ignore tools without an error, and the row would train
        # calls of tools that its prompt does not mention.
        forms = [json.dumps(name, ensure_ascii=way)[1:-1].encode() for way in (False, True)]
        forms.append(str(name).encode())
        is_written = any(form in record.text for form in forms for record in records)
        if isinstance(name, str) and not is_written:
            what = f"tool '{name}' is not in the rendering. {_OTHER_TEMPLATE}"
            raise RefusedError("content_lost", what)
    others = [*_keys(talk.given.arguments)]
    for piece in pieces:
        if piece.field.kind == "id":
            others += [piece.text, piece.field.value]
    calls = [call for m in talk.messages[:num_messages] for call in m.get("tool_calls", ())]
    for call in calls:  # without ids and values that are fields
        function = function_of(call)
        fields = [n for n in ("name", "arguments") if isinstance(function.get(n), str | dict)]
        left = {key: value for key, value in function.items() if key not in fields}
        bare = {**call, "id": "", "function": left} if function else call
        others.append(json.dumps(bare, ensure_ascii=False))
    # Joined with NUL, so that two texts cannot form a control token together.
    noise = talk.control.search("\0".join(others))
    if noise is not None:
        what = f"control-token text {noise.group()!r} in an id, name or number. Remove it"
        raise RefusedError("template", what)
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


def _check_field(talk: TracedRow, field: Field, ranges: _Ranges) -> list[str]:
    """Return the thoughts of a field that are not written; refuse any other missing text."""
    message, is_call = talk.messages[field.message], field.kind == "function"
    thoughts: list[str] = []
    for text, is_thinking in _unwritten(field, ranges, talk.control):
        if is_thinking:
            thoughts.append(text)
            continue
        path = ("call_id", *field.path[1:])
        given = next((own.value for own in ranges if own.kind == "id" and own.path == path), None)
        if is_call and given is not None and field.value.get("name") == text:
            # Kimi's templates write only the ID `functions.NAME:N`, without the name.
            if text in given:
                field.trace.unrecorded.add((field.message, "name in id"))
                continue
            remedy = (
                f": the template writes only its id ({given[:EXCERPT]!r}), which does not contain "
                "the name. Set format.call_ids: functions"
            )
        else:
            is_tagged = message["role"] == "assistant" and "<think>" in str(message.get("content"))
            strips = is_tagged and not talk.is_stripped
            remedy = ". Set format.reasoning: strip. Or: " if strips else ". "
            kinds = {each.kind for each in ranges if each.message == field.message}
            if kinds & {"call", "function"}:  # some write one call, or no text with it
                part = "each call, followed by its result," if is_call else "the text"
                remedy += f"Put {part} in a separate message. Or: "
            remedy += _OTHER_TEMPLATE
        what = f"{'a tool call' if is_call else 'text'} of message {field.message}"
        raise RefusedError(
            "content_lost",
            f"{what} ({message['role']}) is not in the rendering: {_excerpt(text)}{remedy}",
        )
    return thoughts


_TEXT_KEYS = ("text", "content", "contents")
"""Keys that templates use for the text of a document (Granite, Command R, RAG guides of
transformers)."""


def _check_documents(talk: TracedRow, ranges: Mapping[Field, object]) -> None:
    """Refuse a rendering without the text of a document, or without any text of it."""
    own = [field for field in talk.trace.fields if field.kind == "argument" and field.path]
    blank = {field for field in own if field.is_stripped and not field.value.strip()}
    written = {field.path[1:] for field in own if field in ranges or field in blank}
    for at, document in enumerate(talk.given.arguments.get("documents") or ()):
        keys = [key for key, text in document.items() if isinstance(text, str) and text]
        found = [key for key in keys if ("documents", at, key) in written]
        lost = [key for key in keys if key in _TEXT_KEYS and key not in found]
        if lost or (keys and not found):
            key = (lost or keys)[0]
            raise RefusedError(
                "content_lost",
                f"the {key} of document {at} is not in the rendering: {_excerpt(document[key])}. "
                "Use a template that writes documents, or list the field in ignored_fields to "
                "leave it out",
            )


def _keys(value: Any) -> Iterator[str]:
    """Yield the keys of all objects in a JSON value."""
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _keys(inner)


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
    field: Field, ranges: _Ranges, control: re.Pattern[str]
) -> Iterator[tuple[str, bool]]:
    """Yield pieces of a text, or strings of a call, that are not written, last first.

    The flag tells if they are thoughts.

    Raises:
        RefusedError: a piece is written in part.
    """
    written = sorted(ranges.get(field, []))
    if isinstance(field.value, dict):
        if (0, 1) in written:
            return
        if not field.children:
            field.trace.unrecorded.add((field.message, "not written"))
            yield from ((text, False) for text in reversed([*strings_in(field.value)]) if text)
        for child in reversed(field.children):
            yield from _unwritten(child, ranges, control)
        return
    if (0, len(field.value)) in written:
        return
    pieces = list(_pieces(field))
    is_thought_out = field.kind == "content" and any(is_thinking for _, _, is_thinking in pieces)
    if not written and not is_thought_out:
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
        for first, last in written:
            if first <= at < last:
                at = last
        if at < end:
            if any(first < end and start < last for first, last in written):
                if field.kind == "call" and control.search(text) is None:
                    continue  # escaped, say
                raise UNPROVEN
            yield text if is_all else text.strip(), is_thinking

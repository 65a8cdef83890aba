"""One conversation through Jinja: its text, where the row's own texts stand in it, nothing lost.

Contents, calls and tool definitions have to be written; reasoning that the template leaves out is
counted. Control-token text in what is no content (ids, names, numbers) is refused, too.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from packhouse.templates.chat_messages import (
    Messages,
    function_of,
    parsed_arguments,
    strings_in,
    trace_conversation,
)
from packhouse.templates.provenance import (
    BLOCK_EDGES,
    REWRITTEN,
    UNPROVEN,
    Field,
    Part,
    Piece,
    Trace,
    parts_of,
    plain,
)
from packhouse.templates.results import RefusedError
from packhouse.templates.sandbox import ChatTemplate

__all__ = [
    "HAS_TAGS",
    "Conversation",
    "Loss",
    "LostError",
    "Occurrence",
    "Rendering",
    "check_nothing_lost",
    "is_thought",
    "read_parts",
]

Tools = list[Any] | None

EXCERPT = 60  # characters of a lost text that are shown
HAS_TAGS = "<think>"
_OTHER_TEMPLATE = (
    "Give format.template a Jinja file that writes it (docs/masks.md), or mend the rows"
)


class Occurrence(NamedTuple):
    """A run of a field's characters in the rendering."""

    field: Field
    start: int
    """In bytes of the rendering."""
    end: int
    first: int
    """In characters of the field."""
    last: int


@dataclass
class Rendering:
    """A rendering of one conversation."""

    text: bytes
    parts: Sequence[Part]
    occurrences: list[Occurrence]
    """In rendering order. Ids and names are none."""
    generation: list[tuple[int, int]]
    """Byte ranges of the template's own `{% generation %}` blocks."""

    @cached_property
    def shape(self) -> bytes:
        """The text with zeros for ids, which differ from row to row."""
        texts = [plain(part).encode() for part in self.parts]
        for at, part in enumerate(self.parts):
            if isinstance(part, Piece) and part.field.kind == "id":
                texts[at] = bytes(len(texts[at]))
        return b"".join(texts)


def read_parts(parts: Iterable[Part], control: re.Pattern[str]) -> Rendering:
    """Say where the fields are in a text.

    Raises:
        RefusedError: characters of a message were rewritten.
    """
    text, found = bytearray(), list[Occurrence]()
    opened, blocks = 0, list[tuple[int, int]]()
    kept: list[Part] = []
    for part in parts:
        start = len(text)
        if not isinstance(part, Piece):
            if part is BLOCK_EDGES[0]:
                opened = start
            elif part is BLOCK_EDGES[1]:
                # A block right behind another one, without text of the row, is the end of it:
                # `{% generation %}Hi{% endgeneration %}{% generation %}<turn|>{% endgeneration %}`
                if blocks and blocks[-1][1] == opened and (not found or found[-1].end <= opened):
                    opened = blocks.pop()[0]
                blocks.append((opened, start))
            else:
                text += str.encode(part)
                kept.append(part)
            continue
        text += part.text.encode()
        kept.append(part)
        kind = part.field.kind
        if kind == "id":
            continue
        if part.form == REWRITTEN:
            if kind in ("content", "thought") or control.search(part.text):
                raise UNPROVEN
            whole = len(part.field.value) if isinstance(part.field.value, str) else 1
            part = part._replace(start=0, end=whole)
        last = found[-1] if found else None
        if (
            last is not None
            and (last.field, last.end, last.last) == (part.field, start, part.start)
            and part.form is None
        ):
            found[-1] = last._replace(end=len(text), last=part.end)
        elif part.text or part.form == REWRITTEN:
            found.append(Occurrence(part.field, start, len(text), part.start, part.end))
    return Rendering(bytes(text), kept, found, blocks)


class Conversation:
    """One conversation in the hands of a template.

    Args:
        template: compiled.
        messages: as the template gets them.
        tools: parsed tool definitions.
        control: matches control tokens.
        has_content_parts: whether the template is given contents as lists.

    Raises:
        RefusedError: the template refuses it, or shows no spans.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Messages,
        tools: Tools,
        control: re.Pattern[str],
        has_content_parts: bool = False,
    ) -> None:
        self.messages, self.tools, self.control = messages, tools, control
        self._template = template
        self._traced, self._traced_tools, self.trace = trace_conversation(
            messages, tools, control, has_content_parts
        )
        self.rendering = self.prefix(len(messages), is_prompt=False)

    @property
    def roles(self) -> list[str]:
        """Of the messages."""
        return [message["role"] for message in self.messages]

    def prefix(self, number: int, *, is_prompt: bool) -> Rendering:
        """The first messages alone, perhaps as the prompt of inference.

        Raises:
            RefusedError: the template refuses it, or shows no spans.
        """
        text = self._template.render(self._traced[:number], self._traced_tools, is_prompt=is_prompt)
        return read_parts(parts_of(text), self.control)


class Loss(NamedTuple):
    """A content that a template leaves out, whatever it says."""

    message: int
    role: str
    remedy: str
    """Depends on the content by `HAS_TAGS` alone."""

    def of(self, content: str) -> "LostError":
        """The error of a row with this content."""
        what = f"text of message {self.message} ({self.role}) is not in the rendering"
        return LostError(f"{what}: {_excerpt(content)}", self.remedy, self)


class LostError(RefusedError):
    """Text of a row is not in its rendering."""

    def __init__(self, what: str, remedy: str, loss: Loss | None = None) -> None:
        super().__init__("content_lost", f"{what}{remedy}")
        self.what = what
        self.loss = loss
        """None: of a call, a tool or a part of a content."""
        self.asked: Trace | None = None

    def with_remedy(self, remedy: str) -> "LostError":
        """The same loss with another advice."""
        error = LostError(self.what, remedy, self.loss and self.loss._replace(remedy=remedy))
        error.asked = self.asked
        return error


def _excerpt(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= EXCERPT else f"{text[:EXCERPT]}...")


def check_nothing_lost(talk: Conversation, rendering: Rendering, *, is_stripped: bool) -> int:
    """Refuse a rendering that leaves out text of the row.

    Args:
        talk: the conversation.
        rendering: of all of it.
        is_stripped: whether thinking was taken out of contents before.

    Returns:
        Number of thoughts that are not written.

    Raises:
        LostError: a content, call or tool is not there.
        RefusedError: only a part of a text is, or what is no content holds control tokens.
    """
    num_unwritten = 0
    ranges: dict[Field, list[tuple[int, int]]] = {}
    for occurrence in rendering.occurrences:
        ranges.setdefault(occurrence.field, []).append((occurrence.first, occurrence.last))
    for field in reversed(talk.trace.fields):
        if field.kind in ("id", "tool"):
            continue
        message = talk.messages[field.message]
        is_tagged = message["role"] == "assistant" and HAS_TAGS in str(message.get("content"))
        setting = "Set format.reasoning: strip. Or: " if is_tagged and not is_stripped else ""
        loss = Loss(field.message, message["role"], f". {setting}{_OTHER_TEMPLATE}")
        if field.kind != "function":
            for text, is_thinking in _unwritten(field, ranges.get(field, []), talk.control):
                if not is_thinking:
                    error = loss.of(text)
                    if field.literals - {HAS_TAGS}:
                        error.loss = None  # what else of a content is lost depends on its text
                    raise error
                num_unwritten += 1
        for text in _unwritten_strings(field, ranges, talk.control):
            what = f"a tool call of message {loss.message} ({loss.role}) is not in the rendering"
            raise LostError(f"{what}: {_excerpt(text)}", loss.remedy)
        _check_arguments(field, rendering)
    for name in [function_of(tool).get("name") for tool in talk.tools or ()]:
        forms = [json.dumps(name, ensure_ascii=way)[1:-1] for way in (False, True)]
        if isinstance(name, str) and not any(
            form.encode() in rendering.text for form in (name, *forms)
        ):
            raise LostError(f"tool '{name}' is not in the rendering", f". {_OTHER_TEMPLATE}")
    others = [_without_fields(m["tool_calls"]) for m in talk.messages if "tool_calls" in m]
    for part in rendering.parts:
        if isinstance(part, Piece) and part.field.kind == "id":
            others += [part.text, part.field.value]
    noise = talk.control.search("\0".join(others))
    if noise is not None:
        raise RefusedError(
            "template", f"control-token text {noise.group()!r} in an id, name or number"
        )
    return num_unwritten


def _check_arguments(function: Field, rendering: Rendering) -> None:
    """Refuse a call whose arguments are no JSON object where the template writes them as JSON.

    It would write the arguments `oops` as `"oops"`: a call that the model never made.
    """
    for own in function.children:
        if not isinstance(own.value, str) or (own.path or ("",))[0] != "call_arguments":
            continue
        forms = [p.form for p in rendering.parts if isinstance(p, Piece) and p.field is own]
        if None not in forms and parsed_arguments(own.value) is None:
            raise RefusedError(
                "template",
                f"arguments of a call of message {function.message} are no JSON object, and the"
                f" template writes them as JSON: {_excerpt(own.value)}",
            )


def _without_fields(calls: list[Any]) -> str:
    """Calls as JSON without ids and what is a field."""
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
    """Pieces of a text between what the template looked for, and whether they are thoughts.

    "<think>hm</think> hi", looked for: "<think>" and "</think>"
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
        if field.value.strip() or not field.is_stripped:
            yield field.value, field.kind == "thought"
        return
    # In rows that answer alike, something else may be left out.
    field.trace.unrecorded.add((field.message, "written in part"))
    for start, end, is_thinking in reversed(pieces):
        text = field.value[start:end]
        is_all = end - start == len(field.value)
        end = start + len(text.rstrip())
        start = end - len(text.strip())
        at = start
        for first, last in ranges:
            if first <= at < last:
                at = last
        if at < end:
            if any(first < end and start < last for first, last in ranges):
                if field.kind == "call" and control.search(text) is None:
                    continue  # escaped, say
                raise UNPROVEN
            yield text if is_all else text.strip(), is_thinking


def _unwritten_strings(
    field: Field, ranges: dict[Field, list[tuple[int, int]]], control: re.Pattern[str]
) -> Iterator[str]:
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

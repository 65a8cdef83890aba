"""Render one conversation with Jinja, and locate the row's own texts in the result."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from packhouse.render.chat_messages import Given, Messages, in_parts, trace_conversation
from packhouse.render.provenance import (
    BLOCK_EDGES,
    REWRITTEN,
    UNPROVEN,
    Field,
    Part,
    Piece,
    Trace,
    parts_of,
    plain,
    value_of,
)
from packhouse.render.results import RefusedError

FREE_MESSAGES = 2**18  # messages that a row may render, in addition to 64 per message


class Occurrence(NamedTuple):
    """A run of a field's characters in the rendering."""

    field: Field
    start: int
    """Start and end are byte offsets in the rendering."""
    end: int
    first: int
    """First and last are character offsets in the field, the latter exclusive."""
    last: int

    @property
    def characters(self) -> tuple[Field, int, int]:
        """Field, and range of its characters."""
        return self.field, self.first, self.last


@dataclass
class Rendering:
    """A rendering of one conversation, or a piece of one; made by `read_parts`."""

    text: bytes
    parts: Sequence[Part]
    starts: Sequence[int]
    """First byte of each part."""
    occurrences: list[Occurrence]
    """In rendering order. Ids and names have none."""
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

    @property
    def end(self) -> int:
        """Byte after the last text of the row."""
        return self.occurrences[-1].end if self.occurrences else 0

    @property
    def tail(self) -> bytes:
        """Text that the template writes after the last text of the row."""
        return self.text[self.end :]

    @cached_property
    def _places(self) -> list[int]:
        return [o.start for o in self.occurrences]

    @cached_property
    def _of_message(self) -> dict[int, list[Occurrence]]:
        owned: dict[int, list[Occurrence]] = {}
        for occurrence in self.occurrences:
            owned.setdefault(occurrence.field.message, []).append(occurrence)
        return owned

    def own(self, message: int, at: int = 0) -> list[Occurrence]:
        """Return the texts of one message from byte `at` on."""
        return [o for o in self._of_message.get(message, ()) if o.start >= at]

    def before(self, message: int) -> bytes:
        """Return all before the texts of this message and later ones; nothing if it has none."""
        starts = (o.start for o in self.occurrences if o.field.message >= message)
        return self.text[: min(starts, default=0)]

    def between(self, start: int, end: int) -> "Rendering":
        """Return bytes `start` to `end`, without blocks. They must not cut a text of the row."""
        parts = list[Part]()
        # All text of a list written as `['a', 'b']` belongs to "a"; "b" follows it and is empty.
        first, last = bisect_right(self.starts, start) - 1, bisect_right(self.starts, end)
        for number in range(max(first, 0), last):
            part, begin = self.parts[number], self.starts[number]
            if not isinstance(part, Piece):
                parts.append(str.encode(part)[max(start - begin, 0) : end - begin].decode())
            elif begin >= start and (begin < end or not part.text):  # the others end there
                parts.append(part)
        return read_parts(parts)

    def __add__(self, other: "Rendering") -> "Rendering":
        return join_renderings([self, other])

    def controls(
        self, control: re.Pattern[bytes], start: int = 0, end: int | None = None
    ) -> Iterator[re.Match[bytes]]:
        """Yield the template's control tokens between `start` and `end`, not those in row texts."""
        at, end = start, len(self.text) if end is None else end
        first = max(bisect_right(self._places, start) - 1, 0)
        own = self.occurrences[first : bisect_left(self._places, end)]
        for begin, stop in [*((o.start, o.end) for o in own), (end, end)]:
            yield from control.finditer(self.text, at, max(begin, at))
            at = max(at, stop)


def join_renderings(pieces: Iterable[Rendering | bytes]) -> Rendering:
    """Concatenate pieces; bytes are text of the template."""
    parts = list[Part]()
    for piece in pieces:
        parts += [piece.decode()] if isinstance(piece, bytes) else piece.parts
    return read_parts(parts)


def read_parts(parts: Iterable[Part], control: re.Pattern[str] | None = None) -> Rendering:
    """Locate the fields in a text.

    Args:
        parts: parts of the text.
        control: matches control tokens; None if the parts were read before.

    Raises:
        RefusedError: characters of a message were rewritten.
    """
    text, found = bytearray(), list[Occurrence]()
    opened, blocks = 0, list[tuple[int, int]]()
    kept, starts = list[Part](), list[int]()
    for part in parts:
        start = len(text)
        if part is BLOCK_EDGES[0]:
            opened = start
            continue
        if part is BLOCK_EDGES[1]:
            # A block directly after another one, without text of the row, continues it:
            # `{% generation %}Hi{% endgeneration %}{% generation %}<turn|>{% endgeneration %}`
            if blocks and blocks[-1][1] == opened and (not found or found[-1].end <= opened):
                opened = blocks.pop()[0]
            blocks.append((opened, start))
            continue
        if part:
            text += plain(part).encode()
            kept.append(part)
            starts.append(start)
        if not isinstance(part, Piece) or part.field.kind == "id":
            continue
        first, last = part.start, part.end
        if part.form == REWRITTEN:
            if part.field.kind in ("content", "thought") or (control and control.search(part.text)):
                raise UNPROVEN
            first, last = 0, len(part.field.value) if isinstance(part.field.value, str) else 1
        before = found[-1] if found else None
        if before and before[::2] == (part.field, start, first) and part.form is None:
            found[-1] = before._replace(end=len(text), last=last)
        elif part.text or part.form == REWRITTEN:
            found.append(Occurrence(part.field, start, len(text), first, last))
    return Rendering(bytes(text), kept, starts, found, blocks)


class Template(Protocol):
    """Writes conversations: Jinja in its sandbox, or a renderer in Python."""

    where: str
    names: frozenset[str]
    """Arguments that it looks up."""
    values: Mapping[str, tuple[object, ...]]
    """Values with which to probe some arguments, instead of true and false."""
    has_generation: bool

    def render(
        self,
        messages: Sequence[object],
        tools: Sequence[object] | None = None,
        arguments: Mapping[str, object] = {},
        *,
        is_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation; texts of `messages` may be traced."""
        ...


class Conversation:
    """One conversation, and the renderings of its first messages.

    Args:
        template: compiled template.
        messages: messages as the template gets them.
        given: tools and arguments.
        control: matches control tokens.
        has_content_parts: pass contents to the template as lists of parts.
        is_stripped: thinking was already removed from the contents.
    """

    def __init__(
        self,
        template: Template,
        messages: Messages,
        given: Given,
        control: re.Pattern[str],
        has_content_parts: bool = False,
        is_stripped: bool = False,
    ) -> None:
        self.messages, self.given, self.control = messages, given, control
        self.is_stripped = is_stripped
        self.roles: list[str] = [message["role"] for message in messages]
        self._template, self._has_content_parts = template, has_content_parts
        self._traced, self._traced_given, self.trace = trace_conversation(
            messages, given, control, has_content_parts
        )
        self.num_written = 0
        """Number of messages in the records so far."""
        self._num_rendered = 0

    @cached_property
    def rendering(self) -> Rendering:
        """Rendering of all messages."""
        return self.prefix(len(self.messages))

    def prefix(
        self,
        number: int,
        arguments: Mapping[str, object] = {},
        *,
        is_prompt: bool = False,
        then: Sequence[dict[str, Any]] = (),
        calls: object = None,
    ) -> Rendering:
        """Render only the first messages.

        Args:
            number: number of messages.
            arguments: arguments of the template; those of the row take precedence.
            is_prompt: add the generation prompt.
            then: messages to append that are not in the row; their contents are attributed to
                message `number`.
            calls: tool calls to give to the last message, which has none.

        Raises:
            RefusedError: the template refuses the messages, no spans can be determined, or the row
                costs too much.
        """
        messages = self._traced[:number]
        if calls is not None:
            messages = [*messages[:-1], {**messages[-1], "tool_calls": calls}]
        for at, message in enumerate(then, start=number):
            content = value_of(Field(Trace(), at, "content", message["content"]))
            if self._has_content_parts:
                content = in_parts(content)
            messages = [*messages, {**message, "content": content}]
        self._num_rendered += len(messages)
        if self._num_rendered > FREE_MESSAGES + 64 * len(self.messages) + 4 * self.num_written:
            raise RefusedError(
                "template_limit",
                f"the {len(self.messages):,} messages are rendered in so many ways that it takes "
                "too long to prove each prompt; split the conversation before it is read",
            )
        tools, own = self._traced_given
        text = self._template.render(messages, tools, {**arguments, **own}, is_prompt=is_prompt)
        return read_parts(parts_of(text), self.control)

"""Render one conversation with Jinja, and locate the row's own texts in the result.

`measure_kinds` groups the messages of a rendering by everything that decides how the template
writes them. In a row of 5,000 answers, only one of each kind is rendered by itself; the others are
written in the same way. So the cost grows with the length of the text, not with the square of the
number of answers.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from packhouse.render.provenance import (
    BLOCK_EDGES,
    REWRITTEN,
    UNPROVEN,
    Field,
    Part,
    Piece,
    Predicate,
    Trace,
    answers,
    parts_of,
    plain,
    value_of,
)
from packhouse.render.rendered_texts import RefusedError
from packhouse.render.template_arguments import (
    Messages,
    TemplateArguments,
    in_parts,
    trace_conversation,
)

# Templates whose gaps between turns all differ would take quadratic time. In others one message of
# each kind is rendered by itself, and a row of 10,000 turns takes half a second.
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
    def _of_message(self) -> dict[int, list[Occurrence]]:
        owned: dict[int, list[Occurrence]] = {}
        for occurrence in self.occurrences:
            owned.setdefault(occurrence.field.message, []).append(occurrence)
        return owned

    def own(self, message: int, at: int = 0) -> list[Occurrence]:
        """Return the texts of one message from byte `at` on."""
        return [o for o in self._of_message.get(message, ()) if o.start >= at]

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

    def controls(
        self, control: re.Pattern[bytes], start: int = 0, end: int | None = None
    ) -> Iterator[re.Match[bytes]]:
        """Yield the template's control tokens between `start` and `end`, not those in row texts."""
        at, end = start, len(self.text) if end is None else end
        place = attrgetter("start")
        first = max(bisect_right(self.occurrences, start, key=place) - 1, 0)
        own = self.occurrences[first : bisect_left(self.occurrences, end, key=place)]
        for begin, stop in [*((o.start, o.end) for o in own), (end, end)]:
            yield from control.finditer(self.text, at, max(begin, at))
            at = max(at, stop)


def join_renderings(*pieces: Rendering | bytes) -> Rendering:
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


class TracedRow:
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
        given: TemplateArguments,
        control: re.Pattern[str],
        has_content_parts: bool = False,
        is_stripped: bool = False,
    ) -> None:
        self.messages, self.given, self.control = messages, given, control
        self.is_stripped = is_stripped
        self.roles: list[str] = [message["role"] for message in messages]
        self._template, self._has_content_parts = template, has_content_parts
        traced = trace_conversation(messages, given, control, has_content_parts)
        self._traced, self._traced_given, self.trace = traced
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
            # A separate trace, because questions about a probe say nothing about the row.
            content = value_of(Field(Trace(), at, "content", message["content"]))
            content = in_parts(content) if self._has_content_parts else content
            messages = [*messages, {**message, "content": content}]
        # Messages are counted, not renderings: each rendering costs as many as it has.
        self._num_rendered += len(messages)
        if self._num_rendered > FREE_MESSAGES + 64 * len(self.messages) + 4 * self.num_written:
            raise RefusedError(
                "template_limit",
                f"the {len(self.messages):,} messages would need too many renderings to check the "
                "prompt of each answer; split the conversation before preparing it",
            )
        tools, own = self._traced_given
        text = self._template.render(messages, tools, {**arguments, **own}, is_prompt=is_prompt)
        return read_parts(parts_of(text), self.control)


class Place(NamedTuple):
    """Position of a message, in bytes of the whole rendering."""

    before: int
    """End of the last text before it."""
    first: int
    last: int
    """Its texts are between `first` and `last`; both equal `before` if it has no text."""
    after: int
    """Start of the next text."""
    has_text: bool


def places_of(whole: Rendering, num_messages: int) -> list[Place | None]:
    """Return the position of each message; None if it is uncertain.

    That is so if other texts are between its own, or it and the message before have no text.
    """
    found = whole.occurrences
    own: list[list[int]] = [[] for _ in range(num_messages)]
    for number, occurrence in enumerate(found):
        if 0 <= occurrence.field.message < num_messages:
            own[occurrence.field.message].append(number)
    places: list[Place | None] = []
    following = len(found)  # first text of any message after it
    for number in reversed(range(num_messages)):
        texts = own[number]
        first, after = (texts[0], texts[-1] + 1) if texts else (following, following)
        before = found[first - 1].end if first else 0
        stop = found[after].start if after < len(found) else len(whole.text)
        if len(texts) < after - first or (number and not texts and not own[number - 1]):
            places.append(None)
        else:
            start, end = (found[first].start, found[after - 1].end) if texts else (before, before)
            places.append(Place(before, start, end, stop, has_text=bool(texts)))
        following = min([following, *texts[:1]])
    return places[::-1]


Measured = TypeVar("Measured")


def measure_kinds(
    whole: Rendering,
    talk: TracedRow,
    numbers: Sequence[int],
    thinking: Sequence[bool],
    measure: Callable[[int], Measured],
) -> list[Measured]:
    """Measure the first message of each kind, and return for each message that of its kind.

    A kind is what decides how a template writes a message: the keys of the messages around it and
    their answers to the template's questions, the kinds of messages before it, and the template's
    own text around it. A message whose position is uncertain is alone in its kind.

    Args:
        whole: rendering of all messages.
        talk: its conversation.
        numbers: indices of the messages to measure, ascending; those in between count as
            surroundings of the others.
        thinking: True for each message whose exchange has a thought.
        measure: renders a message by itself.
    """
    places, shape = places_of(whole, len(talk.messages)), whole.shape
    measured: dict[int, Measured] = {}
    while True:
        num_questions, signs = talk.trace.num_questions, _signs(talk)
        seen: dict[object, None] = {}  # signs of the messages so far, by their last appearance
        first: dict[object, int] = {}  # of each kind
        leaders: list[int] = []
        start, before = 0, None
        for number in numbers:
            place = places[number]
            around = (*signs[max(number - 2, 0) : number + 1], thinking[number])
            kind: object = number
            if place is not None:
                gaps = shape[place.before : place.first], shape[place.last : place.after]
                kind = (before, around, tuple(seen), gaps)
            leaders.append(first.setdefault(kind, number))
            before = None if place is None else around
            for sign in signs[start : number + 1]:
                # A sign moves to the end: of two switches in the text, the later one counts.
                seen.pop(sign, None)
                seen[sign] = None
            start = number + 1
        for number in first.values():
            if number not in measured:
                measured[number] = measure(number)
        if talk.trace.num_questions == num_questions:  # else there may be more kinds
            return [measured[number] for number in leaders]


def _signs(talk: TracedRow) -> list[object]:
    """Return each message's role, keys, and its texts' answers to all questions."""
    asked: list[set[object]] = [set() for _ in talk.messages]
    # To all, because a prompt may ask its last message what it asks of no other one.
    questions = {(path[0], each.kind, each.argument) for path, each in talk.trace.predicates}
    for kind, question, argument in questions:
        key = "reasoning_content" if kind == "thought" else kind
        if key in ("content", "reasoning_content", "name", "tool_call_id"):
            texts = [message.get(key) or "" for message in talk.messages]
            own = answers(Predicate(question, argument, True), pa.array(texts, pa.string()))
            for of_message, answer in zip(asked, own.tolist(), strict=True):
                of_message.add((kind, question, argument, answer))
    for message, other in talk.trace.unrecorded:
        if message >= 0:
            asked[message].add(other)
    return [
        (message["role"], *sorted(key for key in message if message[key]), frozenset(own))
        for message, own in zip(talk.messages, asked, strict=True)
    ]

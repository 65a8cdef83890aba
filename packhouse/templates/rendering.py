"""One conversation through Jinja: its text, and where the row's own texts stand in it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from packhouse.templates.chat_messages import (
    Given,
    Messages,
    trace_conversation,
)
from packhouse.templates.provenance import (
    BLOCK_EDGES,
    REWRITTEN,
    UNPROVEN,
    Field,
    Part,
    Piece,
    plain,
)
from packhouse.templates.sandbox import ChatTemplate
from packhouse.templates.traced_text import parts_of


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
        given: tools and arguments.
        control: matches control tokens.
        has_content_parts: whether the template is given contents as lists.

    Raises:
        RefusedError: the template refuses it, or shows no spans.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Messages,
        given: Given,
        control: re.Pattern[str],
        has_content_parts: bool = False,
    ) -> None:
        self.messages, self.given, self.control = messages, given, control
        self._template = template
        self._traced, self._traced_given, self.trace = trace_conversation(
            messages, given, control, has_content_parts
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
        traced, given = self._traced[:number], self._traced_given
        text = self._template.render(traced, *given, is_prompt=is_prompt)
        return read_parts(parts_of(text), self.control)

"""A conversation through Jinja: the text, and where the row's own texts stand in it.

By trace: one rendering of strings that know where they come from (see tracing.py). By marks: a
plain rendering and a marked one (see marks.py), for templates and rows that tracing does not
understand; twice the price. Where both can be, they see the same.
"""

import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from packhouse.templates.call_ids import with_call_ids
from packhouse.templates.chat_messages import chat_messages
from packhouse.templates.json_strings import CallStrings
from packhouse.templates.leaves import Leaf, replace_ids, replace_leaves
from packhouse.templates.losses import writes_whole
from packhouse.templates.marks import (
    MARKINGS,
    MARKINGS_OF_TEXTS,
    Marked,
    Marker,
    Marking,
    Occurrence,
    TornError,
)
from packhouse.templates.renderer import RefusedError
from packhouse.templates.sandbox import ChatTemplate
from packhouse.templates.tracing import OpaqueError, Trace, TracedText, parts_of

__all__ = ["PROBE", "UNPROVEN", "Sight", "Sights", "UnseenError"]

Messages = list[dict[str, Any]]
Tools = list[Any] | None

PROBE = ("Perhaps", "Certainly", "Otherwise", "Naturally")

UNPROVEN = RefusedError(
    "template", "the template writes other text when contents are marked: no spans can be proven"
)

_FLIPS = ("equals", "startswith", "endswith")  # marks would turn a yes into a no


class UnseenError(Exception):
    """A part of a traced conversation is not understood: it has to be seen by marks."""


@dataclass
class Sight:
    """A rendering of one conversation."""

    messages: Messages
    """As the template got them."""
    tools: Tools
    marked: Marked
    leaves: list[Leaf]
    """Which the occurrences of `marked` count."""
    prefix: Callable[[int, bool], Marked]
    """(number of messages, whether as the prompt of inference) -> rendering of these alone.
    Raises RefusedError; TornError where marks are torn, UnseenError where a trace is."""
    trace: Trace | None = None
    """By trace: what was asked in all renderings of it so far."""
    asked: Trace | None = None
    """By trace: what was asked in the rendering of all of it."""

    @property
    def roles(self) -> list[str]:
        """Of the messages."""
        return [message["role"] for message in self.messages]

    @cached_property
    def shape(self) -> bytes:
        """The rendering with zeros for ids, as long as it is."""
        if not any(_is_id(part) for part in self.marked.parts):
            return self.marked.text
        texts = map(str.encode, self.marked.parts)
        return b"".join(
            bytes(len(text)) if _is_id(part) else text
            for part, text in zip(self.marked.parts, texts, strict=True)
        )

    @property
    def owners(self) -> list[int]:
        """Message of each leaf."""
        return [leaf.message for leaf in self.leaves]


class Sights:
    """Renders conversations with one template, and finds their texts.

    Args:
        template: compiled.
        control: matches control tokens.
    """

    def __init__(self, template: ChatTemplate, control: re.Pattern[str]) -> None:
        self.template = template
        self.control = control
        literals = template.literals
        self._literals = re.compile("|".join(map(re.escape, literals))) if literals else None

    def see(self, messages: Messages, tools: Tools) -> Sight:
        """The conversation by trace, else by marks.

        Raises:
            RefusedError: the template refuses the row, or shows no spans.
        """
        return self.by_trace(messages, tools) or self.by_marks(messages, tools, self.markings)

    @property
    def can_trace(self) -> bool:
        """Whether traces of this template are worth anything."""
        return self.template.is_traceable

    def by_trace(self, messages: Messages, tools: Tools) -> Sight | None:
        """By a single rendering; None where it is not understood, or refused."""
        if not self.can_trace or self.template.has_generation:
            return None
        sight = self._traced(messages, tools)
        if sight is None or sight.asked is None or _is_flipped(sight.asked):
            return None
        if self.takes_calls_apart and _is_rich(messages, tools):
            return self._apart(sight) if self.is_quiet(messages, tools) else None
        if any(isinstance(p, TracedText) and p.hole and p.hole.cut for p in sight.marked.parts):
            return None
        whole = writes_whole(sight.marked, sight.leaves, lambda: self.is_quiet(messages, tools))
        return sight if whole else None

    def by_both(self, messages: Messages, tools: Tools) -> Sight | None:
        """By marks, with what a trace adds, where they agree."""
        try:
            marked = self.by_marks(messages, tools, MARKINGS[:1])
        except RefusedError:
            return None
        traced = self._traced(messages, tools)
        if traced is None or traced.marked.text != marked.marked.text:
            return None
        if traced.marked.occurrences != marked.marked.occurrences:
            return None
        both = replace(marked.marked, parts=traced.marked.parts)
        return replace(marked, marked=both, trace=traced.trace, asked=traced.asked)

    def _traced(self, messages: Messages, tools: Tools) -> Sight | None:
        trace = Trace(opens_tools=self.takes_calls_apart)
        leaves: list[Leaf] = []

        def note(leaf: Leaf, copy: Any) -> Any:
            leaves.append(leaf)
            return trace.leaf(leaf, copy)

        traced, traced_tools = replace_leaves(messages, tools, note)
        replace_ids(traced, trace.id)

        def prefix(number: int, is_prompt: bool) -> list[str]:
            try:
                pieces = self.template.trace(
                    traced[:number], traced_tools, add_generation_prompt=is_prompt
                )
            except OpaqueError:
                raise UnseenError from None
            if trace.is_opaque:
                raise UnseenError
            return [part for piece in pieces for part in parts_of(piece)]

        try:
            parts = prefix(len(messages), False)
        except (UnseenError, RefusedError):
            return None
        return Sight(
            messages,
            tools,
            _marked(parts),
            leaves,
            lambda number, is_prompt: _marked(prefix(number, is_prompt)),
            trace,
            trace.copy(),
        )

    def _apart(self, sight: Sight) -> Sight | None:
        """With the strings of calls one by one, as marks see templates that take calls apart."""
        strings = CallStrings(sight.leaves)
        marked, prefix = strings.apart(sight.marked), sight.prefix
        if marked is None or not strings.add_unwritten(sight.marked):
            return None

        def prefix_apart(number: int, is_prompt: bool) -> Marked:
            whole = strings.apart(prefix(number, is_prompt))
            if whole is None:
                raise UnseenError
            return whole

        return replace(sight, marked=marked, leaves=strings.leaves, prefix=prefix_apart)

    def by_marks(self, messages: Messages, tools: Tools, markings: Sequence[Marking]) -> Sight:
        """By the first marking that leaves the rendering as it is.

        Raises:
            RefusedError: the template refuses the row, or no marking does.
        """
        expected = self.template.render(messages, tools).encode()
        is_rich = _is_rich(messages, tools)
        if not is_rich:
            markings = MARKINGS_OF_TEXTS[: len(markings)]
        is_quiet = not is_rich or self.is_quiet(messages, tools)
        whole: set[int] = set()
        for marking in markings:
            if not is_quiet and marking.calls == "none":
                continue
            marker = Marker(messages, tools, marking, self._literals, self.control)
            marker.whole = whole if marking.is_inner else set()
            try:
                rendering = self.template.render(
                    marker.messages, marker.tools, generation_marks=marker.generation_marks
                )
                if marking == MARKINGS[0]:
                    whole = marker.written_whole(rendering)
                marked = marker.read(rendering)
            except (RefusedError, TornError):
                continue
            if marked.text == expected and (
                marking.calls != "whole" or writes_whole(marked, marker.leaves, lambda: is_quiet)
            ):
                if marker.has_bare_noise():
                    raise UNPROVEN
                return self._marked_sight(marked, marker)
        raise UNPROVEN

    def _marked_sight(self, marked: Marked, marker: Marker) -> Sight:
        def prefix(number: int, is_prompt: bool) -> Marked:
            text = self.template.render(
                marker.messages[:number], marker.tools, add_generation_prompt=is_prompt
            )
            return marker.read(text)

        messages, tools = marker.plain_messages, marker.plain_tools
        return Sight(messages, tools, marked, marker.leaves, prefix)

    def is_quiet(self, messages: Messages, tools: Tools) -> bool:
        """Whether no control-token text is in the row."""
        text = json.dumps([messages, tools], ensure_ascii=False)
        return self.control.search(text) is None

    @cached_property
    def takes_calls_apart(self) -> bool:
        """Whether the template writes calls in another way than whole objects."""
        return MARKINGS[0] not in self.markings

    @cached_property
    def markings(self) -> Sequence[Marking]:
        """Markings worth trying: none of whole calls where the template takes calls to pieces."""
        call = {"type": "function", "id": "probe0001", "function": {"name": "f", "arguments": {}}}
        messages: Messages = [
            {"role": "user", "content": PROBE[0]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            self.by_marks(messages, None, MARKINGS[:1])
        except RefusedError:
            return [marking for marking in MARKINGS if marking.calls != "whole"]
        return MARKINGS

    def chat(self, raw: Messages) -> Messages:
        """Canonical messages as this template gets them; see `chat_messages`."""
        messages = chat_messages(raw)
        is_asked = any("tool_calls" in m or m["role"] == "tool" for m in messages)
        return with_call_ids(messages) if is_asked and self.needs_call_ids else messages

    @cached_property
    def needs_call_ids(self) -> bool:
        """Whether the template refuses calls without an id, or with one of another form."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        bare: Messages = [
            {"role": "user", "content": PROBE[0]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": PROBE[1]},
            {"role": "assistant", "content": PROBE[2]},
        ]
        return self._refuses(bare) and not self._refuses(with_call_ids(bare))

    def _refuses(self, messages: Messages) -> bool:
        try:
            self.template.render(messages, None)
        except RefusedError:
            return True
        return False


def _is_rich(messages: Messages, tools: Tools) -> bool:
    return tools is not None or any("tool_calls" in message for message in messages)


def _is_flipped(trace: Trace) -> bool:
    return any(
        check.answer and check.kind in _FLIPS for asked in trace.checks.values() for check in asked
    )


def _marked(parts: list[str]) -> Marked:
    """The text of parts, and the leaves in it."""
    text = bytearray()
    occurrences: list[Occurrence] = []
    for part in parts:
        start = len(text)
        text += str.encode(part)
        if isinstance(part, TracedText) and part.hole and isinstance(part.hole.leaf, int):
            occurrences.append(Occurrence(part.hole.leaf, start, len(text)))
    return Marked(bytes(text), occurrences, [], parts)


def _is_id(part: str) -> bool:
    return isinstance(part, TracedText) and part.hole is not None and _leads_to_id(part.hole.leaf)


def _leads_to_id(leaf: Hashable) -> bool:
    return isinstance(leaf, tuple) and leaf[0] == "id"

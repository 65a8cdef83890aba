"""One conversation through Jinja: text, spans of contents, trained spans, and nothing lost.

A row is rendered plain and marked (see marks.py). Its trained spans come from the template's own
behaviour (see turns.py). A row whose spans cannot be shown, or some of whose text the template
leaves out, is refused.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig
from packhouse.templates.borders import Borders, find_borders
from packhouse.templates.call_ids import with_call_ids
from packhouse.templates.groups import chat_messages
from packhouse.templates.leaves import Leaf, ids_of, replace_ids, replace_leaves, skeleton
from packhouse.templates.marks import (
    MARKINGS,
    MARKINGS_OF_TEXTS,
    Marked,
    Marker,
    Marking,
    Occurrence,
    TornError,
    inspected_literals,
)
from packhouse.templates.renderer import RefusedError
from packhouse.templates.sandbox import ChatTemplate
from packhouse.templates.thinking import thought_spans
from packhouse.templates.turns import (
    Starts,
    TurnRules,
    check_generation,
    learn_rules,
    locate_turns,
)
from packhouse.tokenization.snapshot import TokenizerSnapshot

__all__ = ["RenderedRow", "RowRenderer", "Trained"]

Messages = list[dict[str, Any]]

PROBE = ("Perhaps", "Certainly", "Otherwise", "Naturally")


class Trained(NamedTuple):
    """A trained span in bytes of the text, and the message whose weight it has; -1: it is 1."""

    start: int
    end: int
    message: int


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """One conversation as text."""

    text: bytes
    content: list[tuple[int, int]]
    """Spans of contents, ascending."""
    trained: list[Trained]
    """Ascending and disjoint; there is at least one."""


class LostError(RefusedError):
    """Text of a row is not in its rendering."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__("content_lost", f"{what}. {remedy}")
        self.what = what


class RowRenderer:
    """Renders single conversations with one Jinja template.

    Args:
        config: the recipe's format section.
        snapshot: of the tokenizer: control tokens, and what templates may ask for.
        source: Jinja source.
        where: what errors call the template.
    """

    def __init__(
        self, config: FormatConfig, snapshot: TokenizerSnapshot, source: str, where: str
    ) -> None:
        self._config = config
        self._train_on = config.train_on
        self._template_args = (source, dict(snapshot.special_tokens), where)
        tokens = {*snapshot.added_tokens, *snapshot.special_tokens.values()} - {""}
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._control, self._control_bytes = re.compile(pattern), re.compile(pattern.encode())
        self._starts: Starts = {}
        self._borders: dict[tuple[tuple[str, ...], bytes], int] = {}
        self._probe_refusal = ""  # what the template said to the first probe that it refused

    @cached_property
    def template(self) -> ChatTemplate:
        """The compiled template."""
        source, tokens, where = self._template_args
        return ChatTemplate(source, tokens, where=where)

    @cached_property
    def rules(self) -> TurnRules | None:
        """The template's turn rules; None where it marks what is generated or all is trained."""
        template = self.template
        if self._train_on == "all":
            return None
        if template.has_generation:
            probed = self._probe(2, False)
            check_generation(probed, self._probe(1, True), self._control_bytes, template.where)
            return None
        try:
            rules = learn_rules(self._probe, self._control_bytes, template.where)
        except TemplateError as error:
            said = self._probe_refusal.removeprefix(template.where).lstrip(": ")
            raise TemplateError(f"{error} (it says: {said})" if said else str(error)) from None
        if not rules.ends_inner_turns and self._train_on == "assistant":
            raise TemplateError(
                f"{template.where} ends only the last assistant turn with"
                f" {rules.end_token.decode()!r}: earlier turns would teach the model to go on."
                " Use train_on: last_assistant, or a template that ends every turn."
            )
        return rules

    def render(
        self,
        raw: Messages,
        messages: Messages,
        tools: list[Any] | None,
        notes: Counter[str],
    ) -> RenderedRow:
        """Text, spans of its contents and trained spans.

        Args:
            raw: canonical messages, each with the weight decided for it.
            messages: the same as the template gets them.
            tools: parsed tool definitions.
            notes: counts what is worth knowing.

        Raises:
            RefusedError: the template refuses the row, loses text of it or shows no spans.
        """
        if not raw:
            raise RefusedError("template", "the conversation has no message")
        marked, marker = self.marked(messages, tools, self.markings)
        lost: LostError | None = None
        try:
            self.check_nothing_lost(messages, tools, marked, marker.leaves, Counter())
        except LostError as error:
            lost = error
        trained = self.trained(raw, marked, marker)
        if lost is not None or self._config.one_example_per_turn:
            behind = self._behind_prompt(raw, marked, marker, trained, lost)
            if behind is not None:
                marked, trained = behind
        self.check_nothing_lost(messages, tools, marked, marker.leaves, notes)
        content = [(o.start, o.end) for o in marked.occurrences]
        return RenderedRow(marked.text, content, trained)

    def trained(self, raw: Messages, marked: Marked, marker: Marker) -> list[Trained]:
        """Trained spans of a rendering, ascending; there is at least one.

        Raises:
            RefusedError: none is trained, or a span cannot be shown.
        """
        weights = [message["weight"] for message in raw]
        if not any(weights):
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        if self._train_on == "all":
            if not self._config.never_train and all(weight == 1 for weight in weights):
                return [Trained(0, len(marked.text), -1)]
            return self._messages_trained(weights, marked, marker)
        roles = [message["role"] for message in raw]
        wanted = {n for n, role in enumerate(roles) if role == "assistant" and weights[n] > 0}
        trained = list(self._turns(marked, marker, wanted))
        others = [n for n, weight in enumerate(weights) if weight > 0 and n not in wanted]
        if others:
            borders = self._find_borders(marked, marker)
            trained += [Trained(*borders.body(number), number) for number in others]
        if self._config.reasoning == "train_last":
            trained = _without_earlier_thoughts(trained, marked, marker, roles)
        if not trained:
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        return sorted(trained)

    def _turns(self, marked: Marked, marker: Marker, wanted: set[int]) -> Iterator[Trained]:
        """Spans of the answers that are wanted."""
        roles = [message["role"] for message in marker.messages]
        owners = [leaf.message for leaf in marker.leaves]
        if self.rules is None:
            yield from _generated(marked, owners, roles, wanted)
            return

        def prompt_tail(number: int) -> tuple[int, bytes]:
            return self._prompt_tail(marker, number)

        turns = locate_turns(marked, owners, roles, wanted, self.rules, prompt_tail, self._starts)
        yield from (Trained(start, end, number) for number, (start, end) in turns.items())

    def _messages_trained(
        self, weights: list[float], marked: Marked, marker: Marker
    ) -> list[Trained]:
        """Whole messages, headers included; those of one weight that touch are one span."""
        borders = self._find_borders(marked, marker)
        trained: list[Trained] = []
        for number, weight in enumerate(weights):
            span = Trained(*borders.turn(number), number)
            last = trained[-1] if trained else None
            if last is not None and last.end == span.start and weights[last.message] == weight == 1:
                trained[-1] = last._replace(end=span.end)
            elif weight > 0:
                trained.append(span)
        return trained

    def _find_borders(self, marked: Marked, marker: Marker) -> Borders:
        roles = [message["role"] for message in marker.messages]
        owners = [leaf.message for leaf in marker.leaves]

        def text_after(message: int, leaf: int) -> bytes | None:
            try:
                text = self.template.render(marker.messages[: message + 1], marker.tools)
                shorter = marker.read(text)
            except (RefusedError, TornError):
                return None
            ends = [o.end for o in shorter.occurrences if o.leaf == leaf]
            return shorter.text[ends[-1] :] if ends else None

        return find_borders(marked, owners, roles, self._control_bytes, text_after, self._borders)

    def _behind_prompt(
        self,
        raw: Messages,
        marked: Marked,
        marker: Marker,
        trained: list[Trained],
        lost: LostError | None,
    ) -> tuple[Marked, list[Trained]] | None:
        """The last answer behind the prompt that inference gives; None where it is there already.

        For templates that write a prompt otherwise once it is answered: Mistral's puts the system
        turn into the last user turn, and into none where the assistant speaks last.

        Raises:
            RefusedError: `lost`, or the answer cannot be shown to follow that prompt.
        """
        last = len(raw) - 1
        prompt = self._prompt(marker, last) if raw[last]["role"] == "assistant" else None
        if prompt is None or (lost is not None and not _restores(prompt, marked, marker)):
            if lost is not None:
                raise lost
            raise _OTHER_PROMPT
        if {span.message for span in trained} != {last}:
            assert lost is not None
            raise RefusedError(
                "content_lost",
                f"{lost.what}: the template writes it only where the last turn asks. Set"
                " format.one_example_per_turn, or train_on: last_assistant",
            )
        anchor = prompt.occurrences[-1] if prompt.occurrences else None
        tail = prompt.text[anchor.end :] if anchor else prompt.text
        ends = [o.end for o in marked.occurrences if anchor and o.leaf == anchor.leaf]
        cut = (ends[-1] if ends else 0) + len(tail)
        if not marked.text[:cut].endswith(tail) or cut > trained[0].start:
            raise _OTHER_PROMPT
        if marked.text[:cut] == prompt.text:
            return None
        shift = len(prompt.text) - cut
        kept = [o for o in marked.occurrences if o.start >= cut]
        moved = [Occurrence(o.leaf, o.start + shift, o.end + shift) for o in kept]
        whole = Marked(prompt.text + marked.text[cut:], [*prompt.occurrences, *moved], [])
        return whole, [Trained(a + shift, b + shift, message) for a, b, message in trained]

    def _prompt(self, marker: Marker, number: int) -> Marked | None:
        """What inference gives before message `number`, checked against its plain rendering."""
        try:
            text = self.template.render(
                marker.messages[:number], marker.tools, add_generation_prompt=True
            )
            marked = marker.read(text)
            plain = self.template.render(
                marker.plain_messages[:number], marker.plain_tools, add_generation_prompt=True
            )
        except (RefusedError, TornError):
            return None
        return marked if marked.text == plain.encode() else None

    def _prompt_tail(self, marker: Marker, number: int) -> tuple[int, bytes]:
        """Last leaf, and the text behind it, of the prompt that ends before message `number`."""
        if number == 0:
            raise RefusedError("template", "the conversation starts with the assistant")
        prompt = self.template.render(
            marker.messages[:number], marker.tools, add_generation_prompt=True
        )
        try:
            marked = marker.read(prompt)
        except TornError:
            raise _UNPROVEN from None
        last = marked.occurrences[-1] if marked.occurrences else None
        return (last.leaf, marked.text[last.end :]) if last else (-1, marked.text)

    def marked(
        self, messages: Messages, tools: list[Any] | None, markings: Sequence[Marking]
    ) -> tuple[Marked, Marker]:
        """The first marking that leaves the rendering as it is."""
        expected = self.template.render(messages, tools).encode()
        is_rich = tools is not None or any("tool_calls" in message for message in messages)
        if not is_rich:
            markings = MARKINGS_OF_TEXTS[: len(markings)]
        is_quiet = not is_rich or not self._control.search(_json([messages, tools]))
        whole: set[int] = set()
        for marking in markings:
            if not is_quiet and marking.calls == "none":
                continue
            marker = Marker(messages, tools, marking, self._literals, self._control)
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
                marking.calls != "whole" or _writes_whole(marked, marker, is_quiet)
            ):
                if marker.has_bare_noise():
                    raise _UNPROVEN
                return marked, marker
        raise _UNPROVEN

    @cached_property
    def markings(self) -> Sequence[Marking]:
        """Markings worth trying: none of whole calls where the template takes calls to pieces."""
        call = {"type": "function", "id": "probe0001", "function": {"name": "f", "arguments": {}}}
        messages: Messages = [
            {"role": "user", "content": PROBE[0]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            self.marked(messages, None, MARKINGS[:1])
        except RefusedError:
            return [marking for marking in MARKINGS if marking.calls != "whole"]
        return MARKINGS

    def chat(self, raw: Messages) -> Messages:
        """Canonical messages as this template gets them; see `chat_messages`."""
        messages = chat_messages(raw)
        is_asked = any("tool_calls" in m or m["role"] == "tool" for m in messages)
        return with_call_ids(messages) if is_asked and self._needs_call_ids else messages

    @cached_property
    def _needs_call_ids(self) -> bool:
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

    @cached_property
    def _literals(self) -> re.Pattern[str] | None:
        literals = inspected_literals(self.template.ast)
        return re.compile("|".join(map(re.escape, literals))) if literals else None

    def check_nothing_lost(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        marked: Marked,
        leaves: list[Leaf],
        notes: Counter[str],
    ) -> None:
        """Refuse a rendering that leaves out text of the row; left out reasoning is counted."""
        found = {occurrence.leaf for occurrence in marked.occurrences}
        is_covered = False
        for number, leaf in reversed(list(enumerate(leaves))):
            if leaf.kind == "function":
                is_covered = number in found
            elif leaf.kind == "thought":
                notes["reasoning_not_rendered"] += number not in found
            elif leaf.kind == "call" and is_covered:
                continue
            elif leaf.kind != "tools" and number not in found:
                message = messages[leaf.message]
                kind = "a tool call" if leaf.kind == "call" else "text"
                what = (
                    f"{kind} of message {leaf.message} ({message['role']}) is not in the rendering"
                )
                raise LostError(f"{what}: {_excerpt(leaf.value)}", self._remedy(message))
        if tools is not None or not all(message.keys() <= _PLAIN for message in messages):
            self._check_unmarked(messages, tools, marked.text)

    def _remedy(self, message: dict[str, Any]) -> str:
        has_tags = message["role"] == "assistant" and "<think>" in str(message.get("content"))
        if has_tags and self._config.reasoning != "strip":
            return f"Set format.reasoning: strip. Or: {_OTHER_TEMPLATE}"
        return _OTHER_TEMPLATE

    def _check_unmarked(self, messages: Messages, tools: list[Any] | None, text: bytes) -> None:
        """Refuse rows whose tools are left out, or that have control-token text without marks."""
        for name in _names_defined(tools):
            if not _is_in(name, text):
                raise LostError(f"tool '{name}' is not in the rendering", _OTHER_TEMPLATE)
        for number, message in enumerate(messages):
            for name in _names_called(message):
                if not _is_in(name, text):
                    what = f"a tool call of message {number} is not in the rendering: {name!r}"
                    raise LostError(what, _OTHER_TEMPLATE)
        bare, _ = skeleton(messages, None)
        noise = self._control.search(bare) or self._noise_in_ids(messages, tools, text)
        if noise:
            raise RefusedError(
                "template", f"control-token text {noise.group()!r} in an id, name or number"
            )

    def _noise_in_ids(
        self, messages: Messages, tools: list[Any] | None, text: bytes
    ) -> re.Match[str] | None:
        """Control-token text in ids, if the template writes ids at all."""
        noise = self._control.search("\0".join(ids_of(messages)))
        if noise is None:
            return None
        other, _ = replace_leaves(messages, None, lambda _, copy: copy)
        replace_ids(other, lambda value: "x" * len(value) if isinstance(value, str) else value)
        return None if self.template.render(other, tools).encode() == text else noise

    def _probe(
        self, num_messages: int, add_generation_prompt: bool
    ) -> tuple[Marked, Marker] | None:
        roles = ("user", "assistant", "user", "assistant")
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles[:num_messages], PROBE, strict=False)
        ]
        marker = Marker(messages, None, MARKINGS[0], None, self._control)
        try:
            rendering = self.template.render(
                marker.messages,
                None,
                add_generation_prompt=add_generation_prompt,
                generation_marks=marker.generation_marks,
            )
            return marker.read(rendering), marker
        except RefusedError as error:
            self._probe_refusal = self._probe_refusal or error.refusal.detail
        except TornError:
            pass
        return None


_OTHER_TEMPLATE = (
    "Give format.template a Jinja file that writes it (docs/masks.md), or mend the rows"
)
_EXCERPT = 60  # characters of a lost text that are shown
_PLAIN = {"role", "content", "thinking", "reasoning_content"}
_UNPROVEN = RefusedError(
    "template", "the template writes other text when contents are marked: no spans can be proven"
)


_OTHER_PROMPT = RefusedError(
    "template", "the last answer does not follow the prompt that inference gives"
)


def _restores(prompt: Marked, marked: Marked, marker: Marker) -> bool:
    """Whether a prompt holds a text that the whole conversation lacks."""
    there = {occurrence.leaf for occurrence in marked.occurrences}
    return any(o.leaf not in there for o in prompt.occurrences)


def _without_earlier_thoughts(
    trained: list[Trained], marked: Marked, marker: Marker, roles: list[str]
) -> list[Trained]:
    """Take thinking out of what is trained before the last user turn."""
    last_user = max((n for n, role in enumerate(roles) if role == "user"), default=-1)
    kept: list[Trained] = []
    for start, end, message in trained:
        thoughts = _thoughts_in(start, end, marked, marker) if message < last_user else []
        for begin, stop in thoughts:
            if begin > start:
                kept.append(Trained(start, begin, message))
            start = max(start, stop)
        if start < end:
            kept.append(Trained(start, end, message))
    return kept


def _thoughts_in(start: int, end: int, marked: Marked, marker: Marker) -> list[tuple[int, int]]:
    """Spans of thinking in a turn: between tags, and texts of fields that are written otherwise."""
    spans = [(start + a, start + b) for a, b in thought_spans(marked.text[start:end])]
    for o in marked.occurrences:
        is_thought = marker.leaves[o.leaf].kind == "thought" and start <= o.start < end
        if is_thought and not any(a <= o.start < b for a, b in spans):
            spans.append((o.start, o.end))
    return sorted(spans)


def _generated(
    marked: Marked, owners: list[int], roles: list[str], wanted: set[int]
) -> Iterator[Trained]:
    """The template's own generation blocks that hold a wanted assistant message."""
    for start, end in marked.generation:
        inside = {owners[o.leaf] for o in marked.occurrences if start <= o.start and o.end <= end}
        held = [number for number in sorted(inside) if number >= 0 and roles[number] == "assistant"]
        if not held:  # a turn without text: the message after those before the block
            before = [owners[o.leaf] for o in marked.occurrences if o.end <= start]
            held = [n for n in [max(before, default=-1) + 1] if roles[n : n + 1] == ["assistant"]]
        if end > start and held and held[0] in wanted:
            yield Trained(start, end, held[0])


def _excerpt(value: Any) -> str:
    text = value if isinstance(value, str) else _json(value)
    return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}...")


def _names_called(message: dict[str, Any]) -> Iterator[str]:
    for call in message.get("tool_calls", ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _names_defined(tools: list[Any] | None) -> Iterator[str]:
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _is_in(name: str, text: bytes) -> bool:
    """Whether a name is in a text, as it is or within JSON."""
    forms = (name, *(json.dumps(name, ensure_ascii=way)[1:-1] for way in (False, True)))
    return any(form.encode() in text for form in forms)


def _writes_whole(marked: Marked, marker: Marker, is_quiet: bool) -> bool:
    """Whether the template wrote calls (and tools, if they are not quiet) as marked objects."""
    found = {occurrence.leaf for occurrence in marked.occurrences}
    is_covered = False
    for number, leaf in reversed(list(enumerate(marker.leaves))):
        if leaf.kind == "function":
            is_covered = number in found
        elif leaf.kind == "call" and not is_covered and number not in found:
            return False
        elif leaf.kind == "tools" and not is_quiet and number not in found:
            return False
    return True


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

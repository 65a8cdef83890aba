"""One conversation through Jinja: text, spans of contents, trained spans, and nothing lost.

A row is rendered once by trace, or twice by marks (see sights.py). A row whose spans cannot be
shown, or some of whose text the template leaves out, is refused.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig
from packhouse.templates.losses import LostError, check_leaves, check_unmarked, is_plain
from packhouse.templates.marks import MARKINGS, Marked, Marker, Occurrence, TornError
from packhouse.templates.questions import AnyOf
from packhouse.templates.renderer import RefusedError
from packhouse.templates.sandbox import ChatTemplate
from packhouse.templates.sights import PROBE, Sight, Sights, UnseenError
from packhouse.templates.trained import SpanFinder, Trained
from packhouse.templates.turns import TurnRules, check_generation, learn_rules
from packhouse.tokenization.snapshot import TokenizerSnapshot

__all__ = ["RenderedRow", "RowRenderer"]

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """One conversation as text."""

    text: bytes
    content: list[tuple[int, int]]
    """Spans of contents, ascending."""
    trained: list[Trained]
    """Ascending and disjoint; there is at least one."""


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
        self._template_args = (source, dict(snapshot.special_tokens), where)
        tokens = {*snapshot.added_tokens, *snapshot.special_tokens.values()} - {""}
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self.control, self.control_bytes = re.compile(pattern), re.compile(pattern.encode())
        self.control_texts = AnyOf(tokens)
        self._finder = SpanFinder(config, lambda: self.rules, self.control_bytes)
        self._probe_refusal = ""  # what the template said to the first probe that it refused

    @cached_property
    def sights(self) -> Sights:
        """Renders and finds texts; compiles the template."""
        source, tokens, where = self._template_args
        return Sights(ChatTemplate(source, tokens, where=where), self.control)

    @property
    def template(self) -> ChatTemplate:
        """The compiled template."""
        return self.sights.template

    @cached_property
    def rules(self) -> TurnRules | None:
        """The template's turn rules; None where it marks what is generated or all is trained."""
        template = self.template
        if self._config.train_on == "all":
            return None
        if template.has_generation:
            probed = self._probe(2, False)
            check_generation(probed, self._probe(1, True), self.control_bytes, template.where)
            return None
        try:
            rules = learn_rules(self._probe, self.control_bytes, template.where)
        except TemplateError as error:
            said = self._probe_refusal.removeprefix(template.where).lstrip(": ")
            raise TemplateError(f"{error} (it says: {said})" if said else str(error)) from None
        if not rules.ends_inner_turns and self._config.train_on == "assistant":
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
        sight = self.sights.by_trace(messages, tools)
        if sight is not None:
            noted = Counter[str]()
            try:
                row = self._row(raw, sight, noted)
            except UnseenError:
                pass
            else:
                notes.update(noted)
                return row
        return self.render_by_marks(raw, messages, tools, notes)

    def render_by_marks(
        self, raw: Messages, messages: Messages, tools: list[Any] | None, notes: Counter[str]
    ) -> RenderedRow:
        """The same by a plain rendering and a marked one: the proof of what tracing gives."""
        if not raw:
            raise RefusedError("template", "the conversation has no message")
        sights = self.sights
        return self._row(raw, sights.by_marks(messages, tools, sights.markings), notes)

    def _row(self, raw: Messages, sight: Sight, notes: Counter[str]) -> RenderedRow:
        marked, trained = self.shown(raw, sight, notes)
        content = [(o.start, o.end) for o in marked.occurrences]
        return RenderedRow(marked.text, content, trained)

    @property
    def rewrites(self) -> bool:
        """Whether prompts decide the text of every row."""
        return self._config.one_example_per_turn

    def shown(
        self, raw: Messages, sight: Sight, notes: Counter[str]
    ) -> tuple[Marked, list[Trained]]:
        """The text as it is trained, and its trained spans.

        Raises:
            RefusedError: text of the row is lost, or no spans are shown.
        """
        lost: LostError | None = None
        noted = Counter[str]()
        try:
            self.check_nothing_lost(sight, sight.marked, noted)
        except LostError as error:
            lost = error
        marked, trained = sight.marked, self._finder.find(raw, sight)
        behind = None
        if lost is not None or self.rewrites:
            behind = self._behind_prompt(raw, sight, trained, lost)
        if behind is not None:
            marked, trained = behind
            noted.clear()
            self.check_nothing_lost(sight, marked, noted)
        elif lost is not None:
            raise lost
        notes.update(noted)
        return marked, trained

    def check_nothing_lost(self, sight: Sight, marked: Marked, notes: Counter[str]) -> None:
        """Refuse a rendering that leaves out text of the row; left out reasoning is counted."""
        check_leaves(
            sight.messages,
            marked,
            sight.leaves,
            notes,
            is_stripped=self._config.reasoning == "strip",
        )
        if not is_plain(sight.messages, sight.tools):
            check_unmarked(
                sight.messages, sight.tools, marked.text, self.control, self.template.render
            )

    def _behind_prompt(
        self,
        raw: Messages,
        sight: Sight,
        trained: list[Trained],
        lost: LostError | None,
    ) -> tuple[Marked, list[Trained]] | None:
        """The last answer behind the prompt that inference gives; None where it is there already.

        For templates that write a prompt otherwise once it is answered: Mistral's puts the system
        turn into the last user turn, and into none where the assistant speaks last.

        Raises:
            RefusedError: `lost`, or the answer cannot be shown to follow that prompt.
        """
        last, marked = len(raw) - 1, sight.marked
        prompt = self._prompt(sight, last) if raw[last]["role"] == "assistant" else None
        if prompt is None or (lost is not None and not _restores(prompt, marked)):
            if lost is not None:
                raise lost
            raise _OTHER_PROMPT
        if {span.message for span in trained} != {last}:
            assert lost is not None
            raise lost.with_remedy(
                ": the template writes it only where the last turn asks. Set"
                " format.one_example_per_turn, or train_on: last_assistant"
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
        parts = [*prompt.parts, *_parts_behind(marked.parts, cut)] if prompt.parts else []
        whole = Marked(prompt.text + marked.text[cut:], [*prompt.occurrences, *moved], [], parts)
        return whole, [Trained(a + shift, b + shift, message) for a, b, message in trained]

    def _prompt(self, sight: Sight, number: int) -> Marked | None:
        """What inference gives before message `number`; by marks checked against the plain one."""
        try:
            marked = sight.prefix(number, True)
            if sight.trace is not None:
                return marked
            plain = self.template.render(
                sight.messages[:number], sight.tools, add_generation_prompt=True
            )
        except (RefusedError, TornError):
            return None
        return marked if marked.text == plain.encode() else None

    def _probe(
        self, num_messages: int, add_generation_prompt: bool
    ) -> tuple[Marked, Marker] | None:
        roles = ("user", "assistant", "user", "assistant")
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles[:num_messages], PROBE, strict=False)
        ]
        marker = Marker(messages, None, MARKINGS[0], None, self.control)
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


_OTHER_PROMPT = RefusedError(
    "template", "the last answer does not follow the prompt that inference gives"
)


def _restores(prompt: Marked, marked: Marked) -> bool:
    """Whether a prompt holds a text that the whole conversation lacks."""
    there = {occurrence.leaf for occurrence in marked.occurrences}
    return any(o.leaf not in there for o in prompt.occurrences)


def _parts_behind(parts: Sequence[str], cut: int) -> Iterator[str]:
    """Parts from byte `cut` on, which is between parts or within a constant."""
    at = 0
    for part in parts:
        data = str.encode(part)
        if at >= cut:
            yield part
        elif at + len(data) > cut:
            yield data[cut - at :].decode()
        at += len(data)

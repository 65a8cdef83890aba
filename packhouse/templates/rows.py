"""One conversation through Jinja: text, spans of contents, trained spans, and nothing lost.

A row whose spans cannot be shown, or some of whose text the template leaves out, is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import orjson

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig
from packhouse.templates.chat_messages import (
    PLAIN,
    Given,
    MessageForm,
    Messages,
    chat_messages,
    in_parts,
)
from packhouse.templates.conversations import DEFAULTS
from packhouse.templates.losses import LostError, check_nothing_lost
from packhouse.templates.predicates import any_of
from packhouse.templates.provenance import Part, plain
from packhouse.templates.rendering import Conversation, Rendering
from packhouse.templates.results import RefusedError
from packhouse.templates.sandbox import ChatTemplate
from packhouse.templates.trained_spans import Trained, find_spans
from packhouse.templates.turn_rules import TurnRules, check_generation, learn_rules
from packhouse.tokenization.snapshot import TokenizerSnapshot

MAX_RULES = 256  # arguments of rows whose rules are remembered
MAX_SHOWN = 80  # characters of arguments in a refusal
_ALWAYS = ("messages", "add_generation_prompt", "raise_exception", "strftime_now", "namespace")
PROBE = ("Perhaps", "Certainly", "Otherwise", "Naturally")


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """One conversation as text."""

    talk: Conversation
    rendering: Rendering
    """As it is trained: perhaps behind another prompt than the conversation's own rendering."""
    trained: list[Trained]
    """Ascending and disjoint; there is at least one."""
    num_unwritten: int
    """Thoughts that the template leaves out."""

    @property
    def content(self) -> list[tuple[int, int]]:
        """Spans of contents, ascending."""
        return [(o.start, o.end) for o in self.rendering.occurrences]


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
        self.control_texts = any_of(tokens)
        self._eos = snapshot.special_tokens.get("eos_token", "").encode()
        self._rules: dict[str, TurnRules | RefusedError | None] = {}
        self._probe_refusal = ""  # what the template said to the first probe that it refused

    @cached_property
    def template(self) -> ChatTemplate:
        """The compiled template."""
        source, tokens, where = self._template_args
        arguments = self._config.chat_template_kwargs
        # `tools` and `documents` are put into the rows that have none: they are text like theirs.
        own = {name: value for name, value in arguments.items() if name not in DEFAULTS}
        template = ChatTemplate(source, tokens, where=where, arguments=own)
        unread = sorted(set(own) - template.names)
        if unread:
            known = sorted(template.names - {*_ALWAYS, *tokens, *DEFAULTS})[:20]
            raise TemplateError(
                f"{where} does not read {unread[0][:60]!r} of format.chat_template_kwargs; it "
                f"reads {', '.join(name[:60] for name in known) or 'no argument'}. Mend the name, "
                "or take it out"
            )
        return template

    def rules(self, arguments: Mapping[str, object]) -> TurnRules | None:
        """Turn rules; None where blocks say what is generated, or all is trained.

        Args:
            arguments: the row's own; rules are learnt anew for others, but for `documents`.

        Raises:
            TemplateError: the template cannot be used.
            RefusedError: it cannot with these arguments.
        """
        own = {name: value for name, value in arguments.items() if name != "documents"}
        key = json.dumps(own, sort_keys=True)
        if key not in self._rules:
            if len(self._rules) >= MAX_RULES:
                self._rules.clear()
            try:
                self._rules[key] = self._learn(own)
            except TemplateError as error:
                if not own:
                    raise
                detail = f"{error}, given the row's arguments {key[:MAX_SHOWN]}"
                self._rules[key] = RefusedError("template", detail)
        rules = self._rules[key]
        if isinstance(rules, RefusedError):
            raise rules
        return rules

    def _learn(self, arguments: Mapping[str, object]) -> TurnRules | None:
        template, probe = self.template, partial(self._probe, Given(None, arguments))
        if self._config.train_on == "all":
            return None
        if template.has_generation:
            trains_all = self._config.train_on == "assistant"
            return check_generation(
                probe, self.control_bytes, self._eos, template.where, trains_all=trains_all
            )
        try:
            rules = learn_rules(probe, self.control_bytes, self._eos, template.where)
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

    def _probe(self, given: Given, num_messages: int, is_prompt: bool) -> Rendering | None:
        roles = ("user", "assistant", "user", "assistant")
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, PROBE, strict=True)
        ]
        given = given._replace(arguments={**self._probe_arguments, **given.arguments})
        try:
            talk = Conversation(
                self.template, messages[:num_messages], given, self.control, self.has_content_parts
            )
            done = talk.prefix(num_messages, is_prompt=True) if is_prompt else talk.rendering
            return replace(done, occurrences=[o for o in done.occurrences if o.field.message >= 0])
        except RefusedError as error:
            self._probe_refusal = self._probe_refusal or error.refusal.detail
        return None

    @cached_property
    def _probe_arguments(self) -> dict[str, object]:
        """What probes need beside messages: documents, where the template fails without any.

        Rows have to bring them, or the recipe.
        """
        documents = [{"title": "Therefore", "text": "Likewise"}]
        tries: list[dict[str, object]] = [{}, {"documents": documents}]
        for own in tries:
            with suppress(RefusedError):
                self.template.render([{"role": "user", "content": PROBE[0]}], arguments=own)
                return own
        return {}

    def chat(self, raw: Messages) -> Messages:
        """Canonical messages as this template gets them; see `chat_messages`."""
        return chat_messages(raw, self.form)

    @cached_property
    def has_content_parts(self) -> bool:
        """Return True if the template writes contents as lists of parts, but not as texts."""
        talk: Messages = [
            {"role": "user", "content": PROBE[0]},
            {"role": "assistant", "content": PROBE[1]},
        ]
        form = MessageForm(has_content_parts=True)
        return not self._writes(PROBE[:2], talk, PLAIN) and bool(
            self._writes(PROBE[:2], talk, form)
        )

    @cached_property
    def form(self) -> MessageForm:
        """The first form of messages with tool calls in which the template loses no text.

        Most take the first. Where none will do, the first that the template does not refuse.
        """
        function = {"name": PROBE[3], "arguments": {"a": "Therefore"}}
        called = orjson.dumps([{"type": "function", "function": function}]).decode()
        talk: Messages = [
            {"role": "user", "content": PROBE[0]},
            {"role": "assistant", "content": "", "tool_calls": called},
            {"role": "tool", "content": PROBE[1]},
            {"role": "assistant", "content": PROBE[2]},
        ]
        forms = [
            MessageForm(ids, text, self.has_content_parts)
            for text, ids in product((False, True), repeat=2)
        ]
        writes = [self._writes((*PROBE, "Therefore"), talk, form) for form in forms]
        return next(
            (forms[writes.index(answer)] for answer in (True, False) if answer in writes), forms[0]
        )

    def _writes(self, texts: Sequence[str], talk: Messages, form: MessageForm) -> bool | None:
        """Return True if all texts are in the rendering; None where the template refuses it."""
        messages = chat_messages(talk, form)
        if form.has_content_parts:
            for message in messages:
                message["content"] = in_parts(message["content"])
        try:
            written = self.template.render(messages, arguments=self._probe_arguments)
        except RefusedError:
            return None
        return all(text in written for text in texts)

    def render(self, raw: Messages, messages: Messages, given: Given) -> RenderedRow:
        """Text, spans of its contents and trained spans.

        Args:
            raw: canonical messages, each with the weight decided for it.
            messages: the same as the template gets them.
            given: tools and arguments.

        Raises:
            RefusedError: the template refuses the row, loses text of it or shows no spans.
        """
        if not raw:
            raise RefusedError("template", "the conversation has no message")
        talk = Conversation(self.template, messages, given, self.control, self.has_content_parts)
        lost: LostError | None = None
        num_unwritten = 0
        try:
            num_unwritten = self._check(talk, talk.rendering)
        except LostError as error:
            lost = error
            lost.asked = talk.trace
        rendering = talk.rendering
        trained = find_spans(raw, talk, self._config, self.rules, self.control_bytes)
        if lost is not None or self._config.one_example_per_turn:
            behind = self._behind_prompt(raw, talk, trained, lost)
            if behind is not None:
                rendering, trained = behind
                num_unwritten = self._check(talk, rendering)
            elif lost is not None:
                raise lost
        return RenderedRow(talk, rendering, trained, num_unwritten)

    def _check(self, talk: Conversation, rendering: Rendering) -> int:
        """Refuse a rendering that leaves out text of the row; returns thoughts left out."""
        is_stripped = self._config.reasoning == "strip"
        return check_nothing_lost(talk, rendering, is_stripped=is_stripped)

    def _behind_prompt(
        self,
        raw: Messages,
        talk: Conversation,
        trained: list[Trained],
        lost: LostError | None,
    ) -> tuple[Rendering, list[Trained]] | None:
        """The last answer behind the prompt that inference gives; None where it is there already.

        For templates that write a prompt otherwise once it is answered: Mistral's puts the system
        turn into the last user turn, and into none where the assistant speaks last.

        Raises:
            RefusedError: `lost`, or the answer cannot be shown to follow that prompt.
        """
        last, rendering = len(raw) - 1, talk.rendering
        prompt: Rendering | None = None
        if raw[last]["role"] == "assistant":
            try:
                prompt = talk.prefix(last, is_prompt=True)
            except RefusedError:
                pass
        written = {occurrence.field for occurrence in rendering.occurrences}
        if prompt is None or (lost and all(o.field in written for o in prompt.occurrences)):
            raise lost or _OTHER_PROMPT
        if {span.message for span in trained} != {last}:
            assert lost is not None
            raise lost.with_remedy(
                ": the template writes it only where the last turn asks. Set"
                " format.one_example_per_turn, or train_on: last_assistant"
            )
        anchor = prompt.occurrences[-1] if prompt.occurrences else None
        tail = prompt.text[anchor.end :] if anchor else prompt.text
        ends = [o.end for o in rendering.occurrences if anchor and o.field is anchor.field]
        cut = (ends[-1] if ends else 0) + len(tail)
        if not rendering.text[:cut].endswith(tail) or cut > trained[0].start:
            raise _OTHER_PROMPT
        if rendering.text[:cut] == prompt.text:
            return None
        # "<s>[I]Q[/I]A</s>" behind the prompt "<s>[I]SYS Q[/I]": cut at 11, all from there on
        # moves by 4 bytes.
        shift = len(prompt.text) - cut
        moved = [
            o._replace(start=o.start + shift, end=o.end + shift)
            for o in rendering.occurrences
            if o.start >= cut
        ]
        whole = Rendering(
            prompt.text + rendering.text[cut:],
            [*prompt.parts, *_parts_behind(rendering.parts, cut)],
            [*prompt.occurrences, *moved],
            [],
        )
        return whole, [s._replace(start=s.start + shift, end=s.end + shift) for s in trained]


_OTHER_PROMPT = RefusedError(
    "template", "the last answer does not follow the prompt that inference gives"
)


def _parts_behind(parts: Sequence[Part], cut: int) -> Iterator[Part]:
    """Parts from byte `cut` on, which is between parts or within a constant."""
    at = 0
    for part in parts:
        data = plain(part).encode()
        if at >= cut:
            yield part
        elif at + len(data) > cut:
            yield data[cut - at :].decode()
        at += len(data)

"""Render one conversation with Jinja: text, spans of contents and trained spans.

A row is refused if its spans cannot be determined or the template leaves out some of its text.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import orjson

from packhouse.errors import ConfigError, TemplateError
from packhouse.recipe import FormatConfig
from packhouse.records.conversations import BEGINS_THOUGHT, DEFAULTS, tag_spans
from packhouse.records.identity import Extent
from packhouse.render.chat_messages import (
    PLAIN,
    Given,
    MessageForm,
    Messages,
    chat_messages,
    in_parts,
)
from packhouse.render.losses import check_row
from packhouse.render.provenance import Predicate, literally
from packhouse.render.rendering import Conversation, Rendering, Template
from packhouse.render.results import RefusedError, Trained
from packhouse.render.sandbox import ChatTemplate
from packhouse.render.template_facts import ANSWER, PROBE, QUESTION, TemplateFacts, learn_facts
from packhouse.render.trained_spans import add_other_turns, all_spans, other_spans, weigh_spans
from packhouse.render.turns import NOT_TRAINED, Answers, Record
from packhouse.tokenize.control_text import any_of
from packhouse.tokenize.encoders import TokenizerSnapshot, TokenLimit

_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_FUNCTION = {"name": "therefore", "description": "Likewise", "parameters": _PARAMETERS}
_TOOLS: list[object] = [{"type": "function", "function": _FUNCTION}]
_ALWAYS = ("messages", "add_generation_prompt", "raise_exception", "strftime_now", "namespace")


class RenderedRecord(NamedTuple):
    """One record of a row."""

    rendering: Rendering
    trained: list[Trained]
    """Ascending and disjoint; there is at least one."""
    extent: Extent | None
    """Part of the row in the record; None for all of it."""
    content: list[tuple[int, int]]
    """Spans of the row's own texts, ascending, in which a control token is text."""


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """One conversation as text."""

    talk: Conversation
    records: list[RenderedRecord]
    notes: Counter[str]


class RowRenderer:
    """Renders single conversations with one Jinja template.

    Args:
        config: format section of the recipe.
        snapshot: tokenizer, with its control tokens and the variables that templates may use.
        source: Jinja source.
        where: name of the template in errors.
    """

    def __init__(
        self, config: FormatConfig, snapshot: TokenizerSnapshot, source: str, where: str
    ) -> None:
        self._config = config
        self._template_args = (source, dict(snapshot.special_tokens), where)
        tokens = {*snapshot.added_tokens, *snapshot.special_tokens.values()} - {""}
        self.control = re.compile(any_of(tokens))
        encoded = [token.encode().decode("latin-1") for token in tokens]
        self.control_bytes = re.compile(any_of(encoded).encode("latin-1"))
        self.control_texts = any_of(tokens, literally)
        self._has_tags = tokens.issuperset(("<think>", "</think>"))
        self._stops = dict.fromkeys(config.stop_tokens, "format.stop_tokens") or dict(
            snapshot.stop_tokens
        )
        unknown = sorted(set(config.stop_tokens) - tokens)
        if unknown:
            raise ConfigError(
                f"format.stop_tokens: {unknown[0]!r} is not a control token of the tokenizer. Use "
                "one of its added tokens"
            )

    @cached_property
    def template(self) -> Template:
        """Compiled template, or Python renderer (`packhouse.addons.renderers`)."""
        source, tokens, where = self._template_args
        arguments = self._config.chat_template_kwargs
        # `tools` and `documents` are added to rows without any, and treated like text of the row.
        own = {name: value for name, value in arguments.items() if name not in DEFAULTS}
        template = ChatTemplate(source, tokens, where=where, arguments=own)
        unread = sorted(set(own) - template.names)
        if unread:
            known = sorted(template.names - {*_ALWAYS, *tokens, *DEFAULTS})[:20]
            raise TemplateError(
                f"{where} does not read {unread[0][:60]!r} of format.chat_template_kwargs (it "
                f"reads {', '.join(name[:60] for name in known) or 'no argument'}). Correct the "
                "name, or remove it"
            )
        return template

    @cached_property
    def facts(self) -> TemplateFacts:
        """Return the facts that probes show about the template.

        Raises:
            TemplateError: it cannot be used.
        """
        set_arguments, template = self._config.chat_template_kwargs, self.template
        return learn_facts(
            self._probe,
            where=template.where,
            arguments={name: template.values.get(name, (True, False)) for name in self._arguments},
            is_set=lambda name: name in set_arguments,
            stop_tokens=self._stops,
            control=self.control_bytes,
        )

    @property
    def _arguments(self) -> frozenset[str]:
        """Names that the template looks up, except those that every template gets."""
        return self.template.names - {*_ALWAYS, *self._template_args[1], *DEFAULTS}

    @property
    def argument_advice(self) -> str:
        """Advice if probes do not find the argument for thinking; empty if there is none to set.

        Probes set arguments to true, false or a word in the template. Some templates need a number.
        """
        unset = ", ".join(sorted(self._arguments - {*self._config.chat_template_kwargs})[:8])[:400]
        advice = f". If an argument turns thinking on ({unset}), set format.chat_template_kwargs"
        return advice if unset else ""

    def check(self) -> None:
        """Refuse a template that cannot be used, before any row.

        Raises:
            TemplateError: it cannot be used; the message tells why.
        """
        if self._config.train_on == "all":
            _ = self.template
            return
        _ = self.facts
        raw = [{**QUESTION[0], "weight": 0.0}, {**ANSWER[0], "weight": 1.0}]
        if self.facts.opens_thought:
            raw[1]["reasoning"] = PROBE[2]
        try:
            self.render(raw, self._probe_given)
        except RefusedError as error:
            if error.refusal.reason not in ("no_reasoning", "thought_lost"):
                said = error.refusal.detail.removesuffix(f", or {NOT_TRAINED}")
                raise TemplateError(
                    f"{self.template.where}, tried with one question and answer: {said}"
                    f"{self.argument_advice}"
                ) from None

    def _probe(
        self, messages: Messages, arguments: Mapping[str, object] = {}, is_prompt: bool = False
    ) -> Rendering:
        tools, needed = self._probe_given
        if any("tool_calls" in message for message in messages):
            tools = tools or _TOOLS  # Hunyuan 3 writes reasoning only where there are some
        given = Given(tools, {**needed, **arguments})
        talk = Conversation(self.template, messages, given, self.control, self.has_content_parts)
        done = talk.prefix(len(messages), is_prompt=is_prompt)
        return replace(done, occurrences=[o for o in done.occurrences if o.field.message >= 0])

    @cached_property
    def _probe_given(self) -> Given:
        """Documents or tools for probes, if the template fails without them.

        Rows or the recipe must provide them too.
        """
        documents: dict[str, object] = {"documents": [{"title": "Therefore", "text": "Likewise"}]}
        for given in (Given(), Given(None, documents), Given(_TOOLS)):
            with suppress(RefusedError):
                self.template.render(QUESTION, given.tools, given.arguments)
                return given
        return Given()

    @cached_property
    def has_content_parts(self) -> bool:
        """Return True if the template writes contents as lists of parts, but not as texts."""
        texts, talk = PROBE[:2], [*QUESTION, *ANSWER]
        parts = MessageForm(has_content_parts=True)
        return not self._writes(texts, talk, PLAIN) and bool(self._writes(texts, talk, parts))

    @cached_property
    def form(self) -> MessageForm:
        """First form of messages with tool calls in which the template loses no text.

        Most templates accept the first form. If all lose text, use the first that is not refused.
        """
        function = {"name": PROBE[3], "arguments": {"a": "Therefore"}}
        called = orjson.dumps([{"type": "function", "function": function}]).decode()
        talk: Messages = [
            *QUESTION,
            {"role": "assistant", "content": "", "tool_calls": called},
            {"role": "tool", "content": PROBE[1]},
            {"role": "assistant", "content": PROBE[2]},
        ]
        is_numbered = self._config.call_ids is not None
        forms = [
            MessageForm(ids and not is_numbered, is_numbered, text, self.has_content_parts)
            for text, ids in product((False, True), repeat=2)
        ]
        writes = [self._writes((*PROBE, "Therefore"), talk, form) for form in forms]
        return next(
            (forms[writes.index(answer)] for answer in (True, False) if answer in writes), forms[0]
        )

    def _content_spans(self, rendering: Rendering, talk: Conversation) -> list[tuple[int, int]]:
        """Return the spans of the row's own texts, without thought tags at the start of answers.

        The model writes those tags as tokens, wherever the template takes them from.
        """
        spans, roles, end = list[tuple[int, int]](), talk.roles, 0
        for own in rendering.occurrences:
            start, value, number = own.start, own.field.value, own.field.message
            is_answer = own.field.kind == "content" and roles[number] == "assistant"
            if is_answer and self._has_tags:
                before = rendering.text[max(start - 16, end) : start].rstrip()
                is_opened = before.endswith(b"<think>")
                pattern = "</think>" if is_opened else f"{BEGINS_THOUGHT}(?s:.*)</think>"
                is_tagged = bool(re.search(pattern, value))
                question = Predicate("matches", pattern, is_tagged)
                talk.trace.predicates.add((("content", number), question))
                if is_tagged:  # rows whose answers have tags are written differently
                    talk.trace.unrecorded.add((number, "tags of a thought"))
                for first, last in tag_spans(value, is_opened=is_opened):
                    if own.first <= first and last <= own.last:
                        at = own.start + len(value[own.first : first].encode())
                        spans.append((start, at))
                        start = at + last - first
            spans.append((start, own.end))
            end = own.end
        return [span for span in spans if span[0] < span[1]]

    def _writes(self, texts: Sequence[str], talk: Messages, form: MessageForm) -> bool | None:
        """Return True if all texts are in the rendering; None if the template refuses the row."""
        messages = chat_messages(talk, form)
        if form.has_content_parts:
            for message in messages:
                message["content"] = in_parts(message["content"])
        try:
            written = self.template.render(messages, *self._probe_given)
        except RefusedError:
            return None
        return all(text in written for text in texts)

    def render(self, raw: Messages, given: Given, limit: TokenLimit | None = None) -> RenderedRow:
        """Render the records of a row.

        Args:
            raw: canonical messages, each with the weight decided for it.
            given: tools and arguments.
            limit: see `Answers`.

        Raises:
            RefusedError: the template refuses the row, loses text of it or shows no spans.
        """
        if not raw:
            raise RefusedError("template", "the conversation has no message")
        messages = chat_messages(raw, self.form)
        is_stripped = self._config.reasoning == "strip"
        talk = Conversation(
            self.template, messages, given, self.control, self.has_content_parts, is_stripped
        )
        weights = [message["weight"] for message in raw]
        if not any(weights):
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        config, control = self._config, self.control_bytes
        answers = [n for n, role in enumerate(talk.roles) if role == "assistant" and weights[n] > 0]
        others = [n for n, role in enumerate(talk.roles) if role != "assistant" and weights[n] > 0]
        is_whole = config.turns == "whole" or config.train_on == "all" or not answers
        if is_whole:
            record = Record(talk.rendering, num_messages=len(raw))
            notes = check_row(talk, [record.rendering], len(raw), {*answers, *others})
            if config.train_on == "all":
                record.spans = all_spans(raw, talk, config, control)
            else:
                if answers:
                    rule = Answers(raw, talk, config, self.facts, control)
                    record = rule.whole_record(answers)
                record.spans = sorted([*record.spans, *other_spans(talk, others, control)])
            records = [record]
        else:
            rule = Answers(raw, talk, config, self.facts, control, limit)
            records = rule.records(answers)
            written, last = [record.rendering for record in records], records[-1].num_messages
            kept = {*others, *(number for record in records for number in record.turns)}
            notes = rule.notes + check_row(talk, written, last, kept)
            add_other_turns(records, talk, other_spans(talk, others, control))
            if len(written) == 1 and rule.notes["rewritten_prompts"] and last == len(raw):
                # The empty thoughts that Qwen3 writes before each answer stay in the record.
                with suppress(RefusedError):
                    notes["joined_bytes"] = len(written[0].text) - len(talk.rendering.text)
        done: list[RenderedRecord] = []
        for record in records:
            trained = weigh_spans(record, raw, talk, config)
            is_row = is_whole or (record.num_messages == len(raw) and record.turns == answers)
            extent = None
            if not is_row:
                awaits = rule.awaits_thought(record)
                extent = Extent(record.num_messages, (*record.turns, *others), awaits)
            if trained:
                content = self._content_spans(record.rendering, talk)
                done.append(RenderedRecord(record.rendering, trained, extent, content))
        if not done:
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        return RenderedRow(talk, done, notes)

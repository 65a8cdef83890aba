"""Render one conversation with Jinja: text, spans of contents and trained spans.

A row is refused if its spans cannot be determined or the template leaves out some of its text.

The rule for answers is in `packhouse.render.trained_answers`. This module adds the spans of
`train_on: all` and of turns of other roles that have a weight, and cuts spans by the weights of
parts and of reasoning:

    "Let me see. " (weight 0) and "Four."  ->  "Four.<|im_end|>"

Text that the template writes around the parts (the end token) has the weight of the message.
"""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Any, NamedTuple

import orjson

from packhouse.errors import ConfigError, TemplateError
from packhouse.recipe import FormatConfig
from packhouse.records.conversation_shapes import BEGINS_THOUGHT, DEFAULTS, tag_spans, thought_spans
from packhouse.records.record_ids import Extent
from packhouse.render.jinja_sandbox import ChatTemplate
from packhouse.render.lost_content import check_row, is_thought
from packhouse.render.provenance import UNPROVEN, Predicate, literally
from packhouse.render.rendered_texts import RefusedError, Trained, shown
from packhouse.render.template_arguments import (
    PLAIN,
    MessageForm,
    Messages,
    TemplateArguments,
    best_form,
    chat_messages,
)
from packhouse.render.template_probes import ANSWER, PROBE, QUESTION, TemplateFacts, learn_facts
from packhouse.render.text_positions import (
    Occurrence,
    Rendering,
    Template,
    TracedRow,
    measure_kinds,
)
from packhouse.render.trained_answers import NOT_TRAINED, AnswerRule, Record
from packhouse.tokenize.control_tokens import any_of
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

    talk: TracedRow
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
        # Latin-1 has one character for each byte, so a pattern of its characters fits bytes.
        encoded = [token.encode().decode("latin-1") for token in tokens]
        self.control_bytes = re.compile(any_of(encoded).encode("latin-1"))
        self.control_texts = any_of(tokens, literally)
        self._has_tags = tokens.issuperset(("<think>", "</think>"))
        own = dict.fromkeys(config.stop_tokens, "format.stop_tokens")
        self._stops = own or dict(snapshot.stop_tokens)
        unknown = sorted(set(config.stop_tokens) - tokens)
        if unknown:
            what = f"{unknown[0]!r} is not a control token of the tokenizer"
            raise ConfigError(f"format.stop_tokens: {what}. Use one of its added tokens")

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
            read = ", ".join(name[:60] for name in known) or "no arguments"
            what = f"{where} does not read {unread[0][:60]!r} from format.chat_template_kwargs"
            raise TemplateError(f"{what} (it reads: {read}). Correct the name, or remove it")
        return template

    @cached_property
    def facts(self) -> TemplateFacts:
        """Return the facts that probes show about the template.

        Raises:
            TemplateError: it cannot be used.
        """
        values = self.template.values
        return learn_facts(
            self._probe,
            where=self.template.where,
            arguments={name: values.get(name, (True, False)) for name in self._arguments},
            set_arguments=self._config.chat_template_kwargs,
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
                what = f"{self.template.where} fails on a test question and answer"
                raise TemplateError(f"{what}: {said}{self.argument_advice}") from None

    def _probe(
        self, messages: Messages, arguments: Mapping[str, object] = {}, is_prompt: bool = False
    ) -> Rendering:
        tools, needed = self._probe_given
        if any("tool_calls" in message for message in messages):
            tools = tools or _TOOLS  # Hunyuan 3 writes reasoning only where there are some
        given = TemplateArguments(tools, {**needed, **arguments})
        talk = TracedRow(self.template, messages, given, self.control, self.has_content_parts)
        done = talk.prefix(len(messages), is_prompt=is_prompt)
        return replace(done, occurrences=[o for o in done.occurrences if o.field.message >= 0])

    @cached_property
    def _probe_given(self) -> TemplateArguments:
        """Documents or tools for probes, if the template fails without them.

        Rows or the recipe must provide them too.
        """
        documents: dict[str, object] = {"documents": [{"title": "Therefore", "text": "Likewise"}]}
        tries = TemplateArguments(), TemplateArguments(None, documents), TemplateArguments(_TOOLS)
        for given in tries:
            with suppress(RefusedError):
                self.template.render(QUESTION, given.tools, given.arguments)
                return given
        return TemplateArguments()

    @cached_property
    def has_content_parts(self) -> bool:
        """Return True if the template writes contents as lists of parts, but not as texts."""
        texts, talk = PROBE[:2], [*QUESTION, *ANSWER]
        parts = MessageForm(has_content_parts=True)
        return not self._writes(texts, talk, PLAIN) and bool(self._writes(texts, talk, parts))

    @cached_property
    def form(self) -> MessageForm:
        """Form of messages with tool calls in which the template loses no text, if any does."""
        function = {"name": PROBE[3], "arguments": {"a": "Therefore"}}
        called = orjson.dumps([{"type": "function", "function": function}]).decode()
        talk: Messages = [
            *QUESTION,
            {"role": "assistant", "content": "", "tool_calls": called},
            {"role": "tool", "content": PROBE[1]},
            {"role": "assistant", "content": PROBE[2]},
        ]
        return best_form(
            partial(self._writes, (*PROBE, "Therefore"), talk),
            has_function_ids=self._config.call_ids is not None,
            has_content_parts=self.has_content_parts,
        )

    def _content_spans(self, rendering: Rendering, talk: TracedRow) -> list[tuple[int, int]]:
        """Return the spans of the row's own texts, without thought tags at the start of answers.

        The model writes those tags as tokens, wherever the template takes them from.
        """
        spans, roles, end = list[tuple[int, int]](), talk.roles, 0
        for own in rendering.occurrences:
            start, value, number = own.start, own.field.value, own.field.message
            is_answer = own.field.kind == "content" and roles[number] == "assistant"
            if is_answer and self._has_tags:
                # 16 bytes hold `<think>` and up to nine of white space after it.
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
        try:
            written = self.template.render(chat_messages(talk, form), *self._probe_given)
        except RefusedError:
            return None
        return all(text in written for text in texts)

    def render(
        self, raw: Messages, given: TemplateArguments, limit: TokenLimit | None = None
    ) -> RenderedRow:
        """Render the records of a row.

        Args:
            raw: canonical messages, each with the weight decided for it.
            given: tools and arguments.
            limit: see `AnswerRule`.

        Raises:
            RefusedError: the template refuses the row, loses text of it or shows no spans.
        """
        if not raw:
            raise RefusedError("template", "the conversation has no messages")
        # `TracedRow` makes parts of the contents.
        messages = chat_messages(raw, self.form._replace(has_content_parts=False))
        config, control, has_parts = self._config, self.control_bytes, self.has_content_parts
        is_stripped = config.reasoning == "strip"
        talk = TracedRow(self.template, messages, given, self.control, has_parts, is_stripped)
        weights = [message["weight"] for message in raw]
        if not any(weights):
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        answers = [n for n, role in enumerate(talk.roles) if role == "assistant" and weights[n] > 0]
        others = [n for n, role in enumerate(talk.roles) if role != "assistant" and weights[n] > 0]
        is_whole = config.turns == "whole" or config.train_on == "all" or not answers
        if is_whole:
            record = Record(talk.rendering, num_messages=len(raw))
            notes = check_row(talk, [record.rendering], len(raw), {*answers, *others})
            if config.train_on == "all":
                record.spans = all_spans(raw, talk, config, control)
            elif answers:
                rule = AnswerRule(raw, talk, config, self.facts, control)
                record = rule.whole_record(answers)
            records = [record]
        else:
            rule = AnswerRule(raw, talk, config, self.facts, control, limit)
            records = rule.records(answers)
            written, last = [record.rendering for record in records], records[-1].num_messages
            kept = {*others, *(number for record in records for number in record.turns)}
            notes = rule.notes + check_row(talk, written, last, kept)
            if len(written) == 1 and rule.notes["rewritten_prompts"] and last == len(raw):
                # The empty thoughts that Qwen3 writes before each answer stay in the record.
                with suppress(RefusedError):
                    # Four tokens an answer: 1.02 to 1.25 times the text of plain chats.
                    notes["repeated_bytes"] = len(written[0].text) - len(talk.rendering.text)
        if others and config.train_on != "all":
            add_other_turns(records, talk, others, control)
        done: list[RenderedRecord] = []
        for record in records:
            trained = weigh_spans(record, raw, talk, config)
            # Without an extent, the record keeps the id of its row, so ids do not change with the
            # template.
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


class Bounds(NamedTuple):
    """Position of a message, in bytes."""

    text: int
    """Start of its text, including a space of the template, which is in the same token."""
    end: int
    """End of the template's text that closes it."""
    has_tools: bool
    """True if tool definitions come between its header and its text."""


def message_bounds(talk: TracedRow, control: re.Pattern[bytes]) -> list[Bounds]:
    """Return the positions of the messages of a conversation.

    Args:
        talk: the conversation.
        control: matches control tokens.

    Raises:
        RefusedError: the end of a message cannot be determined.
    """
    whole, text = talk.rendering, talk.rendering.text
    before_first: dict[int, int] = {}  # message -> end of the text before its first one
    end = -1
    for occurrence in whole.occurrences:
        before_first.setdefault(occurrence.field.message, end)
        end = occurrence.end
    own = [whole.own(number) for number in range(len(talk.roles))]
    for number, texts in enumerate(own):
        if not texts:
            raise _unshown(talk, number, "none of its text is in the rendering")
        if number and texts[0].start < own[number - 1][-1].end:
            raise RefusedError("template", "the template writes messages out of order")

    gaps = [text[a[-1].end : b[0].start] for a, b in pairwise(own)]
    measure = partial(_closing_length, talk, control, gaps)
    closings = measure_kinds(whole, talk, range(len(gaps)), [False] * len(own), measure)
    ends = [own[at][-1].end + size for at, size in enumerate(closings)] + [len(text)]
    bounds: list[Bounds] = []
    for number, texts in enumerate(own):
        start, begin = texts[0].start, bounds[-1].end if bounds else 0
        has_tools = any(begin <= o.start < start for o in whole.own(-1))
        is_spaced = text[max(start - 1, 0) : start] == b" " and before_first[number] != start
        bounds.append(Bounds(start - is_spaced, ends[number], has_tools))
    return bounds


def _closing_length(
    talk: TracedRow, control: re.Pattern[bytes], gaps: Sequence[bytes], number: int
) -> int:
    """Return how many bytes of the gap after a message close it.

    They are those that the gap shares with the end of a rendering of the messages up to this one.
    """
    gap = gaps[number]
    with suppress(RefusedError):
        shorter = talk.prefix(number + 1)
        if own := shorter.own(number):
            # "<|end|>\n<|eot|>" and "<|end|>\n<|user|>": the first 8 bytes. A control token is
            # never split.
            pairs = zip(shorter.text[own[-1].end :], gap, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            cut = (m.start() for m in control.finditer(gap) if m.start() < common < m.end())
            return next(cut, common)
    if control.search(gap) is None:
        return 0
    raise _unshown(talk, number, f"{shown(gap[:40])} follows it")


def _unshown(talk: TracedRow, number: int, why: str) -> RefusedError:
    what = f"the end of message {number} ({talk.roles[number]}) cannot be determined"
    return RefusedError("template", f"{what}: {why}")


def add_other_turns(
    records: Sequence[Record], talk: TracedRow, others: Sequence[int], control: re.Pattern[bytes]
) -> None:
    """Train each turn of another role in the first record that writes it like the whole rendering.

    A span runs from the message's text to the end of its closing; headers are not trained.

    Args:
        records: records of the conversation, modified in place.
        talk: the conversation.
        others: indices of the turns.
        control: matches control tokens.

    Raises:
        RefusedError: a span cannot be determined, or no record writes a turn like that.
    """
    bounds, text = message_bounds(talk, control), talk.rendering.text
    for number in others:
        start, end, _ = bounds[number]
        for record in records:
            if number < record.num_messages and record.rendering.text.startswith(text[:end]):
                record.spans = sorted([*record.spans, Trained(start, end, number)])
                record.turns = sorted([*record.turns, number])
                break
        else:
            raise RefusedError(
                "template",
                f"message {number} ({talk.roles[number]}) is trained, but no record renders it "
                "the same way as the whole conversation does. Set format.turns: whole",
            )


def all_spans(
    raw: Messages, talk: TracedRow, config: FormatConfig, control: re.Pattern[bytes]
) -> list[Trained]:
    """Return the spans of `train_on: all`: whole messages, headers included.

    Adjacent spans of weight 1 are merged, except those of messages with weighted parts. The text
    before the first message's own text belongs to no message.

    Raises:
        RefusedError: a span cannot be determined.
    """
    weights = [message["weight"] for message in raw]
    apart = {at for at, message in enumerate(raw) if "part_weights" in message}
    if not (config.never_train or apart) and all(w == 1 for w in weights):
        return [Trained(0, len(talk.rendering.text), 0)]
    bounds, trained = message_bounds(talk, control), list[Trained]()
    for number, weight in enumerate(weights):
        is_headless = number == 0 or bounds[number].has_tools
        start = bounds[number].text if is_headless else bounds[number - 1].end
        last = trained[-1] if trained and apart.isdisjoint((number, number - 1)) else None
        if last is not None and last.end == start and weights[last.message] == weight == 1:
            trained[-1] = last._replace(end=bounds[number].end)
        elif weight > 0:
            trained.append(Trained(start, bounds[number].end, number))
    return trained


def weigh_spans(
    record: Record, raw: Messages, talk: TracedRow, config: FormatConfig
) -> list[Trained]:
    """Return the spans of a record with their weights, cut where the weight changes.

    Args:
        record: has spans of whole turns.
        raw: canonical messages with their final weights.
        talk: the conversation.
        config: with `reasoning: train_last`, reasoning before the last user turn is not trained.

    Raises:
        RefusedError: the template rewrites a text whose parts have weights.
    """
    # Roles s u a u a: the last user turn is the 2nd from the end, so 5 - 1 - 1 = 3 are before it.
    is_last = config.reasoning == "train_last" and "user" in talk.roles
    num_earlier = len(raw) - 1 - talk.roles[::-1].index("user") if is_last else 0
    found, text = record.rendering.occurrences, record.rendering.text
    starts = [occurrence.start for occurrence in found]
    weighed: list[Trained] = []
    for span in record.spans:
        number, message = span.message, raw[span.message]
        pieces = [span._replace(weight=message["weight"])]
        if number < num_earlier and message["role"] == "assistant":
            own = found[bisect_left(starts, span.start) : bisect_left(starts, span.end)]
            calls = talk.messages[number].get("tool_calls", [])
            pieces = _cut(pieces, _thoughts_in(span, text, own, calls))
        if "part_weights" in message:
            pieces = _cut(pieces, _parts_in(number, message, text, record.rendering.own(number)))
        weighed += pieces
    return weighed


Range = tuple[int, int, float]
"""Start and end in bytes, and the factor by which the weight is multiplied."""


def _cut(spans: list[Trained], ranges: Sequence[Range]) -> list[Trained]:
    """Cut spans into pieces of equal weight, and leave out those of weight 0.

    (0, 90) with (0, 20, 0.0) and (40, 50, 0.5)  ->  (20, 40), (40, 50) of half the weight, (50, 90)
    """
    cut: list[Trained] = []
    for span in spans:
        at, pieces = span.start, list[Range]()
        for begin, stop, factor in ranges:
            begin, stop = max(begin, at), min(stop, span.end)
            if begin < stop:
                pieces += [(at, begin, 1.0), (begin, stop, factor)]
                at = stop
        pieces.append((at, span.end, 1.0))
        filled = (piece for piece in pieces if piece[0] < piece[1])
        for factor, run in groupby(filled, lambda piece: piece[2]):  # neighbours of equal weight
            (begin, stop, _), *rest = run
            end = rest[-1][1] if rest else stop
            if factor:
                cut.append(span._replace(start=begin, end=end, weight=span.weight * factor))
    return cut


def _parts_in(
    number: int, message: Mapping[str, Any], text: bytes, written: Sequence[Occurrence]
) -> list[Range]:
    """Return the ranges of a message's parts in the rendering; see `part_weights` in MESSAGE."""
    parts = json.loads(message["part_weights"])
    ends = list(accumulate(size for size, _ in parts))
    sizes = {"content": len(message["content"]), "thought": len(message.get("reasoning", ""))}
    begins = {"content": ends[-1] - sizes["content"], "thought": 0}
    ranges: list[Range] = []
    for own in written:
        kind, said = own.field.kind, str(own.field.value)
        if kind not in begins or (kind == "thought" and not begins["content"]):
            continue
        is_same = len(said) == sizes[kind] and begins["content"] in (0, sizes["thought"])
        if not is_same or text[own.start : own.end] != said[own.first : own.last].encode():
            raise RefusedError(
                "template",
                f"the parts of message {number} have different weights, but the template changes "
                "its text. Give the message one weight",
            )
        # Parts of 12 and 5 characters end at [12, 17]: characters 0 to 12 and 12 to 17 of the
        # content "Let me see. Four.", wherever it is in the rendering.
        at = own.start
        for (size, factor), end in zip(parts, ends, strict=True):
            first = max(end - size - begins[kind], own.first)
            part = said[first : max(min(end - begins[kind], own.last), first)].encode()
            ranges.append((at, at + len(part), 1.0 if factor is None else factor))
            at += len(part)
    return ranges


def _thoughts_in(
    turn: Trained, text: bytes, own: list[Occurrence], calls: Sequence[object]
) -> list[Range]:
    """Return the ranges of a turn's reasoning: text between tags, and reasoning fields without.

    Tags inside calls and reasoning fields are ignored.

    Raises:
        RefusedError: a call quotes a tag, and its place in the rendering is unknown.
    """
    in_calls = [o for o in own if o.field.kind in ("call", "function")]
    if not in_calls and "think>" in json.dumps(calls):
        raise UNPROVEN
    start, blanked = turn.start, bytearray(text[turn.start : turn.end])
    for o in own:
        if o.field.kind in ("call", "function", "thought"):
            blanked[o.start - start : o.end - start] = bytes(o.end - o.start)
    ranges = [(start + a, start + b, 0.0) for a, b in thought_spans(bytes(blanked))]
    for o in own:
        if is_thought(o) and not any(a <= o.start < b for a, b, _ in ranges):
            ranges.append((o.start, o.end, 0.0))
    return sorted(ranges)

r"""Split a conversation into prompts and trained answers, exactly as inference would have them.

    prompt      <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    completion                                                         Hello!<|im_end|>

The prompt `P` is the template's output for the messages before the answer, with
`add_generation_prompt`. The completion `C` is its output for the answer after that prompt, up to
the first stop token after the answer's own text. If the stop token is only written as the header of
the next turn (GLM), one more message is rendered to see it.

If a template rewrites history (Qwen3 drops earlier reasoning), a conversation becomes several
records: an answer joins the previous record if `P` continues it, otherwise it starts a new one. So
every answer is trained after the prompt that it has at inference.

Each answer costs two renderings of the messages up to it. In long rows (over `MAX_PROVEN` answers)
only one answer of each kind is rendered, and the last one is compared with the whole record, so the
cost grows with the length of the text.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from packhouse.recipe import FormatConfig
from packhouse.records.conversation_shapes import BEGINS_THOUGHT
from packhouse.render.lost_content import check_answer, is_thought
from packhouse.render.provenance import Piece, Predicate
from packhouse.render.rendered_texts import RefusedError, Trained, shown
from packhouse.render.template_arguments import Messages, function_of
from packhouse.render.template_probes import IN_TAGS, TemplateFacts, ends_in_tag
from packhouse.render.text_positions import (
    Occurrence,
    Place,
    Rendering,
    TracedRow,
    join_renderings,
    measure_kinds,
    places_of,
    read_parts,
)
from packhouse.tokenize.encoders import TokenLimit

PROBE_NAME = "Likewise"
_FUNCTION = {"name": PROBE_NAME, "arguments": {}}
PROBE_CALL = [{"type": "function", "id": "call00000", "function": _FUNCTION}]
PROBE_TEXT = "Therefore"
NOT_TRAINED = 'set "weight": 0 on that message so that it is not trained'
MAX_BYTES = 2**26  # in all records of one row
# To render each prompt of a long row takes quadratic time.
MAX_PROVEN = 16  # with more answers than this in a row, only one of each kind is rendered


@dataclass(frozen=True, slots=True)
class TrainedAnswer:
    """One trained answer, as inference sees it."""

    message: int
    prompt: Rendering
    completion: Rendering
    """Text after the prompt. Text after the stop token is not trained."""
    end: int
    """Number of bytes of the completion through its stop token."""
    stop: bytes
    """The stop token."""
    trained: list[tuple[int, int]]
    """Ranges of the completion: all of it, or the parts that generation blocks select."""
    notes: tuple[str, ...] = ()
    thinks: bool | None = None
    """True if its prompt asks for reasoning; None if the template has no switch."""


@dataclass
class Record:
    """One text: a first prompt, then completions and the rest of their prompts in turn."""

    rendering: Rendering
    end: int = 0
    """Offset in bytes after the stop token of its last answer."""
    stop: bytes = b""
    """The stop token of its last answer."""
    spans: list[Trained] = field(default_factory=list)
    num_messages: int = 0
    """Number of messages of the row that it contains."""
    turns: list[int] = field(default_factory=list)
    """Indices of the messages that it trains."""
    thinks: bool | None = None
    """True if the prompt of its last answer asks for reasoning; see `TrainedAnswer`."""


class _Difference(NamedTuple):
    """How the answers of a kind differ from the rendering that contains all of them."""

    skipped: int
    """Bytes after the previous answer that are replaced by its closing."""
    header: bytes
    """End of the prompt, after its last text."""
    opening: bytes
    """Start of the completion, before the answer's first text."""
    closing: bytes
    notes: Counter[str]


class Closing(NamedTuple):
    """Text that the template writes after an answer's last own text."""

    rendering: Rendering
    text: bytes
    """Its text through the stop token."""
    stop: bytes


class AnswerRule:
    """Finds the prompts and completions of a conversation's answers.

    Args:
        raw: canonical messages.
        talk: the conversation.
        config: format section of the recipe.
        facts: properties of the template, learned from probes.
        control: matches control tokens.
        limit: if given, answers whose prompts start a record and are over it are left out.
    """

    def __init__(
        self,
        raw: Messages,
        talk: TracedRow,
        config: FormatConfig,
        facts: TemplateFacts,
        control: re.Pattern[bytes],
        limit: TokenLimit | None = None,
    ) -> None:
        self._raw, self._talk, self._config = raw, talk, config
        self._facts, self._control, self._limit = facts, control, limit
        self.notes = Counter[str]()
        self._reasoning = [message.get("reasoning") for message in raw]
        """Text of each message's reasoning field; None or empty if it has none."""
        self._thinks: list[bool] = []
        """True for each answer that has a thought, in its field or between tags."""
        needs_tags = bool(facts.switch or facts.opens_thought or facts.opened)
        for number, message in enumerate(raw):
            content, is_answer = message["content"] or "", talk.roles[number] == "assistant"
            is_tagged, reasoning = "</think>" in content, self._reasoning[number]
            if is_answer and content and needs_tags and not reasoning:
                # Tags decide how this row is rendered, and may differ in rows of the same shape.
                question = Predicate("contains", "</think>", is_tagged)
                talk.trace.predicates.add((("content", number), question))
            self._thinks.append(is_answer and (bool(reasoning) or is_tagged))
        # An exchange is a user turn and all up to the next: roles s u a u a are in 0 1 1 2 2.
        self._exchange = list(accumulate(int(role == "user") for role in talk.roles))
        pairs = zip(self._exchange, self._thinks, strict=True)
        with_thought = {at for at, thinks in pairs if thinks}
        # Known only from all of the row: the switch of an answer depends on later answers too. So
        # rows cannot be split into single answers before they are rendered.
        self._is_thinking = [at in with_thought for at in self._exchange]
        """True for each message whose exchange has a thought."""

    # Records.

    def records(self, wanted: Sequence[int]) -> list[Record]:
        """Return the records of the conversation, and count notable cases in `notes`.

        Args:
            wanted: indices of the answers to train, ascending; at least one.

        Raises:
            RefusedError: an answer cannot be trained as inference would have it.
        """
        can_join, made = self._config.turns != "alone", list[Record]()
        if len(wanted) > MAX_PROVEN and can_join:
            if (long := self._long_record(wanted)) is not None:
                made, wanted = [long], ()
            else:
                # It has counted notes of answers that are now rendered, and counted, again.
                self.notes.clear()
        limit, history = self._limit, None
        for place, number in enumerate(wanted):
            if limit and history:
                # What the last prompt keeps of the messages before an answer is in the answer's own
                # prompt, too. If that is too long, all later prompts are.
                later = (o.start for o in history.occurrences if o.field.message >= number)
                if not limit.fits(history.text[: next(later, 0)]):
                    self.notes["answers_too_long"] += len(wanted) - place
                    break
            turn = self._turn(number)
            joined = self._join(made[-1], turn) if made and can_join else None
            if limit and made and joined is None and not limit.fits(turn.prompt.text):
                self.notes["answers_too_long"] += 1
                arguments = self._arguments(wanted[-1])[0][0]
                history = history or self._talk.prefix(wanted[-1], arguments, is_prompt=True)
                continue
            self.notes.update(turn.notes)
            if joined is None:
                made.append(Record(joined := turn.prompt))
            record, start = made[-1], len(joined.text)
            record.thinks = turn.thinks
            record.rendering = join_renderings(joined, turn.completion)
            record.end, record.stop = start + turn.end, turn.stop
            record.spans += [Trained(start + a, start + b, number) for a, b in turn.trained]
            record.turns.append(number)
            record.num_messages = number + 1
            self._talk.num_written = sum(each.num_messages for each in made)
            if sum(len(each.rendering.text) for each in made) > MAX_BYTES:
                raise RefusedError(
                    "template_limit",
                    f"the {len(wanted):,} answers need {len(made):,} or more records, over "
                    f"{MAX_BYTES >> 20} MiB in total, because the template rewrites the history "
                    "before each. Set format.turns: whole, or split the conversation before "
                    "preparing it",
                )
        last = made[-1]
        if last.num_messages < len(self._raw):
            # Append the messages after the last trained answer, if the text before stays the same.
            with suppress(RefusedError):
                whole = self._talk.prefix(len(self._raw), self._arguments(len(self._raw) - 1)[0][0])
                if whole.text.startswith(last.rendering.text[: last.end]):
                    last.rendering, last.num_messages = whole, len(self._raw)
        return made

    def _join(self, record: Record, turn: TrainedAnswer) -> Rendering | None:
        """Extend the record so far by a prompt; return None if the prompt does not continue it."""
        prompt, done = turn.prompt, record.rendering.text[: record.end]
        if prompt.text.startswith(done):
            return prompt
        # If the thinking switch changes, only an exact continuation joins: SmolLM3's system turn
        # says whether to think, so the earlier prompt would say the opposite of what is trained.
        if self._config.turns != "joined" or turn.thinks != record.thinks:
            return None
        # Compared by the row's own texts, because history differs in text of the template: Qwen3
        # drops the empty thinking block, gpt-oss writes `<|end|>` for `<|return|>`. With a record
        # for each such answer (`turns: exact`), 300 Glaive rows have 2.41 times the tokens with
        # Qwen3.
        written = [o for o in record.rendering.occurrences if o.end <= record.end]
        others = prompt.occurrences[: len(written)]
        is_same = [o.characters for o in written] == [o.characters for o in others]
        if not is_same or not written:
            return None
        begin, closing = others[-1].end, done[written[-1].end :]
        size = self._closing_in_history(prompt, begin, closing, record.stop)
        if size is None:
            return None
        self.notes["rewritten_prompts"] += 1
        added = prompt.between(begin + size, len(prompt.text))
        return join_renderings(record.rendering.between(0, record.end), added)

    def _closing_in_history(
        self, rendering: Rendering, begin: int, closing: bytes, stop: bytes
    ) -> int | None:
        """Return how many bytes close an answer in a longer text; None if that is unclear.

        History may have another token, such as `<|end|>` in place of `<|return|>`. It must be the
        control token that ends all system and user turns.

        Args:
            rendering: rendering of more messages.
            begin: end of the answer's last text in it.
            closing: text that closes the answer when it is last, through its stop token.
            stop: that stop token.
        """
        found, roles = rendering.occurrences, self._talk.roles
        end = next((o.start for o in found if o.start >= begin), len(rendering.text))
        gap = rendering.text[begin:end]
        if gap.startswith(closing):
            return len(closing)
        match = next(rendering.controls(self._control, begin, end), None)
        if match is None:
            return None
        enders = list[bytes]()
        edges = [*(o.start for o in found[1:]), len(rendering.text)]
        for own, edge in zip(found, edges, strict=True):
            number = own.field.message
            if number >= 0 and roles[number] in ("system", "user"):
                token = next(rendering.controls(self._control, own.end, edge), None)
                enders.append(token.group() if token else b"")
        before = closing.removesuffix(stop)
        if {*enders} == {match.group()} and gap[: match.start() - begin] == before:
            return match.end() - begin
        if gap.startswith(before) and self._control.search(before):
            return len(before)  # "<|end|>\n" without the EOS that ends the last turn
        return None

    # Many answers: only one of each kind is rendered.

    def _long_record(self, wanted: Sequence[int]) -> Record | None:
        """Return the one record of a row with many answers; None if each must be rendered.

        The prompt of the last answer contains all others, which differ from their completions only
        in header and closing, and answers of one kind in the same way. The first of each kind is
        rendered to learn the difference, and the last answer is checked against the whole record.
        """
        try:
            arguments = self._arguments(wanted[-1])[0][0]
            whole = self._talk.prefix(wanted[-1], arguments, is_prompt=True)
        except RefusedError:
            return None
        earlier, thinking = wanted[:-1], self._is_thinking
        # What this misses is a template that counts the messages in its prompts. Only the audit
        # finds it.
        turns = measure_kinds(whole, self._talk, earlier, thinking, self._turn)
        turns.append(last := self._turn(wanted[-1]))
        places = places_of(whole, len(self._raw))
        learned: dict[int, _Difference] = {}
        record, done = Record(whole), 0  # `done` is the end of the answer before, in `whole`
        pieces: list[Rendering | bytes] = []
        for number, turn in zip(wanted, turns, strict=True):
            place = places[number]
            if turn.message != number and place is not None:
                kind = learned[turn.message]
                self.notes.update(kind.notes)
                head = whole.between(done + kind.skipped, place.before)
                body = whole.between(place.first, place.last)
                start = record.end + len(head.text) + len(kind.header)
                end = start + len(kind.opening) + len(body.text) + len(kind.closing)
                pieces += [head, kind.header + kind.opening, body, kind.closing]
            else:
                record.rendering, before = join_renderings(*pieces), self.notes.copy()
                joined = self._join(record, turn) if pieces else turn.prompt
                # A completion that blocks train in part cannot stand for others of its kind.
                if joined is None or turn.trained != [(0, turn.end)]:
                    return None
                self.notes.update(turn.notes)
                if turn is not last:
                    own, text = turn.completion.own(number), turn.completion.text
                    others = whole.own(number)
                    is_same = [o.characters for o in own] == [o.characters for o in others]
                    if place is None or not own or not is_same or not joined.occurrences:
                        return None
                    first, stop = own[0].start, own[-1].end
                    between = joined.text[record.end : joined.end]
                    gap = whole.text[done : place.before]
                    is_written = whole.text[place.first : place.last] == text[first:stop]
                    if not is_written or not gap.endswith(between):
                        return None
                    learned[number] = _Difference(
                        skipped=len(gap) - len(between),
                        # After the stop token of an answer directly before this one.
                        header=joined.text[max(record.end, joined.end) :],
                        opening=text[:first],
                        closing=text[stop : turn.end],
                        notes=self.notes - before,
                    )
                start = len(joined.text)
                end = start + turn.end
                pieces = [joined, turn.completion.between(0, turn.end)]
            record.stop, record.thinks = turn.stop, turn.thinks
            record.spans.append(Trained(start, end, number))
            record.turns.append(number)
            record.end, record.num_messages = end, number + 1
            done = place.last if place else done
        record.rendering = join_renderings(pieces[0], last.completion)
        return record

    # One rendering of all messages: `turns: whole`.

    def whole_record(self, wanted: Sequence[int]) -> Record:
        """Return the rendering of all messages with its answers, measuring one of each kind.

        An answer is trained from the end of its prompt through the stop token, or through the token
        that history has in its place (`<|end|>` for `<|return|>`).

        Raises:
            RefusedError: the start or end of an answer cannot be determined.
        """
        whole, spans = self._talk.rendering, list[Trained]()
        last = len(self._raw) - 1
        if wanted[-1] == last and (own := whole.own(last)):
            ending = self._closing(last, {}, whole, at := own[-1].end)
            if not whole.text.startswith(ending.text, at):  # GLM's is the header of the next turn
                longer = join_renderings(whole.between(0, at), ending.rendering)
                whole = replace(longer, generation=whole.generation)
        places = places_of(whole, len(self._raw))

        def measure(number: int) -> tuple[int, int]:
            return self._measure(number, whole, places[number])

        sizes = measure_kinds(whole, self._talk, wanted, self._is_thinking, measure)
        for number, (header, closing) in zip(wanted, sizes, strict=True):
            place = places[number]
            assert place is not None, "measured above"
            start = place.before + header
            end = max(place.last, start) + closing
            ranges = in_blocks(number, whole, start, end) if whole.generation else [(start, end)]
            spans += [Trained(a, b, number) for a, b in ranges]
        return Record(whole, spans=spans, num_messages=len(self._raw), turns=[*wanted])

    def _measure(self, number: int, whole: Rendering, place: Place | None) -> tuple[int, int]:
        """Return the length of the header before an answer and of its closing, in bytes."""
        if place is None:
            raise RefusedError(
                "template",
                f"message {number} (assistant) has no text in the rendering, or other text is "
                f"inside it, so its span is ambiguous. Set format.turns: joined, or {NOT_TRAINED}",
            )
        is_all = number + 1 == len(self._raw)
        finished = self._talk.rendering if is_all else self._talk.prefix(number + 1)
        prompt = self._prompt(number, {}, finished)
        gap = whole.text[place.before : place.first if place.has_text else place.after]
        before = next((o for o in reversed(whole.occurrences) if o.end == place.before), None)
        last = prompt.occurrences[-1] if prompt.occurrences else None
        is_same = (before and before.characters) == (last and last.characters)
        # The prompt may open something more, such as `<think>`, which this rendering lacks.
        if not is_same or not (gap.startswith(prompt.tail) or prompt.tail.startswith(gap)):
            raise RefusedError(
                "template",
                f"the prompt before message {number} (assistant) differs from the rendering: "
                f"{shown(prompt.tail[-40:])} instead of {shown(gap[-40:])}. Set format.turns: "
                f"joined, or {NOT_TRAINED}",
            )
        header = min(len(prompt.tail), len(gap))
        own = finished.own(number)
        closing = self._closing(number, {}, finished, own[-1].end if own else finished.end + header)
        at = max(place.last, place.before + header)
        size = self._closing_in_history(whole, at, closing.text, closing.stop)
        if size is None:
            rest = shown(whole.text[at : place.after][:40])
            raise RefusedError(
                "no_stop",
                f"no stop token follows message {number} (assistant) in the rendering of all "
                f"messages, only {rest}. Set format.turns: joined, or {NOT_TRAINED}",
            )
        *_, last_token = whole.controls(self._control, at, at + size)
        return header, last_token.end() - at

    # Arguments: the thinking switch.

    def _arguments(self, number: int) -> list[tuple[dict[str, object], bool | None]]:
        """Return arguments to try, and whether they ask for reasoning (None without a switch)."""
        switch = self._facts.switch
        if switch is None or switch.name in self._talk.given.arguments:
            return [({}, None)]
        # Decided once per exchange, because clients set the switch per request. If an answer
        # without a thought cannot follow the thinking prompt (Nemotron 3), it gets the other one.
        on, off = {switch.name: switch.thinking}, {switch.name: switch.plain}
        return [(on, True), (off, False)] if self._is_thinking[number] else [(off, False)]

    def awaits_thought(self, record: Record) -> bool:
        """Return True if a prompt of a record asks for reasoning that only later messages have."""
        if not any(asks for _, asks in self._arguments(record.turns[-1])):
            return False
        asked, shown_messages = self._exchange[record.turns[-1]], range(record.num_messages)
        return not any(self._thinks[n] and self._exchange[n] == asked for n in shown_messages)

    # One answer.

    def _turn(self, number: int) -> TrainedAnswer:
        """Return the prompt and the completion of one answer.

        Raises:
            RefusedError: no arguments of the template lead to the answer.
        """
        refused: RefusedError | None = None
        for arguments, thinks in self._arguments(number):
            try:
                turn = self._turn_with(number, arguments)
            except RefusedError as error:
                # The first refusal is of the arguments that a client would choose, so it is shown.
                refused = refused or error
                if self._thinks[number]:  # reasoning needs a prompt that asks for it
                    break
                continue
            notes = list(turn.notes)
            if thinks is not None:
                notes.append("thinking_turns" if thinks else "plain_turns")
            if refused is not None:
                notes.append("turns_without_thought")
            return replace(turn, notes=tuple(notes), thinks=thinks)
        assert refused is not None
        raise refused

    def _turn_with(self, number: int, arguments: Mapping[str, object]) -> TrainedAnswer:
        finished = self._talk.prefix(number + 1, arguments)
        prompt = self._prompt(number, arguments, finished)
        start = self._start(number, prompt, finished)
        own_end = max([start or 0, *(o.end for o in finished.own(number, start or 0))])
        closing = self._closing(number, arguments, finished, own_end)
        body, notes = None, tuple[str, ...]()
        if start is not None:
            body = finished.between(start, own_end)
            if check_answer(self._talk, number, body):  # reasoning is missing
                body = None
        if body is None:  # a final answer may remove reasoning that its prompt still has in history
            body = self._borrowed(number, arguments, prompt)
            notes = ("borrowed_thoughts",) if body else ()
        if body is None:
            body, start = self._with_thought_end(number, prompt, finished), None
            if check_answer(self._talk, number, body):
                raise RefusedError(
                    "thought_lost",
                    f"message {number} (assistant) has reasoning in a field and in its text, but "
                    "the template leaves out the latter. Put all of it in the field "
                    f"(reasoning_content), or {NOT_TRAINED}",
                )
        # Templates that never write reasoning (Nemotron Nano v2) open `<think>` before any answer.
        in_thought = ends_in_tag(prompt.tail)
        is_unclosed = in_thought and b"</think>" not in body.text
        if is_unclosed or (self._facts.opens_thought and not self._thinks[number]):
            raise self._no_reasoning(number, prompt.tail[-20:])
        if in_thought and self._thinks[number] and not self._reasoning[number]:
            self._check_tagged(number, body)
        if any(match.group() in self._facts.stops for match in body.controls(self._control)):
            # The model would stop there: gpt-oss cannot sample two calls in one turn. Of 108 turns
            # in its format, 10 had a stop token inside, all of them with parallel calls.
            raise self._stop_inside(number, arguments, body, closing.stop)
        end = len(body.text) + len(closing.text)
        trained = [(0, end)]
        # A body that was borrowed or put together is not in `finished`, whose blocks say nothing
        # about its positions.
        if finished.generation and start is not None and not notes:
            blocks = in_blocks(number, finished, start, start + end)
            trained = [(a - start, b - start) for a, b in blocks]
        completion = join_renderings(body, closing.rendering)
        return TrainedAnswer(number, prompt, completion, end, closing.stop, trained, notes)

    def _prompt(
        self, number: int, arguments: Mapping[str, object], finished: Rendering
    ) -> Rendering:
        if number:
            return self._talk.prefix(number, arguments, is_prompt=True)
        # No message comes before the first answer. If the template refuses an empty conversation,
        # `turns: whole` starts the answer after the header that follows a question.
        with suppress(RefusedError):
            empty = self._talk.prefix(0, arguments, is_prompt=True)
            if finished.text.startswith(empty.text):
                return empty
        own = finished.own(0)
        opening = self._facts.opening
        at = finished.text.rfind(opening, 0, own[0].start if own else len(finished.text))
        if self._config.turns == "whole" and opening and at >= 0:
            return finished.between(0, at + len(opening))
        raise RefusedError(
            "starts_with_assistant",
            "message 0 (assistant) has no prompt: the template writes none before the first "
            f"message. Add the question before it, or {NOT_TRAINED}",
        )

    def _start(self, number: int, prompt: Rendering, finished: Rendering) -> int | None:
        """Return the start of the completion in `finished`; None if its reasoning is missing.

        Raises:
            RefusedError: the prompt does not lead to the answer.
        """
        if finished.text.startswith(prompt.text):
            return len(prompt.text)
        own = finished.own(number)
        if self._reasoning[number] and not any(map(is_thought, own)):
            return None
        # Older turns may be written differently: gpt-oss has reasoning before a call in the prompt
        # only. So find the last text of the earlier messages; the header must follow it.
        last = prompt.occurrences[-1] if prompt.occurrences else None
        same = [o.end for o in finished.occurrences if last and o.characters == last.characters]
        tail, gap, opened = prompt.tail, b"", self._facts.opened
        if same:
            first = own[0].start if own else len(finished.text)
            gap = finished.text[same[-1] : max(first, same[-1])]
            if finished.text.startswith(tail, same[-1]):
                return same[-1] + len(tail)
            if opened and gap.startswith(tail.removesuffix(opened)) and tail.endswith(opened):
                if self._thinks[number]:
                    return None
                raise self._no_reasoning(number, opened)
        raise RefusedError(
            "template",
            f"the prompt before message {number} (assistant) does not match the conversation: the "
            f"prompt ends in {shown(tail[-40:])}, but the conversation continues with "
            f"{shown(gap[-40:])}. Set format.template to a Jinja file that writes both the same "
            f"way, or {NOT_TRAINED}",
        )

    def _with_thought_end(self, number: int, prompt: Rendering, finished: Rendering) -> Rendering:
        """Join reasoning, `format.thought_end` and answer, for templates that drop reasoning."""
        end, thinks = self._config.thought_end, self._reasoning[number]
        opens = self._opens_thought(number, prompt)
        # DeepSeek R1, R1-Distill, V3.1 and QwQ never write reasoning.
        remedies = [] if self._facts.needs_thought else ["set format.reasoning: strip"]
        remedies.append(NOT_TRAINED)
        if end is None or not thinks or not opens:
            if opens and thinks:
                best = ["set format.thought_end to the text between reasoning and answer"]
            elif opens:
                best = ["put it in a field (reasoning_content) and set format.thought_end"]
            else:  # `thought_end` would close reasoning that was never opened
                best = [IN_TAGS] if thinks and self._control.fullmatch(b"<think>") else []
            raise self._thought_lost(number, "", [*best, *remedies])
        own = [o for o in finished.own(number) if o.field.kind != "thought"]
        first = own[0].start if own else 0
        if own and own[0].field.kind != "content":  # a call: include its opening
            before = max((o.end for o in finished.occurrences if o.end <= first), default=0)
            headers = [prompt.tail, prompt.tail.removesuffix(self._facts.opened)]
            gap = finished.text[before:first]
            header = next((each for each in headers if gap.startswith(each)), None)
            if header is None:
                unknown = ", and the start of its tool call cannot be determined"
                raise self._thought_lost(number, unknown, remedies)
            # "\n</think>\n\n<tool_call>": drop the tag that closes an empty thought here, since
            # `thought_end` closes the real one.
            opening = gap[len(header) :]
            if (closing := end.strip().encode()) and closing in opening:
                opening = opening.rpartition(closing)[2].lstrip()
            first -= len(opening)
        answer = finished.between(first, own[-1].end) if own else read_parts([])
        fields = self._talk.trace.fields
        thought = next(f for f in fields if f.kind == "thought" and f.message == number)
        reasoning = read_parts([Piece(thought.value, thought, 0, len(thought.value))])
        return join_renderings(reasoning, end.encode(), answer)

    def _thought_lost(self, number: int, more: str, remedies: Sequence[str]) -> RefusedError:
        advice = ", or ".join(remedies)
        what = f"the template leaves out the reasoning of message {number} (assistant){more}"
        return RefusedError("thought_lost", f"{what}. {advice[0].upper()}{advice[1:]}")

    def _opens_thought(self, number: int, prompt: Rendering) -> bool:
        """Return True if the prompt opens reasoning, which `format.thought_end` can close."""
        facts, tail, opened = self._facts, prompt.tail, self._facts.opened
        if facts.opens_thought or ends_in_tag(tail) or (opened and tail.endswith(opened)):
            return True
        with suppress(RefusedError):
            plain = {facts.switch.name: facts.switch.plain} if facts.switch else {}
            return not self._talk.prefix(number, plain, is_prompt=True).tail.startswith(tail)
        return False

    def _borrowed(
        self, number: int, arguments: Mapping[str, object], prompt: Rendering
    ) -> Rendering | None:
        """Render the answer with a call appended; None if this does not keep its reasoning."""
        if "tool_calls" in self._raw[number]:
            return None
        # Kimi K2-Thinking and K2.5 write reasoning only in turns that call a tool.
        try:
            called = self._talk.prefix(number + 1, arguments, calls=PROBE_CALL)
            start = self._start(number, prompt, called)
        except RefusedError:
            return None
        own = called.own(number, start or 0)
        if start is None or not own:
            return None
        body = called.between(start, own[-1].end)
        constants = b"".join(part.encode() for part in body.parts if isinstance(part, str))
        is_between = PROBE_NAME.encode() in constants  # the call is between the texts
        return None if is_between or check_answer(self._talk, number, body) else body

    def _check_tagged(self, number: int, body: Rendering) -> None:
        """Refuse tagged reasoning that is opened again after a prompt that already opened it.

        Raises:
            RefusedError: `<think>` comes twice, or the template closes it before the text.
        """
        is_opened = bool(re.match(BEGINS_THOUGHT, self._raw[number]["content"] or ""))
        question = Predicate("matches", BEGINS_THOUGHT, is_opened)
        self._talk.trace.predicates.add((("content", number), question))
        first = min((o.start for o in body.occurrences), default=0)
        if body.text.lstrip().startswith(b"<think>") or b"</think>" in body.text[:first]:
            raise RefusedError(
                "thought_lost",
                f"the prompt before message {number} (assistant) opens a thinking block, and the "
                "template writes the reasoning in the message's text as another one. Put the "
                "reasoning in a separate field (reasoning_content), with format.thought_end if "
                "the template does not write that field, or set format.reasoning: strip",
            )

    def _no_reasoning(self, number: int, opened: bytes) -> RefusedError:
        end = "" if self._facts.writes_thoughts else " and set format.thought_end"
        return RefusedError(
            "no_reasoning",
            f"the prompt before message {number} (assistant) opens a thinking block "
            f"({shown(opened)}), but the message has no reasoning. Add reasoning{end}, set "
            f"format.template to a Jinja file whose prompt does not open one, or {NOT_TRAINED}",
        )

    def _stop_inside(
        self, number: int, arguments: Mapping[str, object], body: Rendering, last: bytes
    ) -> RefusedError:
        """Return the error for an answer that contains stop tokens, with a fix for the first."""
        inside = [m for m in body.controls(self._control) if m.group() in self._facts.stops]
        found, at = body.occurrences, inside[0].start()
        before = next((o for o in reversed(found) if o.end <= at), None)
        after = next((o for o in found if o.start >= at), None)
        others = self._facts.stops - {m.group() for m in inside}
        if last in others and others & self._facts.plain_stops:
            remedy = f"Set format.stop_tokens: {json.dumps(sorted(map(bytes.decode, others)))}"
        elif before and is_thought(before) and not self._facts.needs_thought:
            remedy = "Set format.reasoning: strip"
        elif before and after and self._can_stand_apart(number, arguments, before, after):
            remedy = "Put the text after it in a separate message"
        else:
            remedy = "Set format.template to a Jinja file that writes it only at the end"
        return RefusedError(
            "stop_inside",
            f"the template writes the stop token {inside[0].group().decode()!r} inside message "
            f"{number} (assistant), so the model would stop there. {remedy}, or {NOT_TRAINED}",
        )

    def _can_stand_apart(
        self, number: int, arguments: Mapping[str, object], before: Occurrence, after: Occurrence
    ) -> bool:
        """Return True if the text after a stop token could be moved to a separate message."""
        # A call can if the template writes a generation prompt after the text before it. Nemotron
        # Nano v2 does not: it continues the last answer without a header.
        calls = ("call", "function")
        if after.field.kind not in calls or before.field.kind in calls:
            return after.field.kind in calls
        with suppress(RefusedError):
            text = self._talk.prefix(number + 1, arguments, calls=())
            prompt = self._talk.prefix(number + 1, arguments, calls=(), is_prompt=True)
            return prompt.text.startswith(text.text)
        return False

    # The end of an answer.

    def _closing(
        self, number: int, arguments: Mapping[str, object], finished: Rendering, at: int
    ) -> Closing:
        """Return the template's text after the answer's last own text, which ends at `at`.

        Raises:
            RefusedError: no stop token follows it.
        """
        rest = finished.between(at, len(finished.text))
        following = [*rest.controls(self._control)]
        for match in following:  # in the row's own text, a stop token is text
            if match.group() in self._facts.stops:
                return Closing(rest, rest.text[: match.end()], match.group())
        # GLM writes the stop token as the header of the next turn: `<|user|>` after an answer,
        # `<|observation|>` after a call. So one more message is rendered to see it.
        calls = self._raw[number].get("tool_calls") and self._talk.messages[number]["tool_calls"]
        probes: Messages = [] if calls else [{"role": "user", "content": PROBE_TEXT}]
        for call in calls or ():
            probe = {"role": "tool", "content": PROBE_TEXT, "name": function_of(call).get("name")}
            probe["tool_call_id"] = isinstance(call, dict) and call.get("id")
            probes.append({key: value for key, value in probe.items() if value})
        with suppress(RefusedError):
            longer = self._talk.prefix(number + 1, arguments, then=probes)
            next_start = min((o.start for o in longer.own(number + 1)), default=0)
            own_end = max([o.end for o in longer.own(number)], default=0)
            if not own_end and longer.text.startswith(finished.text[:at]):  # no own text
                own_end = at
            gap = longer.between(own_end, next_start)
            controls = [*gap.controls(self._control)]
            stop = next((m for m in controls if m.group() in self._facts.stops), None)
            if gap.text.startswith(rest.text.rstrip(b"\n")) or not rest.text.strip():
                following += controls
                if stop is not None:
                    ending = gap.between(0, stop.end())
                    return Closing(ending, ending.text, stop.group())
        known = sorted(stop.decode() for stop in self._facts.stops)
        others = [m.group().decode() for m in following if m.group() not in self._facts.stops]
        remedy = "Set format.template to a Jinja file that ends the message with one"
        if others:
            remedy = f"Set format.stop_tokens: {json.dumps([*known, others[0]])}"
        raise RefusedError(
            "no_stop",
            f"no stop token ({', '.join(known)}) follows message {number} (assistant), only "
            f"{shown(rest.text[:40])}. {remedy}, or {NOT_TRAINED}",
        )


def in_blocks(number: int, rendering: Rendering, start: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges of an answer that a template's generation blocks select.

    If one block has all texts of the answer, this is the whole completion, because a header or stop
    token outside the block is generated too. Otherwise it is the blocks and the stop token.

    Args:
        number: index of the answer.
        rendering: has the blocks.
        start: start of the completion in it.
        end: end of the completion, after the stop token; may be past the end of the rendering.

    Raises:
        RefusedError: no block contains the last text of the answer.
    """
    own = rendering.own(number, start)
    first, last = (own[0].start, own[-1].end) if own else (start, start)
    blocks: list[tuple[int, int]] = []
    for a, b in rendering.generation:
        a, b = max(a, start), min(b, end)
        if a < b and blocks and blocks[-1][1] == a:  # [0, 3) and [3, 5) are one block
            a, _ = blocks.pop()
        if a < b:
            blocks.append((a, b))
    if not blocks or blocks[-1][1] < last or (own and blocks[-1][0] >= last):
        raise RefusedError(
            "template",
            f"message {number} (assistant) does not end inside a generation block of the "
            "template. Put {% generation %} right after the assistant's header and {% "
            "endgeneration %} right after the end token, or remove the tags",
        )
    if len(blocks) == 1 and blocks[0][0] <= first:
        return [(start, end)]
    return [*blocks[:-1], (blocks[-1][0], end)]

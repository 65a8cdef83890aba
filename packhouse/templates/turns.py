r"""The rule for what is trained: answers as inference asks for them, and as the model writes them.

    prompt      <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    completion                                                         Hello!<|im_end|>

The prompt `P` is what the template writes for the messages before the answer with
`add_generation_prompt`. The completion `C` is what it writes for the answer after that prompt, up
to the first stop token after the answer's own text. Where the template writes the stop token only
as the next turn's header (GLM), one more message is rendered to see it.

Templates that rewrite history (Qwen3 drops earlier reasoning) give a conversation several records:
an answer joins the record before it if `P` continues that record, else it starts a new one. So
every answer is trained after the prompt that it will have.

Each answer costs two renderings of the messages up to it. In long rows (over `MAX_PROVEN` answers)
one is proven for each kind of answer, and the last one against the whole record: the cost then
grows with the text that is written.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from packhouse.recipe import FormatConfig
from packhouse.templates.chat_messages import Messages
from packhouse.templates.losses import check_answer, is_thought
from packhouse.templates.predicates import Predicate
from packhouse.templates.provenance import Piece
from packhouse.templates.rendering import Conversation, Occurrence, Rendering, join_renderings
from packhouse.templates.results import RefusedError, Trained
from packhouse.templates.template_facts import TemplateFacts

PROBE_NAME = "Likewise"
PROBE_CALL = [
    {"type": "function", "id": "call00000", "function": {"name": PROBE_NAME, "arguments": {}}}
]
PROBE_TEXT = "Therefore"
MAX_PROVEN = 16  # answers of a row of which each is rendered; in longer rows, one of each kind
FREE_MESSAGES = 2**18  # messages of prompts that a row may cost, beyond 64 for each of its own


@dataclass(frozen=True, slots=True)
class Turn:
    """One trained answer, as inference sees it."""

    message: int
    prompt: Rendering
    completion: Rendering
    """From the end of the prompt on; what follows the stop token is not trained."""
    end: int
    """Bytes of the completion up to and with its stop token."""
    stop: bytes
    """That token."""
    trained: tuple[tuple[int, int], ...]
    """Ranges of the completion: all of it, or what generation blocks leave of it."""
    notes: tuple[str, ...] = ()


@dataclass
class Record:
    """One text: a prompt, and the completions that follow one another in it."""

    rendering: Rendering
    end: int
    """Bytes up to and with the stop token of its last answer."""
    stop: bytes
    """That token."""
    spans: list[Trained]
    num_messages: int
    """Messages of the row that it has."""
    turns: list[int]
    """Messages that it trains."""


@dataclass
class Records:
    """What a conversation gives."""

    records: list[Record] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


def make_records(
    raw: Messages,
    talk: Conversation,
    wanted: Sequence[int],
    config: FormatConfig,
    facts: TemplateFacts,
    control: re.Pattern[bytes],
) -> Records:
    """Make the records of a conversation.

    Args:
        raw: canonical messages.
        talk: the conversation.
        wanted: numbers of the answers that are trained, ascending; at least one.
        config: the recipe's format section; `turns` is `joined`, `exact` or `alone`.
        facts: what probes showed of the template.
        control: matches control tokens.

    Raises:
        RefusedError: an answer cannot be trained as inference would have it.
    """
    return _RowTurns(raw, talk, config, facts, control).records(wanted)


class _RowTurns:
    def __init__(
        self,
        raw: Messages,
        talk: Conversation,
        config: FormatConfig,
        facts: TemplateFacts,
        control: re.Pattern[bytes],
    ) -> None:
        self._raw, self._talk, self._config = raw, talk, config
        self._facts, self._control = facts, control
        self._roles = talk.roles
        self._thinks = [self._has_thought(number) for number in range(len(raw))]
        self._exchange = exchanges(self._roles)
        self._thinking = {
            self._exchange[number] for number, thinks in enumerate(self._thinks) if thinks
        }

    def records(self, wanted: Sequence[int]) -> Records:
        is_long = len(wanted) > MAX_PROVEN and self._config.turns != "alone"
        if is_long and (made := self._long_record(wanted)) is not None:
            return made
        made = Records()
        for number in wanted:
            turn = self.turn(number)
            made.notes.update(turn.notes)
            can_join = made.records and self._config.turns != "alone"
            joined = self._join(made, turn) if can_join else None
            if joined is not None:
                record = made.records[-1]
                start = len(joined.text)
            else:
                joined, start = turn.prompt, len(turn.prompt.text)
                record = Record(joined, 0, b"", [], 0, [])
                made.records.append(record)
            record.rendering = joined + turn.completion
            record.end, record.stop = start + turn.end, turn.stop
            record.spans += [Trained(start + a, start + b, number) for a, b in turn.trained]
            record.turns.append(number)
            record.num_messages = number + 1
            self._check_budget(made)
        self._extend(made.records[-1])
        return made

    # Long rows.

    def _long_record(self, wanted: Sequence[int]) -> Records | None:
        """The one record of a row of many answers; None where each has to be rendered.

        The prompt of the last answer has all other answers. Those of a kind differ from it in the
        same way: in header and closing. The first of each kind shows how, and the last answer is
        compared with the whole record.
        """
        try:
            arguments = self._arguments(wanted[-1])[0][0]
            whole = self._talk.prefix(wanted[-1], arguments, is_prompt=True)
        except RefusedError:
            return None
        kinds = _Kinds(whole, self._talk, [at in self._thinking for at in self._exchange])
        made, known = Records(), dict[object, _Kind]()
        record = Record(whole, 0, b"", [], 0, [])
        pieces: list[Rendering | bytes] = []
        turn: Turn | None = None
        for number in wanted:
            own, key = kinds.own(number), kinds.key(number)
            kind = known.get(key)
            if kind is not None and own is not None and number != wanted[-1]:
                head = whole.between(kinds.end + kind.skipped, own.before)
                body = whole.between(own.first, own.last)
                start = record.end + len(head.text) + len(kind.header)
                end = start + len(kind.opening) + len(body.text) + len(kind.closing)
                pieces += [head, kind.header + kind.opening, body, kind.closing]
                record.stop = kind.stop
                made.notes.update(kind.notes)
            else:
                turn = self.turn(number)
                notes = Counter(turn.notes)
                record.rendering = join_renderings(pieces)
                joined: Rendering | None = turn.prompt
                if pieces:
                    num_rewritten = made.notes["rewritten_prompts"]
                    joined = self._join(made, turn)
                    notes["rewritten_prompts"] = made.notes["rewritten_prompts"] - num_rewritten
                    made.notes["rewritten_prompts"] = num_rewritten
                if joined is None or turn.trained != ((0, turn.end),):
                    return None
                if number != wanted[-1]:
                    shown = kinds.compare(record, joined, turn, notes)
                    if shown is None:
                        return None
                    known[key] = shown
                start = len(joined.text)
                end = start + turn.end
                pieces = [joined, turn.completion.between(0, turn.end)]
                record.stop = turn.stop
                made.notes.update(notes)
            made.records = [record]
            record.spans.append(Trained(start, end, number))
            record.turns.append(number)
            record.end, record.num_messages = end, number + 1
            kinds.advance(number)
            self._check_budget(made)
        assert turn is not None, "the last answer is rendered"
        record.rendering = join_renderings([*pieces[:-1], turn.completion])
        self._extend(record)
        return made

    def _extend(self, last: Record) -> None:
        """Append the messages after the last trained answer where these change nothing before."""
        if last.num_messages == len(self._raw):
            return
        done = last.rendering.text[: last.end]
        try:
            whole = self._talk.prefix(len(self._raw), self._arguments(len(self._raw) - 1)[0][0])
        except RefusedError:
            return
        if whole.text.startswith(done):
            last.rendering, last.num_messages = whole, len(self._raw)

    def _check_budget(self, made: Records) -> None:
        written = sum(record.num_messages for record in made.records)
        if self._talk.num_rendered > FREE_MESSAGES + 64 * len(self._raw) + 4 * written:
            raise RefusedError(
                "template_limit",
                f"the {len(self._raw):,} messages are rendered in so many ways that it takes too "
                "long to prove each prompt; split the conversation before it is read",
            )

    # Arguments: the thinking switch.

    def _has_thought(self, number: int) -> bool:
        message = self._raw[number]
        if message["role"] != "assistant":
            return False
        if message.get("reasoning"):
            return True
        content = message["content"] or ""
        is_tagged = "</think>" in content
        facts = self._facts
        if content and (facts.switch or facts.opens_thought or facts.opened):
            # It decides what this row becomes: other rows of its shape may have none.
            question = Predicate("contains", "</think>", is_tagged)
            self._talk.trace.predicates.add((("content", number), question))
        return is_tagged

    def _arguments(self, number: int) -> list[tuple[dict[str, object], bool | None]]:
        """Arguments to try for an answer, and whether they ask for a thought (None: no switch)."""
        switch = self._facts.switch
        if switch is None or switch.name in self._talk.given.arguments:
            return [({}, None)]
        on, off = {switch.name: switch.thinking}, {switch.name: switch.plain}
        if self._exchange[number] in self._thinking:
            return [(on, True), (off, False)]
        return [(off, False)]

    # One answer.

    def turn(self, number: int) -> Turn:
        """The prompt and the completion of one answer.

        Raises:
            RefusedError: it has none.
        """
        refused: RefusedError | None = None
        for arguments, thinks in self._arguments(number):
            try:
                turn = self._turn(number, arguments)
            except RefusedError as error:
                refused = refused or error
                if self._thinks[number]:  # a thought needs the prompt that asks for it
                    break
                continue
            notes = list(turn.notes)
            if thinks is not None:
                notes.append("thinking_turns" if thinks else "plain_turns")
            if refused is not None:
                notes.append("turns_without_thought")
            return replace(turn, notes=tuple(notes))
        assert refused is not None
        raise refused

    def _turn(self, number: int, arguments: Mapping[str, object]) -> Turn:
        finished = self._talk.prefix(number + 1, arguments)
        prompt = self._prompt(number, arguments, finished)
        start = self._start(number, prompt, finished)
        own_end = max([start or 0, *(o.end for o in finished.own(number, start or 0))])
        closing = self._closing(number, arguments, finished, own_end)
        notes: list[str] = []
        if start is None:
            body = self._with_thought_end(number, finished)
        else:
            body = finished.between(start, own_end)
            if self._check_answer(number, body):
                borrowed = self._borrowed(number, arguments, prompt)
                if borrowed is not None:
                    body = borrowed
                    notes.append("borrowed_thoughts")
                else:
                    body = self._with_thought_end(number, finished)
        self._check_answer(number, body)
        opens = self._facts.opens_thought and self._facts.switch is None
        if opens and not self._thinks[number]:
            raise self._no_reasoning(number, prompt.text[-20:])
        inside = [m.group() for m in body.controls(self._control) if m.group() in self._facts.stops]
        if inside:
            raise RefusedError(
                "stop_inside",
                f"the template writes the stop token {inside[0].decode()!r} inside message "
                f"{number} (assistant): the model would stop there. Split the message in two, or "
                "leave that token out of format.stop_tokens",
            )
        end = len(body.text) + closing.stop
        completion = body + closing.rendering
        trained: tuple[tuple[int, int], ...] = ((0, end),)
        if finished.generation and start is not None and not notes:
            trained = tuple(in_blocks(number, finished, start, start + end))
            trained = tuple((a - start, b - start) for a, b in trained)
        return Turn(number, prompt, completion, end, closing.token, trained, tuple(notes))

    def _prompt(
        self, number: int, arguments: Mapping[str, object], finished: Rendering
    ) -> Rendering:
        if number:
            return self._talk.prefix(number, arguments, is_prompt=True)
        # No message comes before the first answer. Templates that refuse an empty conversation
        # show where it begins by the header that they write after a question.
        try:
            empty = self._talk.prefix(0, arguments, is_prompt=True)
        except RefusedError:
            empty = None
        if empty is not None and finished.text.startswith(empty.text):
            return empty
        own = finished.own(0)
        opening = self._facts.opening
        at = finished.text.rfind(opening, 0, own[0].start if own else len(finished.text))
        if at < 0 or not opening:
            raise RefusedError("template", f"message 0 (assistant) does not begin with {opening!r}")
        return finished.between(0, at + len(opening))

    def _start(self, number: int, prompt: Rendering, finished: Rendering) -> int | None:
        """Where the completion begins in `finished`; None: the prompt opens a lost thought.

        Raises:
            RefusedError: the prompt does not lead to the answer.
        """
        if finished.text.startswith(prompt.text):
            return len(prompt.text)
        anchor = prompt.occurrences[-1] if prompt.occurrences else None
        tail = prompt.text[anchor.end if anchor else 0 :]
        first = self._first_own(number, finished)
        is_lost = not any(map(is_thought, finished.own(number)))
        if self._raw[number].get("reasoning") and is_lost:
            return None
        gap, opened = tail[:0], self._facts.opened
        for place in reversed(finished.occurrences):
            if anchor is None or not place.is_same_text(anchor):
                continue
            gap = finished.text[place.end : max(first, place.end)]
            if finished.text.startswith(tail, place.end):
                return place.end + len(tail)
            if opened and gap.startswith(tail.removesuffix(opened)) and tail.endswith(opened):
                if self._thinks[number]:
                    return None
                raise self._no_reasoning(number, opened)
            break
        raise RefusedError(
            "template",
            f"the prompt before message {number} (assistant) does not lead to it: the prompt ends "
            f"in {tail[-40:]!r}, the conversation goes on with {gap[-40:]!r}",
        )

    def _first_own(self, number: int, finished: Rendering) -> int:
        own = finished.own(number)
        return own[0].start if own else len(finished.text)

    def _with_thought_end(self, number: int, finished: Rendering) -> Rendering:
        """Reasoning, `format.thought_end` and the answer, for templates that drop reasoning."""
        end, message = self._config.thought_end, self._raw[number]
        if end is None or not message.get("reasoning"):
            advice = (
                "Set format.thought_end to the text between reasoning and answer"
                if message.get("reasoning")
                else "Put the reasoning into a field of its own (reasoning_content) and set "
                "format.thought_end"
            )
            raise RefusedError(
                "thought_lost",
                f"the template leaves out the reasoning of message {number} (assistant). {advice}, "
                "or format.reasoning: strip",
            )
        own = [o for o in finished.own(number) if o.field.kind != "thought"]
        answer = finished.between(own[0].start, own[-1].end) if own else finished.between(0, 0)
        thought = next(
            f for f in self._talk.trace.fields if f.kind == "thought" and f.message == number
        )
        size = len(thought.value.encode())
        reasoning = Rendering(
            thought.value.encode(),
            [Piece(thought.value, thought, 0, len(thought.value))],
            [0],
            [Occurrence(thought, 0, size, 0, len(thought.value))],
            [],
        )
        return reasoning + end.encode() + answer

    def _borrowed(
        self, number: int, arguments: Mapping[str, object], prompt: Rendering
    ) -> Rendering | None:
        """The answer's texts as the template writes them with a call: some keep thoughts there."""
        if "tool_calls" in self._raw[number]:
            return None
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
        if PROBE_NAME.encode() in constants:  # the call stands between the texts
            return None
        return None if self._check_answer(number, body) else body

    def _check_answer(self, number: int, body: Rendering) -> list[str]:
        """Thoughts of an answer that a completion leaves out; all else of it has to be there."""
        is_stripped = self._config.reasoning == "strip"
        return check_answer(self._talk, number, body, is_stripped=is_stripped)

    def _no_reasoning(self, number: int, opened: bytes) -> RefusedError:
        return RefusedError(
            "no_reasoning",
            f"the prompt before message {number} (assistant) opens a thought ({opened.decode()!r})"
            ", and the message has none. Give the rows reasoning, or take a template that can be "
            "asked without",
        )

    # The end of an answer.

    def _closing(
        self, number: int, arguments: Mapping[str, object], finished: Rendering, at: int
    ) -> "_Closing":
        """What the template writes after the answer's last own text, byte `at`.

        Raises:
            RefusedError: no stop token follows it.
        """
        rest = finished.between(at, len(finished.text))
        for match in rest.controls(self._control):
            if match.group() in self._facts.stops:
                return _Closing(rest, match.end(), match.group())
        calls = self._raw[number].get("tool_calls") and self._talk.messages[number]["tool_calls"]
        probes: Messages = [{"role": "user", "content": PROBE_TEXT}]
        if calls:
            probes = [_probe_result(call) for call in calls]
        try:
            longer = self._talk.prefix(number + 1, arguments, then=probes)
        except RefusedError:
            longer = None
        if longer is not None:
            next_start = min((o.start for o in longer.own(number + 1)), default=-1)
            own_end = max([o.end for o in longer.own(number)], default=-1)
            if own_end < 0 and longer.text.startswith(finished.text[:at]):  # it has no text
                own_end = at
            gap = longer.between(max(own_end, 0), max(next_start, 0))
            for match in gap.controls(self._control):
                if match.group() in self._facts.stops:
                    is_same = gap.text.startswith(rest.text.rstrip(b"\n"))
                    if is_same or not rest.text.strip():
                        return _Closing(gap.between(0, match.end()), match.end(), match.group())
                    break
        known = ", ".join(sorted(stop.decode() for stop in self._facts.stops))
        raise RefusedError(
            "no_stop",
            f"no stop token ({known}) follows message {number} (assistant), but "
            f"{rest.text[:40]!r}. Name the token that ends it in format.stop_tokens",
        )

    # Records.

    def _join(self, made: Records, turn: Turn) -> Rendering | None:
        """The record so far and what the prompt adds to it; None: the prompt is another text."""
        record, prompt = made.records[-1], turn.prompt
        done = record.rendering.text[: record.end]
        if prompt.text.startswith(done):
            return prompt
        if self._config.turns != "joined":
            return None
        written = [o for o in record.rendering.occurrences if o.end <= record.end]
        others = prompt.occurrences[: len(written)]
        is_same = len(others) == len(written) and all(
            one.is_same_text(other) for one, other in zip(written, others, strict=True)
        )
        if not is_same or not written:
            return None
        begin = others[-1].end
        stop = (
            prompt.occurrences[len(written)].start
            if len(prompt.occurrences) > len(written)
            else None
        )
        gap = prompt.text[begin : len(prompt.text) if stop is None else stop]
        closing = done[written[-1].end :]
        size = self._closing_in_history(prompt, begin, gap, closing, record.stop)
        if size is None:
            return None
        made.notes["rewritten_prompts"] += 1
        return record.rendering.between(0, record.end) + prompt.between(
            begin + size, len(prompt.text)
        )

    def _closing_in_history(
        self, prompt: Rendering, begin: int, gap: bytes, closing: bytes, stop: bytes
    ) -> int | None:
        """Bytes of the gap after an answer that stand for its closing; None: it is not shown.

        `<|return|>` became `<|end|>`: a control token that ends turns of others as well.
        """
        if gap.startswith(closing):
            return len(closing)
        match = next(prompt.controls(self._control, begin, begin + len(gap)), None)
        if match is None:
            return None
        enders = set[bytes]()
        found = prompt.occurrences
        for one, other in pairwise(found):
            if one.field.message >= 0 and self._roles[one.field.message] != "assistant":
                token = next(prompt.controls(self._control, one.end, other.start), None)
                enders |= {token.group()} if token else set()
        if found:
            token = next(prompt.controls(self._control, found[-1].end), None)
            enders |= {token.group()} if token else set()
        before = closing.removesuffix(stop)
        if match.group() in enders and gap[: match.start() - begin] == before:
            return match.end() - begin
        if gap.startswith(before) and self._control.search(before):
            return len(before)  # "<|end|>\n" without the EOS that ends the last turn
        return None


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the answers of a kind differ from the rendering that has all of them."""

    skipped: int
    """Bytes after the answer before, which its closing stands for."""
    header: bytes
    """What the prompt ends with, after its last text."""
    opening: bytes
    """What the completion begins with, before the answer's first text."""
    closing: bytes
    stop: bytes
    notes: Counter[str]


class _Own(NamedTuple):
    """Where an answer is, in bytes of the whole rendering."""

    before: int
    """End of the last text before it."""
    first: int
    last: int


class _Kinds:
    """The answers of a long row by what decides how a template writes them.

    That is: what the messages around an answer have and what the template asked of their texts,
    what kinds of messages the record has so far, and the template's own text around the answer.
    """

    def __init__(self, whole: Rendering, talk: Conversation, thinking: Sequence[bool]) -> None:
        self._whole, self._thinking = whole, thinking
        self.end = 0
        """Where the answer before ends in the whole rendering."""
        asked: list[set[object]] = [set() for _ in talk.messages]
        for (kind, *at), predicate in talk.trace.predicates:
            if kind in ("content", "thought", "name", "tool_call_id"):
                asked[at[0]].add((kind, predicate))
        for message, question in talk.trace.unrecorded:
            if message >= 0:
                asked[message].add(question)
        self._signs = [
            (message["role"], *sorted(key for key in message if message[key]), frozenset(own))
            for message, own in zip(talk.messages, asked, strict=True)
        ]
        self._seen: frozenset[object] = frozenset()
        self._num_seen = 0
        self._before: object = None
        self._places: dict[int, list[int]] = {}
        for place, occurrence in enumerate(whole.occurrences):
            self._places.setdefault(occurrence.field.message, []).append(place)

    def own(self, number: int) -> _Own | None:
        places, found = self._places.get(number), self._whole.occurrences
        if not places or places[-1] - places[0] + 1 != len(places):
            return None
        before = found[places[0] - 1].end if places[0] else 0
        return _Own(before, found[places[0]].start, found[places[-1]].end)

    def key(self, number: int) -> object:
        own = self.own(number)
        if own is None:
            return None
        shape, after = self._whole.shape, self._places[number][-1] + 1
        found = self._whole.occurrences
        stop = found[after].start if after < len(found) else len(shape)
        around = tuple(self._signs[max(number - 2, 0) : number + 1])
        gaps = shape[own.before : own.first], shape[own.last : stop]
        return (self._before, around, self._thinking[number], self._seen, gaps)

    def advance(self, number: int) -> None:
        own = self.own(number)
        key = self.key(number)
        self._before = key[1:3] if isinstance(key, tuple) else None
        self._seen |= {*self._signs[self._num_seen : number + 1]}
        self._num_seen = number + 1
        self.end = own.last if own else self.end

    def compare(
        self, record: Record, joined: Rendering, turn: Turn, notes: Counter[str]
    ) -> _Kind | None:
        """What an answer that was rendered alone shows of its kind; None: of no other."""
        own, places = self.own(turn.message), self._places.get(turn.message, [])
        texts = turn.completion.own(turn.message)
        found = [self._whole.occurrences[place] for place in places]
        is_same = len(found) == len(texts) and all(
            one.is_same_text(other) for one, other in zip(found, texts, strict=True)
        )
        if own is None or not is_same or not joined.occurrences:
            return None
        first, last, end = texts[0].start, texts[-1].end, joined.occurrences[-1].end
        between, shown = joined.text[record.end : end], self._whole.text[self.end : own.before]
        is_written = self._whole.text[own.first : own.last] == turn.completion.text[first:last]
        if not is_written or not shown.endswith(between):
            return None
        return _Kind(
            len(shown) - len(between),
            joined.text[end:],
            turn.completion.text[:first],
            turn.completion.text[last : turn.end],
            turn.stop,
            notes,
        )


class _Closing(NamedTuple):
    rendering: Rendering
    stop: int
    """Bytes up to and with the stop token."""
    token: bytes


def _probe_result(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    own: dict[str, Any] = {"role": "tool", "content": PROBE_TEXT}
    if isinstance(call, dict) and call.get("id"):
        own["tool_call_id"] = call["id"]
    if isinstance(function, dict) and function.get("name"):
        own["name"] = function["name"]
    return own


def exchanges(roles: Sequence[str]) -> list[int]:
    """Number the exchanges of a conversation: a user turn and all up to the next.

    Example:
        >>> exchanges(["system", "user", "assistant", "user", "assistant"])
        [0, 1, 1, 2, 2]
    """
    return list(accumulate(int(role == "user") for role in roles))


def merge_touching(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that touch.

    Example:
        >>> merge_touching([(0, 3), (3, 5), (6, 7)])
        [(0, 5), (6, 7)]
    """
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, end))
    return merged


def in_blocks(number: int, rendering: Rendering, start: int, end: int) -> list[tuple[int, int]]:
    """What a template's generation blocks leave of an answer.

    All of it where a block has all of its texts: a header or a stop token that the tags leave out
    is generated as well. Else what is in blocks, and the stop token.

    Args:
        number: of the answer.
        rendering: has the blocks.
        start: where the completion begins in it.
        end: after its stop token, which the rendering may not have.

    Raises:
        RefusedError: no block has the last text of the answer.
    """
    own = rendering.own(number, start)
    first, last = (own[0].start, own[-1].end) if own else (start, start)
    blocks = [(max(a, start), min(b, end)) for a, b in rendering.generation]
    blocks = merge_touching([(a, b) for a, b in blocks if a < b])
    if not blocks or blocks[-1][1] < last or (own and blocks[-1][0] >= last):
        raise RefusedError(
            "template",
            f"message {number} (assistant) does not end in a generation block of the template. Put"
            " {% generation %} right after the assistant's header and {% endgeneration %} right"
            " after the end token, or take the tags out",
        )
    if len(blocks) == 1 and blocks[0][0] <= first:
        return [(start, end)]
    return [*blocks[:-1], (blocks[-1][0], end)]

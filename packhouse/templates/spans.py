r"""Which bytes of a rendering are trained, proven from the template's own behaviour.

An answer is trained from where the prompt of inference ends to the token that ends the turn:

    <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n
                                                          ^^^^^^^^^^^^^^^^
- Its start comes from rendering the turns before it with `add_generation_prompt=True`: that is the
  prompt a model continues. Templates without a generation prompt (Mistral) start a turn where the
  turns before it end; a header they write there (`ASSISTANT:`) is no part of the turn.
- Its end is the first end-of-turn token that the template writes behind the turn's own text. Which
  token that is comes from a probe conversation, and must be the same for every turn.
- A template with `{% generation %}` blocks says so itself, and is taken at its word; but what the
  prompt of inference holds is given to the model, and is cut from the beginning of a block.

Other turns (`never_train`, a weight on a user turn) end where the conversation rendered up to them
stops agreeing with the whole rendering.

A prompt is rendered once for each kind of gap between two texts, not for each answer: the cost
grows with the number of turns. Where nothing is shown, the template (`TemplateError`) or the row
(`RefusedError`) is refused.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from packhouse.recipe import FormatConfig
from packhouse.templates.losses import is_thought
from packhouse.templates.provenance import UNPROVEN
from packhouse.templates.rendering import Conversation, Occurrence, Rendering
from packhouse.templates.results import RefusedError
from packhouse.templates.thinking import thought_spans
from packhouse.templates.turn_rules import TurnRules

__all__ = ["SpanFinder", "Trained"]

Messages = list[dict[str, Any]]

FREE_MESSAGES = 2**18  # messages of prompts that a row may cost, beyond 64 for each of its own


class Trained(NamedTuple):
    """A trained span in bytes of the text, and the message whose weight it has; -1: it is 1."""

    start: int
    end: int
    message: int


class SpanFinder:
    """Finds the trained spans of renderings of one template.

    Args:
        config: the recipe's format section.
        rules: a row's arguments -> turn rules; None where the template marks what is generated.
        control: matches control tokens.
    """

    def __init__(
        self,
        config: FormatConfig,
        rules: Callable[[Mapping[str, Any]], TurnRules | None],
        control: re.Pattern[bytes],
    ) -> None:
        self._config, self._rules, self._control = config, rules, control

    def find(self, raw: Messages, talk: Conversation) -> list[Trained]:
        """Trained spans of a conversation's rendering, ascending; there is at least one.

        Args:
            raw: canonical messages, each with the weight decided for it.
            talk: the conversation.

        Raises:
            RefusedError: none is trained, or a span cannot be shown.
        """
        weights = [message["weight"] for message in raw]
        if not any(weights):
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        places = _Places(talk, self._control)
        if self._config.train_on == "all":
            apart = {at for at, message in enumerate(raw) if "part_weights" in message}
            if not (self._config.never_train or apart) and all(w == 1 for w in weights):
                return [Trained(0, len(talk.rendering.text), -1)]
            return _whole_messages(weights, places, apart)
        wanted = [n for n, role in enumerate(talk.roles) if role == "assistant" and weights[n] > 0]
        rules = self._rules(talk.given.arguments)
        if rules is None or rules.is_tagged:
            blocks = list(_generated(talk.rendering, talk.roles, weights, wanted))
            starts = [places.start(block.message, rules) if rules else 0 for block in blocks]
            trained = [
                block._replace(start=max(block.start, start))
                for block, start in zip(blocks, starts, strict=True)
                if start < block.end
            ]
        else:
            trained = [Trained(*places.answer(number, rules), number) for number in wanted]
        others = sorted({n for n, weight in enumerate(weights) if weight > 0} - set(wanted))
        if others:
            firsts, ends, _ = places.boundaries()
            trained += [Trained(firsts[number], ends[number], number) for number in others]
        if self._config.reasoning == "train_last":
            trained = _without_earlier_thoughts(trained, talk)
        if not trained:
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        return sorted(trained)


class _Places:
    """Where the messages of one rendering are, as spans of its bytes."""

    def __init__(self, talk: Conversation, control: re.Pattern[bytes]) -> None:
        self._talk, self._control = talk, control
        self._known: dict[tuple[Any, ...], int] = {}
        """Bytes of a gap that are a header, or that close a turn: by what decides about it."""
        self._roles, self._text = talk.roles, talk.rendering.text
        self._found = talk.rendering.occurrences
        self._own: list[list[int]] = [[] for _ in talk.messages]
        for number, occurrence in enumerate(self._found):
            if occurrence.field.message >= 0:
                self._own[occurrence.field.message].append(number)
        # Of each message: the first occurrence of any message behind it.
        self._behind = [behind := len(self._found)] * len(self._own)
        for number in reversed(range(len(self._own))):
            self._behind[number] = behind
            behind = min([behind, *self._own[number][:1]])
        self._left = FREE_MESSAGES + 64 * len(self._own)
        self._num_questions = talk.trace.num_questions
        self._asked = [set[Any]() for _ in self._own]
        """What the rendering of all messages asked of each one's texts, and the answers."""
        for (kind, *at), predicate in talk.trace.predicates:
            if kind in ("content", "thought", "name", "tool_call_id"):
                self._asked[at[0]].add((kind, predicate))
        for message, question in talk.trace.unrecorded:
            if message >= 0:
                self._asked[message].add(question)

    def _prefix(self, number: int, *, is_prompt: bool) -> Rendering:
        self._left -= number
        if self._left < 0:
            raise RefusedError(
                "template_limit",
                f"the template opens the {len(self._own):,} turns in so many ways that it takes too"
                " long to prove where each begins; split the conversation before it is read",
            )
        return self._talk.prefix(number, is_prompt=is_prompt)

    def _length(self, kind: str, number: int, gap: bytes, measure: Callable[[], int]) -> int:
        """A length within a gap before message `number`, measured once for gaps of a kind.

        What decides is the gap itself (with zeros for ids), the roles next to it and the first one,
        and what the template asked of the first message, the last one of the user and the one
        before the gap. (All messages before it would make every gap of a long conversation
        another.) Where the prompt of inference asks what the rendering did not ask, nothing is
        remembered: behind the next message it may be answered otherwise. Nor is anything from row
        to row: the spans of a row depend on that row alone.
        """
        roles = self._roles
        user = next((at for at in range(number - 1, 0, -1) if roles[at] == "user"), 0)
        answers = [frozenset(self._asked[at]) for at in (0, user, number - 1)]
        key = (kind, number < 2, *roles[max(number - 2, 0) : number + 1], *answers, gap)
        length = self._known.get(key)
        if length is None:
            length = measure()
            if self._talk.trace.num_questions == self._num_questions:
                self._known[key] = length
        return length

    def answer(self, number: int, rules: TurnRules) -> tuple[int, int]:
        """Span of an assistant turn."""
        start = self.start(number, rules)
        own = self._own[number]
        first = own[-1] + 1 if own else self._behind[number]  # of what follows the turn
        at = max(self._found[own[-1]].end if own else start, start)
        found_at = -1
        for after in (*self._found[first:], None):
            found_at = self._text.find(rules.end_token, at, after.start if after else None)
            if found_at >= 0 or after is None or after.field.message >= 0:
                break
            at = max(at, after.end)  # an argument of the row, written into the answer
        closing = self._text[at:found_at]
        if found_at < 0 or (rules.before_end in closing and not closing.endswith(rules.before_end)):
            raise RefusedError(
                "template", f"no end token {rules.end_token!r} after message {number} (assistant)"
            )
        return start, found_at + len(rules.end_token)

    def start(self, number: int, rules: TurnRules) -> int:
        """Where an assistant turn begins: where the prompt of inference ends."""
        own, found = self._own[number], self._found
        first = own[0] if own else self._behind[number]
        before = found[first - 1] if first else None
        if own and own[-1] - first + 1 != len(own):
            raise RefusedError("template", f"message {number} (assistant) is torn by other text")
        last_before = before.field.message if before else -1
        if not own and "assistant" in self._roles[last_before + 1 : number]:
            raise RefusedError(
                "template", f"message {number} (assistant) has no text to be found by"
            )
        start = before.end if before else 0
        stop = found[first].start if first < len(found) else len(self._text)
        return start + self._length(
            "answer" if before else "first answer",
            number,
            self._talk.rendering.shape[start:stop],
            lambda: self._header_length(number, before, self._text[start:stop], rules),
        )

    def _header_length(
        self, number: int, before: Occurrence | None, gap: bytes, rules: TurnRules
    ) -> int:
        """Bytes of the gap that the prompt of inference holds, and a header."""
        if number == 0:  # no prompt comes before it
            at = gap.rfind(rules.opening)
            if at < 0:
                raise RefusedError(
                    "template", f"message 0 (assistant) does not begin with {rules.opening!r}"
                )
            return at + len(rules.opening)
        prompt = self._prefix(number, is_prompt=True)
        last = prompt.occurrences[-1] if prompt.occurrences else None
        tail = prompt.text[last.end :] if last else prompt.text
        if (last.field if last else None) is (before.field if before else None):
            if gap.startswith(tail + rules.header):
                return len(tail + rules.header)
            if rules.has_prompt and tail.startswith(gap):
                return len(gap)  # the prompt opens something more, as `<think>`: not in this turn
        raise RefusedError(
            "template",
            f"the prompt before message {number} (assistant) is no beginning of the rendering:"
            f" {tail[-40:]!r} against {gap[-40:]!r}",
        )

    def boundaries(self) -> tuple[list[int], list[int], list[bool]]:
        r"""Where each message's own text begins, and where its closing text ends.

        The last of the three lists says whether tool definitions stand behind its header.

            <|im_start|>user\nhi<|im_end|>\n|<|im_start|>assistant\nhello<|im_end|>\n
                                            ^ the end of message 0

        Raises:
            RefusedError: an end cannot be shown.
        """
        firsts, ends, has_tools = list[int](), list[int](), list[bool]()
        for number, own in enumerate(self._own):
            if not own:
                raise self._unshown(number, "it has no text of its own")
            start = self._found[own[0]].start
            at = own[0] - 1
            while at >= 0 and self._found[at].field.message < 0:
                at -= 1
            if number:
                if at < 0:
                    raise _OTHER_ORDER
                ends.append(self._end(number - 1, self._found[at], start))
            begin = ends[-1] if ends else 0
            tools = self._found[at + 1 : own[0]]
            has_tools.append(any(occurrence.start >= begin for occurrence in tools))
            # One token begins with a word and the template's space before it.
            is_spaced = self._text[max(start - 1, 0) : start] == b" "
            is_own = own[0] > 0 and self._found[own[0] - 1].end == start
            firsts.append(start - 1 if is_spaced and not is_own else start)
        if firsts != sorted(firsts):
            raise _OTHER_ORDER
        return firsts, [*ends, len(self._text)], has_tools

    def _end(self, message: int, anchor: Occurrence, stop: int) -> int:
        shape = self._talk.rendering.shape[anchor.end : stop]
        gap = self._text[anchor.end : stop]
        return anchor.end + self._length(
            "end", message + 1, shape, lambda: self._closing_length(message, anchor, gap)
        )

    def _closing_length(self, message: int, anchor: Occurrence, gap: bytes) -> int:
        """Bytes of the gap behind a message that are its own."""
        try:
            shorter = self._prefix(message + 1, is_prompt=False)
        except RefusedError:
            places = []
        else:
            places = [o.end for o in shorter.occurrences if o.field is anchor.field]
        if places:
            return _agreement(shorter.text[places[-1] :], gap, self._control)
        if self._control.search(gap) is None:
            return 0
        raise self._unshown(message, f"{gap[:40]!r} follows it")

    def _unshown(self, message: int, why: str) -> RefusedError:
        what = f"the end of message {message} ({self._roles[message]}) cannot be shown"
        return RefusedError("template", f"{what}: {why}")


_OTHER_ORDER = RefusedError("template", "messages are not written in their order")


def _agreement(tail: bytes, gap: bytes, control: re.Pattern[bytes]) -> int:
    r"""Bytes that two texts have in common at their beginning, control tokens whole.

    Example:
        >>> _agreement(b"<|end|>\n<|eot|>", b"<|end|>\n<|user|>\n", re.compile(rb"<\|\w+\|>"))
        8
    """
    pairs = zip(tail, gap, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    for match in control.finditer(gap):
        if match.start() < common < match.end():
            return match.start()
    return common


def _whole_messages(weights: list[float], places: _Places, apart: set[int]) -> list[Trained]:
    """Whole messages, headers included; those of weight 1 that touch are one span.

    Those that are `apart`, by weights of their parts, are spans of their own. The opening before
    the first text belongs to no message.
    """
    firsts, ends, has_tools = places.boundaries()
    trained: list[Trained] = []
    for number, weight in enumerate(weights):
        is_headless = number == 0 or has_tools[number]
        start = firsts[number] if is_headless else ends[number - 1]
        last = trained[-1] if trained and apart.isdisjoint((number, number - 1)) else None
        if last is not None and last.end == start and weights[last.message] == weight == 1:
            trained[-1] = last._replace(end=ends[number])
        elif weight > 0:
            trained.append(Trained(start, ends[number], number))
    return trained


def _generated(
    rendering: Rendering, roles: list[str], weights: list[float], wanted: list[int]
) -> Iterator[Trained]:
    """The template's own generation blocks that hold a wanted assistant message.

    Raises:
        RefusedError: a wanted message is in none, or in one with what is not trained as it is.
    """
    found = rendering.occurrences
    starts = [occurrence.start for occurrence in found]
    last_before, at = -1, 0  # the last message that is written before a block
    missing = set(wanted)
    for start, end in rendering.generation:
        first, stop = bisect_left(starts, start), bisect_left(starts, end)
        while at < first:
            last_before = max(last_before, found[at].field.message)
            at += 1
        inside = found[first:stop]
        held = sorted({o.field.message for o in inside})
        if not held and roles[last_before + 1 : last_before + 2] == ["assistant"]:
            held = [last_before + 1]  # a turn without text
        if end <= start or set(wanted).isdisjoint(held):
            continue
        is_one = all(n >= 0 and roles[n] == "assistant" for n in held)
        if not is_one or len({weights[n] for n in held}) > 1 or any(o.end > end for o in inside):
            raise RefusedError(
                "template",
                f"a generation block holds more than the answer of message {held[0]}: "
                "text that is not trained, or not with its weight",
            )
        missing.difference_update(held)
        yield Trained(start, end, held[0])
    if missing:
        raise RefusedError(
            "template",
            f"message {min(missing)} (assistant) is in no generation block; put the tags around "
            "it, or set train_on: last_assistant",
        )


def _without_earlier_thoughts(trained: list[Trained], talk: Conversation) -> list[Trained]:
    """Take thinking out of the answers that are trained before the last user turn."""
    roles, found = talk.roles, talk.rendering.occurrences
    starts = [occurrence.start for occurrence in found]
    last_user = max((n for n, role in enumerate(roles) if role == "user"), default=-1)
    kept: list[Trained] = []
    for start, end, message in trained:
        if message < last_user and roles[message] == "assistant":
            own = found[bisect_left(starts, start) : bisect_left(starts, end)]
            calls = talk.messages[message].get("tool_calls", [])
            # (0, 90) with thoughts at (0, 20) and (40, 50) -> (20, 40), (50, 90)
            for begin, stop in _thoughts_in(start, talk.rendering.text[start:end], own, calls):
                if begin > start:
                    kept.append(Trained(start, begin, message))
                start = max(start, stop)
        if start < end:
            kept.append(Trained(start, end, message))
    return kept


def _thoughts_in(
    start: int, text: bytes, own: list[Occurrence], calls: list[Any]
) -> list[tuple[int, int]]:
    """Spans of thinking in a turn: between tags, and texts of fields that are written otherwise.

    Tags within calls and reasoning fields open and close nothing.

    Raises:
        RefusedError: a call quotes a tag, and where the template writes it cannot be shown.
    """
    in_calls = [o for o in own if o.field.kind in ("call", "function")]
    if not in_calls and "think>" in json.dumps(calls):
        raise UNPROVEN
    blanked = bytearray(text)
    for o in own:
        if o.field.kind in ("call", "function", "thought"):
            blanked[o.start - start : o.end - start] = bytes(o.end - o.start)
    spans = [(start + a, start + b) for a, b in thought_spans(bytes(blanked))]
    for o in own:
        if is_thought(o) and not any(a <= o.start < b for a, b in spans):
            spans.append((o.start, o.end))
    return sorted(spans)

r"""Where the messages of one rendering begin and end, proven by rendering beginnings of it.

A prompt is rendered once for each kind of gap between two texts, not for each answer: the cost
grows with the number of turns.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from itertools import takewhile

from packhouse.templates.rendering import Conversation, Occurrence, Rendering
from packhouse.templates.results import RefusedError
from packhouse.templates.template_facts import TemplateFacts

ENOUGH = 8  # equal lengths of a kind of gap
FREE_MESSAGES = 2**18  # messages of prompts that a row may cost, beyond 64 for each of its own


class MessageBounds:
    """Where the messages of one rendering are, as spans of its bytes."""

    def __init__(self, talk: Conversation, control: re.Pattern[bytes]) -> None:
        self._talk, self._control = talk, control
        self._known: dict[tuple[object, ...], int] = {}
        """Bytes of a gap that are a header, or that close a turn: by what decides about it."""
        self._measured = Counter[object]()
        self._roles, self._text = talk.roles, talk.rendering.text
        self._found = talk.rendering.occurrences
        self._own: list[list[int]] = [[] for _ in talk.messages]
        for number, occurrence in enumerate(self._found):
            if occurrence.field.message >= 0:
                self._own[occurrence.field.message].append(number)
        # Of each message: the first occurrence of any message behind it. Occurrences of messages
        # 0 0 1 3, four messages: own [[0, 1], [2], [], [3]], behind [2, 3, 3, 4].
        self._behind = [behind := len(self._found)] * len(self._own)
        for number in reversed(range(len(self._own))):
            self._behind[number] = behind
            behind = min([behind, *self._own[number][:1]])
        self._left = FREE_MESSAGES + 64 * len(self._own)
        self._num_questions = talk.trace.num_questions
        self._asked = [set[object]() for _ in self._own]
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
        another.) Where the prompt of inference asks what the rendering did not ask, a length is
        remembered after `ENOUGH` equal measurements. Nothing is remembered from row to row: the
        spans of a row depend on that row alone.
        """
        roles = self._roles
        user = next((at for at in range(number - 1, 0, -1) if roles[at] == "user"), 0)
        answers = [frozenset(self._asked[at]) for at in (0, user, number - 1)]
        key = (kind, number < 2, *roles[max(number - 2, 0) : number + 1], *answers, gap)
        length = self._known.get(key)
        if length is None:
            length = measure()
            is_answered = self._talk.trace.num_questions == self._num_questions
            self._measured[key, length] += 1
            if is_answered or self._measured[key, length] >= ENOUGH:
                self._known[key] = length
        return length

    def answer(self, number: int, facts: TemplateFacts) -> tuple[int, int]:
        """Span of an assistant turn: from the end of its prompt to its stop token.

        Where history has another token in its place (`<|end|>` for `<|return|>`), to that one.

        Raises:
            RefusedError: neither follows it.
        """
        start, own = self.start(number, facts), self._own[number]
        at = max(self._found[own[-1]].end if own else start, start)
        after = self._found[own[-1] + 1 if own else self._behind[number] :]
        following = next((o for o in after if o.field.message >= 0), None)
        stop = following.start if following else len(self._text)
        tokens = list(self._talk.rendering.controls(self._control, at, stop))
        stops = [token.end() for token in tokens if token.group() in facts.stops]
        is_next = following is not None and following.field.message == number + 1
        if stops and (is_next or number == len(self._own) - 1 or stops[0] == tokens[0].end()):
            return start, stops[0]
        shape = self._talk.rendering.shape[at:stop]
        return start, at + self._length(
            "stop", number + 1, shape, lambda: self._closing_in_history(number, at, stop, facts)
        )

    def _closing_in_history(self, number: int, at: int, stop: int, facts: TemplateFacts) -> int:
        """Bytes after an answer's own text that stand for its closing, which another message hides.

        The stop token of a later message without text does not end this one; nor does the header
        of the next message, where the template ends only the last turn.
        """
        shorter, own = self._prefix(number + 1, is_prompt=False), self._own[number]
        places = [o.end for o in shorter.own(number)] if own else []
        begin = places[-1] if places else at
        closing = [m.group() for m in shorter.controls(self._control, begin)]
        gap = self._text[at:stop]
        common = at + _agreement(shorter.text[begin:], gap, self._control)
        tokens = list(self._talk.rendering.controls(self._control, at, stop))
        for token in tokens:
            if token.end() <= common and token.group() in facts.stops:
                return token.end() - at
        has_stop = not facts.stops.isdisjoint(closing)
        for token in tokens[:1]:
            if has_stop and (token.end() <= common or token.group() in self._enders):
                return token.end() - at
        raise RefusedError(
            "no_stop",
            f"no stop token follows message {number} (assistant) in the rendering of all "
            f"messages, but {gap[:40]!r}. Set format.turns: joined",
        )

    @cached_property
    def _enders(self) -> set[bytes]:
        """First control tokens after messages of other roles than the assistant."""
        enders = set[bytes]()
        for number, own in enumerate(self._own):
            if own and self._roles[number] != "assistant":
                end = self._found[own[-1]].end
                at = own[-1] + 1
                following = self._found[at].start if at < len(self._found) else len(self._text)
                token = self._control.search(self._text, end, following)
                enders |= {token.group()} if token else set()
        return enders

    def start(self, number: int, facts: TemplateFacts) -> int:
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
            lambda: self._header_length(number, before, self._text[start:stop], facts),
        )

    def _header_length(
        self, number: int, before: Occurrence | None, gap: bytes, facts: TemplateFacts
    ) -> int:
        """Bytes of the gap that the prompt of inference holds, and a header."""
        if number == 0:  # no prompt comes before it
            at = gap.rfind(facts.opening)
            if at < 0:
                raise RefusedError(
                    "template", f"message 0 (assistant) does not begin with {facts.opening!r}"
                )
            return at + len(facts.opening)
        prompt = self._prefix(number, is_prompt=True)
        last = prompt.occurrences[-1] if prompt.occurrences else None
        tail = prompt.text[last.end :] if last else prompt.text
        if (last.field if last else None) is (before.field if before else None):
            if gap.startswith(tail):
                return len(tail)
            if tail.startswith(gap):
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

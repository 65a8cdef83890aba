"""Group the answers of a rendering by everything that decides how the template writes them.

In a row of 5,000 answers, only one of each kind is rendered by itself; the others are written in
the same way. So the cost grows with the length of the text, not with the square of the number of
answers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from packhouse.render.predicates import Predicate, answers
from packhouse.render.rendering import Conversation, Rendering


@dataclass(frozen=True, slots=True)
class Turn:
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


@dataclass(frozen=True, slots=True)
class Kind:
    """How the answers of a kind differ from the rendering that contains all of them."""

    skipped: int
    """Bytes after the previous answer that are replaced by its closing."""
    header: bytes
    """End of the prompt, after its last text."""
    opening: bytes
    """Start of the completion, before the answer's first text."""
    closing: bytes
    stop: bytes
    thinks: bool | None
    notes: Counter[str]
    """Counts for each answer of the kind."""


class Place(NamedTuple):
    """Position of a message, in bytes of the whole rendering."""

    before: int
    """End of the last text before it."""
    first: int
    last: int
    """Its texts are between `first` and `last`; both equal `before` if it has no text."""
    after: int
    """Start of the next text."""
    has_text: bool


class Kinds:
    """Messages of a rendering, classified by what decides how a template writes them.

    That is: the keys of the messages around it and their answers to the template's questions, the
    kinds of messages before it, and the template's own text around it. Go through the messages in
    order; those in between count as surroundings of the others.

    Args:
        whole: the rendering.
        talk: its conversation.
        thinking: True for each message whose exchange has a thought.
    """

    def __init__(self, whole: Rendering, talk: Conversation, thinking: Sequence[bool]) -> None:
        self._whole, self._thinking = whole, thinking
        self.end = 0
        """End of the previous message in the whole rendering."""
        self._talk = talk
        self._num_questions = -1
        self._seen: dict[object, None] = {}
        """Signs of the messages so far, in order of their last appearance: if there are two
        switches in the text, the later one counts."""
        self._num_seen = 0
        self._before: object = None
        self._own: list[list[int]] = [[] for _ in talk.messages]
        for number, occurrence in enumerate(whole.occurrences):
            if 0 <= occurrence.field.message < len(self._own):
                self._own[occurrence.field.message].append(number)
        # For each message, the first text of any message after it. Four messages with texts of
        # messages 0 0 1 3: own [[0, 1], [2], [], [3]], following [2, 3, 3, 4].
        self._following = [following := len(whole.occurrences)] * len(self._own)
        for number in reversed(range(len(self._own))):
            self._following[number] = following
            following = min([following, *self._own[number][:1]])

    def place(self, number: int) -> Place | None:
        """Return the position of a message; None if it is uncertain.

        That is so if other texts are between its own, or it and the message before have no text.
        """
        found, own, behind = self._whole.occurrences, self._own[number], self._following[number]
        first, after = (own[0], own[-1] + 1) if own else (behind, behind)
        stop = found[after].start if after < len(found) else len(self._whole.text)
        before = found[first - 1].end if first else 0
        if own:
            is_whole = own[-1] - own[0] + 1 == len(own)
            ends = found[own[0]].start, found[own[-1]].end
            return Place(before, *ends, stop, has_text=True) if is_whole else None
        if number and not self._own[number - 1]:
            return None
        return Place(before, before, before, stop, has_text=False)

    def key(self, number: int) -> object:
        """Return the properties that define the message's kind; None if it has no position."""
        place = self.place(number)
        if place is None:
            return None
        around = tuple(self._signs()[max(number - 2, 0) : number + 1])
        shape = self._whole.shape
        gaps = shape[place.before : place.first], shape[place.last : place.after]
        return (self._before, around, self._thinking[number], tuple(self._seen), gaps)

    def _signs(self) -> list[object]:
        """Return each message's role, keys, and its texts' answers to all questions.

        All, because a prompt may ask its last message a question that was asked of no other one.
        """
        trace = self._talk.trace
        if trace.num_questions != self._num_questions:
            self._num_questions = trace.num_questions
            asked: list[set[object]] = [set() for _ in self._talk.messages]
            questions = {(path[0], each.kind, each.argument) for path, each in trace.predicates}
            for kind, question, argument in questions:
                key = "reasoning_content" if kind == "thought" else kind
                if key in ("content", "reasoning_content", "name", "tool_call_id"):
                    texts = [message.get(key) or "" for message in self._talk.messages]
                    own = answers(Predicate(question, argument, True), pa.array(texts, pa.string()))
                    for of_message, answer in zip(asked, own.tolist(), strict=True):
                        of_message.add((kind, question, argument, answer))
            for message, other in trace.unrecorded:
                if message >= 0:
                    asked[message].add(other)
            self._of_messages: list[object] = [
                (message["role"], *sorted(key for key in message if message[key]), frozenset(own))
                for message, own in zip(self._talk.messages, asked, strict=True)
            ]
        return self._of_messages

    def advance(self, number: int) -> None:
        """Continue with the messages after this one."""
        place, key = self.place(number), self.key(number)
        self._before = key[1:3] if isinstance(key, tuple) else None
        for sign in self._signs()[self._num_seen : number + 1]:
            self._seen.pop(sign, None)
            self._seen[sign] = None
        self._num_seen = number + 1
        self.end = place.last if place else self.end

    def compare(self, done: int, joined: Rendering, turn: Turn, notes: Counter[str]) -> Kind | None:
        """Learn a kind from an answer that was rendered alone; None if it is not representative.

        Args:
            done: length in bytes of the record so far.
            joined: the record so far and the rest of the answer's prompt.
            turn: the answer.
            notes: counts for each answer of the kind.
        """
        place, completion = self.place(turn.message), turn.completion
        texts = completion.own(turn.message)
        found = [self._whole.occurrences[at] for at in self._own[turn.message]]
        is_same = [o.characters for o in found] == [o.characters for o in texts]
        if place is None or not texts or not is_same or not joined.occurrences:
            return None
        first, last = texts[0].start, texts[-1].end
        between = joined.text[done : joined.end]
        shown = self._whole.text[self.end : place.before]
        is_written = self._whole.text[place.first : place.last] == completion.text[first:last]
        if not is_written or not shown.endswith(between):
            return None
        skipped, text = len(shown) - len(between), completion.text
        opening, closing = text[:first], text[last : turn.end]
        return Kind(skipped, joined.tail, opening, closing, turn.stop, turn.thinks, notes)

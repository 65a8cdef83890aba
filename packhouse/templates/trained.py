"""Which bytes of a rendering are trained: spans of answers, of other messages, or all.

Spans of answers come from the template's own behaviour (see turns.py), those of other messages
from where they end (see borders.py). Where spans cannot be shown, the row is refused.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from packhouse.recipe import FormatConfig
from packhouse.templates.borders import Borders, find_borders
from packhouse.templates.marks import Marked, Occurrence, TornError
from packhouse.templates.renderer import RefusedError
from packhouse.templates.sights import UNPROVEN, Sight
from packhouse.templates.thinking import thought_spans
from packhouse.templates.turns import Starts, TurnRules, locate_turns

__all__ = ["SpanFinder", "Trained"]

Messages = list[dict[str, Any]]


class Trained(NamedTuple):
    """A trained span in bytes of the text, and the message whose weight it has; -1: it is 1."""

    start: int
    end: int
    message: int


class SpanFinder:
    """Finds the trained spans of renderings of one template.

    Args:
        config: the recipe's format section.
        rules: the template's turn rules; None where it marks what is generated.
        control: matches control tokens.
    """

    def __init__(
        self,
        config: FormatConfig,
        rules: Callable[[], TurnRules | None],
        control: re.Pattern[bytes],
    ) -> None:
        self._config = config
        self._rules = rules
        self._control = control
        self._starts: Starts = {}
        self._borders: dict[tuple[tuple[str, ...], bytes], int] = {}

    def find(self, raw: Messages, sight: Sight) -> list[Trained]:
        """Trained spans of a rendering, ascending; there is at least one.

        Args:
            raw: canonical messages, each with the weight decided for it.
            sight: the rendering.

        Raises:
            RefusedError: none is trained, or a span cannot be shown.
        """
        weights = [message["weight"] for message in raw]
        if not any(weights):
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        if self._config.train_on == "all":
            if not self._config.never_train and all(weight == 1 for weight in weights):
                return [Trained(0, len(sight.marked.text), -1)]
            return self._messages(weights, sight)
        roles = [message["role"] for message in raw]
        wanted = {n for n, role in enumerate(roles) if role == "assistant" and weights[n] > 0}
        trained = list(self._turns(sight, wanted))
        others = [n for n, weight in enumerate(weights) if weight > 0 and n not in wanted]
        if others:
            borders = self._find_borders(sight)
            trained += [Trained(*borders.body(number), number) for number in others]
        if self._config.reasoning == "train_last":
            trained = _without_earlier_thoughts(trained, sight)
        if not trained:
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        return sorted(trained)

    def _turns(self, sight: Sight, wanted: set[int]) -> Iterator[Trained]:
        """Spans of the answers that are wanted."""
        rules = self._rules()
        if rules is None:
            yield from _generated(sight.marked, sight.owners, sight.roles, wanted)
            return

        def prompt_tail(number: int) -> tuple[int, bytes]:
            """Last leaf, and the text behind it, of the prompt before message `number`."""
            if number == 0:
                raise RefusedError("template", "the conversation starts with the assistant")
            try:
                prompt = sight.prefix(number, True)
            except TornError:
                raise UNPROVEN from None
            last = prompt.occurrences[-1] if prompt.occurrences else None
            return (last.leaf, prompt.text[last.end :]) if last else (-1, prompt.text)

        turns = locate_turns(
            sight.marked,
            sight.shape,
            sight.owners,
            sight.roles,
            wanted,
            rules,
            prompt_tail,
            self._starts,
        )
        yield from (Trained(start, end, number) for number, (start, end) in turns.items())

    def _messages(self, weights: list[float], sight: Sight) -> list[Trained]:
        """Whole messages, headers included; those of one weight that touch are one span."""
        borders = self._find_borders(sight)
        trained: list[Trained] = []
        for number, weight in enumerate(weights):
            span = Trained(*borders.turn(number), number)
            last = trained[-1] if trained else None
            if last is not None and last.end == span.start and weights[last.message] == weight == 1:
                trained[-1] = last._replace(end=span.end)
            elif weight > 0:
                trained.append(span)
        return trained

    def _find_borders(self, sight: Sight) -> Borders:
        def text_after(message: int, leaf: int) -> bytes | None:
            try:
                shorter = sight.prefix(message + 1, False)
            except (RefusedError, TornError):
                return None
            ends = [o.end for o in shorter.occurrences if o.leaf == leaf]
            return shorter.text[ends[-1] :] if ends else None

        return find_borders(
            sight.marked, sight.owners, sight.roles, self._control, text_after, self._borders
        )


def _without_earlier_thoughts(trained: list[Trained], sight: Sight) -> list[Trained]:
    """Take thinking out of the answers that are trained before the last user turn."""
    last_user = max((n for n, role in enumerate(sight.roles) if role == "user"), default=-1)
    kept: list[Trained] = []
    for start, end, message in trained:
        is_earlier = message < last_user and sight.roles[message] == "assistant"
        thoughts = _thoughts_in(start, end, message, sight) if is_earlier else []
        for begin, stop in thoughts:
            if begin > start:
                kept.append(Trained(start, begin, message))
            start = max(start, stop)
        if start < end:
            kept.append(Trained(start, end, message))
    return kept


def _thoughts_in(start: int, end: int, message: int, sight: Sight) -> list[tuple[int, int]]:
    """Spans of thinking in a turn: between tags, and texts of fields that are written otherwise."""
    own = [o for o in sight.marked.occurrences if start <= o.start < end]
    text = bytearray(sight.marked.text[start:end])
    for o in _quoting(own, sight.messages[message], sight):
        text[o.start - start : o.end - start] = bytes(o.end - o.start)
    spans = [(start + a, start + b) for a, b in thought_spans(bytes(text))]
    for o in own:
        is_thought = sight.leaves[o.leaf].kind == "thought"
        if is_thought and not any(a <= o.start < b for a, b in spans):
            spans.append((o.start, o.end))
    return sorted(spans)


def _quoting(own: list[Occurrence], message: dict[str, Any], sight: Sight) -> list[Occurrence]:
    """Calls and reasoning fields of a turn: tags in these open and close nothing.

    Raises:
        RefusedError: a call quotes a tag, and where the template writes it cannot be shown.
    """
    reasoning = message.get("reasoning_content") or ""
    calls, fields = [], []
    for o in own:
        leaf = sight.leaves[o.leaf]
        if leaf.kind in ("call", "function"):
            calls.append(o)
        elif leaf.kind == "thought" and leaf.value in (reasoning, reasoning.strip()):
            fields.append(o)
    if not calls and "think>" in json.dumps(message.get("tool_calls", [])):
        raise UNPROVEN
    return calls + fields


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

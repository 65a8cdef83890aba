r"""Which bytes of a rendering are trained, and how much, proven from the template's own behaviour.

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

A span is cut where something weighs other than its message: thoughts of earlier answers under
`reasoning: train_last`, and parts. What a template writes around the parts (the end token) weighs
what the message weighs:

    "Let me see. " (weight 0) and "Four."  ->  "Four.<|im_end|>"

Where nothing is shown, the template (`TemplateError`) or the row
(`RefusedError`) is refused.
"""

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from packhouse.recipe import FormatConfig
from packhouse.templates.chat_messages import Messages
from packhouse.templates.losses import is_thought
from packhouse.templates.message_bounds import MessageBounds
from packhouse.templates.provenance import UNPROVEN
from packhouse.templates.rendering import Conversation, Occurrence, Rendering
from packhouse.templates.results import RefusedError
from packhouse.templates.thinking import thought_spans
from packhouse.templates.turn_rules import TurnRules


class Trained(NamedTuple):
    """A trained span in bytes of the text."""

    start: int
    end: int
    message: int
    """The one whose weight it has; of several that are one span, any. -1: none, but the row's."""
    weight: float = 1.0
    """Of a row that is rendered alone."""


Range = tuple[int, int, float]
"""Bytes from, to, and the factor of their weight."""


def find_spans(
    raw: Messages,
    talk: Conversation,
    config: FormatConfig,
    rules_of: Callable[[Mapping[str, object]], TurnRules | None],
    control: re.Pattern[bytes],
) -> list[Trained]:
    """Trained spans of a conversation's rendering, ascending and disjoint; at least one.

    Args:
        raw: canonical messages, each with the weight decided for it.
        talk: the conversation.
        config: the recipe's format section.
        rules_of: a row's arguments -> turn rules; None where the template marks what is generated.
        control: matches control tokens.

    Raises:
        RefusedError: none is trained, or a span cannot be shown.
    """
    weights = [message["weight"] for message in raw]
    if not any(weights):
        raise RefusedError("nothing_trained", "no turn of the conversation is trained")
    bounds = MessageBounds(talk, control)
    if config.train_on == "all":
        apart = {at for at, message in enumerate(raw) if "part_weights" in message}
        if not (config.never_train or apart) and all(w == 1 for w in weights):
            return [Trained(0, len(talk.rendering.text), 0)]
        return _weighed(_whole_messages(weights, bounds, apart), raw, talk, 0)
    # Answers: the template's own blocks, cut where the prompt of inference ends; else from the
    # end of that prompt to the end token.
    wanted = [n for n, role in enumerate(talk.roles) if role == "assistant" and weights[n] > 0]
    rules = rules_of(talk.given.arguments)
    if rules is None or rules.is_tagged:
        blocks = list(_generated(talk.rendering, talk.roles, weights, wanted))
        starts = [bounds.start(block.message, rules) if rules else 0 for block in blocks]
        trained = [
            block._replace(start=max(block.start, start))
            for block, start in zip(blocks, starts, strict=True)
            if start < block.end
        ]
    else:
        trained = [Trained(*bounds.answer(number, rules), number) for number in wanted]
    # Turns of others, which a row gave a weight.
    others = sorted({n for n, weight in enumerate(weights) if weight > 0} - set(wanted))
    if others:
        firsts, ends, _ = bounds.boundaries()
        trained += [Trained(firsts[number], ends[number], number) for number in others]
    # Roles s u a u a: the last user turn is the 2nd from the end, so 5 - 1 - 1 = 3 are before it.
    is_last = config.reasoning == "train_last" and "user" in talk.roles
    num_earlier = len(raw) - 1 - talk.roles[::-1].index("user") if is_last else 0
    return _weighed(sorted(trained), raw, talk, num_earlier)


def _whole_messages(weights: list[float], bounds: MessageBounds, apart: set[int]) -> list[Trained]:
    """Whole messages, headers included; those of weight 1 that touch are one span.

    Those that are `apart`, by weights of their parts, are spans of their own. The opening before
    the first text belongs to no message.
    """
    firsts, ends, has_tools = bounds.boundaries()
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


def _weighed(
    spans: list[Trained], raw: Messages, talk: Conversation, num_earlier: int
) -> list[Trained]:
    """Spans with their weights, cut where these change; there is at least one.

    Args:
        spans: of whole turns.
        raw: canonical messages, each with the weight decided for it.
        talk: the conversation.
        num_earlier: messages at its beginning whose thoughts are not trained.

    Raises:
        RefusedError: the template rewrites a text that has parts, or nothing is left.
    """
    found, text = talk.rendering.occurrences, talk.rendering.text
    starts = [occurrence.start for occurrence in found]
    written = defaultdict[int, list[Occurrence]](list)
    for occurrence in found:
        written[occurrence.field.message].append(occurrence)
    weighed: list[Trained] = []
    for span in spans:
        number, message = span.message, raw[span.message]
        pieces = [span._replace(weight=message["weight"])]
        if number < num_earlier and message["role"] == "assistant":
            own = found[bisect_left(starts, span.start) : bisect_left(starts, span.end)]
            calls = talk.messages[number].get("tool_calls", [])
            pieces = _cut(pieces, _thoughts_in(span, text, own, calls))
        if "part_weights" in message:
            pieces = _cut(pieces, _parts_in(number, message, text, written[number]))
        weighed += pieces
    if not weighed:
        raise RefusedError("nothing_trained", "no turn of the conversation is trained")
    return weighed


def _cut(spans: list[Trained], ranges: Sequence[Range]) -> list[Trained]:
    """Spans in pieces of one weight; those of weight 0 are left out.

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
        for factor, run in groupby(filled, lambda piece: piece[2]):  # neighbours of one weight
            (begin, stop, _), *rest = run
            end = rest[-1][1] if rest else stop
            if factor:
                cut.append(span._replace(start=begin, end=end, weight=span.weight * factor))
    return cut


def _parts_in(
    number: int, message: Mapping[str, Any], text: bytes, written: Sequence[Occurrence]
) -> list[Range]:
    """Where the parts of a message stand in the rendering; see `part_weights` in MESSAGE."""
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
                f"the parts of message {number} have weights of their own, and it is not written "
                "as it stands",
            )
        # Parts of 13 and 5 characters end at [13, 18]: of the content "Let me see. Four." those
        # are characters 0 to 13 and 13 to 18, wherever it stands in the rendering.
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
    """Where a turn thinks: between tags, and in texts of fields that are written otherwise.

    Tags within calls and reasoning fields open and close nothing.

    Raises:
        RefusedError: a call quotes a tag, and where the template writes it cannot be shown.
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

"""Weigh and cut trained spans, and find the spans that the rule for answers does not cover.

The rule for answers is in `packhouse.render.turns`. This module handles everything else: spans of
`train_on: all`, turns of other roles that have a weight, and the weights of parts and of
reasoning, which cut spans:

    "Let me see. " (weight 0) and "Four."  ->  "Four.<|im_end|>"

Text that the template writes around the parts (the end token) has the weight of the message.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, groupby, takewhile
from typing import Any, NamedTuple

from packhouse.recipe import FormatConfig
from packhouse.records.conversations import thought_spans
from packhouse.render.chat_messages import Messages
from packhouse.render.losses import is_thought
from packhouse.render.provenance import UNPROVEN
from packhouse.render.rendering import Conversation, Kinds, Occurrence
from packhouse.render.results import RefusedError, Trained, shown
from packhouse.render.turns import Record


class Bounds(NamedTuple):
    """Position of a message, in bytes."""

    text: int
    """Start of its text, including a space of the template, which is in the same token."""
    end: int
    """End of the template's text that closes it."""
    has_tools: bool
    """True if tool definitions come between its header and its text."""


def message_bounds(talk: Conversation, control: re.Pattern[bytes]) -> list[Bounds]:
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
    kinds, known = Kinds(whole, talk, [False] * len(talk.roles)), dict[object, int]()
    bounds: list[Bounds] = []
    for number in range(len(talk.roles)):
        own, following = whole.own(number), whole.own(number + 1)
        if not own:
            raise _unshown(talk, number, "it has no text of its own")
        start, begin, end = own[0].start, bounds[-1].end if bounds else 0, len(text)
        if following:
            if following[0].start < own[-1].end:
                raise RefusedError("template", "messages are not written in their order")
            key = kinds.key(number)
            if key is None or key not in known:
                gap = text[own[-1].end : following[0].start]
                known[key] = _closing_length(talk, number, gap, control)
            end = own[-1].end + known[key]
        has_tools = any(begin <= o.start < start for o in whole.own(-1))
        is_spaced = text[max(start - 1, 0) : start] == b" " and before_first[number] != start
        bounds.append(Bounds(start - is_spaced, end, has_tools))
        kinds.advance(number)
    return bounds


def _closing_length(talk: Conversation, number: int, gap: bytes, control: re.Pattern[bytes]) -> int:
    """Return how many bytes of the gap after a message close it."""
    with suppress(RefusedError):
        shorter = talk.prefix(number + 1)
        if own := shorter.own(number):
            return _agreement(shorter.text[own[-1].end :], gap, control)
    if control.search(gap) is None:
        return 0
    raise _unshown(talk, number, f"{shown(gap[:40])} follows it")


def _unshown(talk: Conversation, number: int, why: str) -> RefusedError:
    what = f"the end of message {number} ({talk.roles[number]}) cannot be shown"
    return RefusedError("template", f"{what}: {why}")


def _agreement(tail: bytes, gap: bytes, control: re.Pattern[bytes]) -> int:
    r"""Return the length of the common prefix of two texts, without splitting control tokens.

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


Range = tuple[int, int, float]
"""Start and end in bytes, and the factor by which the weight is multiplied."""


def other_spans(
    talk: Conversation, others: Sequence[int], control: re.Pattern[bytes]
) -> list[Trained]:
    """Return the spans of messages of other roles than the assistant in the whole rendering.

    A span runs from the message's text to the end of its closing; headers are not trained.

    Raises:
        RefusedError: a span cannot be determined.
    """
    bounds = message_bounds(talk, control) if others else []
    return [Trained(bounds[number].text, bounds[number].end, number) for number in others]


def add_other_turns(
    records: Sequence[Record], talk: Conversation, spans: Sequence[Trained]
) -> None:
    """Train each turn of another role in the first record that writes it like the whole rendering.

    Args:
        records: records of the conversation, modified in place.
        talk: the conversation.
        spans: spans of the turns in the whole rendering.

    Raises:
        RefusedError: no record writes a turn like that.
    """
    for span in spans:
        text = talk.rendering.text
        for record in records:
            if span.message < record.num_messages and record.rendering.text.startswith(
                text[: span.end]
            ):
                record.spans = sorted([*record.spans, span])
                record.turns = sorted([*record.turns, span.message])
                break
        else:
            raise RefusedError(
                "template",
                f"message {span.message} ({talk.roles[span.message]}) is trained, and no record has"
                " it as the rendering of all messages does. Set format.turns: whole",
            )


def all_spans(
    raw: Messages, talk: Conversation, config: FormatConfig, control: re.Pattern[bytes]
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
    record: Record, raw: Messages, talk: Conversation, config: FormatConfig
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
                f"the parts of message {number} have weights of their own, and it is not written "
                "as it stands. Give the message one weight",
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

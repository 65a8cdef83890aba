r"""Where each message begins and ends in the rendering of all messages.

    <|im_start|>user\nhi<|im_end|>\n|<|im_start|>assistant\nhello<|im_end|>\n
                                    ^ the end of message 0

What closes a message is what the rendering has in common with that of the messages up to it. Of
closings of a kind one is measured, so the cost grows with the number of messages.
"""

import re
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

from packhouse.render.kinds import Kinds
from packhouse.render.rendering import Conversation
from packhouse.render.results import RefusedError, shown


class Bounds(NamedTuple):
    """Where one message is, in bytes."""

    text: int
    """Where its own text begins, with the template's space before it: one token has both."""
    end: int
    """Where its closing text ends."""
    has_tools: bool
    """True if tool definitions stand after its header."""


def message_bounds(talk: Conversation, control: re.Pattern[bytes]) -> list[Bounds]:
    """Return where the messages of a conversation are.

    Args:
        talk: the conversation.
        control: matches control tokens.

    Raises:
        RefusedError: an end cannot be shown.
    """
    whole, text = talk.rendering, talk.rendering.text
    before_first: dict[int, int] = {}  # of each message: where the text before its first one ends
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
    """Bytes of the gap after a message that close it."""
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

r"""Where each message's own text ends and the next one's header begins.

    <|im_start|>user\nhi<|im_end|>\n|<|im_start|>assistant\nhello<|im_end|>\n
                                    ^ the border

Needed where other turns than answers are trained (`never_train`, a weight on a user turn). The
conversation is rendered up to the message: as far as that agrees with the whole rendering, the text
behind the message is its own. Where this cannot be shown, the row is refused.
"""

import re
from collections.abc import Callable
from itertools import takewhile

from packhouse.templates.marks import Marked, Occurrence
from packhouse.templates.renderer import RefusedError

__all__ = ["Borders", "find_borders"]

TextAfter = Callable[[int, int], bytes | None]
"""(message, leaf) -> what stands behind the leaf where the conversation ends with the message;
None: the leaf is not there."""


class Borders:
    """Where messages begin and end, in bytes of a rendering."""

    def __init__(self, first: list[int], ends: list[int], before: list[bool]) -> None:
        self.first = first
        """First byte of each message's own text."""
        self.ends = ends
        """Byte behind each message's closing text."""
        self.has_tools_before = before
        """Whether tool definitions stand between a message's beginning and its own text."""

    def turn(self, message: int) -> tuple[int, int]:
        """A message with its header; the opening before the first text belongs to none."""
        if message == 0 or self.has_tools_before[message]:
            return self.first[message], self.ends[message]
        return self.ends[message - 1], self.ends[message]

    def body(self, message: int) -> tuple[int, int]:
        """A message without its header."""
        return self.first[message], self.ends[message]


def find_borders(
    marked: Marked,
    owners: list[int],
    roles: list[str],
    control: re.Pattern[bytes],
    text_after: TextAfter,
    known: dict[tuple[tuple[str, ...], bytes], int],
) -> Borders:
    """Find the borders of all messages of a rendering.

    Args:
        marked: the rendering.
        owners: message of each leaf; -1: tool definitions.
        roles: of the messages.
        control: matches control tokens.
        text_after: asked once for each kind of gap.
        known: its answers so far, by roles up to the message and gap.

    Raises:
        RefusedError: a border cannot be shown.
    """
    firsts: list[int] = []
    tools: list[bool] = []
    ends: list[int] = []
    for number in range(len(roles)):
        own = [o for o in marked.occurrences if owners[o.leaf] == number]
        if not own:
            raise _unshown(number, roles, "it has no text of its own")
        firsts.append(_with_space(marked, own[0].start))
        if number:
            anchor = _last_before(marked, owners, own[0].start)
            if anchor is None:
                raise _OTHER_ORDER
            ends.append(
                _border(marked, anchor, own[0].start, number - 1, roles, control, text_after, known)
            )
        begin = ends[-1] if ends else 0
        tools.append(
            any(owners[o.leaf] < 0 and begin <= o.start < own[0].start for o in marked.occurrences)
        )
    if firsts != sorted(firsts):
        raise _OTHER_ORDER
    return Borders(firsts, [*ends, len(marked.text)], tools)


_OTHER_ORDER = RefusedError("template", "messages are not written in their order")


def _with_space(marked: Marked, start: int) -> int:
    """Beginning of a text with the template's space before it: one token begins with both."""
    is_spaced = marked.text[max(start - 1, 0) : start] == b" "
    is_own = any(o.start < start <= o.end for o in marked.occurrences)
    return start - 1 if is_spaced and not is_own else start


def _last_before(marked: Marked, owners: list[int], place: int) -> Occurrence | None:
    before = [o for o in marked.occurrences if o.end <= place and owners[o.leaf] >= 0]
    return before[-1] if before else None


def _border(
    marked: Marked,
    anchor: Occurrence,
    stop: int,
    message: int,
    roles: list[str],
    control: re.Pattern[bytes],
    text_after: TextAfter,
    known: dict[tuple[tuple[str, ...], bytes], int],
) -> int:
    gap = marked.text[anchor.end : stop]
    key = (tuple(roles[: message + 2]), gap)
    length = known.get(key)
    if length is None:
        if len(known) > 4096:
            known.clear()
        length = known[key] = _closing_length(message, anchor, gap, roles, control, text_after)
    return anchor.end + length


def _closing_length(
    message: int,
    anchor: Occurrence,
    gap: bytes,
    roles: list[str],
    control: re.Pattern[bytes],
    text_after: TextAfter,
) -> int:
    """Bytes of the gap behind a message that are its own."""
    tail = text_after(message, anchor.leaf)
    if tail is not None:
        return _agreement(tail, gap, control)
    if control.search(gap) is None:
        return 0
    raise _unshown(message, roles, f"{gap[:40]!r} follows it")


def _agreement(tail: bytes, gap: bytes, control: re.Pattern[bytes]) -> int:
    r"""Bytes that two texts have in common at their beginning, control tokens whole.

    Example:
        >>> _agreement(b"<|end|>\n<|eot|>", b"<|end|>\n<|user|>\n", re.compile(rb"<\|\w+\|>"))
        8
    """
    common = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tail, gap, strict=False))
    )
    for match in control.finditer(gap):
        if match.start() < common < match.end():
            return match.start()
    return common


def _unshown(message: int, roles: list[str], why: str) -> RefusedError:
    return RefusedError(
        "template", f"the end of message {message} ({roles[message]}) cannot be shown: {why}"
    )

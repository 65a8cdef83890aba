"""Findings looked at one by one: what looks wrong by ids and places, and is right.

Sound rows have none that gets here, but where whole kinds of turns have no end of their own.
"""

import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from packhouse.auditing.tokens import Tokens
from packhouse.records.messages import FlatMessages
from packhouse.system.arrays import Bools, Int64s

_MAX_TAIL = 8  # tokens


def ends_blank(tokens: Tokens, at: int, control: int) -> bool:
    r"""Return True if nothing but white space follows the last control token of a range.

    For rows whose tokens do not spell their text, as where a tokenizer normalises: what is content
    is not known there, but a line break behind `<|im_end|>` is the template's.

    Args:
        tokens: of all rows.
        at: number of the range.
        control: place of the last control token before its end.
    """
    start, end = int(tokens.range_starts[at]), int(tokens.range_ends[at])
    known = tokens.pipeline.token_bytes
    is_exact = tokens.is_exact[tokens.range_rows[at]]
    if is_exact or known is None or control < start or end - control > _MAX_TAIL:
        return False
    tail = known.take(pa.array(tokens.ids[control + 1 : end]))
    return not b"".join(tail.to_pylist()).strip()


def has_no_end(tokens: Tokens, at: int, messages: FlatMessages) -> bool:
    """Return True if a range ends with a message that is not the assistant's and has no end.

    So does Mistral's system turn, which stands in the user's: the template writes no control token
    between it and the next content.

    Args:
        tokens: of all rows.
        at: number of the range.
        messages: of each row.
    """
    row = int(tokens.range_rows[at])
    if not tokens.is_exact[row]:
        return False
    start, end = tokens.starts[tokens.range_starts[at]], tokens.ends[tokens.range_ends[at] - 1]
    first, last = messages.offsets[row : row + 2].tolist()
    roles = dict(_roles(tokens, row, messages.values[first:last].to_pylist()))
    own = slice(tokens.content_offsets[row], tokens.content_offsets[row + 1])
    starts, ends = tokens.content_starts[own], tokens.content_ends[own]
    inside = np.flatnonzero((starts >= start) & (starts < end))
    if not len(inside) or inside[-1] + 1 == len(starts):
        return False
    span = int(inside[-1])
    control = tokens.starts[tokens.control]
    has_end = ((control >= ends[span]) & (control < starts[span + 1])).any()
    return roles.get(span, "assistant") != "assistant" and not has_end


def _roles(tokens: Tokens, row: int, messages: list[dict[str, str]]) -> Iterator[tuple[int, str]]:
    """Contents of a row that are messages as they are, and the roles of these."""
    said = [
        f"{each['content']}\n{each['context']}" if each["context"] else each["content"]
        for each in messages
    ]
    message = 0
    for span, text in enumerate(_contents(tokens, row)):
        for number in range(message, len(messages)):
            if text.strip() == said[number].strip():
                yield span, messages[number]["role"]
                message = number + 1
                break


def are_written(
    tokens: Tokens,
    rows: Int64s,
    first: Int64s,
    second: Int64s,
) -> Bools:
    """Which pairs of control tokens overlap contents of their row as text, each as often."""
    names = {token.id: token.text for token in tokens.pipeline.added}
    left: dict[tuple[int, str], int] = {}
    written = []
    for row, *pair in zip(rows.tolist(), tokens.ids[first], tokens.ids[second], strict=True):
        text = "".join(names[int(token)] for token in pair)
        if (row, text) not in left:
            left[row, text] = _num_overlapping(tokens, row, text.encode())
        left[row, text] -= 1
        written.append(left[row, text] >= 0)
    return np.array(written, np.bool_)


def _num_overlapping(tokens: Tokens, row: int, pair: bytes) -> int:
    """How often a text stands in a row where at least some of it is content."""
    begin, end = tokens.bases[row], tokens.bases[row + 1]
    found = re.finditer(b"(?=" + re.escape(pair) + b")", tokens.data[begin:end].tobytes())
    places = begin + np.array([match.start() for match in found], np.int64)
    return int((tokens.content.within(places, places + len(pair)) > 0).sum())


def _contents(tokens: Tokens, row: int) -> Iterator[str]:
    for span in range(tokens.content_offsets[row], tokens.content_offsets[row + 1]):
        start, end = tokens.content_starts[span], tokens.content_ends[span]
        yield tokens.data[start:end].tobytes().decode()

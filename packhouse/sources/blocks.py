"""Text in pieces that fit a processor's cache, each of whole records.

Parsing a megabyte at a time takes a third of the time of parsing 32 at once, and what is made of
a piece is gone before the next. Lines may be cut at any newline. Where an array may be cut is
guessed and then proven: a piece that parses, put between brackets, is a list of whole elements,
and such lists, if none is empty, joined by commas are the list of all their elements, for JSON can
be read in one way only.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from packhouse.sources.structure import split_elements

__all__ = ["Block", "array_blocks", "leading_blocks", "line_blocks"]

BLOCK_BYTES = 2**21
"""Bytes of a block, unless a record is longer: enough that what a block costs by itself is little,
and few enough that its rows are parsed, checked and dropped in cache."""

_FIRST_BYTES = 2**16
_KEY_BYTES = 12


class Block(NamedTuple):
    """Whole elements: bytes [start, end) of what was cut; what divides it from the next is left."""

    start: int
    end: int
    rows: list[Any]


def array_blocks(data: bytes) -> Iterator[Block]:
    r"""Parse the inside of a JSON array block by block.

    Args:
        data: from the start of an element to the end of one.

    Raises:
        orjson.JSONDecodeError: this is not JSON; what was yielded before is.

    Example:
        >>> list(array_blocks(b'{"a": 1}, 2'))
        [Block(start=0, end=11, rows=[{'a': 1}, 2])]
    """
    start = 0
    for block in leading_blocks(data, len(data), BLOCK_BYTES):
        yield block
        start = block.end + 1
    yield Block(start, len(data), _parse(data, start, len(data)))


def leading_blocks(data: bytes | bytearray, stop: int, block_bytes: int) -> Iterator[Block]:
    """Blocks of at most `block_bytes` up to the last one, which is left: it ends at no comma.

    Raises:
        orjson.JSONDecodeError: elements before `stop` are not JSON.
    """
    dividing = _dividing(data)
    start, size = 0, block_bytes
    while start + size < stop:
        block = _block(data, start, start + size, dividing)
        if block is None:  # of one element that is longer
            size *= 2
            continue
        yield block
        start, size = block.end + 1, block_bytes


def _block(data: bytes | bytearray, start: int, stop: int, dividing: bytes) -> Block | None:
    """The elements up to a comma before `stop`; None if none is found."""
    likely = data.rfind(dividing, start, stop) + 1 if dividing else 0
    if likely:
        try:
            return Block(start, likely, _parse(data, start, likely))
        except orjson.JSONDecodeError:  # the comma is inside an element, or one of them is bad
            pass
    commas = split_elements(data[start:stop]).commas
    if not len(commas):
        return None
    end = start + int(commas[-1])
    return Block(start, end, _parse(data, start, end))


def _parse(data: bytes | bytearray, start: int, end: int) -> list[Any]:
    rows: list[Any] = orjson.loads(b"".join((b"[", data[start:end], b"]")))
    if not rows and end - start < len(data):  # no element, though there is a comma beside it
        raise orjson.JSONDecodeError("no element between two commas", "", 0)
    return rows


def _dividing(data: bytes | bytearray) -> bytes:
    """What stands between the first elements: a brace, a comma, and how the next one begins.

    By the name of their first key elements are told from the objects in them, mostly.
    """
    first = bytes(data[:_FIRST_BYTES])
    commas = split_elements(first).commas
    if not len(commas):
        return b""
    comma = int(commas[0])
    space = len(first) - comma - 1 - len(first[comma + 1 :].lstrip())
    return first[comma - 1 : comma + 1 + space + _KEY_BYTES]


def line_blocks(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    r"""Bounds of blocks that end behind a newline, or at the end; one for no data.

    Example:
        >>> list(line_blocks(b'{"a": 1}\n{"a": 2}'))
        [(0, 17)]
    """
    start = 0
    while len(data) - start > 2 * BLOCK_BYTES:
        end = data.rfind(b"\n", start, start + BLOCK_BYTES) + 1
        end = end or data.find(b"\n", start + BLOCK_BYTES) + 1
        if not end:
            break
        yield start, end
        start = end
    if start < len(data) or not data:
        yield start, len(data)

r"""Read JSON Lines: one row on each line that is not blank.

Only `\n` ends a line; U+2028, U+0085 and a lone `\r` are text. A shard is parsed in blocks that fit
a processor's cache: a megabyte at a time takes a third of the time of 32 at once.
"""

import re
import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from packhouse.read.records import Ints, Records, parse_pieces
from packhouse.read.text_files import SAMPLE_ROWS, Parsing, TextFile, parse_sample

BLOCK_BYTES = 2**21
"""Bytes of a block, unless a record is longer: enough that what a block costs by itself is little,
and few enough that its rows are parsed, checked and dropped in cache."""

_IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


class LinesFile(TextFile):
    """JSON Lines: records end at newlines."""

    def boundary(self, data: bytearray) -> int | None:
        """After the last newline in a shard's size, or after the first behind it."""
        end = data.rfind(b"\n", 0, self.max_shard_bytes)
        if end < 0:
            end = data.find(b"\n", self.max_shard_bytes)
        return None if end < 0 else end + 1

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Lines that are not blank."""
        data = self.buffer[:size]
        odd = (b"\n\n", b"\n\r", b"\n ", b"\n\t")
        if data.startswith((b"\n", b"\r", b" ", b"\t")) or any(pattern in data for pattern in odd):
            return sum(len(line_spans(data[start:end])) for start, end in line_blocks(data))
        return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))

    def sample(self, head: bytes) -> list[object]:
        """The first lines that are JSON."""
        return parse_sample(head[start:end] for start, end in line_spans(head)[:SAMPLE_ROWS])

    @staticmethod
    def parse(data: bytes, how: Parsing) -> Records:
        """Parse all lines."""
        return parse_lines(data, how.max_row_bytes)

    @staticmethod
    def parse_blocks(data: bytes, how: Parsing) -> Iterator[tuple[int, int, Records]]:
        """Parse some lines at a time."""
        for start, end in line_blocks(data):
            yield start, end, parse_lines(data[start:end], how.max_row_bytes)


def parse_lines(data: bytes, max_row_bytes: int) -> Records:
    r"""Parse lines; blank ones are counted, not records.

    Example:
        >>> records = parse_lines(b'{"a": 1}\n\n{"a": 1, "a": 2}\n', 2**20)
        >>> records.rows, [(f.number, f.reason) for f in records.failures], records.notes
        ([{'a': 1}], [(1, 'duplicate_key')], {'blank_lines': 1})
    """
    spans = line_spans(data)
    records = parse_pieces(data, spans, max_row_bytes)
    num_lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    if num_lines > len(spans):
        records.notes["blank_lines"] = num_lines - len(spans)
    return records


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


def line_spans(data: bytes | bytearray) -> Ints:
    r"""Start and end of each line that is not blank, line end excluded.

    Example:
        >>> line_spans(b"ab\n\n  \ncd\r\n").tolist()
        [[0, 2], [7, 10]]
    """
    array = np.frombuffer(data, np.uint8)
    spans = filled_lines(array)
    unsure = np.flatnonzero(array[spans[:, 0]] <= 0x20)
    if not len(unsure):
        return spans
    # Only lines that begin with white space may be blank. Spans [0, 2] [4, 6] -> pieces 0:2, 2:4,
    # 4:6 and 6:, every other one of which is a line; `reduceat` needs a place for the last bound.
    holds_text = np.append(~_IS_SPACE[array], False)
    keep = np.ones(len(spans), np.bool_)
    keep[unsure] = np.logical_or.reduceat(holds_text, spans[unsure].ravel())[::2]
    return spans[keep]


def filled_lines(array: npt.NDArray[np.uint8]) -> Ints:
    """Start and end of each line that has any byte; empty ones cost neither time nor memory."""
    # ab\n\ncd -> 0 [1 1 0 0 1 1] 0, which changes at 0 2 4 6: lines [0, 2] and [4, 6].
    holds_text = np.zeros(len(array) + 2, np.bool_)
    holds_text[1:-1] = array != ord("\n")
    return np.flatnonzero(holds_text[1:] != holds_text[:-1]).reshape(-1, 2)


# Read JSON objects that stand one after another, each over as many lines as it takes.
#
# One object ends and the next begins where a line ends in `}` and the next that is not blank
# begins with `{`. In JSON that is so nowhere else: between the objects of a list stands a comma,
# and no string holds a newline. So nothing is counted, and a broken object harms at most its
# neighbour.


_BETWEEN = re.compile(rb"\}[ \t\r]*\n\s*(?=\{)")


class ObjectsFile(TextFile):
    """JSON objects one after another."""

    def boundary(self, data: bytearray) -> int | None:
        """Where the last object in a shard's size ends, or the first behind it."""
        return _last_end(data, 0, self.max_shard_bytes)

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Number of objects."""
        return len(object_spans(bytes(self.buffer[:size])))

    def sample(self, head: bytes) -> list[object]:
        """The first objects that are JSON."""
        return parse_sample(head[start:end] for start, end in object_spans(head)[:SAMPLE_ROWS])

    @staticmethod
    def parse(data: bytes, how: Parsing) -> Records:
        """Parse all objects."""
        return parse_pieces(data, object_spans(data), how.max_row_bytes)

    @staticmethod
    def parse_blocks(data: bytes, how: Parsing) -> Iterator[tuple[int, int, Records]]:
        """Parse some objects at a time."""
        start = 0
        while start < len(data) or not data:
            end = len(data)
            if end - start > 2 * BLOCK_BYTES:
                end = _last_end(data, start, BLOCK_BYTES) or end
            piece = data[start:end]
            yield start, end, parse_pieces(piece, object_spans(piece), how.max_row_bytes)
            if not data:
                return
            start = end


def object_spans(data: bytes) -> Ints:
    r"""Start and end of each object.

    Example:
        >>> object_spans(b'{\n "a": 1\n}\n\n{"a": [{},\n{}]}\n').tolist()
        [[0, 13], [13, 29]]
    """
    if not data.strip():
        return np.zeros((0, 2), np.int64)
    ends = np.fromiter(_ends(data, 0, len(data)), np.int64)  # may be as many as a third of bytes
    return np.stack([np.append(0, ends), np.append(ends, len(data))], axis=1)


def _last_end(data: bytes | bytearray, start: int, size: int) -> int | None:
    """Where the last object in `size` bytes ends, else the first one behind; None: nowhere."""
    last = deque(_ends(data, start, start + size), maxlen=1) or islice(_ends(data, start), 1)
    return next(iter(last), None)


def _ends(data: bytes | bytearray, start: int, stop: int = sys.maxsize) -> Iterator[int]:
    return (found.end() for found in _BETWEEN.finditer(data, start, stop))

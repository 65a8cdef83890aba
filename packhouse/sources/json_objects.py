r"""Read JSON objects that stand one after another, each over as many lines as it takes.

One object ends and the next begins where a line ends in `}` and the next that is not blank begins
with `{`. In JSON that is so nowhere else: between the objects of a list stands a comma, and no
string holds a newline. So nothing is counted, and a broken object harms at most its neighbour.
"""

import re
import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np

from packhouse.sources.json_lines import BLOCK_BYTES
from packhouse.sources.records import Ints, Records, parse_pieces
from packhouse.sources.text_files import SAMPLE_ROWS, Parsing, TextFile, parse_sample

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

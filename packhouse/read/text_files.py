r"""Cut text files into shards of whole records, and parse these; JSON Lines is the simplest.

A subclass of `TextFile` for each kind of file says where records end and how they are parsed. Fed
a file's uncompressed bytes, it holds those of the shard under way and gives it up at the last
record boundary within `max_shard_bytes`. What pieces the bytes come in never changes a cut.

In JSON Lines only `\n` ends a line; U+2028, U+0085 and a lone `\r` are text.
"""

import hashlib
import re
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import orjson

from packhouse.errors import SourceError
from packhouse.read.file_formats import BOM
from packhouse.read.json_structure import with_joined_objects_apart
from packhouse.read.records import Ints, Records, parse_pieces
from packhouse.read.streams import name_row

SAMPLE_ROWS = 100
"""Rows looked at to find the format of a file's rows."""

MAX_RECORD_BYTES = 2**26
"""A record beyond this is no record: a quote or a bracket was left open. Bounds memory."""

BLOCK_BYTES = 2**21
"""Bytes of a block that is parsed by itself, unless a record is longer: enough that what a block
costs is little, and few enough that its rows are parsed, checked and dropped in a processor's
cache. A megabyte at a time takes a third of the time of 32 at once."""

_COMMA, _CLOSE = b",}"
_IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


@dataclass(frozen=True, slots=True)
class Cut:
    """One shard: bytes [start, end) of the uncompressed file."""

    start: int
    end: int
    row_start: int
    num_rows: int | None
    sha256: str


class NotInBlocksError(Exception):
    """Blocks of a shard cannot be parsed one by one; the shard can."""


class TextFile(ABC):
    """One kind of text file: cuts a file into shards, and parses a shard.

    Args:
        uri: for messages.
        max_shard_bytes: of a shard, unless one record is longer.
        header: column names of CSV and TSV, where they are known.
        rows_at: the field of a JSON file's one object that holds its rows.
        encoding: of the file, for the lines in messages.
        max_record_bytes: a longer record is refused.
    """

    def __init__(
        self,
        uri: str,
        max_shard_bytes: int = 0,
        *,
        header: tuple[str, ...] | None = None,
        rows_at: str | None = None,
        encoding: str = "utf-8",
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self.uri = uri
        self.max_shard_bytes = max_shard_bytes
        self.header = header
        self.rows_at = rows_at
        self.encoding = encoding
        self.max_record_bytes = max_record_bytes
        self.buffer = bytearray()
        self.position = 0  # offset in the file of the buffer's first byte
        self.num_rows = 0
        self.notes: dict[str, int] = {}

    @abstractmethod
    def boundary(self, data: bytearray) -> int | None:
        """Offset of the last record boundary within a shard; else of the first one; else None."""

    @abstractmethod
    def spans(self, data: bytes | bytearray) -> Ints:
        """Start and end of each record, shape [num_records, 2]."""

    def blocks(self, data: bytes, max_row_bytes: int) -> Iterator[tuple[int, int, Records]]:
        """Yield start, end and records of blocks of a shard, to bound memory.

        Raises:
            NotInBlocksError: use `parse`, which may give other records than the blocks so far.
        """
        yield 0, len(data), self.parse(data, max_row_bytes)

    def parse(self, data: bytes, max_row_bytes: int, num_rows: int | None = None) -> Records:
        """Parse a whole shard.

        Args:
            data: of the shard.
            max_row_bytes: longer records fail unparsed.
            num_rows: records that the scan counted.

        Raises:
            SourceError: what is bad is not a record but the file.
        """
        return parse_pieces(data, self.spans(data), max_row_bytes)

    def sample(self, head: bytes) -> list[object]:
        """Return the first rows that are JSON, to find their format; called after `cut`.

        Args:
            head: first bytes of the file, without a byte order mark.
        """
        rows: list[object] = []
        for start, end in self.spans(head)[:SAMPLE_ROWS]:
            with suppress(orjson.JSONDecodeError):
                rows.append(orjson.loads(head[start:end]))
        return rows

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Records in the buffer's first `size` bytes, a shard; None: not known, but some."""
        return len(self.spans(self.buffer[:size]))

    def begin(self, *, at_end: bool) -> bool:
        """Skip what precedes the first record; False where more bytes are needed."""
        return True

    def after_cut(self) -> None:  # noqa: B027 - nothing divides lines but their ends
        """Drop what divides the shard just taken from the next."""

    def end_of_file(self) -> None:  # noqa: B027 - nothing follows the last line
        """Check and drop what follows the last record."""

    def cut(self, chunks: Iterable[bytes]) -> Iterator[Cut]:
        """Yield the shards of a file; one of no rows for a file without any."""
        has_begun = False
        searched = 0  # buffer size at the last search without a boundary
        for chunk in chunks:
            self.buffer += chunk
            has_begun = has_begun or self._begin(at_end=False)
            # A search goes through the whole buffer, so it is tried again when that has doubled: a
            # record of 512 MiB is searched 4 times behind 32 MiB, and not once for each chunk.
            while has_begun and len(self.buffer) > max(self.max_shard_bytes, 2 * searched):
                end = self.boundary(self.buffer)
                if end is None:
                    searched = len(self.buffer)
                    self.check_record_size()
                else:
                    searched = 0
                    yield self._take(end)
        if not has_begun:
            self._begin(at_end=True)
        while len(self.buffer) > self.max_shard_bytes:
            end = self.boundary(self.buffer)
            if end is None or end >= len(self.buffer):
                break
            yield self._take(end)
        self.end_of_file()
        if self.buffer or self.num_rows == 0:
            yield self._take(len(self.buffer))
        if self.num_rows == 0:
            self.notes["empty_files"] = 1

    def skip(self, size: int) -> None:
        """Drop bytes before the next shard."""
        del self.buffer[:size]
        self.position += size

    def check_record_size(self) -> None:
        """Refuse a record that does not end.

        Raises:
            SourceError: says where it begins.
        """
        if len(self.buffer) > self.max_record_bytes:
            offset, what = self.find_open()
            place = self.position + offset
            line = name_row(self.uri, self.num_rows, place, self.encoding)
            raise SourceError(
                f"source file '{self.uri}': {what.format(line)} (looked at "
                f"{len(self.buffer):,} bytes). Correct the file there; if the row is that long, "
                "set `validate.max_row_bytes` to more than its bytes",
                uri=self.uri,
                row=self.num_rows,
                byte_offset=place,
            )

    def find_open(self) -> tuple[int, str]:
        """Return where in the buffer something is left open, and what to say of its line."""
        return 0, "the row that begins at {} does not end; if rows are in it, set `rows_at`"

    def _begin(self, *, at_end: bool) -> bool:
        if len(self.buffer) < len(BOM) and not at_end:
            return False
        if self.position == 0 and self.buffer.startswith(BOM):
            self.notes["bom"] = 1
            self.skip(len(BOM))
        return self.begin(at_end=at_end)

    def _take(self, size: int) -> Cut:
        num_rows = self.count(size, is_last=size == len(self.buffer))
        with memoryview(self.buffer) as view:
            sha256 = hashlib.sha256(view[:size]).hexdigest()
        end = self.position + size
        cut = Cut(self.position, end, self.num_rows, num_rows, sha256)
        self.num_rows += 1 if num_rows is None else num_rows
        self.skip(size)
        self.after_cut()
        return cut


class LinesFile(TextFile):
    """JSON Lines: records end at newlines."""

    def last_end(self, data: bytes | bytearray, start: int, size: int) -> int | None:
        """Where the last record within `size` bytes ends, else the first behind; None: nowhere."""
        end = data.rfind(b"\n", start, start + size) + 1
        return end or data.find(b"\n", start + size) + 1 or None

    def boundary(self, data: bytearray) -> int | None:
        """After the last record in a shard's size, or after the first behind it."""
        return self.last_end(data, 0, self.max_shard_bytes)

    @staticmethod
    def spans(data: bytes | bytearray) -> Ints:
        r"""Start and end of each object, without a comma that divides it from its neighbour.

        Example:
            >>> LinesFile.spans(b'{"a": 1},\n{"a": 2} {"a": 3}\n').tolist()
            [[0, 8], [10, 19], [19, 27]]
        """
        return _objects_of(data, LinesFile.lines(data))

    @staticmethod
    def lines(data: bytes | bytearray) -> Ints:
        r"""Start and end of each line that is not blank, line end excluded.

        Example:
            >>> LinesFile.lines(b"ab\n\n  \ncd\r\n").tolist()
            [[0, 2], [7, 10]]
        """
        array = np.frombuffer(data, np.uint8)
        spans = filled_lines(array)
        unsure = np.flatnonzero(array[spans[:, 0]] <= 0x20)
        if not len(unsure):
            return spans
        # Only lines that begin with white space may be blank. Spans [0, 2] [4, 6] -> pieces 0:2,
        # 2:4, 4:6 and 6:, every other one of which is a line; `reduceat` needs a place for the
        # last bound.
        holds_text = np.append(~_IS_SPACE[array], False)
        keep = np.ones(len(spans), np.bool_)
        keep[unsure] = np.logical_or.reduceat(holds_text, spans[unsure].ravel())[::2]
        return spans[keep]

    def parse(self, data: bytes, max_row_bytes: int, num_rows: int | None = None) -> Records:
        r"""Parse all lines; blank ones are noted, and no records.

        Example:
            >>> records = LinesFile("a.jsonl").parse(b'{"a": 1}\n\n{"a": 1, "a": 2}\n', 2**20)
            >>> records.rows, [(f.number, f.reason) for f in records.failures], records.notes
            ([{'a': 1}], [(1, 'duplicate_key')], {'blank_lines': 1})
        """
        lines = self.lines(data)
        records = parse_pieces(data, lines, max_row_bytes)
        if records.failures:
            records = parse_pieces(data, _objects_of(data, lines), max_row_bytes)
        num_lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
        if num_lines > len(lines):
            records.notes["blank_lines"] = num_lines - len(lines)
        if records.num_records > len(lines):
            records.notes["joined_rows"] = records.num_records - len(lines)
        return records

    def blocks(self, data: bytes, max_row_bytes: int) -> Iterator[tuple[int, int, Records]]:
        """Parse some records at a time."""
        for start, end in self._bounds(data):
            yield start, end, self.parse(data[start:end], max_row_bytes)

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Records, block by block: a file may have half as many as bytes."""
        data = self.buffer[:size]
        return sum(len(self.spans(data[start:end])) for start, end in self._bounds(data))

    def _bounds(self, data: bytes | bytearray) -> Iterator[tuple[int, int]]:
        """Bounds of blocks that end where a record does, or with the data; one for no data."""
        start = 0
        while len(data) - start > 2 * BLOCK_BYTES:
            end = self.last_end(data, start, BLOCK_BYTES)
            if end is None:
                break
            yield start, end
            start = end
        if start < len(data) or not data:
            yield start, len(data)


def filled_lines(array: npt.NDArray[np.uint8]) -> Ints:
    """Start and end of each line that has any byte; empty ones cost neither time nor memory."""
    # ab\n\ncd -> 0 [1 1 0 0 1 1] 0, which changes at 0 2 4 6: lines [0, 2] and [4, 6].
    holds_text = np.zeros(len(array) + 2, np.bool_)
    holds_text[1:-1] = array != ord("\n")
    return np.flatnonzero(holds_text[1:] != holds_text[:-1]).reshape(-1, 2)


def _objects_of(data: bytes | bytearray, lines: Ints) -> Ints:
    """Spans of the objects in lines: `{...} {...}` apart, `{...},` without its comma."""
    array = np.frombuffer(data, np.uint8)
    ends = lines[:, 1]
    for _ in range(2):
        ends = ends - _IS_SPACE[array[ends - 1]]
    has_comma = (array[ends - 1] == _COMMA) & (array[ends - 2] == _CLOSE) & (ends > lines[:, 0] + 1)
    starts = lines[:, 0] + ((array[lines[:, 0]] == _COMMA) & (ends > lines[:, 0] + 1))
    spans = np.stack([starts, np.where(has_comma, ends - 1, lines[:, 1])], axis=1)
    return with_joined_objects_apart(data, spans)


_BETWEEN = re.compile(rb"\}[ \t\r]*\n\s*(?=\{)|^\}[ \t]*(?=\{)", re.MULTILINE)


class ObjectsFile(LinesFile):
    """JSON objects one after another, each over as many lines as it takes.

    One ends and the next begins where a line ends in `}` and the next that is not blank begins
    with `{`, and where `{` follows a `}` that begins its line. In JSON that is so nowhere else:
    between the objects of a list stands a comma, and no string holds a newline. So nothing is
    counted, and a broken object harms at most its neighbour. Where a comma divides two, they are
    cut apart if they are no JSON together.
    """

    def last_end(self, data: bytes | bytearray, start: int, size: int) -> int | None:
        """Where the last object within `size` bytes ends, else the first behind; None: nowhere."""
        last = deque(_ends(data, start, start + size), maxlen=1) or islice(_ends(data, start), 1)
        return next(iter(last), None)

    @staticmethod
    def spans(data: bytes | bytearray) -> Ints:
        r"""Start and end of each object.

        Example:
            >>> ObjectsFile.spans(b'{\n "a": 1\n}\n\n{"a": [{},\n{}]}\n').tolist()
            [[0, 13], [13, 29]]
        """
        if not data.strip():
            return np.zeros((0, 2), np.int64)
        # There may be a third as many ends as bytes, so no list of Python's integers is made.
        ends = np.fromiter(_ends(data, 0, len(data)), np.int64)
        spans = np.stack([np.append(0, ends), np.append(ends, len(data))], axis=1)
        return with_joined_objects_apart(data, spans, b" \t\r\n,")

    def parse(self, data: bytes, max_row_bytes: int, num_rows: int | None = None) -> Records:
        """Parse all objects."""
        return TextFile.parse(self, data, max_row_bytes)


def _ends(data: bytes | bytearray, start: int, stop: int = sys.maxsize) -> Iterator[int]:
    return (found.end() for found in _BETWEEN.finditer(data, start, stop))

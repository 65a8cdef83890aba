"""Cutters: fed a file's uncompressed bytes in any pieces, they say where its shards lie.

Each holds the bytes of the shard under way and gives it up at the last record boundary within
`max_shard_bytes`. What pieces the bytes come in never changes a cut.
"""

import csv
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import orjson

from packhouse.errors import SourceError
from packhouse.sources.blocks import leading_blocks, line_blocks
from packhouse.sources.decoding import MAX_COLUMNS
from packhouse.sources.records import gc_paused
from packhouse.sources.sniffing import BOM
from packhouse.sources.structure import line_spans, record_ends, split_elements

__all__ = ["CUTTERS", "Cut", "Cutter"]

MAX_RECORD_BYTES = 2**29
"""A record beyond this is no record: a quote or a bracket was left open. Bounds memory."""


MAX_LINE_END_BYTES = 2**16
"""Bytes looked at for the first line end."""

_BLOCK_BYTES = 2**19  # parsed to be counted only


@dataclass(frozen=True, slots=True)
class Cut:
    """One shard: bytes [start, end) of the uncompressed file."""

    start: int
    end: int
    row_start: int
    num_rows: int | None
    sha256: str


class Cutter:
    """Base: buffers bytes and asks the format where its records end."""

    skips: ClassVar[bytes] = b""

    def __init__(self, uri: str, max_shard_bytes: int) -> None:
        self.uri = uri
        self.max_shard_bytes = max_shard_bytes
        self.buffer = bytearray()
        self.position = 0  # offset in the file of the buffer's first byte
        self.num_rows = 0
        self.header: tuple[str, ...] | None = None
        self.notes: dict[str, int] = {}
        self.tried = 0  # buffer size at the last search without a boundary
        self.began = False

    def feed(self, chunk: bytes) -> Iterator[Cut]:
        """Take the next bytes; yield the shards that are now complete."""
        self.buffer += chunk
        if not self.began and not self._begin(at_end=False):
            return
        while len(self.buffer) > max(self.max_shard_bytes, 2 * self.tried):
            end = self.boundary(self.buffer)
            if end is None:
                self.tried = len(self.buffer)
                self._check_record_size()
                return
            self.tried = 0
            yield self._take(end)

    def finish(self) -> Iterator[Cut]:
        """Yield the last shard, or one of no rows for a file without any."""
        if not self.began:
            self._begin(at_end=True)
        while len(self.buffer) > self.max_shard_bytes:
            end = self.boundary(self.buffer)
            if end is None or end >= len(self.buffer):
                break
            yield self._take(end)
        self.end_of_file()
        if self.buffer or self.position == 0 or self.num_rows == 0:
            yield self._take(len(self.buffer))
        if self.num_rows == 0:
            self.notes["empty_files"] = 1

    def boundary(self, data: bytearray) -> int | None:
        """Offset of the last record boundary within a shard; else of the first one; else None."""
        raise NotImplementedError

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Records in the buffer's first `size` bytes, a shard; None: not known, but some."""
        raise NotImplementedError

    def begin(self, *, at_end: bool) -> bool:
        """Skip what precedes the first record; False where more bytes are needed."""
        return True

    def end_of_file(self) -> None:
        """Check and drop what follows the last record."""

    def skip(self, size: int) -> None:
        """Drop bytes before the next shard."""
        del self.buffer[:size]
        self.position += size

    def _begin(self, *, at_end: bool) -> bool:
        if len(self.buffer) < 3 and not at_end:
            return False
        if self.position == 0 and self.buffer.startswith(BOM):
            self.notes["bom"] = 1
            self.skip(len(BOM))
        self.began = self.begin(at_end=at_end)
        return self.began

    def _take(self, size: int) -> Cut:
        num_rows = self.count(size, is_last=size == len(self.buffer))
        with memoryview(self.buffer) as view:
            sha256 = hashlib.sha256(view[:size]).hexdigest()
        cut = Cut(
            start=self.position,
            end=self.position + size,
            row_start=self.num_rows,
            num_rows=num_rows,
            sha256=sha256,
        )
        self.num_rows += 1 if num_rows is None else num_rows
        self.skip(size)
        self.after_cut()
        return cut

    def after_cut(self) -> None:
        """Drop what divides the shard just taken from the next."""

    def _check_record_size(self) -> None:
        if len(self.buffer) > MAX_RECORD_BYTES:
            raise SourceError(
                f"source file '{self.uri}': record {self.num_rows} at byte {self.position:,} does "
                f"not end within {MAX_RECORD_BYTES:,} bytes; is a quote or bracket left open?",
                uri=self.uri,
                row=self.num_rows,
                byte_offset=self.position,
            )


class LineCutter(Cutter):
    """JSON Lines: records end at newlines."""

    def begin(self, *, at_end: bool) -> bool:
        """Refuse what is not one record a line."""
        head = bytes(self.buffer)
        check_line_ends(head, self.uri, at_end=at_end)
        if b"\n" not in head and not at_end and len(head) < MAX_LINE_END_BYTES:
            return False
        if _is_array_of_rows(head.lstrip()):
            raise SourceError(
                f"source file '{self.uri}' is one JSON array, not JSON Lines; set file_format to "
                "json (or end its name in .json)",
                uri=self.uri,
            )
        return True

    def boundary(self, data: bytearray) -> int | None:
        """After the last newline in a shard's size, or after the first behind it."""
        end = data.rfind(b"\n", 0, self.max_shard_bytes)
        if end < 0:
            end = data.find(b"\n", self.max_shard_bytes)
        return None if end < 0 else end + 1

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Lines that are not blank."""
        return count_lines(self.buffer[:size])


class ArrayCutter(Cutter):
    """A JSON array: records end at the commas of its first level.

    Elements are counted, and the commas between them proven, by parsing block after block, which
    takes less than half the time of looking for structure; that is done where a block is no JSON.
    """

    counted: tuple[int, int] | None = None
    """Size of the shard that was parsed to find its end, and its elements."""

    def begin(self, *, at_end: bool) -> bool:
        """Skip the opening bracket."""
        space = len(self.buffer) - len(self.buffer.lstrip())
        if space == len(self.buffer):
            return at_end
        assert self.buffer[space] == ord("["), "sniffing saw a bracket"
        self.skip(space + 1)
        self._skip_space()
        return True

    def boundary(self, data: bytearray) -> int | None:
        """Last comma within a shard's size, or the first behind it."""
        self.counted = _last_comma(data, self.max_shard_bytes)
        if self.counted is not None:
            return self.counted[0]
        commas = split_elements(data).commas
        return int(commas[0]) if len(commas) else None

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Elements: one more than commas. Nothing needs the last shard's count, so it is saved."""
        if self.counted is not None and self.counted[0] == size:
            return self.counted[1]
        data = self.buffer[:size]
        if not data.strip():
            return 0
        return None if is_last else len(split_elements(data).commas) + 1

    def after_cut(self) -> None:
        """Skip the dividing comma and the space behind it."""
        self.counted = None
        if self.buffer[:1] == b",":
            self.skip(1)
            self._skip_space()

    def end_of_file(self) -> None:
        """Drop the closing bracket; what follows it is no row."""
        tail = self.buffer.rstrip()
        if tail.endswith(b"]"):  # whether it is the array's own shows when the shard is parsed
            self.buffer = tail[:-1].rstrip()
        elif self.began:
            self._refuse_tail(bytes(tail))

    def _skip_space(self) -> None:
        self.skip(len(self.buffer) - len(self.buffer.lstrip()))

    def _refuse_tail(self, tail: bytes) -> None:
        elements = split_elements(tail)
        if elements.end is None or tail[elements.end] != ord("]"):
            self.notes["truncated_files"] = 1
            return
        place = self.position + elements.end + 1
        raise SourceError(
            f"source file '{self.uri}': text follows the end of the JSON array at byte {place:,}",
            uri=self.uri,
            byte_offset=place,
        )


def _last_comma(data: bytes | bytearray, limit: int) -> tuple[int, int] | None:
    """Last comma up to `limit` between elements, and how many are before it; None if not found.

    Equal to what `split_elements` says: blocks that parse are whole elements, and what is behind
    the last of them is looked at for structure.
    """
    start = num_elements = 0
    with gc_paused(), suppress(orjson.JSONDecodeError):
        for block in leading_blocks(data, limit, _BLOCK_BYTES):
            start = block.end + 1
            num_elements += len(block.rows)
    commas = split_elements(data[start : limit + 1]).commas
    if len(commas):
        return start + int(commas[-1]), num_elements + len(commas)
    return (start - 1, num_elements) if start else None


class DelimitedCutter(Cutter):
    """CSV or TSV: records end at newlines outside quotes; the first one names the columns."""

    delimiter: ClassVar[str] = ","

    def begin(self, *, at_end: bool) -> bool:
        """Take the header."""
        head = bytes(self.buffer)
        check_line_ends(head, self.uri, at_end=at_end)
        ends = record_ends(head, self.delimiter, is_whole=at_end)
        if not len(ends) and not at_end:
            self._check_record_size()
            return False
        end = int(ends[0]) if len(ends) else len(head)
        self.header = self._read_header(head[:end])
        self.skip(end)
        return True

    def boundary(self, data: bytearray) -> int | None:
        """Last end of a record within a shard's size, or the first behind it."""
        if b'"' not in data and (end := data.rfind(b"\n", 0, self.max_shard_bytes) + 1):
            return end
        ends = record_ends(data[: self.max_shard_bytes], self.delimiter)
        if not len(ends):
            ends = record_ends(data, self.delimiter)
        within = ends[ends <= self.max_shard_bytes]
        if len(within):
            return int(within[-1])
        return int(ends[0]) if len(ends) else None

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Records that are not blank lines."""
        from packhouse.sources.delimited import record_spans

        return len(record_spans(self.buffer[:size], self.delimiter))

    def _read_header(self, line: bytes) -> tuple[str, ...] | None:
        if not line.strip():
            return None
        try:
            names = next(
                csv.reader([line.decode("utf-8").rstrip("\r\n")], delimiter=self.delimiter)
            )
        except (UnicodeDecodeError, csv.Error) as error:
            raise SourceError(f"source file '{self.uri}': header cannot be read: {error}") from None
        if len(names) > MAX_COLUMNS:
            raise SourceError(
                f"source file '{self.uri}' has {len(names):,} columns, over {MAX_COLUMNS:,}; keep "
                "those that hold rows"
            )
        twice = sorted(name for name, times in Counter(names).items() if times > 1)
        if twice:
            raise SourceError(f"source file '{self.uri}': column {twice[0]!r} is named twice")
        return tuple(names)


class TabCutter(DelimitedCutter):
    """TSV."""

    delimiter = "\t"


CUTTERS: dict[str, type[Cutter]] = {
    "jsonl": LineCutter,
    "json": ArrayCutter,
    "csv": DelimitedCutter,
    "tsv": TabCutter,
}


def count_lines(data: bytes | bytearray) -> int:
    """Number of lines that are not blank, fast where none is."""
    odd = (b"\n\n", b"\n\r", b"\n ", b"\n\t")
    if data[:1] in (b"\n", b"\r", b" ", b"\t") or any(pattern in data for pattern in odd):
        return sum(len(line_spans(data[start:end])) for start, end in line_blocks(data))
    return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))


def check_line_ends(head: bytes, uri: str, *, at_end: bool) -> None:
    """Refuse a file whose lines end in a bare carriage return (old Macintosh).

    Raises:
        SourceError: carriage returns and no newline.
    """
    if b"\n" in head or b"\r" not in head.rstrip(b"\r\n"):
        return
    if at_end or len(head) >= MAX_LINE_END_BYTES:
        raise SourceError(
            f"source file '{uri}' ends its lines in CR only; convert them to LF (tr '\\r' '\\n')",
            uri=uri,
        )


def _is_array_of_rows(start: bytes) -> bool:
    """Whether lines begin an array of objects, rather than each being a list of messages."""
    first = start.partition(b"\n")[0]
    if first[:1] != b"[":
        return False
    try:
        value = orjson.loads(first)
    except orjson.JSONDecodeError:
        return start[1:].lstrip()[:1] in (b"{", b"")
    return bool(value) and isinstance(value[0], dict) and not {"role", "from"} & value[0].keys()

"""Cut text files into shards of whole records, and parse the shards.

A subclass of `TextFile` for each kind of file finds record boundaries and parses records; JSON
Lines is the simplest. `cut` is fed a file's uncompressed bytes in chunks, buffers those of the
current shard, and cuts after the record in the second half of `max_shard_bytes` with the smallest
checksum. Chunk sizes never change a cut. An inserted row usually changes one shard, because the
next cuts are after the same records as before.
"""

import hashlib
import json
import re
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from itertools import chain, islice, pairwise
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
import orjson

from packhouse.read.compression import name_row
from packhouse.read.file_formats import BOM, file_error
from packhouse.read.json_parsing import (
    MAX_LIST_DEPTH,
    Ints,
    Records,
    Rows,
    between,
    check_parsed,
    json_in,
    lists_in,
    parse_pieces,
    spans_from,
    split_elements,
    with_joined_objects_apart,
)

SAMPLE_ROWS = 100
"""Rows from which the format of a file's rows is detected."""

MAX_RECORD_BYTES = 2**26
"""A longer record means that a quote or bracket was left open. Bounds memory."""

HEAD_BYTES = 2**20
"""Uncompressed bytes from which formats are detected, and within which the first record begins."""

BLOCK_BYTES = 2**21
"""Bytes parsed at a time, unless a record is longer. Large enough that the cost per block is small,
and small enough that its rows stay in the processor's cache: 1 MB blocks take a third of the time
of 32 MB blocks."""

_MAX_CANDIDATES = 2**17
"""Records, after one of which a shard is cut. Checksums of more tiny ones would take seconds."""

_COMMA, _CLOSE, _NEWLINE = b",}\n"
_IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


@dataclass(frozen=True, slots=True)
class Cut:
    """One shard: bytes [start, end) of the uncompressed file."""

    byte_start: int
    byte_end: int
    row_start: int
    num_rows: int | None
    sha256: str


@dataclass(eq=False)
class TextFile(ABC):
    """One kind of text file: cuts a file into shards and parses them."""

    separator: ClassVar[re.Pattern[bytes]] = re.compile(b"")
    """Bytes between two shards."""

    uri: str
    """For messages."""
    max_shard_bytes: int = 0
    """Size limit of a shard, unless one record is longer."""
    _: KW_ONLY
    header: tuple[str, ...] | None = None
    """Column names of CSV and TSV, if known."""
    rows_at: str | None = None
    """The field with the rows, in a JSON file that is one object."""
    encoding: str = "utf-8"
    """Encoding of the file, to find line numbers for messages."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """A longer record is refused."""
    first: int = 0
    """Offset in the file of its first record; known after `cut`."""
    position: int = 0
    """Offset in the file of the data that is cut or parsed."""
    num_rows: int = 0
    """Records before this position."""
    notes: dict[str, int] = field(default_factory=dict)

    @abstractmethod
    def ends(self, data: bytearray) -> Ints:
        """Return the ends of records in the second half of a shard's size.

        Without any, return the last one in its first half, else the first one after it, else none.
        """

    def boundary(self, data: bytearray) -> int | None:
        """Return the end of the record after which a shard is cut; None if none has ended."""
        ends: list[int] = self.ends(data)[:_MAX_CANDIDATES].tolist()
        if len(ends) < 3:  # no choice: a record's bytes begin at the end of the one before it
            return ends[-1] if ends else None
        with memoryview(data) as view:
            checksums = [crc32(view[start:end]) for start, end in pairwise(ends)]
        return ends[1 + checksums.index(min(checksums))]

    @abstractmethod
    def spans(self, data: bytes | bytearray) -> Ints:
        """Return start and end of each record, shape [num_records, 2]."""

    def bounds(self, data: bytes | bytearray) -> Iterator[tuple[int, int]]:
        """Yield the bounds of blocks of whole records; one if there are none, or they are small."""
        yield 0, len(data)

    def blocks(
        self, data: bytes, max_row_bytes: int, num_rows: int | None = None
    ) -> Iterator[tuple[int, int, Records]]:
        """Yield start, end and records of blocks of a shard, to bound memory; see `parse`."""
        for start, end in self.bounds(data):
            yield start, end, self.parse(data[start:end], max_row_bytes, num_rows)

    def parse(self, data: bytes, max_row_bytes: int, num_rows: int | None = None) -> Records:
        """Parse a whole shard.

        Args:
            data: bytes of the shard.
            max_row_bytes: longer records fail unparsed.
            num_rows: records counted by the scan.

        Raises:
            SourceError: the file itself is bad, not just a record.
        """
        return parse_pieces(data, self.spans(data), max_row_bytes)

    def sample(self, head: bytes) -> list[object]:
        """Return the first rows that are valid JSON, to detect their format.

        Args:
            head: first bytes of the file, from its first record.
        """
        rows = (json_in(head[start:end]) for start, end in self.spans(head)[:SAMPLE_ROWS])
        return [row for row in rows if row is not None]

    def count(self, data: bytearray, *, is_last: bool) -> int | None:
        """Count the records of a shard; None if unknown but not 0."""
        # In blocks to bound memory: a file can have half as many records as bytes.
        return sum(len(self.spans(data[start:end])) for start, end in self.bounds(data))

    def begin(self, head: bytearray) -> int:
        """Return the offset of the first record, after a byte-order mark.

        Args:
            head: the file's first `HEAD_BYTES`, or all of a shorter file.
        """
        if not head.startswith(BOM):
            return 0
        self.notes["bom"] = 1
        return len(BOM)

    def end(self, rest: bytearray) -> int:
        """Return the end of the last record, after checking what follows it."""
        return len(rest)

    def cut(self, chunks: Iterable[bytes]) -> Iterator[Cut]:
        """Yield the shards of a file; a file without rows gives one empty shard."""
        chunks, buffer = iter(chunks), bytearray()
        while len(buffer) < HEAD_BYTES and (chunk := next(chunks, None)) is not None:
            buffer += chunk
        self.position = self.first = self.begin(buffer)
        del buffer[: self.first]
        searched = 0  # size of the buffer at the last search without a boundary
        # The empty chunk first: `begin` may have read all of the file into the buffer.
        for chunk in chain([b""], chunks, [None]):  # None: the file has ended
            is_end = chunk is None
            chunk = chunk or b""
            if self.separator.pattern and self.num_rows and not buffer:
                # White space after the last cut may go on in this chunk.
                self.position += len(chunk) - len(chunk.lstrip())
                chunk = chunk.lstrip()
            buffer += chunk
            while buffer or is_end:
                end = None
                # Each search scans the whole buffer, so after a failure wait until the buffer
                # doubles: a record of 512 MiB is searched 4 times after 32 MiB, not once per chunk.
                if len(buffer) > max(self.max_shard_bytes, 0 if is_end else 2 * searched):
                    end = self.boundary(buffer)
                    searched = len(buffer) if end is None else 0
                    if end is None and not is_end:
                        self.check_record_size(buffer)
                is_last = is_end and (end is None or end >= len(buffer))
                if is_last:
                    end = self.end(buffer)
                if end is None or (is_last and not end and self.num_rows):
                    break
                num_rows = self.count(buffer[:end], is_last=is_last)
                # Released before `del buffer[:end]`: Python raises BufferError if a bytearray with
                # a view changes its size.
                with memoryview(buffer) as view:
                    sha256 = hashlib.sha256(view[:end]).hexdigest()
                after = self.position + end
                yield Cut(self.position, after, self.num_rows, num_rows, sha256)
                self.num_rows += 1 if num_rows is None else num_rows
                between_shards = self.separator.match(buffer, end)
                end = end if between_shards is None else between_shards.end()
                self.position += end
                del buffer[:end]
                if is_last:
                    break
        if self.num_rows == 0:
            self.notes["empty_files"] = 1

    def check_record_size(self, data: bytearray) -> None:
        """Refuse a record that does not end.

        Raises:
            SourceError: the message tells where the record begins.
        """
        if len(data) > self.max_record_bytes:
            offset, what = self.find_open(data)
            place = self.position + offset
            line = name_row(self.uri, self.num_rows, place, self.encoding)
            raise file_error(
                self.uri,
                f": {what.format(line)}, within {len(data):,} bytes. Correct the file there; if "
                "the row really is that long, raise `validate.max_row_bytes`",
                row=self.num_rows,
                byte_offset=place,
            )

    def find_open(self, data: bytearray) -> tuple[int, str]:
        """Return the offset of what is left open, and a message with a place for its line."""
        return 0, "the row that begins at {} does not end (for rows inside it, set `rows_at`)"


class LinesFile(TextFile):
    """JSON Lines: records end at newlines."""

    def ends(self, data: bytearray) -> Ints:
        """Return the ends of records from which a cut is chosen; see `TextFile`."""
        half = self.max_shard_bytes // 2
        ends = self.ends_between(data, half, self.max_shard_bytes)
        last = None if len(ends) else self.last_end(data, 0, self.max_shard_bytes)
        return ends if last is None else np.array([last])

    def ends_between(self, data: bytearray, start: int, stop: int) -> Ints:
        """Return the ends of records within [start, stop)."""
        return np.flatnonzero(np.frombuffer(data[start:stop], np.uint8) == _NEWLINE) + start + 1

    def last_end(self, data: bytes | bytearray, start: int, size: int) -> int | None:
        """Return the end of the last record within `size` bytes, else of the first one, or None."""
        # Only a newline ends a line; U+2028, U+0085 and a lone carriage return are text.
        end = data.rfind(b"\n", start, start + size) + 1
        return end or data.find(b"\n", start + size) + 1 or None

    @staticmethod
    def spans(data: bytes | bytearray) -> Ints:
        r"""Return start and end of each object: `{...} {...}` is two, `{...},` loses its comma.

        Example:
            >>> LinesFile.spans(b'{"a": 1},\n{"a": 2} {"a": 3}\n').tolist()
            [[0, 8], [10, 19], [19, 27]]
        """
        lines = LinesFile.lines(data)
        array = np.frombuffer(data, np.uint8)
        ends = lines[:, 1]
        for _ in range(2):  # a line may end with a space and a carriage return
            ends = ends - _IS_SPACE[array[ends - 1]]
        # A line of one byte has no byte before its last one; at offset 0, `ends - 2` would be the
        # last byte of the data.
        is_long = ends > lines[:, 0] + 1
        has_comma = (array[ends - 1] == _COMMA) & (array[ends - 2] == _CLOSE) & is_long
        starts = lines[:, 0] + ((array[lines[:, 0]] == _COMMA) & is_long)
        spans = np.stack([starts, np.where(has_comma, ends - 1, lines[:, 1])], axis=1)
        return with_joined_objects_apart(data, spans)

    @staticmethod
    def lines(data: bytes | bytearray) -> Ints:
        r"""Return start and end of each line that is not blank, without its line end.

        Example:
            >>> LinesFile.lines(b"ab\n\n  \ncd\r\n").tolist()
            [[0, 2], [7, 10]]
        """
        array = np.frombuffer(data, np.uint8)
        spans = filled_lines(array)
        unsure = np.flatnonzero(array[spans[:, 0]] <= 0x20)
        if not len(unsure):
            return spans
        # Only lines that begin with white space can be blank. Spans [0, 2] [4, 6] give `reduceat`
        # the pieces 0:2, 2:4, 4:6 and 6:, and every other one is a line. The appended False makes
        # the last bound a valid index.
        holds_text = np.append(~_IS_SPACE[array], False)
        keep = np.ones(len(spans), np.bool_)
        keep[unsure] = np.logical_or.reduceat(holds_text, spans[unsure].ravel())[::2]
        return spans[keep]

    def parse(self, data: bytes, max_row_bytes: int, num_rows: int | None = None) -> Records:
        r"""Parse all lines; blank lines are counted but are not records.

        Example:
            >>> records = LinesFile("a.jsonl").parse(b'{"a": 1}\n\n{"a": 1, "a": 2}\n', 2**20)
            >>> records.rows, [(f.number, f.reason) for f in records.failures], records.notes
            ([{'a': 1}], [(1, 'duplicate_key')], {'blank_lines': 1})
        """
        lines = self.lines(data)
        records = parse_pieces(data, lines, max_row_bytes)
        if records.failures:
            records = parse_pieces(data, self.spans(data), max_row_bytes)
        num_lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
        if num_lines > len(lines):
            records.notes["blank_lines"] = num_lines - len(lines)
        if records.num_records > len(lines):
            records.notes["joined_rows"] = records.num_records - len(lines)
        return records

    def bounds(self, data: bytes | bytearray) -> Iterator[tuple[int, int]]:
        """Yield the bounds of blocks that end at a record's end or with the data."""
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
    """Return start and end of each line that is not empty; empty ones cost no time or memory."""
    # ab\n\ncd -> 0 [1 1 0 0 1 1] 0, which changes at 0 2 4 6: lines [0, 2] and [4, 6].
    holds_text = np.zeros(len(array) + 2, np.bool_)
    holds_text[1:-1] = array != ord("\n")
    return np.flatnonzero(holds_text[1:] != holds_text[:-1]).reshape(-1, 2)


# A boundary is a line that ends in `}` before a non-blank line that begins with `{`, or `{` after a
# `}` at the start of a line. Valid JSON has these nowhere else: objects in a list are separated by
# commas, and strings cannot contain a newline. So no brackets are counted, and a broken object
# harms at most its neighbour.
_BETWEEN = re.compile(rb"\}[ \t\r]*\n\s*(?=\{)|^\}[ \t]*(?=\{)", re.MULTILINE)


class ObjectsFile(LinesFile):
    """A sequence of JSON objects, each of which can span several lines.

    Two objects with a comma between them are split if together they are not valid JSON.
    """

    def ends_between(self, data: bytearray, start: int, stop: int) -> Ints:
        """Return the ends of objects within [start, stop)."""
        return np.fromiter(_ends(data, start, stop), np.int64)

    def last_end(self, data: bytes | bytearray, start: int, size: int) -> int | None:
        """Return the end of the last object within `size` bytes, else of the first one, or None."""
        last = deque(_ends(data, start, start + size), maxlen=1) or islice(_ends(data, start), 1)
        return next(iter(last), None)

    @staticmethod
    def spans(data: bytes | bytearray) -> Ints:
        r"""Return start and end of each object.

        Example:
            >>> ObjectsFile.spans(b'{\n "a": 1\n}\n\n{"a": [{},\n{}]}\n').tolist()
            [[0, 13], [13, 29]]
        """
        if not data.strip():
            return np.zeros((0, 2), np.int64)
        # There can be a third as many ends as bytes, so do not build a list of Python integers.
        ends = np.fromiter(_ends(data, 0, len(data)), np.int64)
        spans = np.stack([np.append(0, ends), np.append(ends, len(data))], axis=1)
        return with_joined_objects_apart(data, spans, b" \t\r\n,")

    def parse(self, data: bytes, max_row_bytes: int, num_rows: int | None = None) -> Records:
        """Parse all objects."""
        return TextFile.parse(self, data, max_row_bytes)


def _ends(data: bytes | bytearray, start: int, stop: int = sys.maxsize) -> Iterator[int]:
    return (found.end() for found in _BETWEEN.finditer(data, start, stop))


# JSON arrays. Objects separated by commas or by nothing are read as an array without its brackets.


_GOES_ON = re.compile(rb"\Z|,\s*[^\s]")  # after a block: the end, or a comma and an element
OTHER_LIST = "list "
"""Before the name of a list that `rows_at` leaves out, in the notes of its file."""


class ArrayFile(TextFile):
    """A JSON array: records end at its top-level commas."""

    separator = re.compile(rb"(,\s*)?")
    has_bracket = True
    """False if the file begins with an object."""
    commas = np.zeros(0, np.int64)
    """Offsets in the file of the commas between elements that were found last."""
    path: Sequence[str] = ()
    """With `rows_at`: the fields that lead to the list."""
    keys: frozenset[str] = frozenset()
    """With `rows_at`: the keys of the first row."""

    def begin(self, head: bytearray) -> int:
        """Return the offset after the opening bracket; with `rows_at`, that of the field's list."""
        start = super().begin(head)
        if self.rows_at is not None:
            text = bytes(head[start:HEAD_BYTES])
            found = find_list(text, self.rows_at)
            if found is None:
                raise file_error(
                    self.uri,
                    f" has no JSON object with a list in field '{self.rows_at}' in its first "
                    f"{HEAD_BYTES:,} bytes. Correct `rows_at`, or, if the list begins later, move "
                    "its field to the beginning of the object",
                )
            self.path = path_of_list(text[:found])
            first = next(iter(self.sample(text[found:])), None)
            self.keys = frozenset(first) if isinstance(first, dict) else self.keys
            self._note_lists(orjson.loads(text[:found] + b"]" + b"}" * len(self.path)))
            start += found
        else:
            start = len(head) - len(head[start:].lstrip())
            has_bracket = head.startswith(b"[", start)
            self.has_bracket = has_bracket or start == len(head)
            start += has_bracket
        return len(head) - len(head[start:].lstrip())

    def ends(self, data: bytearray) -> Ints:
        """Return the commas from which a cut is chosen; see `TextFile`."""
        # Those after the last cut are known; otherwise a quarter of the file is split twice.
        commas = self.commas[self.commas > self.position] - self.position
        # Where a comma is missing, the next element begins at the offset itself.
        start = int(commas[-1]) + (data[commas[-1]] == _COMMA) if len(commas) else 0
        # One byte more, since the comma itself is not part of the shard: an element that fills the
        # shard exactly still ends in it.
        found = split_elements(data[start : self.max_shard_bytes + 1]).commas
        commas = np.append(commas, found + start)
        if not len(commas):
            commas = split_elements(data).commas[:1]
        self.commas = commas + self.position
        within = commas[commas >= self.max_shard_bytes // 2]
        return within if len(within) else commas[-1:]

    def count(self, data: bytearray, *, is_last: bool) -> int | None:
        """Count elements by the commas of `ends`. Nothing needs the count of the last shard."""
        if data.isspace() or not data:
            return 0
        return None if is_last else int(np.searchsorted(self.commas, self.position + len(data))) + 1

    def end(self, rest: bytearray) -> int:
        """Return the end of the last element, before the closing bracket.

        Raises:
            SourceError: the file has text after the bracket.
        """
        tail = rest.rstrip()
        end = split_elements(tail).end if self.rows_at is not None else None
        if end is not None:  # leave out the fields that follow the list in its objects
            with suppress(orjson.JSONDecodeError):
                around = orjson.loads(b'{"":' * len(self.path) + b"[" + tail[end:])
                self._note_lists(around)
                for _ in self.path[1:]:
                    around = around[""]
                if self.path[-1] not in around:
                    tail = tail[: end + 1]
        # Parsing the shard will tell whether a final bracket closes the array.
        if not tail.endswith(b"]") and self.has_bracket:
            self._check_end(tail)
            self.notes["truncated_files"] = 1
            return len(rest)
        tail = tail.removesuffix(b"]").rstrip()
        if tail.endswith(b","):  # `{...},\n]`, as people write it; no row is missing
            self.notes["trailing_commas"] = 1
            return len(tail) - 1
        return len(tail)

    def _note_lists(self, around: dict[str, Any]) -> None:
        """Count the rows of other lists whose objects have at least half of their fields in common.

        Args:
            around: the object around the list, without it; fields that lead to it may be "".
        """
        for path, rows in lists_in(around):
            own = rows[0].keys()
            if 2 * len(self.keys & own) >= len(self.keys | own):
                names = [name or self.path[depth] for depth, name in enumerate(path.split("."))]
                self.notes[f"{OTHER_LIST}'{'.'.join(names)}'"] = len(rows)

    def _check_end(self, data: bytes | bytearray) -> None:
        """Refuse text after the bracket that closes the array."""
        end = split_elements(data).end
        if end is not None and data[end] == ord("]"):
            place = self.position + end + 1
            fix = "Remove it"
            if self.rows_at is not None:
                fix += ", or remove `rows_at`, which reads the list of one object, not of several"
            problem = f" has text after the end of its JSON array, at byte {place:,}. {fix}"
            raise file_error(self.uri, problem, byte_offset=place)

    @staticmethod
    def spans(data: bytes | bytearray) -> Ints:
        """Return the spans of the elements, including white space around them."""
        if not data.strip():
            return np.zeros((0, 2), np.int64)
        return between(data, split_elements(data).commas)

    def sample(self, head: bytes) -> list[object]:
        """Return the first elements that are valid JSON."""
        return super().sample(head[: split_elements(head).end])

    def parse(self, data: bytes, max_row_bytes: int, num_rows: int | None = None) -> Records:
        """Parse all elements separately.

        Raises:
            SourceError: the array ends before the data does.
        """
        self._check_end(data)
        records = parse_pieces(data, self.spans(data), max_row_bytes)
        assert records.spans is not None
        joined = np.count_nonzero(records.spans[1:, 0] == records.spans[:-1, 1])
        if joined:
            records.notes["joined_rows"] = int(joined)
        if _lost_bytes(records) > 0:  # an open bracket or quote may have swallowed good elements
            by_layout = parse_pieces(data, spans_by_layout(data), max_row_bytes)
            # Rows after this shard are numbered from the scan's count, so it must not change.
            if num_rows in (None, by_layout.num_records):
                # If both lose the same number of bytes, `min` keeps the first: the split by syntax.
                records = min(records, by_layout, key=_lost_bytes)
        return records

    def blocks(
        self, data: bytes, max_row_bytes: int, num_rows: int | None = None
    ) -> Iterator[tuple[int, int, Records]]:
        """Parse elements in blocks; from the first block that is not plain JSON, all at once."""
        start, end, guesses = 0, -1, True
        while end < len(data):
            rows: list[Any] | None = None
            if guesses:
                # The bytes up to a comma are a whole array only if the comma is outside of strings
                # and brackets, so parsing proves a guess, in a third of `split_elements`' time.
                end = len(data)
                if end - start > BLOCK_BYTES:
                    end = data.rfind(b"},", start, start + BLOCK_BYTES) + 1
                rows = json_in(b"[%b]" % data[start:end])
            if not rows:
                guesses, end = False, _find_block_end(data, start)
                rows = json_in(b"[%b]" % data[start:end])
            block = data[start:end]
            find_spans = cache(partial(self.spans, block))
            is_plain = bool(rows) and _GOES_ON.match(data, end) is not None
            if is_plain and len(block) > max_row_bytes:
                is_plain = bool(np.diff(find_spans()).max() <= max_row_bytes)
            if not rows or not is_plain:
                start += len(data[start:]) - len(data[start:].lstrip())
                self.position += start
                yield start, len(data), self.parse(data[start:], max_row_bytes, num_rows)
                return
            records = Records(Rows(rows), np.arange(len(rows)), len(rows), find_spans=find_spans)
            check_parsed(records, block, block)
            yield start, end, records
            num_rows = None if num_rows is None else num_rows - len(rows)
            start = end + 1


def _find_block_end(data: bytes, start: int) -> int:
    """Return the last comma between elements within a block, else the first one, else the end."""
    size = BLOCK_BYTES
    while start + size < len(data):
        commas = split_elements(data[start : start + size]).commas
        if len(commas):
            return start + int(commas[-1])
        size *= 2  # one element exceeds the block
    return len(data)


def find_list(data: bytes, name: str) -> int | None:
    """Return the offset after the bracket that opens a field's list; None without such a field.

    `a.b` is field `b` of the object in field `a`.

    Example:
        >>> find_list(b'{"of": {"data": []}, "data": [1, 2]}', "data")
        30
        >>> find_list(b'{"of": {"data": [1, 2]}}', "of.data")
        17
    """
    # The name may have dots, and a file may escape its letters beyond ASCII. Each try parses the
    # text before it, so only the first 100 are made.
    last = name.rpartition(".")[2]
    ends = (json.dumps(last, ensure_ascii=way)[1:].encode() for way in (True, False))
    lists = re.compile(rb"(?i:%b)\s*:\s*\[" % b"|".join(map(re.escape, ends)))
    for found in islice(lists.finditer(data), 100):
        if ".".join(path_of_list(data[: found.end()])) == name:
            return found.end()
    return None


def path_of_list(head: bytes) -> list[str]:
    """Return the fields that lead to a list, given a JSON object up to the list's bracket.

    The bracket opens a field's list if the object parses when everything is closed after it.

    Example:
        >>> path_of_list(b'{"version": 2, "of": {"data": ['), path_of_list(b'{"a": "b: [')
        (['of', 'data'], [])
    """
    for depth in range(1, MAX_LIST_DEPTH + 1):
        with suppress(orjson.JSONDecodeError):
            value, path = orjson.loads(head + b"]" + b"}" * depth), []
            while isinstance(value, dict) and value:
                path.append(next(reversed(value)))
                value = value[path[-1]]
            return path
    return []


def _lost_bytes(records: Records) -> int:
    """Return the bytes of records that did not become rows."""
    assert records.spans is not None
    sizes = records.spans[:, 1] - records.spans[:, 0]
    return int(sizes.sum() - sizes[records.numbers].sum())


def spans_by_layout(data: bytes) -> Ints:
    r"""Return spans of elements by layout: each element begins with `{` on a new line.

    For arrays whose brackets or quotes cannot be trusted. Among the lines that begin with a brace,
    the least indented ones begin elements. If all is one line, they begin like the first element.

    Example:
        >>> spans_by_layout(b'{"a": [1},\n {"b": 2},\n {"c": [\n  {}]}').tolist()
        [[0, 9], [12, 20], [23, 37]]
        >>> spans_by_layout(b'{"a": 1, {"a": 2}').tolist()
        [[0, 7], [9, 17]]
    """
    lines = list(re.finditer(rb"\n([ \t]*)\{", data))
    least = min((len(line[1]) for line in lines), default=0)
    starts = [0, *(line.start() + 1 + least for line in lines if len(line[1]) == least)]
    spans = spans_from(data, starts)
    return with_joined_objects_apart(data, np.array(spans, np.int64), b" \t\r\n,")

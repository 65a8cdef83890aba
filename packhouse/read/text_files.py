"""Cut text files into shards of whole records, and parse the shards.

A subclass of `TextFile` for each kind of file finds record boundaries and parses records; JSON
Lines is the simplest. It is fed a file's uncompressed bytes in chunks, buffers those of the current
shard, and cuts at the last record boundary within `max_shard_bytes`. Chunk sizes never change a
cut.
"""

import hashlib
import re
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from packhouse.errors import SourceError
from packhouse.read.file_formats import BOM
from packhouse.read.records import (
    Ints,
    Records,
    Rows,
    between,
    check_parsed,
    parse_pieces,
    split_elements,
    with_joined_objects_apart,
)
from packhouse.read.streams import name_row

SAMPLE_ROWS = 100
"""Rows from which the format of a file's rows is detected."""

MAX_RECORD_BYTES = 2**26
"""A longer record means that a quote or bracket was left open. Bounds memory."""

BLOCK_BYTES = 2**21
"""Bytes parsed at a time, unless a record is longer. Large enough that the cost per block is small,
and small enough that its rows stay in the processor's cache: 1 MB blocks take a third of the time
of 32 MB blocks."""

_COMMA, _CLOSE = b",}"
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
    buffer: bytearray = field(default_factory=bytearray)
    position: int = 0
    """Offset in the file of the buffer's first byte."""
    num_rows: int = 0
    notes: dict[str, int] = field(default_factory=dict)

    @abstractmethod
    def boundary(self, data: bytearray) -> int | None:
        """Return the last record boundary within a shard, else the first one, else None."""

    @abstractmethod
    def spans(self, data: bytes | bytearray) -> Ints:
        """Return start and end of each record, shape [num_records, 2]."""

    def blocks(
        self, data: bytes, max_row_bytes: int, num_rows: int | None = None
    ) -> Iterator[tuple[int, int, Records]]:
        """Yield start, end and records of blocks of a shard, to bound memory; see `parse`."""
        yield 0, len(data), self.parse(data, max_row_bytes, num_rows)

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
        """Return the first rows that are valid JSON, to detect their format; called after `cut`.

        Args:
            head: first bytes of the file, without a byte-order mark.
        """
        rows: list[object] = []
        for start, end in self.spans(head)[:SAMPLE_ROWS]:
            with suppress(orjson.JSONDecodeError):
                rows.append(orjson.loads(head[start:end]))
        return rows

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Count records in a shard, the buffer's first `size` bytes; None if unknown but not 0."""
        return len(self.spans(self.buffer[:size]))

    def begin(self, *, at_end: bool) -> bool:
        """Skip what precedes the first record; return False if more bytes are needed."""
        if len(self.buffer) < len(BOM) and not at_end:
            return False
        if self.position == 0 and self.buffer.startswith(BOM):
            self.notes["bom"] = 1
            self.skip(len(BOM))
        return True

    def after_cut(self) -> None:  # noqa: B027 - lines have no separator besides the newline
        """Drop the separator between the shard just taken and the next."""

    def end_of_file(self) -> None:  # noqa: B027 - nothing follows the last line
        """Check and drop what follows the last record."""

    def cut(self, chunks: Iterable[bytes]) -> Iterator[Cut]:
        """Yield the shards of a file; a file without rows gives one empty shard."""
        has_begun = False
        searched = 0  # buffer size at the last search without a boundary
        for chunk in chunks:
            self.buffer += chunk
            has_begun = has_begun or self.begin(at_end=False)
            # Each search scans the whole buffer, so after a failure wait until the buffer doubles:
            # a record of 512 MiB is searched 4 times after 32 MiB, not once per chunk.
            while has_begun and len(self.buffer) > max(self.max_shard_bytes, 2 * searched):
                end = self.boundary(self.buffer)
                if end is None:
                    searched = len(self.buffer)
                    self.check_record_size()
                else:
                    searched = 0
                    yield self._take(end)
        if not has_begun:
            self.begin(at_end=True)
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
            SourceError: the message tells where the record begins.
        """
        if len(self.buffer) > self.max_record_bytes:
            offset, what = self.find_open()
            place = self.position + offset
            line = name_row(self.uri, self.num_rows, place, self.encoding)
            raise SourceError(
                f"source file '{self.uri}': {what.format(line)}, within "
                f"{len(self.buffer):,} bytes. Correct the file there; if the row really is that "
                "long, raise `validate.max_row_bytes`",
                uri=self.uri,
                row=self.num_rows,
                byte_offset=place,
            )

    def find_open(self) -> tuple[int, str]:
        """Return the offset of what is left open, and a message with a place for its line."""
        return 0, "the row that begins at {} does not end (for rows inside it, set `rows_at`)"

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
        """Return the end of the last record within `size` bytes, else of the first one, or None."""
        # Only a newline ends a line; U+2028, U+0085 and a lone carriage return are text.
        end = data.rfind(b"\n", start, start + size) + 1
        return end or data.find(b"\n", start + size) + 1 or None

    def boundary(self, data: bytearray) -> int | None:
        """Return the end of the last record within a shard, else of the first one, or None."""
        return self.last_end(data, 0, self.max_shard_bytes)

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

    def blocks(
        self, data: bytes, max_row_bytes: int, num_rows: int | None = None
    ) -> Iterator[tuple[int, int, Records]]:
        """Parse records in blocks."""
        for start, end in self._bounds(data):
            yield start, end, self.parse(data[start:end], max_row_bytes)

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Count records."""
        # In blocks to bound memory: a file can have half as many records as bytes.
        data = self.buffer[:size]
        return sum(len(self.spans(data[start:end])) for start, end in self._bounds(data))

    def _bounds(self, data: bytes | bytearray) -> Iterator[tuple[int, int]]:
        """Yield bounds of blocks that end at a record's end or with the data; one if empty."""
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


_FIRST_BYTES = 2**16
_GOES_ON = re.compile(rb"\Z|,\s*[^\s]")  # after a block: the end, or a comma and an element
_MAX_DEPTH = 4  # objects around the list of rows


class ArrayFile(TextFile):
    """A JSON array: records end at its top-level commas."""

    has_bracket = True
    """False if the file begins with an object."""
    num_elements = 0
    """Elements before the last boundary that was found."""
    path: Sequence[str] = ()
    """With `rows_at`: the fields that lead to the list."""

    def begin(self, *, at_end: bool) -> bool:
        """Skip the opening bracket; with `rows_at`, everything before the list in its field."""
        if not super().begin(at_end=at_end):
            return False
        if self.rows_at is not None:
            start = find_list(bytes(self.buffer[:_FIRST_BYTES]), self.rows_at)
            if start is None and (at_end or len(self.buffer) >= _FIRST_BYTES):
                raise SourceError(
                    f"the first {_FIRST_BYTES:,} bytes of source file '{self.uri}' have no JSON "
                    f"object with a list in field '{self.rows_at}'. Correct `rows_at`",
                    uri=self.uri,
                )
            if start is not None:
                self.path = path_of_list(bytes(self.buffer[:start]))
            self._skip_to(start or 0)
            return start is not None
        space = len(self.buffer) - len(self.buffer.lstrip())
        if space == len(self.buffer):
            self.skip(space)
            return at_end
        self.has_bracket = self.buffer[space] == ord("[")
        self._skip_to(space + self.has_bracket)
        return True

    def boundary(self, data: bytearray) -> int | None:
        """Return the last comma within a shard's size, else the first comma after it."""
        commas = split_elements(data[: self.max_shard_bytes + 1]).commas
        self.num_elements = len(commas)
        if len(commas):
            return int(commas[-1])
        commas = split_elements(data).commas
        self.num_elements = 1
        return int(commas[0]) if len(commas) else None

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Return the count of `boundary`. The last shard is not counted: nothing needs it."""
        if self.buffer[:size].isspace() or not size:
            return 0
        return None if is_last else self.num_elements

    def after_cut(self) -> None:
        """Skip the separating comma and the space after it."""
        if self.buffer[:1] == b",":
            self._skip_to(1)

    def end_of_file(self) -> None:
        """Drop the closing bracket; text after it is an error."""
        tail = self.buffer.rstrip()
        end = split_elements(tail).end if self.rows_at is not None else None
        if end is not None:  # leave out the fields that follow the list in its objects
            with suppress(orjson.JSONDecodeError):
                around = orjson.loads(b'{"":' * len(self.path) + b"[" + tail[end:])
                for _ in self.path[1:]:
                    around = around[""]
                if self.path[-1] not in around:
                    tail = tail[: end + 1]
        # Parsing the shard will tell whether a final bracket closes the array.
        if tail.endswith(b"]") or not self.has_bracket:
            self.buffer = tail.removesuffix(b"]").rstrip()
            if self.buffer.endswith(b","):  # `{...},\n]`, as people write it; no row is missing
                self.buffer = self.buffer[:-1]
                self.notes["trailing_commas"] = 1
            return
        self._check_end(tail)
        self.notes["truncated_files"] = 1

    def _check_end(self, data: bytes | bytearray) -> None:
        """Refuse text after the bracket that closes the array."""
        end = split_elements(data).end
        if end is not None and data[end] == ord("]"):
            place = self.position + end + 1
            raise SourceError(
                f"source file '{self.uri}' has text after the end of its JSON array, at byte "
                f"{place:,}. Remove it",
                uri=self.uri,
                byte_offset=place,
            )

    def _skip_to(self, place: int) -> None:
        """Drop the bytes before an offset, and the white space at it."""
        self.skip(place)
        self.skip(len(self.buffer) - len(self.buffer.lstrip()))

    @staticmethod
    def spans(data: bytes | bytearray) -> Ints:
        """Return the spans of the elements, including white space around them."""
        if not data.strip():
            return np.zeros((0, 2), np.int64)
        return between(data, split_elements(data).commas)

    def sample(self, head: bytes) -> list[object]:
        """Return the first elements that are valid JSON."""
        text = head.lstrip().removeprefix(b"[")
        if self.rows_at is not None:
            text = head[find_list(head, self.rows_at) or 0 :]
        return super().sample(text[: split_elements(text).end])

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
                records = min(records, by_layout, key=_lost_bytes)
        return records

    def blocks(
        self, data: bytes, max_row_bytes: int, num_rows: int | None = None
    ) -> Iterator[tuple[int, int, Records]]:
        """Parse elements in blocks; from the first block that is not plain JSON, all at once."""
        start, end, guesses = 0, -1, True
        while end < len(data):
            rows: list[Any] = []
            if guesses:
                # The bytes up to a comma are a whole array only if the comma is outside of strings
                # and brackets, so parsing proves a guess, in a third of `split_elements`' time.
                end = len(data)
                if end - start > BLOCK_BYTES:
                    end = data.rfind(b"},", start, start + BLOCK_BYTES) + 1
                with suppress(orjson.JSONDecodeError):
                    rows = orjson.loads(b"[%b]" % data[start:end])
            if not rows:
                guesses = False
                end = _find_block_end(data, start)
                with suppress(orjson.JSONDecodeError):
                    rows = orjson.loads(b"[%b]" % data[start:end])
            block = data[start:end]
            find_spans = cache(partial(self.spans, block))
            is_plain = len(rows) > 0 and _GOES_ON.match(data, end) is not None
            if is_plain and len(block) > max_row_bytes:
                is_plain = bool(np.diff(find_spans()).max() <= max_row_bytes)
            if not is_plain:
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
    for found in islice(re.finditer(rb'"\s*:\s*\[', data), 100):  # each parses the text before it
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
    for depth in range(1, _MAX_DEPTH + 1):
        with suppress(orjson.JSONDecodeError):
            value, path = orjson.loads(head + b"]" + b"}" * depth), []
            while isinstance(value, dict) and value:
                name = next(reversed(value))
                path.append(name)
                value = value[name]
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
    the least indented ones begin elements.

    Example:
        >>> spans_by_layout(b'{"a": [1},\n {"b": 2},\n {"c": [\n  {}]}').tolist()
        [[0, 9], [12, 20], [23, 37]]
    """
    lines = list(re.finditer(rb"\n([ \t]*)\{", data))
    least = min((len(line[1]) for line in lines), default=0)
    starts = [0, *(line.start() + 1 + least for line in lines if len(line[1]) == least)]
    spans = []
    for start, end in pairwise([*starts, len(data)]):
        piece = data[start:end].rstrip().removesuffix(b",")
        spans.append((start, start + len(piece)))
    return np.array(spans, np.int64)

"""Read JSON arrays: each element of the file's array is a row.

Objects separated by commas or by nothing are read as an array without its brackets.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import orjson

from packhouse.errors import SourceError
from packhouse.read.json_structure import between, split_elements
from packhouse.read.records import Ints, Records, Rows, check_parsed, parse_pieces
from packhouse.read.text_files import BLOCK_BYTES, NotInBlocksError, TextFile

_FIRST_BYTES = 2**16
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
        if self.rows_at is not None:
            tail = self._without_rest(tail)
        # Parsing the shard will tell whether a final bracket closes the array.
        if tail.endswith(b"]") or not self.has_bracket:
            self.buffer = tail.removesuffix(b"]").rstrip()
            if self.buffer.endswith(b","):  # `{...},\n]`, as people write it; no row is missing
                self.buffer = self.buffer[:-1]
                self.notes["trailing_commas"] = 1
            return
        elements = split_elements(tail)
        if elements.end is not None and tail[elements.end] == ord("]"):
            place = self.position + elements.end + 1
            raise SourceError(
                f"source file '{self.uri}' has text after the end of its JSON array, at byte "
                f"{place:,}. Remove it",
                uri=self.uri,
                byte_offset=place,
            )
        self.notes["truncated_files"] = 1

    def _without_rest(self, tail: bytearray) -> bytearray:
        """Return the end of the array without the fields of the object that follow it."""
        end = split_elements(tail).end
        if end is None:
            return tail
        with suppress(orjson.JSONDecodeError):
            around = orjson.loads(b'{"":' * len(self.path) + b"[" + tail[end:])
            for _ in self.path[1:]:
                around = around[""]
            if self.path[-1] not in around:
                return tail[: end + 1]
        return tail

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
        """Parse all elements separately."""
        return parse_array(data, max_row_bytes, f"source file '{self.uri}'", num_rows)

    def blocks(self, data: bytes, max_row_bytes: int) -> Iterator[tuple[int, int, Records]]:
        """Parse elements in blocks, as long as everything is JSON and no element is too long."""
        if not data.strip():
            yield 0, len(data), parse_pieces(data, self.spans(data), max_row_bytes)
            return
        start, end, guesses = 0, -1, True
        while end < len(data):
            end, rows = _guess_block(data, start) if guesses else (0, None)
            if not rows:
                guesses = False
                end = _find_block_end(data, start)
                try:
                    rows = orjson.loads(b"[%b]" % data[start:end])
                except orjson.JSONDecodeError:
                    raise NotInBlocksError from None
            block = data[start:end]
            find_spans = cache(partial(self.spans, block))
            is_too_long = len(block) > max_row_bytes and np.diff(find_spans()).max() > max_row_bytes
            if is_too_long or not rows:
                raise NotInBlocksError
            records = Records(Rows(rows), np.arange(len(rows)), len(rows), find_spans=find_spans)
            check_parsed(records, block, block)
            yield start, end, records
            if data[end : end + 1] not in (b",", b""):  # a comma is missing
                raise NotInBlocksError
            start = end + 1


def _guess_block(data: bytes, start: int) -> tuple[int, list[Any] | None]:
    """Return the end of a block and its rows, if an object ends there as it seems; else no rows.

    The bytes up to a comma are a whole array only if the comma is outside of strings and brackets,
    so parsing them proves the guess, in a third of the time of `split_elements`.
    """
    end = len(data)
    if end - start > BLOCK_BYTES:
        end = data.rfind(b"},", start, start + BLOCK_BYTES) + 1
    with suppress(orjson.JSONDecodeError):
        return end, orjson.loads(b"[%b]" % data[start:end])
    return end, None


def _find_block_end(data: bytes, start: int) -> int:
    """Return the last comma between elements within a block, else the first one, else the end."""
    size = BLOCK_BYTES
    while start + size < len(data):
        commas = split_elements(data[start : start + size]).commas
        if len(commas):
            return start + int(commas[-1])
        size *= 2  # one element exceeds the block
    return len(data)


def find_list(data: bytes, field: str) -> int | None:
    """Return the offset after the bracket that opens a field's list; None without such a field.

    `a.b` is field `b` of the object in field `a`.

    Example:
        >>> find_list(b'{"of": {"data": []}, "data": [1, 2]}', "data")
        30
        >>> find_list(b'{"of": {"data": [1, 2]}}', "of.data")
        17
    """
    for found in islice(re.finditer(rb'"\s*:\s*\[', data), 100):
        if ".".join(path_of_list(data[: found.end()])) == field:
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


def parse_array(
    data: bytes, max_row_bytes: int, where: str, num_rows: int | None = None
) -> Records:
    """Parse the inside of a JSON array: elements separated by commas, without the brackets.

    Args:
        data: from the start of an element to the end of one.
        max_row_bytes: longer elements fail unparsed.
        where: the file, for messages.
        num_rows: elements counted by the scan, if later rows are numbered from this count.

    Raises:
        SourceError: the array ends before the data does.
    """
    end = split_elements(data).end
    if end is not None and data[end] == ord("]"):
        raise SourceError(
            f"{where} has text after the end of its JSON array, {end:,} bytes into it. Remove it"
        )
    records = parse_pieces(data, ArrayFile.spans(data), max_row_bytes)
    assert records.spans is not None
    joined = np.count_nonzero(records.spans[1:, 0] == records.spans[:-1, 1])
    if joined:
        records.notes["joined_rows"] = int(joined)
    if _lost_bytes(records) > 0:  # an open bracket or quote may have swallowed good elements
        by_layout = parse_pieces(data, spans_by_layout(data), max_row_bytes)
        # Rows after this shard are numbered from the scan's count, so the count must not change.
        if num_rows in (None, by_layout.num_records):
            records = min(records, by_layout, key=_lost_bytes)
    return records


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

"""Read JSON arrays: one row for each element of the file's array.

A parser says what a text means but not where its parts lie, and a file larger than memory must be
cut before it is parsed. So the commas between elements are found first, in one pass over the bytes
with numpy: quotes that are not escaped divide text from syntax, brackets outside text give the
depth, and commas at depth 0 divide elements (the idea of simdjson, Langdale and Lemire 2019).
About 300 MB/s. Broken input stays local where it can: no JSON string may hold a raw newline, so a
string left open ends at the end of its line.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from packhouse.errors import SourceError
from packhouse.read.records import Ints, Records, Rows, check_parsed, parse_pieces
from packhouse.read.text_files import BLOCK_BYTES, NotInBlocksError, TextFile

_QUOTE, _BACKSLASH, _COMMA, _NEWLINE = b'"\\,\n'
_SPLIT_BYTES = 2**18


class Elements(NamedTuple):
    """Places in the inside of a JSON array (the bytes after its `[`)."""

    commas: Ints
    """Offsets of the commas between its elements, rising."""
    end: int | None
    """Offset of the `]` that closes the array, if it is there."""


def split_elements(data: bytes | bytearray | memoryview) -> Elements:
    r"""Find the commas between the elements of an array, and its end.

    Args:
        data: bytes after the array's `[`, from the start of an element.

    Returns:
        Offsets into `data`. After the closing bracket nothing is looked at.

    Example:
        >>> split_elements(b'{"a": "x,]\\""}, [1, 2], 3] tail')
        Elements(commas=array([14, 22]), end=25)
    """
    state = _State()
    commas: list[Ints] = []
    array = np.frombuffer(data, np.uint8)
    for start in range(0, len(array), _SPLIT_BYTES):
        found, end = _split_block(array[start : start + _SPLIT_BYTES], state)
        commas.append(found + start)
        if end is not None:
            return Elements(np.concatenate(commas), start + end)
    return Elements(np.concatenate(commas) if commas else np.zeros(0, np.int64), None)


@dataclass(slots=True)
class _State:
    """What a block hands on to the next."""

    depth: int = 0
    in_text: bool = False
    escapes_next: bool = False


def _split_block(block: npt.NDArray[np.uint8], state: _State) -> tuple[Ints, int | None]:
    quotes = _unescaped_quotes(block, state)
    folded = block | 0x20  # [ ] become { }
    opens_or_closes = (folded == 0x7B) | (folded == 0x7D)
    places = np.flatnonzero(opens_or_closes | (block == _COMMA))
    places = places[~_in_text(places, quotes, block, state)]
    # `{"a": 1}, [2], 3` has { } , [ ] , at 0 7 8 10 12 13: depth 1 0 0 1 0 0 behind each, so the
    # commas at 8 and 13 stand between elements.
    kinds = folded[places]
    steps = (kinds == 0x7B).astype(np.int64) - (kinds == 0x7D)
    depth = state.depth + np.cumsum(steps)
    state.depth = int(depth[-1]) if len(depth) else state.depth
    closings = np.flatnonzero(depth < 0)
    end = int(places[closings[0]]) if len(closings) else None
    is_comma = (block[places] == _COMMA) & (depth == 0)
    if end is not None:
        is_comma &= places < end
    return places[is_comma].astype(np.int64), end


def _unescaped_quotes(block: npt.NDArray[np.uint8], state: _State) -> Ints:
    """Offsets of the quotes that begin or end a text."""
    quotes = np.flatnonzero(block == _QUOTE)
    slashes = np.flatnonzero(block == _BACKSLASH)
    if state.escapes_next:  # the first byte, whatever it is
        quotes, slashes = quotes[quotes != 0], slashes[slashes != 0]
    state.escapes_next = False
    if not len(slashes):
        return quotes
    # A character is escaped when an odd number of backslashes runs up to it: `"a\"b\\"` has them at
    # 2 | 5 6, whose runs begin at 0 1 1; 2 and 5 are the first of theirs, so they escape what
    # follows: the quote at 3, and the backslash at 6. The quotes at 0 and 7 are left.
    new_run = np.concatenate([[True], np.diff(slashes) != 1])
    run_starts = np.maximum.accumulate(np.where(new_run, np.arange(len(slashes)), 0))
    is_odd = (np.arange(len(slashes)) - run_starts) % 2 == 0
    escaping = slashes[is_odd]
    state.escapes_next = len(block) - 1 in escaping[-1:]
    return np.setdiff1d(quotes, escaping + 1, assume_unique=True)


def _in_text(
    places: Ints, quotes: Ints, block: npt.NDArray[np.uint8], state: _State
) -> npt.NDArray[np.bool_]:
    # Quotes before each place: an odd number of them, and it lies in a text. In `"a": "b,c", "d`
    # there are 3 before the comma at 7, and 4 before the one at 10.
    before = np.searchsorted(quotes, places) + state.in_text
    newlines = np.flatnonzero(block == _NEWLINE)
    at_line_start = np.searchsorted(quotes, newlines) + state.in_text
    starts = np.append(0, at_line_start)
    if (starts % 2).any():  # a text open at the end of its line: count from line starts
        before = before - starts[np.searchsorted(newlines, places)]
    state.in_text = bool((len(quotes) + state.in_text - starts[-1]) % 2)
    inside: npt.NDArray[np.bool_] = before % 2 == 1
    return inside


_FIRST_BYTES = 2**16


class ArrayFile(TextFile):
    """A JSON array: records end at the commas of its first level."""

    def begin(self, *, at_end: bool) -> bool:
        """Skip the opening bracket, and what stands before the list of an object's field."""
        if self.rows_at is not None:
            start = find_list(bytes(self.buffer[:_FIRST_BYTES]), self.rows_at)
            if start is None and (at_end or len(self.buffer) >= _FIRST_BYTES):
                raise SourceError(
                    f"source file '{self.uri}' does not begin as a JSON object with a list in its "
                    f"field '{self.rows_at}' (looked at {_FIRST_BYTES:,} bytes); correct rows_at",
                    uri=self.uri,
                )
            self._skip_to(start or 0)
            return start is not None
        space = len(self.buffer) - len(self.buffer.lstrip())
        if space == len(self.buffer):
            return at_end
        assert self.buffer[space] == ord("["), "the file's format was found by this bracket"
        self._skip_to(space + 1)
        return True

    def boundary(self, data: bytearray) -> int | None:
        """Last comma within a shard's size, or the first behind it."""
        commas = split_elements(data[: self.max_shard_bytes + 1]).commas
        if len(commas):
            return int(commas[-1])
        commas = split_elements(data).commas
        return int(commas[0]) if len(commas) else None

    def count(self, size: int, *, is_last: bool) -> int | None:
        """Elements: one more than commas. Nothing needs the last shard's count, so it is saved."""
        data = self.buffer[:size]
        if not data.strip():
            return 0
        return None if is_last else len(self.spans(data))

    def after_cut(self) -> None:
        """Skip the dividing comma and the space behind it."""
        if self.buffer[:1] == b",":
            self._skip_to(1)

    def end_of_file(self) -> None:
        """Drop the closing bracket; what follows it is no row."""
        tail = self.buffer.rstrip()
        if self.rows_at is not None:
            tail = self._without_rest(tail)
        if tail.endswith(b"]"):  # whether it is the array's own shows when the shard is parsed
            self.buffer = tail[:-1].rstrip()
            if self.buffer.endswith(b","):  # `{...},\n]`: written by hand; no row is missing
                self.buffer = self.buffer[:-1]
                self.notes["trailing_commas"] = 1
            return
        elements = split_elements(tail)
        if elements.end is not None and tail[elements.end] == ord("]"):
            place = self.position + elements.end + 1
            raise SourceError(
                f"source file '{self.uri}': text follows the end of the JSON array at byte "
                f"{place:,}",
                uri=self.uri,
                byte_offset=place,
            )
        self.notes["truncated_files"] = 1

    def _without_rest(self, tail: bytearray) -> bytearray:
        """The end of the array, without the fields of the object that come after it."""
        end = split_elements(tail).end
        if end is None:
            return tail
        with suppress(orjson.JSONDecodeError):
            if self.rows_at not in orjson.loads(b'{"":[' + tail[end:]):
                return tail[: end + 1]
        return tail

    def _skip_to(self, place: int) -> None:
        """Drop bytes before a place, and the white space there."""
        self.skip(place)
        self.skip(len(self.buffer) - len(self.buffer.lstrip()))

    @staticmethod
    def spans(data: bytes | bytearray) -> Ints:
        """Elements, with the white space around them."""
        if not data.strip():
            return np.zeros((0, 2), np.int64)
        return _between(split_elements(data).commas, len(data))

    def sample(self, head: bytes) -> list[object]:
        """The first elements that are JSON."""
        text = head.lstrip()[1:]
        if self.rows_at is not None:
            text = head[find_list(head, self.rows_at) or 0 :]
        return super().sample(text[: split_elements(text).end])

    def parse(self, data: bytes, max_row_bytes: int, num_rows: int | None = None) -> Records:
        """Parse all elements one by one."""
        return parse_array(data, max_row_bytes, f"source file '{self.uri}'", num_rows)

    def blocks(self, data: bytes, max_row_bytes: int) -> Iterator[tuple[int, int, Records]]:
        """Parse some elements at a time, as long as all is JSON and no element is too long."""
        if not data.strip():
            yield 0, len(data), parse_pieces(data, self.spans(data), max_row_bytes)
            return
        start, end = 0, -1
        while end < len(data):
            size = BLOCK_BYTES
            commas = split_elements(data[start : start + size]).commas
            while not len(commas) and start + size < len(data):  # of one element that is longer
                size *= 2
                commas = split_elements(data[start : start + size]).commas
            end = len(data) if start + size >= len(data) else start + int(commas[-1])
            block = data[start:end]
            spans = _between(commas[commas < len(block)], len(block))
            try:
                rows = orjson.loads(b"[%b]" % block)
            except orjson.JSONDecodeError:
                raise NotInBlocksError from None
            is_too_long = int(np.diff(spans).max()) > max_row_bytes
            if is_too_long or len(rows) != len(spans):  # or there is nothing between two commas
                raise NotInBlocksError
            records = Records(Rows(rows), np.arange(len(rows)), len(rows), spans=spans)
            check_parsed(records, block, block)
            yield start, end, records
            start = end + 1


def _between(commas: Ints, size: int) -> Ints:
    """Spans of the elements of `size` bytes that commas divide."""
    bounds = np.concatenate([[-1], commas, [size]])
    return np.stack([bounds[:-1] + 1, bounds[1:]], axis=1)


def find_list(data: bytes, field: str) -> int | None:
    """Offset behind the bracket that opens the list in a field of a JSON object; None: no such one.

    A bracket is the right one if the object parses when it is closed right behind it.

    Example:
        >>> find_list(b'{"of": {"data": []}, "data": [1, 2]}', "data")
        30
    """
    opening = re.escape(orjson.dumps(field)) + rb"\s*:\s*\["
    for found in islice(re.finditer(opening, data), 100):
        with suppress(orjson.JSONDecodeError):
            if orjson.loads(data[: found.end()] + b"]}").get(field) == []:
                return found.end()
    return None


def parse_array(
    data: bytes, max_row_bytes: int, where: str, num_rows: int | None = None
) -> Records:
    """Parse the inside of a JSON array: elements divided by commas, no brackets around.

    Args:
        data: from the start of an element to the end of one.
        max_row_bytes: longer elements fail unparsed.
        where: the file, for messages.
        num_rows: how many elements the scan counted, where rows behind are numbered by it.

    Raises:
        SourceError: the array ends before the data does.
    """
    end = split_elements(data).end
    if end is not None and data[end] == ord("]"):
        raise SourceError(f"{where}: text follows the end of the JSON array, {end:,} bytes into it")
    records = parse_pieces(data, ArrayFile.spans(data), max_row_bytes)
    if _lost_bytes(records) > 0:  # an open bracket or quote may have swallowed sound elements
        by_layout = parse_pieces(data, spans_by_layout(data), max_row_bytes)
        # Rows behind this shard are numbered by the scan's count, so another count would move them.
        if num_rows in (None, by_layout.num_records):
            records = min(records, by_layout, key=_lost_bytes)
    return records


def _lost_bytes(records: Records) -> int:
    """Bytes of the records that did not become rows, also of those that nobody looked at."""
    assert records.spans is not None
    sizes = records.spans[:, 1] - records.spans[:, 0]
    return int(sizes.sum() - sizes[records.numbers].sum())


def spans_by_layout(data: bytes) -> Ints:
    r"""Spans of elements by the look of the file: each begins on a line of its own with `{`.

    For arrays whose brackets or quotes cannot be trusted. Of the lines that begin with a brace,
    those of the least indentation begin elements.

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

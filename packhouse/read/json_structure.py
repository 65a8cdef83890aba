"""Find where the values of JSON text begin and end, without parsing it.

A parser does not tell the offsets of values, and a file larger than memory must be cut before it is
parsed. So the commas between elements are found first, in one pass over the bytes with numpy:
unescaped quotes separate strings from syntax, brackets outside strings give the depth, and commas
at depth 0 separate elements (the idea of simdjson, Langdale and Lemire 2019). About 300 MB/s.

Damage stays local if possible: a JSON string cannot contain a raw newline, so a string left open
ends at the end of its line. If the comma between two objects is missing, the second object starts
an element as well.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from packhouse.read.records import Ints

_QUOTE, _BACKSLASH, _COMMA, _NEWLINE = b'"\\,\n'
_SPLIT_BYTES = 2**18


class Elements(NamedTuple):
    """Offsets in the inside of a JSON array (the bytes after its `[`)."""

    commas: Ints
    """Ascending offsets of the commas between elements; where one is missing, the offset of the
    next element's bracket."""
    end: int | None
    """Offset of the `]` that closes the array; None if it is missing."""


def split_elements(data: bytes | bytearray | memoryview) -> Elements:
    r"""Find the commas between the elements of an array, and its end.

    Args:
        data: bytes after the array's `[`, from the start of an element.

    Returns:
        Offsets in `data`. Bytes after the closing bracket are ignored.

    Example:
        >>> split_elements(b'{"a": "x,]\\""}, [1, 2], 3] tail')
        Elements(commas=array([14, 22]), end=25)
        >>> split_elements(b'{"a": 1} {"a": 2}').commas
        array([9])
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
    """State carried from one block to the next."""

    depth: int = 0
    in_text: bool = False
    escapes_next: bool = False
    is_closed: bool = False
    """True directly after the closing bracket of an element."""


def _split_block(block: npt.NDArray[np.uint8], state: _State) -> tuple[Ints, int | None]:
    quotes = _unescaped_quotes(block, state)
    folded = block | 0x20  # [ ] become { }
    opens_or_closes = (folded == 0x7B) | (folded == 0x7D)
    places = np.flatnonzero(opens_or_closes | (block == _COMMA))
    places = places[~_in_text(places, quotes, block, state)]
    # `{"a": 1}, [2], 3` has { } , [ ] , at 0 7 8 10 12 13. The depth after each is 1 0 0 1 0 0, so
    # the commas at 8 and 13 separate elements.
    kinds = folded[places]
    steps = (kinds == 0x7B).astype(np.int64) - (kinds == 0x7D)
    depth = state.depth + np.cumsum(steps)
    state.depth = int(depth[-1]) if len(depth) else state.depth
    closings = np.flatnonzero(depth < 0)
    end = int(places[closings[0]]) if len(closings) else None
    closes = (kinds == 0x7D) & (depth == 0)
    begins = (kinds == 0x7B) & np.append(state.is_closed, closes)[: len(places)]  # without a comma
    if len(places):
        state.is_closed = bool(closes[-1])
    divides = begins | ((kinds == _COMMA) & (depth == 0))
    if end is not None:
        divides &= places < end
    return places[divides].astype(np.int64), end


def _unescaped_quotes(block: npt.NDArray[np.uint8], state: _State) -> Ints:
    """Return the offsets of the quotes that begin or end a string."""
    quotes = np.flatnonzero(block == _QUOTE)
    slashes = np.flatnonzero(block == _BACKSLASH)
    if state.escapes_next:  # the first byte, whatever it is
        quotes, slashes = quotes[quotes != 0], slashes[slashes != 0]
    state.escapes_next = False
    if not len(slashes):
        return quotes
    # A character is escaped if an odd number of backslashes precedes it. `"a\"b\\"` has backslashes
    # at 2 and at 5 6. The first of each run (2 and 5) escapes the next byte: the quote at 3 and the
    # backslash at 6. The quotes at 0 and 7 remain.
    new_run = np.concatenate([[True], np.diff(slashes) != 1])
    run_starts = np.maximum.accumulate(np.where(new_run, np.arange(len(slashes)), 0))
    is_odd = (np.arange(len(slashes)) - run_starts) % 2 == 0
    escaping = slashes[is_odd]
    state.escapes_next = len(block) - 1 in escaping[-1:]
    return np.setdiff1d(quotes, escaping + 1, assume_unique=True)


def _in_text(
    places: Ints, quotes: Ints, block: npt.NDArray[np.uint8], state: _State
) -> npt.NDArray[np.bool_]:
    # An odd number of quotes before a byte puts it in a string. In `"a": "b,c", "d` there are 3
    # before the comma at 7, and 4 before the one at 10.
    before = np.searchsorted(quotes, places) + state.in_text
    newlines = np.flatnonzero(block == _NEWLINE)
    at_line_start = np.searchsorted(quotes, newlines) + state.in_text
    starts = np.append(0, at_line_start)
    if (starts % 2).any():  # a string is open at the end of its line: count from line starts
        before = before - starts[np.searchsorted(newlines, places)]
    state.in_text = bool((len(quotes) + state.in_text - starts[-1]) % 2)
    inside: npt.NDArray[np.bool_] = before % 2 == 1
    return inside


def between(data: bytes | bytearray, commas: Ints) -> Ints:
    """Return start and end of the elements that `Elements.commas` separates."""
    is_comma = np.frombuffer(data, np.uint8)[commas] == _COMMA
    starts, ends = np.append(0, commas + is_comma), np.append(commas, len(data))
    return np.stack([starts, ends], axis=1)


_IN_OBJECT = np.isin(np.arange(256), list(b'" \t\r\n'))
_IS_OPEN = np.arange(256) == 0x7B
_ALIKE = 5


def with_joined_objects_apart(data: bytes | bytearray, spans: Ints, gap: bytes = b" \t\r,") -> Ints:
    """Split records that consist of several objects; return the spans of all records.

    For lines such as `{...} {...}` and `{...}, {...}`. Records that are valid JSON stay unchanged.

    Args:
        data: bytes of all records.
        spans: start and end of each record.
        gap: bytes that may occur between two objects.
    """
    # Look for candidates first: `}` and `{` at most 3 bytes apart, and after a comma only an object
    # that begins like its record. These are rare in a good file, so few records are parsed here.
    array = np.frombuffer(data, np.uint8)
    at = np.flatnonzero(array[: max(0, len(array) - _ALIKE)] == 0x7D) + 1
    is_gap = np.zeros(256, np.bool_)
    is_gap[list(gap)] = True
    at = at[(is_gap | _IS_OPEN)[array[at]]]
    last, has_comma = len(array) - 1, np.zeros(len(at), np.bool_)
    for _ in range(3):
        found = array[at]
        has_comma |= found == _COMMA
        at = np.minimum(at + is_gap[found], last)
    keep = (array[at] == 0x7B) & _IN_OBJECT[array[np.minimum(at + 1, last)]]
    at, has_comma = at[keep], has_comma[keep]
    if not len(at) or not len(spans):
        return spans
    record = np.maximum(np.searchsorted(spans[:, 0], at, side="right") - 1, 0)
    starts = spans[record, 0]
    is_alike = np.ones(len(at), np.bool_)
    for offset in range(_ALIKE):
        is_alike &= array[np.minimum(at + offset, last)] == array[starts + offset]
    is_inside = (at > starts) & (at < spans[record, 1])
    pieces: list[Ints] = []
    done = 0
    for number in np.unique(record[is_inside & (is_alike | ~has_comma)]).tolist():
        start, end = spans[number].tolist()
        piece = bytes(data[start:end])
        with suppress(orjson.JSONDecodeError):
            orjson.loads(piece)
            continue
        own = between(piece, split_elements(piece).commas)
        own = own[[bool(piece[a:b].strip()) for a, b in own.tolist()]]
        if all(piece[a:b].lstrip()[:1] == b"{" for a, b in own.tolist()):
            pieces += [spans[done:number], own + start]
            done = number + 1
    return np.concatenate([*pieces, spans[done:]]) if pieces else spans

"""Where a JSON array's elements and a delimited file's records begin and end, found with numpy.

A parser says what a text means but not where its parts lie, and a file larger than memory must be
cut before it is parsed. Structure needs one pass over bytes: quotes that are not escaped divide
text from syntax, brackets outside text give the depth, and commas at depth 0 divide elements
(the idea of simdjson, Langdale and Lemire 2019, with numpy in place of SIMD). About 300 MB/s.

Broken input stays local where it can: no JSON string may hold a raw newline, so a string left
open ends at the end of its line.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = [
    "Elements",
    "filled_lines",
    "line_spans",
    "record_ends",
    "spans_by_layout",
    "split_elements",
]

Ints = npt.NDArray[np.int64]

_QUOTE, _BACKSLASH, _COMMA, _NEWLINE, _RETURN = b'"\\,\n\r'
_BLOCK_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Elements:
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
    for start in range(0, len(array), _BLOCK_BYTES):
        found, end = _split_block(array[start : start + _BLOCK_BYTES], state)
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
    escaped_first = state.escapes_next
    state.escapes_next = False
    if escaped_first:
        if len(slashes) and slashes[0] == 0:
            slashes = slashes[1:]
        elif len(quotes) and quotes[0] == 0:
            quotes = quotes[1:]
    if not len(slashes):
        return quotes
    # A character is escaped when an odd number of backslashes runs up to it.
    new_run = np.concatenate([[True], np.diff(slashes) != 1])
    run_starts = np.maximum.accumulate(np.where(new_run, np.arange(len(slashes)), 0))
    is_odd = (np.arange(len(slashes)) - run_starts) % 2 == 0
    escaping = slashes[is_odd]
    state.escapes_next = bool(len(escaping)) and int(escaping[-1]) == len(block) - 1
    preceded = np.searchsorted(escaping, quotes - 1)
    preceded[preceded == len(escaping)] = 0
    if not len(escaping):
        return quotes
    plain: Ints = quotes[escaping[preceded] != quotes - 1]
    return plain


def _in_text(
    places: Ints, quotes: Ints, block: npt.NDArray[np.uint8], state: _State
) -> npt.NDArray[np.bool_]:
    before = np.searchsorted(quotes, places) + state.in_text  # quotes before each place
    newlines = np.flatnonzero(block == _NEWLINE)
    at_line_start = np.searchsorted(quotes, newlines) + state.in_text
    if (at_line_start % 2).any():  # a text open at the end of its line: count from line starts
        starts = np.concatenate([[0], at_line_start])
        before = before - starts[np.searchsorted(newlines, places)]
        state.in_text = bool((len(quotes) + state.in_text - at_line_start[-1]) % 2)
    else:
        state.in_text = bool((len(quotes) + state.in_text) % 2)
    inside: npt.NDArray[np.bool_] = before % 2 == 1
    return inside


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


def line_spans(data: bytes | bytearray) -> Ints:
    r"""Start and end of each line that is not blank, line end excluded.

    Only `\n` ends a line; U+2028, U+0085 and a lone `\r` are text.

    Example:
        >>> line_spans(b"ab\n\n  \ncd\r\n").tolist()
        [[0, 2], [7, 10]]
    """
    array = np.frombuffer(data, np.uint8)
    spans = filled_lines(array)
    unsure = np.flatnonzero(array[spans[:, 0]] <= 0x20)
    if not len(unsure):
        return spans
    holds_text = np.append(~_IS_SPACE[array], False)
    keep = np.ones(len(spans), np.bool_)
    keep[unsure] = np.logical_or.reduceat(holds_text, spans[unsure].ravel())[::2]
    return spans[keep]


_IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


def filled_lines(array: npt.NDArray[np.uint8]) -> Ints:
    """Start and end of each line that has any byte; empty ones cost neither time nor memory."""
    holds_text = np.zeros(len(array) + 2, np.bool_)
    holds_text[1:-1] = array != _NEWLINE
    return np.flatnonzero(holds_text[1:] != holds_text[:-1]).reshape(-1, 2)


def record_ends(
    data: bytes | bytearray | memoryview,
    delimiter: str,
    *,
    is_whole: bool = False,
    blank: bool = True,
) -> Ints:
    r"""Offsets just after the newline that ends each complete record of CSV or TSV.

    A quote that begins a field opens it up to the next quote that is not doubled, if the field ends
    there; newlines between belong to the field. Quotes elsewhere are text (`5" disk`).

    Args:
        data: bytes from the start of a record.
        delimiter: one ASCII character.
        is_whole: nothing follows `data`, so a field still open at its end never closes; its record
            then ends with its line.
        blank: whether empty lines count as records.

    Example:
        >>> record_ends(b'a,"b\nc"\n5" d,e\n"f\ng', ",").tolist()
        [8, 15]
        >>> record_ends(b'a,"b\nc"\n5" d,e\n"f\ng', ",", is_whole=True).tolist()
        [8, 15, 18]
    """
    array = np.frombuffer(data, np.uint8)
    is_end = array == _NEWLINE
    if not blank:
        is_end[1:] &= array[:-1] != _NEWLINE
        is_end[:1] = False
    newlines = np.flatnonzero(is_end)
    quotes = np.flatnonzero(array == _QUOTE)
    if not len(quotes):
        return newlines + 1
    if _are_paired(array, quotes, ord(delimiter)):
        is_outside = np.searchsorted(quotes, newlines) % 2 == 0
        return np.asarray(newlines[is_outside] + 1, np.int64)
    fields = _quoted_fields(array, quotes, newlines, ord(delimiter), is_whole)
    starts, ends = np.array(fields, np.int64).reshape(-1, 2).T
    last = np.searchsorted(starts, newlines) - 1
    inside = (last >= 0) & (newlines < ends[np.maximum(last, 0)]) if len(starts) else False
    return newlines[~(inside | np.zeros(len(newlines), np.bool_))] + 1


def _are_paired(array: npt.NDArray[np.uint8], quotes: Ints, delimiter: int) -> bool:
    """Whether quotes simply open and close by turns: each that opens begins a field or is a double.

    A double inside a field closes and opens again, which comes to the same.
    """
    if len(quotes) % 2:
        return False
    opening, closing = quotes[::2], quotes[1::2]
    before = array[np.maximum(opening - 1, 0)]
    begins = (opening == 0) | (before == delimiter) | (before == _NEWLINE)
    doubles = np.concatenate([[False], opening[1:] == closing[:-1] + 1])
    behind = array[np.minimum(closing + 1, len(array) - 1)]
    ends = (behind == delimiter) | (behind == _NEWLINE) | (behind == _RETURN)
    ends |= np.concatenate([doubles[1:], [False]])
    ends[-1:] |= closing[-1:] == len(array) - 1
    return bool((begins | doubles).all() and ends.all())


def _quoted_fields(
    array: npt.NDArray[np.uint8], quotes: Ints, newlines: Ints, delimiter: int, is_whole: bool
) -> list[tuple[int, int]]:
    """Offsets of the opening and closing quote of each quoted field, one after the other."""
    places = quotes.tolist()
    before = array[np.maximum(quotes - 1, 0)]
    begins = (quotes == 0) | (before == delimiter) | (before == _NEWLINE)
    can_open = begins.tolist()
    closers = (delimiter, _NEWLINE, _RETURN)
    fields: list[tuple[int, int]] = []
    at = 0
    while at < len(places):
        if not can_open[at]:
            at += 1
            continue
        closing = at + 1
        while closing + 1 < len(places) and places[closing + 1] == places[closing] + 1:
            closing += 2
        behind = places[closing] + 1 if closing < len(places) else len(array) + 1
        if behind >= len(array) and not is_whole:  # what follows decides
            return [*fields, (places[at], len(array))]
        if behind == len(array) or (behind < len(array) and array[behind] in closers):
            fields.append((places[at], places[closing]))
            at = closing + 1
        else:  # never closed, or text behind the closing quote: go on behind its line
            line_end = int(np.searchsorted(newlines, places[at]))
            stop = newlines[line_end] if line_end < len(newlines) else len(array)
            at = int(np.searchsorted(quotes, stop))
    return fields

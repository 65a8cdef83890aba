"""Parse the records of a shard: JSON values become rows, bad records become failures.

A good row costs no Python call beyond `orjson.loads`.
"""

import gc
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from packhouse.system.plugins import BadRowError

MAX_BAD_ROWS = 500_000
"""Bad rows in a shard. Each takes 700 bytes of memory, but may take only two bytes of the file, as
in `[1,1,1...]`."""
MAX_DEPTH = 32
"""Nested containers, including the row itself."""
MAX_FIELDS = 1000
"""Fields in a row."""
MAX_LIST_DEPTH = 4
"""Objects around a list of rows."""
CUT_OFF = "; the file ends inside this row"
INVALID_ESCAPE = "invalid escape"


Ints = npt.NDArray[np.int64]


class Rows(list[Any]):
    """Parsed rows, with the types and keys that occur in them."""

    def __init__(self, rows: Iterable[Any] = ()) -> None:
        super().__init__(rows)
        self.are_objects = set(map(type, self)) <= {dict}
        objects = self if self.are_objects else [row for row in self if type(row) is dict]
        self.layouts: set[tuple[str, ...]] = set(map(tuple, objects))
        """The distinct sequences of keys among rows that are objects."""
        self.value_types = set(map(type, chain.from_iterable(map(dict.values, objects))))
        """Types of the values of these keys."""


def unwrapped(rows: list[Any]) -> list[Any]:
    """Take rows out of lists with one element.

    Example:
        >>> unwrapped([[{"a": 1}], {"a": 2}, [3]])
        [{'a': 1}, {'a': 2}, [3]]
    """
    return [
        row[0] if type(row) is list and len(row) == 1 and type(row[0]) in (dict, list) else row
        for row in rows
    ]


class Failure(NamedTuple):
    """Why a record of a shard is bad."""

    number: int
    """Number of the record, counted like `Records.numbers`."""
    reason: str
    detail: str


@dataclass(slots=True)
class Records:
    """The records of a part of a shard that is parsed on its own; they are numbered from 0."""

    rows: Rows
    """Values of the good records."""
    numbers: Ints
    """Number of each of `rows`."""
    num_records: int
    """Good and bad records."""
    failures: list[Failure] = field(default_factory=list)
    find_spans: Callable[[], Ints] | None = None
    """Returns `spans`, so that they are searched only if a message or bad row needs them."""
    failed: dict[int, object] = field(default_factory=dict)
    """Values of bad records by their number, for formats without bytes to show."""
    notes: dict[str, int] = field(default_factory=dict)
    originals: list[Any] | None = None
    """The same rows before `select`; None without it."""
    row_start: int = 0
    """Number in the file of the first record; `read_parts` sets this, `byte_start` and `data`."""
    byte_start: int = 0
    """Offset of `data` in the uncompressed file."""
    data: bytes = b""
    """Bytes of the part; empty for columnar formats, whose rows have no bytes."""

    @property
    def spans(self) -> Ints | None:
        """Start and end of every record in the part's bytes, [num_records, 2]; None without bytes.

        A span may include white space around the record.
        """
        return None if self.find_spans is None else self.find_spans()

    def failures_of(self, faults: Iterable[tuple[int, str, str]]) -> list[Failure]:
        """Turn faults (index in `rows`, reason, detail) into failures with record numbers.

        Example:
            >>> records = Records(Rows("ab"), np.array([0, 2]), 3)  # record 1 is not JSON
            >>> records.failures_of([(1, "roles", "no answer")])
            [Failure(number=2, reason='roles', detail='no answer')]
        """
        return [Failure(int(self.numbers[place]), *why) for place, *why in faults]

    def reject(self, faults: Mapping[int, tuple[str, str]]) -> None:
        """Move rows to `failures`; `faults` maps an index in `rows` to a reason and a detail."""
        if not faults:
            return
        self.failures += self.failures_of((place, *why) for place, why in faults.items())
        if self.find_spans is None:
            self.failed |= {int(self.numbers[place]): self.rows[place] for place in faults}
        fit = [place for place in range(len(self.rows)) if place not in faults]
        self.rows, self.numbers = Rows(map(self.rows.__getitem__, fit)), self.numbers[fit]
        if self.originals is not None:
            self.originals = list(map(self.originals.__getitem__, fit))


def parse_pieces(data: bytes, spans: Ints, max_row_bytes: int) -> Records:
    """Parse the JSON value in each span of `data`; those over `max_row_bytes` fail unparsed.

    A file that ends inside its last record is counted in `truncated_files`.
    """
    records = Records(Rows(), np.arange(len(spans)), len(spans), find_spans=lambda: spans)
    parsed = data
    try:
        if int((spans[:, 1] - spans[:, 0]).max(initial=0)) > max_row_bytes:
            raise ValueError
        records.rows = Rows(map(orjson.loads, _pieces(data, spans)))
    except ValueError:  # parse one at a time to find the bad ones
        rows, numbers, failures = [], [], records.failures
        for number, piece in enumerate(_pieces(data, spans)):
            if len(failures) > MAX_BAD_ROWS:  # the reader will refuse the shard
                break
            if len(piece) > max_row_bytes:
                failures.append(too_long(number, piece, max_row_bytes))
                continue
            try:
                rows.append(orjson.loads(piece))
                numbers.append(number)
            except orjson.JSONDecodeError as error:
                failures.append(Failure(number, *why_not_json(piece, error)))
        if failures and not data.endswith(b"\n"):
            number, reason, detail = failures[-1]
            if number == len(spans) - 1 and reason == "json" and _begins_a_row(piece):
                failures[-1] = Failure(number, reason, detail + CUT_OFF)
                records.notes["truncated_files"] = 1
        records.rows, records.numbers = Rows(rows), np.array(numbers, np.int64)
        parsed = b"\n".join(_pieces(data, spans[records.numbers]))
    check_parsed(records, data, parsed)
    return records


def _pieces(data: bytes, spans: Ints) -> Iterator[bytes]:
    """Yield the bytes of each span; spans are converted in blocks, as there can be one per byte."""
    for first in range(0, len(spans), 2**14):
        for start, end in spans[first : first + 2**14].tolist():
            yield data[start:end]


def _begins_a_row(piece: bytes) -> bool:
    """Return False for a last line such as `...`, which is not a row that was cut off."""
    return piece.lstrip()[:1] in (b"{", b"[")


def too_long(number: int, piece: bytes, max_row_bytes: int) -> Failure:
    """Return the failure of a record over the limit."""
    limit = f"more than validate.max_row_bytes ({max_row_bytes:,})"
    return Failure(number, "row_too_long", f"the row has {len(piece):,} bytes, {limit}")


def check_parsed(records: Records, data: bytes, parsed: bytes) -> None:
    """Move rows that orjson should have refused from `rows` to `failures`.

    Args:
        records: the rows, with their spans in `data`.
        data: bytes of all records.
        parsed: bytes of the records that became rows.
    """
    # orjson reads about 240,000 rows a second, but it keeps the last of duplicate keys, turns
    # integers over 64 bits into floats, and accepts NUL and deep nesting. Cheap totals reveal this:
    # the number of colons when its values are written again, the types of the values, the depth of
    # the containers. Only if a total differs, each row is parsed again with the standard library.
    #
    # This is `is_suspect` for all rows at once. numpy counts 2 MB in 0.6 ms; `bytes.count` takes
    # 1.8 ms.
    rows = records.rows
    has_escapes = b"\\u00" in parsed and (b"\\u0000" in parsed or b"\\u003" in parsed)
    if not has_escapes and not _is_deep_or_large(rows):
        texts = (np.frombuffer(text, np.uint8) for text in (parsed, orjson.dumps(rows)))
        num_read, num_written = (np.count_nonzero(text == ord(":")) for text in texts)
        if num_read == num_written:
            return
    assert records.spans is not None
    spans = records.spans[records.numbers].tolist()
    faults = {
        place: wrong
        for place, (row, (start, end)) in enumerate(zip(rows, spans, strict=True))
        if (wrong := hidden_fault(data[start:end], row)) is not None
    }
    records.reject(faults)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the garbage collector from walking a growing heap of rows, which have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Only if this turned it off: a caller may have paused it for longer.
        if was_enabled:
            gc.enable()


def parse_text(text: str) -> tuple[Any, tuple[str, str] | None]:
    """Parse JSON in the text of a field, as strictly as a row; return its value, or why it is bad.

    Example:
        >>> parse_text('[1]'), parse_text('{"a": 1, "a": 2}')[1][0]
        (([1], None), 'duplicate_key')
    """
    data = text.encode("utf-8", "surrogatepass").replace(b"\n", b" ").replace(b"\r", b" ")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not data.strip():
            return None, ("json", "not JSON: the text is empty")
        reason, detail = why_not_json(data, error)
        is_cut = reason == "json" and _begins_a_row(data)
        return None, (reason, detail + CUT_OFF if is_cut else detail)
    bad = hidden_fault(data, value)
    return (value, None) if bad is None else (None, bad)


def value_of(field: object) -> Any:
    """Return a field's value; text is parsed as JSON, and None stands for bad JSON."""
    return parse_text(field)[0] if isinstance(field, str) else field


def json_in(data: bytes | bytearray) -> Any:
    """Return the value of JSON text; None for other text, and for null."""
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(data)
    return None


def lists_in(value: dict[str, Any], path: Sequence[str] = ()) -> Iterator[tuple[str, list[Any]]]:
    """Yield the path of each list of objects in an object and in the objects in it, and the list.

    Example:
        >>> list(lists_in({"meta": {"x": 1}, "of": {"data": [{"a": 1}]}}))
        [('of.data', [{'a': 1}])]
    """
    for name, inner in value.items():
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield ".".join((*path, name)), inner
        elif isinstance(inner, dict) and len(path) + 1 < MAX_LIST_DEPTH:
            yield from lists_in(inner, (*path, name))


def why_not_json(piece: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Return the reason code and a sentence for bytes that orjson rejects."""
    reason, detail = _fault_of(piece, error)
    first = _FIRST.search(piece)
    # Nobody should have to guess how much was lost if it cannot be split into objects.
    if first is not None and (number := piece.count(first[1])) > 1:
        detail += f"; {number:,} objects begin in its {len(piece):,} bytes"
    return reason, detail


def _fault_of(piece: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    said = error.msg
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as bad:
        byte = piece[bad.start]
        return "encoding", f"byte 0x{byte:02x} at offset {bad.start} of the row is not UTF-8"
    if "surrogate" in said:
        return "encoding", f"a \\u escape is half of a surrogate pair ({said})"
    if "depth" in said:
        return "depth", f"nested more than {MAX_DEPTH} levels deep"
    if "control character" in said or "\0" in text:
        return "control", f"a raw control character inside a string ({said})"
    reason, detail = strict_fault(text) or ("json", "")
    if "escaped sequence" in said:
        escape, column = text[error.pos : error.pos + 2], len(text[: error.pos].lstrip()) + 1
        said = f"{INVALID_ESCAPE} {escape} in column {column:,} of the row"
    return reason, detail if reason != "json" else f"not JSON: {said}"


def strict_fault(text: str) -> tuple[str, str] | None:
    """Return the fault of a row under the strictest parsing, or None."""
    try:
        _STRICT.decode(text)
    except BadRowError as refused:
        return refused.reason, refused.detail
    # orjson parses up to 1,024 levels. Python's parser recurses, and its limit may be lower.
    except RecursionError:
        return "depth", f"nested more than {MAX_DEPTH} levels deep"
    except ValueError as error:
        return "json", f"not JSON: {error}"
    return None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRowError("duplicate_key", f"the key {twice[:100]!r} occurs twice in one object")
    return found


def _int64(digits: str) -> int:
    # Python's own `int` takes quadratic time, and refuses more than 4,300 digits.
    # Unsigned integers are allowed, as orjson keeps them: it makes a float of 18446744073709551616,
    # but not of 18446744073709551615.
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise BadRowError("number", f"integer over 64 bits: {digits[:40]}")
    return int(digits)


# orjson refuses 1e400, while `json` returns infinity for it.
def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise BadRowError("number", f"number too large for a float: {digits[:40]}")
    return value


def _no_constant(name: str) -> None:
    raise BadRowError("number", f"{name} is not JSON")


_STRICT = json.JSONDecoder(
    object_pairs_hook=_no_duplicates,
    parse_int=_int64,
    parse_float=_finite,
    parse_constant=_no_constant,
)


# Bytes that neither nest values nor make a number large.
_HARMLESS = bytes(set(range(256)) - set(b"0123456789{["))


def hidden_fault(data: bytes, value: Any) -> tuple[str, str] | None:
    r"""Return the reason and a sentence if orjson should have rejected `data`, else None.

    Example:
        >>> data = b'{"a": 1, "a": 2}'
        >>> hidden_fault(data, orjson.loads(data))
        ('duplicate_key', "the key 'a' occurs twice in one object")
    """
    return find_fault(data, value) if is_suspect(data, value) else None


def is_suspect(data: bytes, row: Any) -> bool:
    """Return True if orjson may have hidden a fault in `data`; never False if it did."""
    # A lost duplicate loses its colon: `{"a": 1, "a": 2}` has two, and written again as `{"a":2}`
    # has one. `\u003a` escapes would change that count, so they are always suspect.
    if b"\\u00" in data and (b"\\u0000" in data or b"\\u003" in data):
        return True
    # Counting bytes is enough for most texts: nesting too deep takes 33 open brackets, an integer
    # over 64 bits takes 19 digits, and too many fields take 1,001 colons.
    num_colons = data.count(b":")
    left = data.translate(None, _HARMLESS)
    num_open = left.count(b"{") + left.count(b"[")
    is_small = num_open <= MAX_DEPTH and len(left) - num_open < 19 and num_colons <= MAX_FIELDS
    if not is_small and _is_deep_or_large([row]):
        return True  # checked first, because orjson cannot write values nested over 254 deep
    return num_colons != orjson.dumps(row).count(b":")


def _is_deep_or_large(rows: list[Any]) -> bool:
    """Return True if containers nest too deep, an object is too wide, or an integer is a float."""
    level = rows
    for _ in range(MAX_DEPTH):
        types = set(map(type, level))
        # orjson turns integers that do not fit 64 bits, from 9.2e18 on, into floats.
        if float in types and any(type(x) is float and not -9e18 < x < 9e18 for x in level):
            return True
        if dict not in types and list not in types:
            return False
        objects = level if types == {dict} else [x for x in level if type(x) is dict]
        if max(map(len, objects), default=0) > MAX_FIELDS:
            return True
        lists = [x for x in level if type(x) is list] if list in types else []
        level = [*chain.from_iterable(map(dict.values, objects)), *chain.from_iterable(lists)]
    return any(type(x) is dict or type(x) is list for x in level)


def find_fault(piece: bytes, row: Any) -> tuple[str, str] | None:
    """Return the reason and a sentence for a row that orjson should have rejected, else None."""
    level = [row]
    for _ in range(MAX_DEPTH):
        containers = [x for x in level if type(x) in (dict, list)]
        level = [v for x in containers for v in (x.values() if type(x) is dict else x)]
    if not {dict, list}.isdisjoint(map(type, level)):
        return "depth", f"nested more than {MAX_DEPTH} levels deep"
    found = strict_fault(piece.decode("utf-8"))
    if found is not None:
        return found
    if _holds_nul(row):
        return "control", "a string contains the NUL character (\\u0000)"
    if isinstance(row, dict) and len(row) > MAX_FIELDS:
        detail = f"the row has {len(row):,} fields; at most {MAX_FIELDS:,} are read"
        return "too_many_fields", detail
    return None


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in key or _holds_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_holds_nul, value))


# Where the values of JSON text begin and end, without parsing it.
#
# A parser does not tell the offsets of values, and a file larger than memory must be cut before it
# is parsed. So the commas between elements are found first, in one pass over the bytes with numpy:
# unescaped quotes separate strings from syntax, brackets outside strings give the depth, and commas
# at depth 0 separate elements (the idea of simdjson, Langdale and Lemire 2019). About 300 MB/s.
#
# Damage stays local if possible: a JSON string cannot contain a raw newline, so a string left open
# ends at the end of its line. If the comma between two objects is missing, the second object starts
# an element as well.


_QUOTE, _BACKSLASH, _COMMA, _NEWLINE = b'"\\,\n'
# Blocks of 256 KiB and their masks stay in the processor's cache: 141 MB/s, but 106 with 4 MiB.
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
    array = np.frombuffer(data, np.uint8)
    found: list[Ints] = []
    # Carried from one block to the next; `is_closed` after the bracket that closes an element.
    depth, in_text, escapes_next, is_closed = 0, False, False, False
    for start in range(0, len(array), _SPLIT_BYTES):
        block = array[start : start + _SPLIT_BYTES]
        quotes = np.flatnonzero(block == _QUOTE)
        slashes = np.flatnonzero(block == _BACKSLASH)
        if escapes_next:  # the first byte, whatever it is
            quotes, slashes = quotes[quotes != 0], slashes[slashes != 0]
        # A character is escaped if an odd number of backslashes precedes it. `"a\"b\\"` has
        # backslashes at 2 and at 5 6. The first of each run (2 and 5) escapes the next byte: the
        # quote at 3 and the backslash at 6. The quotes at 0 and 7 remain.
        order = np.arange(len(slashes))
        is_first = np.diff(slashes, prepend=-2) != 1
        is_odd = (order - np.maximum.accumulate(np.where(is_first, order, 0))) % 2 == 0
        escaping = slashes[is_odd]
        escapes_next = len(block) - 1 in escaping[-1:]
        if len(escaping):
            quotes = np.setdiff1d(quotes, escaping + 1, assume_unique=True)
        folded = block | 0x20  # [ ] become { }
        places = np.flatnonzero((folded == 0x7B) | (folded == 0x7D) | (block == _COMMA))
        # An odd number of quotes before a byte puts it in a string. In `"a": "b,c", "d` there are 3
        # before the comma at 7, and 4 before the one at 10.
        before = np.searchsorted(quotes, places) + in_text
        newlines = np.flatnonzero(block == _NEWLINE)
        line_starts = np.append(0, np.searchsorted(quotes, newlines) + in_text)
        if (line_starts % 2).any():  # a string is open at the end of its line: count from there
            before = before - line_starts[np.searchsorted(newlines, places)]
        in_text = bool((len(quotes) + in_text - line_starts[-1]) % 2)
        places = places[before % 2 == 0]
        if not len(places):
            continue
        # `{"a": 1}, [2], 3` has { } , [ ] , at 0 7 8 10 12 13. The depth after each is 1 0 0 1 0 0,
        # so the commas at 8 and 13 separate elements.
        kinds = folded[places]
        depths = depth + np.cumsum((kinds == 0x7B).astype(np.int64) - (kinds == 0x7D))
        depth = int(depths[-1])
        closes = (kinds == 0x7D) & (depths == 0)
        begins = (kinds == 0x7B) & np.append(is_closed, closes[:-1])  # without a comma
        is_closed = bool(closes[-1])
        divides = begins | ((kinds == _COMMA) & (depths == 0))
        if (depths < 0).any():
            last = int(np.argmax(depths < 0))
            found.append(places[:last][divides[:last]] + start)
            return Elements(np.concatenate(found), start + int(places[last]))
        found.append(places[divides] + start)
    return Elements(np.concatenate([np.zeros(0, np.int64), *found]), None)


def between(data: bytes | bytearray, commas: Ints) -> Ints:
    """Return start and end of the elements that `Elements.commas` separates."""
    # `1, 2` with its comma at 1 -> [0, 1] and [2, 4]; the bracket of an element is part of it.
    is_comma = np.frombuffer(data, np.uint8)[commas] == _COMMA
    starts, ends = np.append(0, commas + is_comma), np.append(commas, len(data))
    return np.stack([starts, ends], axis=1)


_IN_OBJECT = np.isin(np.arange(256), list(b'"{ \t\r\n'))
_BEFORE_VALUE = np.isin(np.arange(256), list(b":[,{ \t\r\n"))
"""Bytes after which an object may be inside another; after more white space, it is unknown."""
_ALIKE = 5
_FIRST = re.compile(rb'(?:\A|[}\]])\s*((?:\[\s*)?\{\s*"[^"\\]*"\s*:)')
"""Where the first object of a record begins; if its first key is broken, the next object."""
_OBJECT = re.compile(rb'(?:\[\s*)?\{\s*["}]')
_NOT_GAP = re.compile(r"[^\s,]")
_MAX_TRIES = 100  # each may read the text up to its end


def with_joined_objects_apart(data: bytes | bytearray, spans: Ints, gap: bytes = b" \t\r,") -> Ints:
    """Split records that consist of several objects; return the spans of all records.

    For lines such as `{...} {...}` and `{...}, {...}`, or `[{...}][{...}]` if the first record is a
    list of objects. Records that are valid JSON stay unchanged. A broken object ends where the next
    one certainly begins.

    Args:
        data: bytes of all records.
        spans: start and end of each record.
        gap: bytes that may occur between two objects.
    """
    # Look for candidates first: `{` at most 3 bytes after `}`, and after a comma or an object that
    # is not closed, only one that begins like its record. These are rare in a good file, so few
    # records are parsed here.
    if not len(spans):
        return spans
    array, first = np.frombuffer(data, np.uint8), spans[0, 0]
    opening = 0x5B if data[first : first + 2] == b"[{" else 0x7B
    at = np.flatnonzero(array[: max(0, len(array) - _ALIKE)] == opening)
    at = at[_IN_OBJECT[array[at + 1]]]
    if not len(at):
        return spans
    is_gap = np.zeros(256, np.bool_)
    is_gap[list(gap)] = True
    last, before, has_comma = len(array) - 1, np.maximum(at - 1, 0), np.zeros(len(at), np.bool_)
    for _ in range(3):
        found = array[before]
        has_comma |= found == _COMMA
        before = np.maximum(before - is_gap[found], 0)
    is_closed = array[before] == opening + 2
    keep = is_closed | (
        ~_BEFORE_VALUE[array[before]] & (array[at + 1] == array[min(first + 1, last)])
    )
    at, has_comma, is_closed = at[keep], has_comma[keep], is_closed[keep]
    if not len(at):
        return spans
    record = np.maximum(np.searchsorted(spans[:, 0], at, side="right") - 1, 0)
    starts = spans[record, 0]
    is_alike = np.ones(len(at), np.bool_)
    for offset in range(_ALIKE):
        here, first_ones = (np.minimum(each + offset, last) for each in (at, starts))
        is_alike &= array[here] == array[first_ones]
    is_inside = (at > starts) & (at < spans[record, 1])
    pieces: list[Ints] = []
    done = 0
    for number in np.unique(record[is_inside & (is_alike | (is_closed & ~has_comma))]).tolist():
        start, end = spans[number].tolist()
        piece = bytes(data[start:end])
        if json_in(piece) is not None:
            continue
        apart = _objects_in(piece, bytes([opening]))
        pieces += [spans[done:number], np.array(apart) + start]
        done = number + 1
    return np.concatenate([*pieces, spans[done:]]) if pieces else spans


def _objects_in(piece: bytes, opening: bytes) -> list[tuple[int, int]]:
    """Return start and end of the objects in a record, some of which may be broken."""
    own = [(a, b) for a, b in between(piece, split_elements(piece).commas).tolist()]
    own = [(a, b) for a, b in own if piece[a:b].strip()]
    texts = [piece[a:b].lstrip() for a, b in own]
    are_objects = [text.startswith(opening) and _OBJECT.match(text) is not None for text in texts]
    bad = 0
    while bad < len(own) and are_objects[bad] and json_in(texts[bad]) is not None:
        bad += 1
    first = _FIRST.search(piece)
    if bad == len(own):
        return own
    if first is None:
        return [(0, len(piece))]
    # `{"a": 1}, "b": 2}`: the first object goes on. `{"a": 1}, "a": 2}` lost an opening bracket.
    key = first[1].lstrip(b"[{ \t\r\n")
    if bad and not are_objects[bad] and not texts[bad].startswith(key):
        bad -= 1
    # Brackets and quotes cannot be trusted from the first broken object on.
    at = own[bad][0]
    is_flat = bad > 0 and all(piece[a:b].count(first[1]) == 1 for a, b in own[:bad])
    is_flat = is_flat and not re.search(rb"[\[:]\s*" + re.escape(first[1]), piece[at:])
    starts = [at + start for start in starts_in(piece[at:], first[1], is_flat=is_flat)]
    alike = [*own[:bad], *spans_from(piece, starts)]
    return min(alike, own if all(are_objects) else alike, key=partial(_bytes_lost, piece))


def _bytes_lost(piece: bytes, spans: Iterable[tuple[int, int]]) -> int:
    return sum(b - a for a, b in spans if json_in(piece[a:b]) is None)


def starts_in(data: bytes, begin: bytes, *, is_flat: bool) -> list[int]:
    r"""Return where objects begin in text whose first object is broken.

    Quotes in a string are escaped, so `{"a":` is not in a string. It may be inside another object:
    then a start is certain only if there is nothing but whole objects from it to the end, and they
    do not follow an object that is certainly inside.

    Args:
        data: the text.
        begin: how objects begin, such as `{"a":`.
        is_flat: no object in another one begins so.

    Example:
        >>> starts_in(b'{"a": "b" c"} {"a": 1, {"a": 2}', b'{"a":', is_flat=True)
        [0, 14, 23]
        >>> starts_in(b'{"a": "b" c", "d": [{"a": 1}, {"a": 2}]} {"a": 3}', b'{"a":', is_flat=False)
        [0, 41]
    """
    lead = len(data) - len(data.lstrip())
    found = (found.start() for found in re.finditer(re.escape(begin), data))
    starts = [start for start in found if start > lead]
    if is_flat:
        return [0, *starts]
    text, seen = data.decode("latin-1"), set[int]()  # with an offset for each byte
    decoder = json.JSONDecoder()
    for start in starts[:_MAX_TRIES]:
        at, rows = start, list[int]()
        is_inside = data[max(0, start - 9) : start].rstrip()[-1:] in (b"[", b":")
        while at < len(text) and at not in seen:
            rows.append(at)
            try:
                _, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                break
            after = _NOT_GAP.search(text, end)
            at = len(text) if after is None else after.start()
        else:
            if at not in seen and not is_inside:
                return [0, *rows]
        seen.update(rows)
    return [0]


def spans_from(data: bytes, starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and end of the objects that begin at `starts`, without commas after them."""
    ends = [
        len(data[a:b].rstrip().removesuffix(b",")) + a for a, b in pairwise([*starts, len(data)])
    ]
    return list(zip(starts, ends, strict=True))

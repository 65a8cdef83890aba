"""Parse the records of a shard: JSON values become rows, bad records become failures.

orjson reads about 240,000 rows a second, but it keeps the last of duplicate keys, turns integers
over 64 bits into floats, and accepts NUL and deep nesting. Cheap totals reveal this: the number of
colons when its values are written again, the types of the values, the depth of the containers. If a
total differs, each row is parsed again with the standard library, which has hooks for all of these.
A good row costs no Python call beyond `orjson.loads`.
"""

import gc
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
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
CUT_OFF = "; the file ends inside this row"


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
    """0-based number of the record in the shard."""
    reason: str
    detail: str


@dataclass(slots=True)
class Records:
    """The records of a shard."""

    rows: Rows
    """Values of the good records."""
    numbers: Ints
    """Number in the shard of each of `rows`."""
    num_records: int
    """Good and bad records."""
    failures: list[Failure] = field(default_factory=list)
    find_spans: Callable[[], Ints] | None = None
    """Returns `spans`, so that they are searched only if a message or bad row needs them."""
    failed: dict[int, object] = field(default_factory=dict)
    """Values of bad records by their number, for formats without bytes to show."""
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def spans(self) -> Ints | None:
        """Start and end of every record in the shard's bytes, [num_records, 2]; None without bytes.

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

    def keep(self, places: list[int]) -> None:
        """Keep only the rows at these indices of `rows`."""
        self.rows = Rows(map(self.rows.__getitem__, places))
        self.numbers = self.numbers[places]


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
            if number == len(spans) - 1 and reason == "json":
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


def too_long(number: int, piece: bytes, max_row_bytes: int) -> Failure:
    """Return the failure of a record over the limit."""
    detail = f"the row has {len(piece):,} bytes; max_row_bytes is {max_row_bytes:,}"
    return Failure(number, "row_too_long", detail)


def check_parsed(records: Records, data: bytes, parsed: bytes) -> None:
    """Move rows that orjson should have refused from `rows` to `failures`.

    Args:
        records: the rows, with their spans in `data`.
        data: bytes of all records.
        parsed: bytes of the records that became rows.
    """
    if not are_suspect(parsed, records.rows):
        return
    assert records.spans is not None
    spans = records.spans[records.numbers].tolist()
    good = []
    for place, (row, (start, end)) in enumerate(zip(records.rows, spans, strict=True)):
        wrong = hidden_fault(data[start:end], row)
        if wrong is None:
            good.append(place)
        else:
            records.failures.append(Failure(int(records.numbers[place]), *wrong))
    records.keep(good)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the garbage collector from walking a growing heap of rows, which have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
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
        return None, (reason, detail + CUT_OFF if reason == "json" else detail)
    bad = hidden_fault(data, value)
    return (value, None) if bad is None else (None, bad)


def value_of(field: object) -> Any:
    """Return a field's value; text is parsed as JSON, and None stands for bad JSON."""
    return parse_text(field)[0] if isinstance(field, str) else field


def why_not_json(piece: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Return the reason code and a sentence for bytes that orjson rejects."""
    said = error.msg
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as bad:
        byte = piece[bad.start]
        return "encoding", f"byte 0x{byte:02x} at offset {bad.start} of the row is not UTF-8"
    if "surrogate" in said:
        return "encoding", f"a \\u escape is half of a surrogate pair ({said})"
    if "depth" in said:
        return "depth", f"nested deeper than {MAX_DEPTH}"
    if "control character" in said or "\0" in text:
        return "control", f"a raw control character inside a string ({said})"
    reason, detail = strict_fault(text) or ("json", "")
    return reason, detail if reason != "json" else f"not JSON: {said}"


def strict_fault(text: str) -> tuple[str, str] | None:
    """Return the fault of a row under the strictest parsing, or None."""
    try:
        _STRICT.decode(text)
    except BadRowError as refused:
        return refused.reason, refused.detail
    except RecursionError:
        return "depth", f"nested deeper than {MAX_DEPTH}"
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
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise BadRowError("number", f"integer over 64 bits: {digits[:40]}")
    return int(digits)


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


_HARMLESS = bytes(set(range(256)) - set(b"0123456789{["))
"""Bytes that neither nest values nor make a number large."""


def hidden_fault(data: bytes, value: Any) -> tuple[str, str] | None:
    r"""Return the reason and a sentence if orjson should have rejected `data`, else None.

    Example:
        >>> data = b'{"a": 1, "a": 2}'
        >>> hidden_fault(data, orjson.loads(data))
        ('duplicate_key', "the key 'a' occurs twice in one object")
    """
    return find_fault(data, value) if is_suspect(data, value) else None


def is_suspect(data: bytes, row: Any) -> bool:
    r"""Return True if orjson may have hidden a fault in `data`; never False if it did.

    Counting bytes is enough for most texts: nesting too deep takes 33 open brackets, an integer
    over 64 bits takes 19 digits, and too many fields take 1,001 colons. A lost duplicate loses its
    colon: `{"a": 1, "a": 2}` has two, and written again as `{"a":2}` has one. `\u003a` escapes
    would change that count, so they are always suspect.
    """
    if b"\\u00" in data and (b"\\u0000" in data or b"\\u003" in data):
        return True
    num_colons = data.count(b":")
    left = data.translate(None, _HARMLESS)
    num_open = left.count(b"{") + left.count(b"[")
    is_small = num_open <= MAX_DEPTH and len(left) - num_open < 19 and num_colons <= MAX_FIELDS
    if not is_small and _is_deep_or_large([row]):
        return True  # checked first, because orjson cannot write values nested over 254 deep
    return num_colons != orjson.dumps(row).count(b":")


def are_suspect(data: bytes, rows: Rows) -> bool:
    """Return True if `is_suspect` may be true of any row, by the same counts over all rows.

    numpy counts 2 MB in 0.6 ms; `bytes.count` and `in` take 1.8 ms.
    """
    raw = np.frombuffer(data, np.uint8)
    places = np.flatnonzero(raw[:-3] == ord("\\"))
    for offset, letter in enumerate(b"u00", start=1):
        places = places[raw[places + offset] == letter]
    if len(places) and (b"\\u0000" in data or b"\\u003" in data):
        return True
    is_plain = rows.are_objects and rows.value_types <= {str, int, bool, type(None)}
    is_flat = is_plain and max(map(len, rows.layouts), default=0) <= MAX_FIELDS
    if not is_flat and _is_deep_or_large(rows):
        return True
    written = np.frombuffer(orjson.dumps(rows), np.uint8)
    return bool(np.count_nonzero(raw == ord(":")) != np.count_nonzero(written == ord(":")))


def _is_deep_or_large(rows: list[Any]) -> bool:
    """Return True if containers nest too deep, an object is too wide, or an integer is a float."""
    level = rows
    for _ in range(MAX_DEPTH):
        types = set(map(type, level))
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
    if _depth_exceeds(row, MAX_DEPTH):
        return "depth", f"nested deeper than {MAX_DEPTH}"
    found = strict_fault(piece.decode("utf-8"))
    if found is not None:
        return found
    if _holds_nul(row):
        return "control", "a string contains the NUL character (\\u0000)"
    if isinstance(row, dict) and len(row) > MAX_FIELDS:
        return (
            "too_many_fields",
            f"the row has {len(row):,} fields; at most {MAX_FIELDS:,} are read",
        )
    return None


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [x for x in level if type(x) is dict or type(x) is list]
        if not level:
            return False
        level = [v for x in level for v in (x.values() if type(x) is dict else x)]
    return True


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in key or _holds_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_holds_nul, value))

"""Parse the bytes of a shard into rows, each good one a Python value, each bad one a failure.

orjson reads about 240,000 rows a second but keeps the last of duplicate keys, turns integers over
64 bits into floats, and admits NUL and deep nesting. What it hides shows in cheap totals: the
colons left when its values are written again, the types it made, the depth of the containers.
Where a total disagrees, rows are looked at one by one with the standard library's parser, which
has hooks for all of it. A row without suspicion costs no Python call beyond `orjson.loads`.
"""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson

from packhouse.errors import SourceError
from packhouse.sources.structure import Ints, line_spans, spans_by_layout, split_elements

__all__ = ["Failure", "Records", "parse_array", "parse_lines", "parse_text"]

MAX_DEPTH = 32
"""Containers within one another, the row itself included."""
MAX_FIELDS = 1000
"""Fields of one row."""


class Failure(NamedTuple):
    """Why a record of a shard is bad."""

    number: int
    """0-based number of the record in the shard."""
    reason: str
    detail: str


@dataclass(slots=True)
class Records:
    """The records of a shard."""

    rows: list[Any]
    """Values of the good ones."""
    numbers: Ints
    """Number in the shard of each of `rows`."""
    num_records: int
    """Good and bad."""
    failures: list[Failure] = field(default_factory=list)
    spans: Callable[[], Ints] | None = None
    """Start and end in the shard's bytes of every record, [num_records, 2]; None: no bytes.
    White space around a record may belong to its span."""
    failed: dict[int, Any] = field(default_factory=dict)
    """Values of bad ones by their number, where there are no bytes to show them by."""
    notes: dict[str, int] = field(default_factory=dict)


def parse_lines(data: bytes, max_row_bytes: int) -> Records:
    r"""Parse JSON Lines; blank lines are counted, not records.

    Example:
        >>> records = parse_lines(b'{"a": 1}\n\n{"a": 1, "a": 2}\n', 2**20)
        >>> records.rows, [(f.number, f.reason) for f in records.failures], records.notes
        ([{'a': 1}], [(1, 'duplicate_key')], {'blank_lines': 1})
    """
    spans = line_spans(data)
    records = _parse_pieces(data, spans, max_row_bytes)
    num_lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    if num_lines > len(spans):
        records.notes["blank_lines"] = num_lines - len(spans)
    _flag_truncation(records, data)
    return records


def parse_array(
    data: bytes, max_row_bytes: int, where: str, num_rows: int | None = None
) -> Records:
    """Parse the inside of a JSON array: elements divided by commas, no brackets around.

    The whole is parsed at once; element by element where that fails.

    Args:
        data: from the start of an element to the end of one.
        max_row_bytes: longer elements fail unparsed.
        where: the file, for messages.
        num_rows: how many elements the scan counted, where rows behind are numbered by it.

    Raises:
        SourceError: the array ends before the data does.
    """
    whole = b"[" + data + b"]"
    try:
        with gc_paused():
            rows = orjson.loads(whole)
    except orjson.JSONDecodeError:
        return _parse_elements(data, max_row_bytes, where, num_rows)
    records = Records(rows, np.arange(len(rows)), len(rows), spans=lambda: _element_spans(data))
    if _may_be_longer(rows, data, max_row_bytes) and _widest(records.spans) > max_row_bytes:
        return _parse_elements(data, max_row_bytes, where, num_rows)
    _look_again(records, data)
    return records


def _parse_elements(data: bytes, max_row_bytes: int, where: str, num_rows: int | None) -> Records:
    end = split_elements(data).end
    if end is not None and data[end] == ord("]"):
        raise SourceError(f"{where}: text follows the end of the JSON array, {end:,} bytes into it")
    records = _parse_pieces(data, _element_spans(data), max_row_bytes)
    if _lost_bytes(records) > 0:  # an open bracket or quote may have swallowed sound elements
        by_layout = _parse_pieces(data, spans_by_layout(data), max_row_bytes)
        if num_rows in (None, by_layout.num_records):
            records = min(records, by_layout, key=_lost_bytes)
    _flag_truncation(records, data)
    return records


def parse_text(text: str) -> tuple[Any, tuple[str, str] | None]:
    """Parse JSON that is the text of a field: its value, or why it is bad, as strictly as a row.

    Example:
        >>> parse_text('[1]'), parse_text('{"a": 1, "a": 2}')[1][0]
        (([1], None), 'duplicate_key')
    """
    data = text.encode("utf-8", "surrogatepass").replace(b"\n", b" ").replace(b"\r", b" ")
    records = parse_lines(data, len(data) + 1)
    if records.failures:
        return None, records.failures[0][1:]
    return (records.rows[0], None) if records.rows else (None, ("json", "not JSON: no text"))


def _lost_bytes(records: Records) -> int:
    assert records.spans is not None
    spans = records.spans()
    lost = spans[[failure.number for failure in records.failures]].reshape(-1, 2)
    return int((lost[:, 1] - lost[:, 0]).sum())


def _element_spans(data: bytes) -> Ints:
    """Spans of the elements, with the white space around them."""
    if not data.strip():
        return np.zeros((0, 2), np.int64)
    commas = split_elements(data).commas
    bounds = np.concatenate([[-1], commas, [len(data)]])
    return np.stack([bounds[:-1] + 1, bounds[1:]], axis=1)


def _may_be_longer(rows: list[Any], data: bytes, max_row_bytes: int) -> bool:
    """Whether a row may have more bytes than allowed; cheap, and never False when one has.

    Written again without white space and escapes, a row is no longer than before (but for oddly
    written numbers); so it had at most its own length plus all that the others together lost.
    """
    if len(data) <= max_row_bytes:
        return False
    written = [len(orjson.dumps(row)) for row in rows]
    return max(written) + len(data) - sum(written) > max_row_bytes


def _widest(spans: Callable[[], Ints] | None) -> int:
    assert spans is not None
    found = spans()
    return int((found[:, 1] - found[:, 0]).max(initial=0))


def _parse_pieces(data: bytes, spans: Ints, max_row_bytes: int) -> Records:
    pieces = [data[start:end] for start, end in spans.tolist()]
    records = Records([], np.arange(len(pieces)), len(pieces), spans=lambda: spans)
    widest = int((spans[:, 1] - spans[:, 0]).max(initial=0))
    try:
        if widest > max_row_bytes:
            raise ValueError
        with gc_paused():
            records.rows = [orjson.loads(piece) for piece in pieces]
    except ValueError:
        _parse_one_by_one(records, pieces, max_row_bytes)
    _look_again(records, data)
    return records


def _parse_one_by_one(records: Records, pieces: list[bytes], max_row_bytes: int) -> None:
    numbers = []
    records.rows = []
    for number, piece in enumerate(pieces):
        if len(piece) > max_row_bytes:
            detail = f"the row has {len(piece):,} bytes, over max_row_bytes {max_row_bytes:,}"
            records.failures.append(Failure(number, "row_too_long", detail))
            continue
        try:
            records.rows.append(orjson.loads(piece))
            numbers.append(number)
        except orjson.JSONDecodeError as error:
            records.failures.append(Failure(number, *_classify(piece, error)))
    records.numbers = np.array(numbers, np.int64)


def _classify(piece: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Reason code and sentence for a piece that orjson refuses."""
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
    reason, detail = _strict(text) or ("json", "")
    return (reason, detail) if reason != "json" else ("json", f"not JSON: {said}")


class _RefusedError(ValueError):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def _strict(text: str) -> tuple[str, str] | None:
    """What is wrong with a row by the strictest reading; None: nothing."""
    try:
        _STRICT.decode(text)
    except _RefusedError as refused:
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
        raise _RefusedError("duplicate_key", f"the key {twice[:100]!r} occurs twice in one object")
    return found


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise _RefusedError("number", f"integer over 64 bits: {digits[:40]}")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _RefusedError("number", f"number too large for a float: {digits[:40]}")
    return value


def _no_constant(name: str) -> None:
    raise _RefusedError("number", f"{name} is not JSON")


_STRICT = json.JSONDecoder(
    object_pairs_hook=_no_duplicates,
    parse_int=_int64,
    parse_float=_finite,
    parse_constant=_no_constant,
)


def _look_again(records: Records, data: bytes) -> None:
    """Move rows that orjson should not have let pass from `rows` to `failures`."""
    if not _is_suspect(data, records.rows):
        return
    assert records.spans is not None
    spans = records.spans()[records.numbers].tolist()
    good = []
    for place, (row, (start, end)) in enumerate(zip(records.rows, spans, strict=True)):
        piece = data[start:end]
        wrong = _wrong(piece, row) if _is_suspect(piece, [row]) else None
        if wrong is None:
            good.append(place)
        else:
            records.failures.append(Failure(int(records.numbers[place]), *wrong))
    records.rows = [records.rows[place] for place in good]
    records.numbers = records.numbers[good]


def _is_suspect(data: bytes, rows: list[Any]) -> bool:
    r"""Whether values parsed from `data` may hide something; never False when they do.

    Colons: every key brings one, and a lost duplicate takes its own away. `\u003a` escapes would
    upset the count, so they are suspect by themselves.
    """
    if b"\\u00" in data and (b"\\u0000" in data or b"\\u003" in data):
        return True
    if _is_deep_or_large(rows):  # first, for orjson does not write what nests over 254 deep
        return True
    return data.count(b":") != orjson.dumps(rows).count(b":")


def _is_deep_or_large(rows: list[Any]) -> bool:
    """Whether containers nest too deep, an object is too wide, or an integer became a float."""
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


def _wrong(piece: bytes, row: Any) -> tuple[str, str] | None:
    if _depth_exceeds(row, MAX_DEPTH):
        return "depth", f"nested deeper than {MAX_DEPTH}"
    found = _strict(piece.decode("utf-8"))
    if found is not None:
        return found
    if _holds_nul(row):
        return "control", "a string holds the NUL character (\\u0000)"
    if isinstance(row, dict) and len(row) > MAX_FIELDS:
        return "too_many_fields", f"the row has {len(row):,} fields, over {MAX_FIELDS:,}"
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


def _flag_truncation(records: Records, data: bytes) -> None:
    """Note that the file ends inside its last record."""
    last = records.num_records - 1
    if data.endswith(b"\n") or not records.failures:
        return
    for place, failure in enumerate(records.failures):
        if failure.number == last and failure.reason == "json":
            detail = f"{failure.detail}; the file ends inside this row"
            records.failures[place] = failure._replace(detail=detail)
            records.notes["truncated_files"] = 1


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the cycle collector from walking a growing heap of rows that hold no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

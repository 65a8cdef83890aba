"""Parse the bytes of a shard into rows, each good one a Python value, each bad one a failure.

What orjson lets pass is found by `packhouse.sources.strict`. A row without suspicion costs no
Python call beyond `orjson.loads`.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson

from packhouse.errors import SourceError
from packhouse.sources.rows import Rows
from packhouse.sources.strict import MAX_DEPTH, are_suspect, find_fault, is_suspect, strict_fault
from packhouse.sources.structure import Ints, line_spans, spans_by_layout, split_elements

__all__ = [
    "Failure",
    "Records",
    "check_elements",
    "gc_paused",
    "parse_array",
    "parse_lines",
    "parse_text",
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
    records = check_elements(rows, data, max_row_bytes)
    return records or _parse_elements(data, max_row_bytes, where, num_rows)


def check_elements(rows: list[Any], data: bytes, max_row_bytes: int) -> Records | None:
    """Records of the elements that were parsed from `data`; None if one of them is too long."""
    numbers = np.arange(len(rows))
    records = Records(Rows(rows), numbers, len(rows), spans=lambda: _element_spans(data))
    if _may_be_longer(rows, data, max_row_bytes) and _widest(records.spans) > max_row_bytes:
        return None
    _look_again(records, data, data)
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
    try:
        written = [len(orjson.dumps(row)) for row in rows]
    except orjson.JSONEncodeError:  # a row nests deeper than orjson writes
        return True
    return max(written) + len(data) - sum(written) > max_row_bytes


def _widest(spans: Callable[[], Ints] | None) -> int:
    assert spans is not None
    found = spans()
    return int((found[:, 1] - found[:, 0]).max(initial=0))


def _parse_pieces(data: bytes, spans: Ints, max_row_bytes: int) -> Records:
    pieces = [data[start:end] for start, end in spans.tolist()]
    records = Records(Rows(), np.arange(len(pieces)), len(pieces), spans=lambda: spans)
    widest = int((spans[:, 1] - spans[:, 0]).max(initial=0))
    parsed = data
    try:
        if widest > max_row_bytes:
            raise ValueError
        with gc_paused():
            records.rows = Rows(map(orjson.loads, pieces))
    except ValueError:
        _parse_one_by_one(records, pieces, max_row_bytes)
        parsed = b"\n".join(map(pieces.__getitem__, records.numbers.tolist()))
    _look_again(records, data, parsed)
    return records


def _parse_one_by_one(records: Records, pieces: list[bytes], max_row_bytes: int) -> None:
    numbers = []
    records.rows = Rows()
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
    reason, detail = strict_fault(text) or ("json", "")
    return (reason, detail) if reason != "json" else ("json", f"not JSON: {said}")


def _look_again(records: Records, data: bytes, parsed: bytes) -> None:
    """Move rows that orjson should not have let pass from `rows` to `failures`.

    Args:
        records: the rows, and where they are in `data`.
        data: bytes of all records.
        parsed: bytes of those that became rows.
    """
    if not are_suspect(parsed, records.rows):
        return
    assert records.spans is not None
    spans = records.spans()[records.numbers].tolist()
    good = []
    for place, (row, (start, end)) in enumerate(zip(records.rows, spans, strict=True)):
        piece = data[start:end]
        wrong = find_fault(piece, row) if is_suspect(piece, row) else None
        if wrong is None:
            good.append(place)
        else:
            records.failures.append(Failure(int(records.numbers[place]), *wrong))
    records.rows = Rows(map(records.rows.__getitem__, good))
    records.numbers = records.numbers[good]


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

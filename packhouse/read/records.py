"""The rows of a shard as values, and the bad ones as failures; how pieces of JSON become rows.

What orjson lets pass is found by `packhouse.read.strict`. A sound row costs no Python call
beyond `orjson.loads`.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from packhouse.read.strict import CUT_OFF, are_suspect, hidden_fault, why_not_json
from packhouse.recipe import SourceConfig

MAX_BAD_ROWS = 500_000
"""Bad rows of a shard. Each takes 700 bytes of memory, and in `[1,1,1...]` two of the file."""

Ints = npt.NDArray[np.int64]


class Rows(list[Any]):
    """Parsed rows, and what they have in common, which is found once."""

    @cached_property
    def are_objects(self) -> bool:
        """True if every row is an object."""
        return set(map(type, self)) <= {dict}

    @cached_property
    def layouts(self) -> set[tuple[str, ...]]:
        """Keys of the rows that are objects: each different sequence of keys once."""
        return set(map(tuple, self._objects))

    @cached_property
    def value_types(self) -> set[type]:
        """Types of the values of these keys."""
        return set(map(type, chain.from_iterable(map(dict.values, self._objects))))

    @property
    def _objects(self) -> "list[Any]":
        return self if self.are_objects else [row for row in self if type(row) is dict]


def unwrapped(rows: list[Any], config: SourceConfig) -> list[Any]:
    """Rows, without the list of one that each stands in if the source says so.

    Example:
        >>> unwrapped([[{"a": 1}], {"a": 2}, [3]], SourceConfig(path="", unwrap=True))
        [{'a': 1}, {'a': 2}, [3]]
    """
    if not config.unwrap:
        return rows
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
    """Values of the good ones."""
    numbers: Ints
    """Number in the shard of each of `rows`."""
    num_records: int
    """Good and bad."""
    failures: list[Failure] = field(default_factory=list)
    spans: Callable[[], Ints] | None = None
    """Start and end in the shard's bytes of every record, [num_records, 2]; None: no bytes.
    White space around a record may belong to its span."""
    failed: dict[int, object] = field(default_factory=dict)
    """Values of bad ones by their number, where there are no bytes to show them by."""
    notes: dict[str, int] = field(default_factory=dict)

    def failures_of(self, faults: Iterable[tuple[int, str, str]]) -> list[Failure]:
        """Return faults (place in `rows`, reason, detail) by the numbers of their records.

        Example:
            >>> records = Records(Rows("ab"), np.array([0, 2]), 3)  # record 1 is no JSON
            >>> records.failures_of([(1, "roles", "no answer")])
            [Failure(number=2, reason='roles', detail='no answer')]
        """
        return [Failure(int(self.numbers[place]), *why) for place, *why in faults]

    def keep(self, places: list[int]) -> None:
        """Drop all rows but those at these places in `rows`."""
        self.rows = Rows(map(self.rows.__getitem__, places))
        self.numbers = self.numbers[places]


def parse_pieces(data: bytes, spans: Ints, max_row_bytes: int) -> Records:
    """Parse the JSON value in each span of `data`; longer ones than allowed fail unparsed.

    A file that ends inside its last record is noted as `truncated_files`.
    """
    records = Records(Rows(), np.arange(len(spans)), len(spans), spans=lambda: spans)
    parsed = data
    try:
        if int((spans[:, 1] - spans[:, 0]).max(initial=0)) > max_row_bytes:
            raise ValueError
        with gc_paused():
            records.rows = Rows(map(orjson.loads, _pieces(data, spans)))
    except ValueError:  # one by one, to see which are bad
        numbers = []
        for number, piece in enumerate(_pieces(data, spans)):
            if len(records.failures) > MAX_BAD_ROWS:  # for which the reader refuses the shard
                break
            if len(piece) > max_row_bytes:
                records.failures.append(too_long(number, piece, max_row_bytes))
                continue
            try:
                records.rows.append(orjson.loads(piece))
                numbers.append(number)
            except orjson.JSONDecodeError as error:
                records.failures.append(Failure(number, *why_not_json(piece, error)))
        records.numbers = np.array(numbers, np.int64)
        parsed = b"\n".join(_pieces(data, spans[records.numbers]))
    check_parsed(records, data, parsed)
    if not data.endswith(b"\n"):
        for place, failure in enumerate(records.failures):
            if failure.number == len(spans) - 1 and failure.reason == "json":
                records.failures[place] = failure._replace(detail=failure.detail + CUT_OFF)
                records.notes["truncated_files"] = 1
    return records


def _pieces(data: bytes, spans: Ints) -> Iterator[bytes]:
    """Yield the bytes of each span, cut some thousands at a time: spans may be as many as bytes."""
    for first in range(0, len(spans), 2**14):
        for start, end in spans[first : first + 2**14].tolist():
            yield data[start:end]


def too_long(number: int, piece: bytes, max_row_bytes: int) -> Failure:
    """The failure of a record over the limit."""
    detail = f"the row has {len(piece):,} bytes, over max_row_bytes {max_row_bytes:,}"
    return Failure(number, "row_too_long", detail)


def check_parsed(records: Records, data: bytes, parsed: bytes) -> None:
    """Move rows that orjson should have refused from `rows` to `failures`.

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
        wrong = hidden_fault(data[start:end], row)
        if wrong is None:
            good.append(place)
        else:
            records.failures.append(Failure(int(records.numbers[place]), *wrong))
    records.keep(good)


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


# The column in which a reader of workbooks and databases says which rows it could not read.
#
# It is the last one of the tables of the formats `WITH_FAULTS`, by its place: a column of the file
# may have any name. A row with a fault is quarantined. The cell that is bad is null, so that the
# row is not taken for mended; the detail says what was in it.


WITH_FAULTS = ("xlsx", "sqlite", "duckdb")
"""Formats of files whose rows have it."""

fault_field = pa.field(
    "packhouse fault", pa.struct([("reason", pa.string()), ("detail", pa.string())])
)


def fault_column(faults: Mapping[int, tuple[str, str]], num_rows: int) -> pa.Array:
    """Return the column of a table; `faults`: row from 0 -> reason and detail."""
    values: list[dict[str, str] | None] = [None] * num_rows
    for row, (reason, detail) in faults.items():
        values[row] = {"reason": reason, "detail": detail}
    return pa.array(values, fault_field.type)

"""Read one shard: bytes in, checked conversations and quarantined rows out.

Nothing is lost: every record of the shard is in exactly one of the two tables, and a quarantined
one keeps its place, its reason and its bytes. Memory is the shard's bytes and its tables, and the
rows of one block; of the whole shard only where blocks cannot be judged by themselves. What those
bytes may come to is limited in `streams`, `cutting` and `decoding`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, TypeVar

import numpy as np
import orjson
import pyarrow as pa

from packhouse.errors import SourceError
from packhouse.identity import GroupBy, conversation_ids, group_keys
from packhouse.messages import Answers, role_violations
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.sources.adapting import Adapted, adapt
from packhouse.sources.blocks import array_blocks, line_blocks
from packhouse.sources.delimited import parse_delimited
from packhouse.sources.extra_fields import (
    IN_MESSAGES,
    bounded,
    check_nothing_is_left_out,
    count_extra_fields,
    find_disallowed,
)
from packhouse.sources.files import pin_of
from packhouse.sources.records import (
    Failure,
    Records,
    check_elements,
    gc_paused,
    parse_array,
    parse_lines,
)
from packhouse.sources.rows import Rows
from packhouse.sources.shapes import check_shapes, find_row_format_of_rows
from packhouse.sources.shards import SourceShard
from packhouse.sources.streams import read_range
from packhouse.sources.tabular import parse_tables
from packhouse.tables import QUARANTINED, VALIDATED

__all__ = ["ShardRows", "find_raw_rows", "read_shard"]

_ANSWERS: dict[str, Answers] = {"classification": "label", "text": "text"}

_T = TypeVar("_T")

RAW_BYTES = 64 * 2**10
"""Bytes of a bad row that are kept."""

MAX_BAD_ROWS = 500_000
"""Bad rows of a shard. Each takes 700 bytes of memory, and in `[1,1,1...]` two of the file."""


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of a shard, good and bad."""

    validated: pa.Table
    """`tables.VALIDATED`, in the file's order."""
    quarantined: pa.Table
    """`tables.QUARANTINED`, in the file's order."""
    num_records: int
    """Records that the shard holds, counted where they were parsed."""
    extra_paths: int
    """Conversations beyond the first of a message tree, counted where they were made."""
    extra_fields: dict[str, int]
    """Rows by name of a field that they have beyond their format; `messages[].name` where it is
    their messages that have it."""
    notes: dict[str, int]
    """Counts of what is no error: `blank_lines`, `bom`, `truncated_files`, `empty_files`,
    `misnamed_compression`, `bidi_controls` (rows)."""


def read_shard(
    shard: SourceShard, config: SourceConfig, rules: ValidateConfig, group_by: GroupBy
) -> ShardRows:
    """Read, check and name the rows of a shard.

    `num_records + extra_paths` = validated rows + quarantined rows: three independent counts,
    which the ledger holds against each other.

    Args:
        shard: from `scan_source`.
        config: the source it comes from.
        rules: what makes a row bad.
        group_by: `prompt` or `record`, see `messages.group_keys`.

    Returns:
        Both tables; equal input gives equal tables, whatever the shard sizes.

    Raises:
        SourceError: the file changed since the scan, mixes shapes, or cannot be read.
        TransientError: the storage did not answer.
    """
    with gc_paused():
        parts = _by_parts(shard, rules, _Reader(config, rules, group_by).read)
    num_records = sum(part.num_records for part in parts)
    notes = Counter(shard.notes)
    for part in parts:
        notes.update(part.notes)
    if notes["truncated_files"]:  # scan and parse may both have seen it
        notes["truncated_files"] = 1
    extra_fields = bounded(sum((part.extra_fields for part in parts), Counter()))
    in_messages = bounded(sum((part.extra_in_messages for part in parts), Counter()))
    return ShardRows(
        validated=_join([part.validated for part in parts]),
        quarantined=_join([part.quarantined for part in parts]),
        num_records=num_records,
        extra_paths=sum(part.extra_paths for part in parts),
        extra_fields=extra_fields | {f"{IN_MESSAGES}{n}": rows for n, rows in in_messages.items()},
        notes={name: count for name, count in notes.items() if count},
    )


def _join(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).combine_chunks() if len(tables) > 1 else tables[0]


@dataclass(frozen=True, slots=True)
class _PartRows:
    """What `ShardRows` says, of a part of a shard."""

    validated: pa.Table
    quarantined: pa.Table
    num_records: int
    extra_paths: int
    extra_fields: Counter[str]
    extra_in_messages: Counter[str]
    notes: Counter[str]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a shard that stands for itself, and its records."""

    shard: SourceShard
    """With the bytes and the rows of the part."""
    data: bytes | None
    records: Records


@dataclass(slots=True)
class _Reader:
    """Makes tables of records."""

    config: SourceConfig
    rules: ValidateConfig
    group_by: GroupBy
    bad: dict[int, int] = field(default_factory=dict)
    """First row of a part -> its bad rows."""

    def read(self, part: _Part) -> _PartRows:
        """Check and name the rows of a part."""
        shard, records = part.shard, part.records
        if shard.row_start in self.bad:  # parts were tried, and now the shard is one part
            self.bad.clear()
        row_format = _settle_format(shard, self.config, records)
        numbers = (records.numbers + shard.row_start).tolist()
        check_nothing_is_left_out(records.rows, numbers, row_format, self.config, shard.uri)
        extra_fields = count_extra_fields(records.rows, row_format, self.config)
        _take_out(records, find_disallowed(records.rows, row_format, self.config))
        self._count_bad(shard, len(records.failures))
        if row_format == "auto":
            self._count_bad(shard, len(records.rows))
            adapted = _nothing(records)
        else:
            adapted = adapt(records.rows, row_format, self.config)
        failures = list(records.failures)
        failures += [Failure(int(records.numbers[i]), *why) for i, *why in adapted.failures]
        kept, bad = _apply_rules(adapted, self.rules, row_format)
        self._count_bad(shard, len(bad) + (len(adapted.failures) if row_format != "auto" else 0))
        failures += [Failure(int(records.numbers[i]), *why) for i, *why in bad]
        validated = _validated_table(shard, records, kept, self.group_by)
        return _PartRows(
            validated=validated,
            quarantined=_quarantined_table(part, failures),
            num_records=records.num_records,
            extra_paths=len(adapted.origin) - len(np.unique(adapted.origin)),
            extra_fields=extra_fields,
            extra_in_messages=adapted.extra,
            notes=Counter(records.notes) + Counter(bidi_controls=_bidi_rows(kept.messages)),
        )

    def _count_bad(self, shard: SourceShard, number: int) -> None:
        self.bad[shard.row_start] = self.bad.get(shard.row_start, 0) + number
        if sum(self.bad.values()) > MAX_BAD_ROWS:
            raise SourceError(
                f"source file '{shard.uri}': more than {MAX_BAD_ROWS:,} rows from row "
                f"{shard.row_start:,} on are bad; is it the right file, and are its format and "
                "file_format right?",
                uri=shard.uri,
                max_bad_rows=MAX_BAD_ROWS,
            )


def _by_parts(shard: SourceShard, rules: ValidateConfig, use: Callable[[_Part], _T]) -> list[_T]:
    """What `use` makes of the parts of a shard, one after the other.

    Parts bound memory and nothing else: where one of them cannot be judged alone (an array that is
    not JSON, rows of another shape), the shard is one part.
    """
    if shard.file_format in ("parquet", "arrow"):
        _check_pin(shard)
        parts = _table_parts(shard)
        if shard.row_format != "auto":
            return [use(part) for part in parts]
        rows = Rows(chain.from_iterable(part.records.rows for part in parts))
        return [use(_Part(shard, None, Records(rows, np.arange(len(rows)), len(rows))))]
    data = read_range(shard.uri, shard.compression, shard.byte_start, shard.byte_end, shard.pin)
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise _changed(shard)
    if shard.row_format != "auto":
        try:
            return [use(part) for part in _parts(shard, data, rules)]
        except (_NotInPartsError, orjson.JSONDecodeError):
            pass
        except SourceError as error:  # what mixes shapes is told of the whole
            if "max_bad_rows" in error.facts:
                raise
    return [use(_Part(shard, data, _parse(shard, data, rules)))]


class _NotInPartsError(Exception):
    """A part of a shard cannot be judged alone."""


def _parts(shard: SourceShard, data: bytes, rules: ValidateConfig) -> Iterator[_Part]:
    row = shard.row_start
    for start, end, records in _PARTS[shard.file_format](data, rules.max_row_bytes):
        first = shard.byte_start
        part = replace(shard, byte_start=first + start, byte_end=first + end, row_start=row)
        yield _Part(part, data[start:end], records)
        row += records.num_records


def _table_parts(shard: SourceShard) -> Iterator[_Part]:
    assert shard.num_rows is not None
    row = shard.row_start
    for records in parse_tables(shard.uri, shard.file_format, shard.row_start, shard.num_rows):
        yield _Part(replace(shard, row_start=row), None, records)
        row += records.num_records


def _line_parts(data: bytes, max_row_bytes: int) -> Iterator[tuple[int, int, Records]]:
    for start, end in line_blocks(data):
        yield start, end, parse_lines(data[start:end], max_row_bytes)


def _array_parts(data: bytes, max_row_bytes: int) -> Iterator[tuple[int, int, Records]]:
    for start, end, rows in array_blocks(data):
        records = check_elements(rows, data[start:end], max_row_bytes)
        if records is None:
            raise _NotInPartsError
        yield start, end, records


def _no_parts(data: bytes, max_row_bytes: int) -> Iterator[tuple[int, int, Records]]:
    raise _NotInPartsError


_PARTS = {"jsonl": _line_parts, "json": _array_parts, "csv": _no_parts, "tsv": _no_parts}


def _parse(shard: SourceShard, data: bytes, rules: ValidateConfig) -> Records:
    if shard.file_format == "jsonl":
        return parse_lines(data, rules.max_row_bytes)
    if shard.file_format == "json":
        where = f"source file '{shard.uri}'"
        return parse_array(data, rules.max_row_bytes, where, shard.num_rows)
    delimiter = "," if shard.file_format == "csv" else "\t"
    return parse_delimited(data, shard.header or (), delimiter, rules.max_row_bytes)


def _check_pin(shard: SourceShard) -> None:
    if pin_of(shard.uri) != (shard.file_size, shard.pin):
        raise _changed(shard)


def _changed(shard: SourceShard) -> SourceError:
    return SourceError(
        f"source file '{shard.uri}' changed since it was scanned (bytes {shard.byte_start:,} to "
        f"{shard.byte_end:,}); run again when nothing writes to it",
        uri=shard.uri,
    )


def _settle_format(shard: SourceShard, config: SourceConfig, records: Records) -> str:
    """Format of the shard's rows, with every row checked against it where it was not stated."""
    row_format = shard.row_format
    if config.format != "auto" or not records.rows:
        return row_format
    if row_format == "auto":
        row_format = find_row_format_of_rows(records.rows, config, shard.uri)
    numbers = (records.numbers + shard.row_start).tolist()
    check_shapes(records.rows, numbers, row_format, config.fields, shard.uri)
    return row_format


def _take_out(records: Records, bad: dict[int, tuple[str, str]]) -> None:
    """Move rows from the good to the failed ones."""
    if bad:
        numbers = records.numbers.tolist()
        records.failures += [Failure(numbers[place], *why) for place, why in bad.items()]
        records.failed |= {numbers[place]: records.rows[place] for place in bad}
        good = [place for place in range(len(records.rows)) if place not in bad]
        records.rows = Rows(map(records.rows.__getitem__, good))
        records.numbers = records.numbers[good]


def _nothing(records: Records) -> Adapted:
    """No row is an object or a list, so none has a format."""
    why = ("not_an_object", "the row is a bare value, not an object")
    return Adapted(
        messages=pa.array([], VALIDATED.field("messages").type),
        tools=pa.array([], pa.string()),
        labels=pa.array([], pa.int64()),
        origin=np.zeros(0, np.int64),
        failures=[(index, *why) for index in range(len(records.rows))],
    )


def _apply_rules(
    adapted: Adapted, rules: ValidateConfig, row_format: str
) -> tuple[Adapted, list[tuple[int, str, str]]]:
    """Take out conversations that break the rules; each path of a tree stands for itself."""
    violations = role_violations(
        adapted.messages,
        allow_ends_on_user=rules.allow_ends_on_user,
        answers=_ANSWERS.get(row_format, "required"),
        max_chars=rules.max_chars,
    )
    if not violations:
        return adapted, []
    good = np.ones(len(adapted.origin), np.bool_)
    good[list(violations)] = False
    bad = [(int(adapted.origin[place]), *why) for place, why in sorted(violations.items())]
    mask = pa.array(good)
    kept = Adapted(
        messages=adapted.messages.filter(mask),
        tools=adapted.tools.filter(mask),
        labels=adapted.labels.filter(mask),
        origin=adapted.origin[good],
    )
    return kept, bad


def _validated_table(
    shard: SourceShard, records: Records, kept: Adapted, group_by: GroupBy
) -> pa.Table:
    ids = conversation_ids(kept.messages, kept.tools, kept.labels)
    groups = group_keys(kept.messages, ids, group_by)
    num_rows = len(kept.origin)
    source = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(num_rows, np.int32)), pa.array([shard.file])
    )
    rows = pa.array(records.numbers[kept.origin] + shard.row_start, pa.int64())
    columns = [ids, source, rows, kept.messages, kept.tools, kept.labels, groups]
    return pa.Table.from_arrays(columns, schema=VALIDATED)


def find_raw_rows(
    shard: SourceShard, rules: ValidateConfig, numbers: Sequence[int]
) -> list[tuple[bytes, int | None]]:
    """Bytes of records of a shard, and where they begin in the uncompressed file (None: nowhere).

    Args:
        shard: from `scan_source`.
        rules: as for `read_shard`.
        numbers: of the records in the shard, from 0.
    """

    def find(part: _Part) -> dict[int, tuple[bytes, int | None]]:
        first = part.shard.row_start - shard.row_start
        inside = [n for n in numbers if first <= n < first + part.records.num_records]
        return dict(zip(inside, _raw_rows(part, [n - first for n in inside]), strict=True))

    with gc_paused():
        found = reduce(or_, _by_parts(shard, rules, find))
    return [found[number] for number in numbers]


def _raw_rows(part: _Part, numbers: Sequence[int]) -> Iterator[tuple[bytes, int | None]]:
    data, records = part.data, part.records
    if data is not None and records.spans is not None:
        bounds = records.spans()[list(numbers)].tolist() if numbers else []
        for start, end in bounds:
            piece = data[start:end]
            offset = part.shard.byte_start + start + len(piece) - len(piece.lstrip())
            yield piece.strip(), offset
        return
    places = {number: place for place, number in enumerate(records.numbers.tolist())}
    for number in numbers:
        if number in places:
            yield _raw_of(records.rows[places[number]]), None
        else:
            yield _raw_of(records.failed.get(number)), None


def _quarantined_table(part: _Part, failures: list[Failure]) -> pa.Table:
    if not failures:
        return QUARANTINED.empty_table()
    columns: dict[str, list[Any]] = {name: [] for name in QUARANTINED.names}
    failures = sorted(failures)
    found = _raw_rows(part, [failure.number for failure in failures])
    for failure, (raw, offset) in zip(failures, found, strict=True):
        row = part.shard.row_start + failure.number
        values = (part.shard.file, row, offset, "validate", failure.reason, failure.detail)
        raw_values = (raw[:RAW_BYTES], len(raw), hashlib.sha256(raw).hexdigest())
        for column, value in zip(columns.values(), values + raw_values, strict=True):
            column.append(value)
    return pa.table(columns, schema=QUARANTINED)


def _raw_of(row: Any) -> bytes:
    """A row without bytes of its own (Parquet, Arrow) as JSON."""
    return orjson.dumps(row, default=repr, option=orjson.OPT_NON_STR_KEYS)


def _bidi_rows(messages: pa.Array) -> int:
    """Rows whose contents hold a bidirectional control (U+202A-202E, U+2066-2069)."""
    content = messages.flatten().field("content")
    data = content.buffers()[2]
    if data is None:
        return 0
    raw = np.frombuffer(data, np.uint8)
    lead = np.flatnonzero(raw[:-2] == 0xE2) if len(raw) > 2 else np.zeros(0, np.int64)
    second, third = raw[lead + 1], raw[lead + 2]
    marks = (second == 0x80) & (third >= 0xAA) & (third <= 0xAE)
    marks |= (second == 0x81) & (third >= 0xA6) & (third <= 0xA9)
    if not marks.any():
        return 0
    text_ends = np.frombuffer(content.buffers()[1], np.int32)[content.offset + 1 :][: len(content)]
    touched = np.unique(np.searchsorted(text_ends, lead[marks], side="right"))
    rows = np.searchsorted(np.asarray(messages.offsets)[1:], touched, side="right")
    return len(np.unique(rows))

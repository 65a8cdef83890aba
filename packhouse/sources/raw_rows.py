"""The bytes of rows as they stand in their file: for the quarantine and for messages."""

import hashlib
from collections.abc import Iterator, Sequence

import orjson
import pyarrow as pa

from packhouse.recipe import ValidateConfig
from packhouse.records.tables import QUARANTINED
from packhouse.sources.lines import name_row
from packhouse.sources.parts import Part, for_parts
from packhouse.sources.records import gc_paused
from packhouse.sources.shards import SourceShard

RAW_BYTES = 64 * 2**10
"""Bytes of a bad row that are kept."""


def raw_rows(
    shard: SourceShard, rules: ValidateConfig, rows: Sequence[int]
) -> dict[int, tuple[bytes, int | None]]:
    """Read and parse a shard again for the bytes of some rows, as they stand in its file.

    Args:
        shard: from `scan_source`.
        rules: as for `read_shard`.
        rows: numbers in the file, of rows of this shard.

    Returns:
        Row -> its bytes, and where they begin in the uncompressed file. Rows of Parquet and other
        tables have no bytes: they are JSON, which begins nowhere (None).

    Raises:
        SourceError: the file changed since it was scanned.
    """

    def find(part: Part) -> dict[int, tuple[bytes, int | None]]:
        first = part.shard.row_start
        inside = [row for row in rows if first <= row < first + part.records.num_records]
        return dict(zip(inside, read_raw(part, [row - first for row in inside]), strict=True))

    found: dict[int, tuple[bytes, int | None]] = {}
    with gc_paused():
        for of_part in for_parts(shard, rules, find) if rows else []:
            found |= of_part
    return found


def with_raw_rows(quarantined: pa.Table, shard: SourceShard, rules: ValidateConfig) -> pa.Table:
    """Put each row's bytes and place, as they stand in its file, into a table of bad rows.

    For bad rows of later steps, which see conversations: what is to be mended is the row. Arguments
    and errors are those of `raw_rows`; all rows are of this shard.
    """
    rows = quarantined["row"].to_pylist()
    found = raw_rows(shard, rules, rows)
    for name, values in raw_columns([found[row] for row in rows]).items():
        field = QUARANTINED.field(name)
        place = QUARANTINED.get_field_index(name)
        quarantined = quarantined.set_column(place, field, pa.array(values, field.type))
    return quarantined


def raw_columns(found: list[tuple[bytes, int | None]]) -> dict[str, list[object]]:
    """Columns of QUARANTINED with the bytes of rows, given whole, and their places."""
    return {
        "byte_offset": [offset for _, offset in found],
        "raw": [raw[:RAW_BYTES] for raw, _ in found],
        "raw_size": [len(raw) for raw, _ in found],
        "raw_sha256": [hashlib.sha256(raw).hexdigest() for raw, _ in found],
    }


def name_row_of(part: Part, index: int) -> str:
    """Name of a good row for messages."""
    number = int(part.records.numbers[index])
    ((_, offset),) = read_raw(part, [number])
    return name_row(part.shard.uri, part.shard.row_start + number, offset, part.shard.encoding)


def read_raw(part: Part, numbers: Sequence[int]) -> Iterator[tuple[bytes, int | None]]:
    """Bytes of records, and where they begin in the uncompressed file (None: nowhere)."""
    data, records = part.data, part.records
    if not numbers:
        return
    if data is not None and records.spans is not None:
        for start, end in records.spans()[list(numbers)].tolist():
            piece = data[start:end]
            offset = part.shard.byte_start + start + len(piece) - len(piece.lstrip())
            yield piece.strip(), offset
        return
    # Rows of Parquet and Arrow have no bytes of their own: they are shown as JSON.
    rows = dict(zip(records.numbers.tolist(), records.rows, strict=True)) | records.failed
    for number in numbers:
        row = rows.get(number)
        yield orjson.dumps(row, default=repr, option=orjson.OPT_NON_STR_KEYS), None

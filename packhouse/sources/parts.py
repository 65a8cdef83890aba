"""The parts of a shard that are read by themselves, so that memory holds the rows of one."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from packhouse.errors import SourceError
from packhouse.recipe import ValidateConfig
from packhouse.sources.files import pin_of
from packhouse.sources.records import Records, Rows
from packhouse.sources.row_formats import ROW_FORMATS
from packhouse.sources.shards import TEXT_FILES, SourceShard
from packhouse.sources.streams import read_range
from packhouse.sources.tabular import TABULAR, parse_tables
from packhouse.sources.text_files import NotInBlocksError, Parsing

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a shard that is read by itself, and its records."""

    shard: SourceShard
    """With the bytes and the rows of the part."""
    data: bytes | None
    records: Records


def for_parts(shard: SourceShard, rules: ValidateConfig, use: Callable[[Part], _T]) -> list[_T]:
    """What `use` returns for each part of a shard, in order.

    Parts bound memory and nothing else: where they cannot be judged alone (an array that is not
    JSON), the shard is one part, and what `use` returned before is dropped.
    """
    is_whole = shard.row_format in ROW_FORMATS and ROW_FORMATS[shard.row_format].needs_all_rows
    if shard.file_format in TABULAR:
        parts = _table_parts(shard)
        return [use(_as_one(shard, parts))] if is_whole else [use(part) for part in parts]
    place = (shard.byte_start, shard.byte_end, shard.pin, shard.encoding)
    data = read_range(shard.uri, shard.compression, *place)
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise _changed(shard)
    text_file = TEXT_FILES[shard.file_format]
    how = Parsing(shard.uri, shard.header or (), shard.num_rows, rules.max_row_bytes)
    try:
        if is_whole:
            raise NotInBlocksError
        return [use(part) for part in _block_parts(shard, data, text_file.parse_blocks(data, how))]
    except NotInBlocksError:
        return [use(Part(shard, data, text_file.parse(data, how)))]


def _block_parts(
    shard: SourceShard, data: bytes, blocks: Iterator[tuple[int, int, Records]]
) -> Iterator[Part]:
    row, first = shard.row_start, shard.byte_start
    for start, end, records in blocks:
        part = replace(shard, byte_start=first + start, byte_end=first + end, row_start=row)
        yield Part(part, data[start:end], records)
        row += records.num_records


def _table_parts(shard: SourceShard) -> Iterator[Part]:
    if pin_of(shard.uri) != (shard.file_size, shard.pin):
        raise _changed(shard)
    assert shard.num_rows is not None
    row = shard.row_start
    rows = (shard.row_start, shard.num_rows)
    for records in parse_tables(shard.uri, shard.file_format, *rows, shard.table):
        yield Part(replace(shard, row_start=row), None, records)
        row += records.num_records


def _as_one(shard: SourceShard, parts: Iterator[Part]) -> Part:
    every = Records(Rows(), np.arange(0), 0)
    for records in (part.records for part in parts):
        first = every.num_records
        every.rows += records.rows
        every.numbers = np.append(every.numbers, records.numbers + first)
        every.failures += [bad._replace(number=bad.number + first) for bad in records.failures]
        every.failed |= {number + first: row for number, row in records.failed.items()}
        every.num_records += records.num_records
    return Part(shard, None, every)


def _changed(shard: SourceShard) -> SourceError:
    return SourceError(
        f"source file '{shard.uri}' changed since it was scanned (bytes {shard.byte_start:,} to "
        f"{shard.byte_end:,}); run again when nothing writes to it",
        uri=shard.uri,
    )

"""The parts of a shard that are read by themselves, so that memory holds the rows of one."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from packhouse.errors import SourceError
from packhouse.recipe import ValidateConfig
from packhouse.sources.files import pin_of
from packhouse.sources.records import Records
from packhouse.sources.shards import TEXT_FILES, SourceShard
from packhouse.sources.streams import read_range
from packhouse.sources.tabular import TABULAR, parse_tables
from packhouse.sources.text_files import NotInBlocksError, Parsing

__all__ = ["Part", "for_parts"]

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
    if shard.file_format in TABULAR:
        return [use(part) for part in _table_parts(shard)]
    place = (shard.byte_start, shard.byte_end, shard.pin, shard.encoding)
    data = read_range(shard.uri, shard.compression, *place)
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise _changed(shard)
    text_file = TEXT_FILES[shard.file_format]
    how = Parsing(shard.uri, shard.header or (), shard.num_rows, rules.max_row_bytes)
    try:
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
    for records in parse_tables(shard.uri, shard.file_format, shard.row_start, shard.num_rows):
        yield Part(replace(shard, row_start=row), None, records)
        row += records.num_records


def _changed(shard: SourceShard) -> SourceError:
    return SourceError(
        f"source file '{shard.uri}' changed since it was scanned (bytes {shard.byte_start:,} to "
        f"{shard.byte_end:,}); run again when nothing writes to it",
        uri=shard.uri,
    )

"""Scan a source: its files cut to shards, the format of its rows, and the types of its columns."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from packhouse.errors import SourceError
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.sources.decoding import decode_head
from packhouse.sources.kinds import Kind, joined_kinds, kind_of_type, kind_of_values
from packhouse.sources.parts import Part, for_parts
from packhouse.sources.records import gc_paused, unwrapped
from packhouse.sources.reshaping import check_types, columns_of, reshape, wanted_columns
from packhouse.sources.row_formats import ROW_FORMATS, find_row_format
from packhouse.sources.shards import MAX_SHARD_BYTES, SourceShard, cut_source
from packhouse.sources.streams import read_range
from packhouse.sources.tabular import TABULAR

MAX_WHOLE_BYTES = 2**29
"""Bytes of a file whose rows are read together."""

_ANY_SIZE = ValidateConfig(max_row_bytes=2**31)


def scan_source(config: SourceConfig, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[SourceShard]:
    """Find a source's files and cut them into shards.

    Where the source has `where` or `select`, all its rows are parsed once for the types of the
    columns that these read, and the expressions are checked against them.

    Args:
        config: the source.
        max_shard_bytes: uncompressed bytes of a shard; one record larger than that is a shard.

    Returns:
        Shards sorted by uri, then by place in the file. A file without rows gives one shard of 0
        rows, noted as `empty_files`.

    Raises:
        ConfigError: `fields` names what no format has; an expression is not allowed, names no
            column, or does not fit the types of the columns.
        SourceError: a file cannot be read; names it and the place.
        TransientError: the storage did not answer.
    """
    shards = cut_source(config, max_shard_bytes)
    if config.is_reshaped:
        with gc_paused():
            shards = _with_columns(shards, config)
    _refuse_other_shapes(shards, config)
    return [shard for _, group in _by_file(shards) for shard in _whole(list(group))]


def _refuse_other_shapes(shards: list[SourceShard], config: SourceConfig) -> None:
    """Files of one source have one shape, as the rows of one file have."""
    first: dict[str, str] = {}
    for shard in shards:
        if shard.row_format != "auto":
            first.setdefault(shard.row_format, shard.uri)
    if len(first) > 1:
        shown = ", ".join(f"'{uri}' is {name}" for name, uri in list(first.items())[:3])
        raise SourceError(
            f"source '{config.path}' mixes shapes: {shown}; give each shape a source of its own",
            path=config.path,
        )


def _whole(shards: list[SourceShard]) -> list[SourceShard]:
    """The shards of a file; one, where its rows mean something only together.

    Raises:
        SourceError: the file is too large for that.
    """
    first, last = shards[0], shards[-1]
    row_format = ROW_FORMATS.get(first.row_format)
    if row_format is None or not row_format.needs_all_rows or len(shards) == 1:
        return shards
    size = last.byte_end - first.byte_start
    if size > MAX_WHOLE_BYTES:
        raise SourceError(
            f"source file '{first.uri}': format {first.row_format} needs all rows of a file at "
            f"once, and it has {size:,} bytes, over {MAX_WHOLE_BYTES:,}; split it by tree",
            uri=first.uri,
        )
    counts = [shard.num_rows for shard in shards]
    sha256 = first.file_sha256
    if first.file_format not in TABULAR:
        place = (first.byte_start, last.byte_end, first.pin, first.encoding)
        data = read_range(first.uri, first.compression, *place)
        sha256 = hashlib.sha256(data).hexdigest()
    return [
        replace(
            first,
            byte_end=last.byte_end,
            num_rows=None if None in counts else sum(n for n in counts if n is not None),
            sha256=sha256,
        )
    ]


def _by_file(shards: Sequence[SourceShard]) -> Iterator[tuple[str, Iterator[SourceShard]]]:
    return groupby(shards, key=lambda shard: shard.uri)


def _with_columns(shards: list[SourceShard], config: SourceConfig) -> list[SourceShard]:
    """Add the kinds of the columns, which hold for all files, and the format of the rows."""
    wanted = wanted_columns(config)
    kinds: dict[str, Kind] = {}
    has_rows = False

    def look(part: Part) -> None:
        nonlocal has_rows
        has_rows = has_rows or len(part.records.rows) > 0
        rows = [row for row in unwrapped(part.records.rows, config) if type(row) is dict]
        for name in dict.fromkeys(key for keys in set(map(tuple, rows)) for key in keys):
            kinds.setdefault(name, "null")
            if name.lower() in wanted:
                kinds[name] = kind_of_values([row.get(name) for row in rows], kinds[name])

    for uri, of_file in _by_file(shards):
        first, *rest = of_file
        if first.file_format in TABULAR:
            _, *batches = decode_head(uri, first.file_format, 1, config.table)
            found = {name: "null" for name in first.header or ()}
            for each in batches:
                found |= {field.name: kind_of_type(field.type) for field in each.schema}
            for name, kind in found.items():
                kinds[name] = joined_kinds(kinds.get(name, "null"), kind)
        else:
            for name in first.header or ():  # a column of CSV, though no row follows
                kinds.setdefault(name, "text")
            for shard in (first, *rest):
                for_parts(shard, _ANY_SIZE, look)
    columns: dict[str, Kind] = {}
    if kinds or has_rows:  # a file without rows and header misses no field
        columns = columns_of(config, kinds)
        check_types(config, columns)
    typed = [replace(shard, columns=columns) for shard in shards]
    if config.format != "auto":
        return typed
    return [shard for _, group in _by_file(typed) for shard in _with_format(list(group), config)]


def _with_format(shards: Sequence[SourceShard], config: SourceConfig) -> list[SourceShard]:
    """Add the format of the first row of a file that has one, as the expressions leave it."""

    def look(part: Part) -> None:
        rows = unwrapped(part.records.rows, config)
        reshaped = reshape(rows, config, part.shard.columns or {})
        row_format = find_row_format(reshaped.rows, config, part.shard.uri)
        if row_format != "auto":
            raise _FoundError(row_format)

    try:
        for shard in shards:
            for_parts(shard, _ANY_SIZE, look)
    except _FoundError as found:
        return [replace(shard, row_format=str(found)) for shard in shards]
    return list(shards)


class _FoundError(Exception):
    """The format of a file's rows: the rest of it need not be parsed."""

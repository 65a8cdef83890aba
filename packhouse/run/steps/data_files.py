"""Published data files: packed rows as Parquet, Arrow IPC or JSON Lines.

Same packs, same bytes: files and row groups are cut at row numbers computed from totals, never by
how the rows happened to arrive. Parquet is zstd-1 without dictionaries (token ids do not repeat
enough to pay for one: 2.56 bytes per token with labels against 2.63 with pyarrow's defaults, and
twice as fast to write) and with page checksums, which catch a flipped bit that readers pass on.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packhouse.pack import preference_names, published_schema, to_layout
from packhouse.recipe import PublishConfig
from packhouse.records.tables import write_batches
from packhouse.system.progress import advance

_TOKENS_PER_GROUP = 2**21
_BYTES_PER_TOKEN = {"labels": 8, "compact": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file of a split, not yet published."""

    path: Path
    split: str
    rows: int
    tokens: int


class ContentHash:
    """sha256 over what rows say, whatever file format, compression or library version held them."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, split: str, batch: pa.RecordBatch) -> None:
        """Take in rows: column names, list lengths and values, in order."""
        self._hash.update(f"{split}:{batch.num_rows}".encode())
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self._hash.update(name.encode())
            for part in _flat(column):
                self._hash.update(part)

    def hexdigest(self) -> str:
        """Return 64 hex digits."""
        return self._hash.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCut:
    """Which packs of a split one file holds."""

    split: str
    number: int
    """Of the file in its split."""
    first: int
    last: int
    """Packs [first, last) of the split."""
    rows_per_group: int
    """Packs of a row group."""
    source: str | None = None
    """The source of all its rows, where eval is published by source."""

    def to_json(self) -> dict[str, object]:
        """Return it as plain JSON; without a source that it has not."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def cut_files(split: str, num_packs: int, num_tokens: int, config: PublishConfig) -> list[FileCut]:
    """Cut a split into files of at most `config.max_file_mb` MiB of token data each, about.

    Example:
        >>> cuts = cut_files("train", 10, 2**19, PublishConfig(max_file_mb=1))
        >>> [(cut.number, cut.first, cut.last) for cut in cuts]
        [(0, 0, 3), (1, 3, 6), (2, 6, 9), (3, 9, 10)]
    """
    if not num_packs:
        return []
    # 1 MiB at 8 bytes a token: 131,072 tokens a file. 2**19 in 10 packs take 4: 3, 3, 3 and 1.
    limit = config.max_file_mb * 2**20 // _BYTES_PER_TOKEN[config.layout]
    rows_per_file = -(-num_packs // max(1, -(-num_tokens // limit)))
    rows_per_group = max(1, num_packs * _TOKENS_PER_GROUP // num_tokens)
    return [
        FileCut(
            split=split,
            number=number,
            first=first,
            last=min(first + rows_per_file, num_packs),
            rows_per_group=rows_per_group,
        )
        for number, first in enumerate(range(0, num_packs, rows_per_file))
    ]


def write_data_file(
    rows: pa.Table,
    cut: FileCut,
    folder: Path,
    config: PublishConfig,
    content: ContentHash,
    *,
    with_label: bool,
    with_weights: bool = False,
    of_preferences: bool = False,
) -> DataFile:
    """Write one file of a split.

    Args:
        rows: the packs [cut.first, cut.last) of its split, schema `tables.PACKED`; mapped from
            disk, read a row group at a time.
        cut: which file it is.
        folder: where to write `<split>-<number>.<ending>`.
        config: layout and file format.
        content: takes in every row.
        with_label: whether any row of the split has a label.
        with_weights: whether any record of the version has a loss weight other than 0 and 1.
        of_preferences: whether some answers are bad: columns have the names of `preference_names`.
    """
    described = (config.layout, config.position_ids, with_label, with_weights)
    layout = published_schema(*described)
    schema = published_schema(*described, of_preferences=of_preferences)

    def groups() -> Iterator[pa.RecordBatch]:
        for start in range(0, rows.num_rows, cut.rows_per_group):
            group = rows.slice(start, cut.rows_per_group).combine_chunks()
            advance(group.num_rows / rows.num_rows)
            batch = to_layout(group.to_batches()[0], layout)
            batch = preference_names(batch) if of_preferences else batch
            content.add(cut.split, batch)
            yield batch

    path = folder / f"{cut.split}-{cut.number:05d}.{config.file_format}"
    _WRITERS[config.file_format](path, schema, groups())
    tokens = pc.sum(pc.list_value_length(rows["input_ids"])).as_py() or 0
    return DataFile(path=path, split=cut.split, rows=rows.num_rows, tokens=tokens)


def _write_parquet(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        for batch in batches:
            writer.write_batch(batch, row_group_size=batch.num_rows)


def _write_jsonl(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    with path.open("wb") as file:
        for batch in batches:
            for row in batch.to_pylist():
                file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


_WRITERS: dict[str, Callable[[Path, pa.Schema, Iterator[pa.RecordBatch]], None]] = {
    "parquet": _write_parquet,
    "arrow": write_batches,
    "jsonl": _write_jsonl,
}


def _flat(column: pa.Array) -> Iterator[bytes]:
    """Logical content of a column as bytes: lengths of lists, then values, without padding.

    Example:
        >>> lists = pa.array([[7], [8, 9]], pa.list_(pa.int32()))
        >>> [part.tolist() for part in _flat(lists)]  # memory views
        [[1, 2], [7, 8, 9]]
    """
    if pa.types.is_list(column.type):
        yield from _flat(column.value_lengths())
        yield from _flat(column.flatten())
    elif pa.types.is_struct(column.type):
        for child in column.flatten():
            yield from _flat(child)
    elif pa.types.is_string(column.type):
        yield "\x00".join(column.to_pylist()).encode()
    elif pa.types.is_floating(column.type):
        yield column.to_numpy(zero_copy_only=False).data  # loss weights, never null
    else:
        yield column.fill_null(-(2**31)).to_numpy(zero_copy_only=False).data

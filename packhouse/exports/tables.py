"""Exports that are tables: Parquet for TRL, Axolotl and Megatron-Bridge, and Arrow streams."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.exports.columns import to_megatron, to_records, to_sequences

__all__ = ["write_arrow", "write_axolotl", "write_megatron", "write_trl"]

Batches = Iterator[pa.RecordBatch]


def write_trl(batches: Batches, split: str, folder: Path) -> None:
    """`<split>.parquet` of packs."""
    _write_parquet(batches, folder / f"{split}.parquet", to_sequences)


def write_axolotl(batches: Batches, split: str, folder: Path) -> None:
    """`<split>.parquet` of records."""
    _write_parquet(batches, folder / f"{split}.parquet", to_records)


def write_megatron(batches: Batches, split: str, folder: Path) -> None:
    """`<split>.idx.parquet` of packs; the name tells Megatron-Bridge that they are packed."""
    _write_parquet(batches, folder / f"{split}.idx.parquet", to_megatron)


def write_arrow(batches: Batches, split: str, folder: Path) -> None:
    """`<split>.arrow`, the stream that `datasets.Dataset.from_file` maps."""
    writer = None
    with pa.OSFile(str(folder / f"{split}.arrow"), "wb") as sink:
        for batch in batches:
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


def _write_parquet(
    batches: Batches, path: Path, convert: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> None:
    writer = None
    for batch in batches:
        rows = convert(batch)
        writer = writer or pq.ParquetWriter(
            path,
            rows.schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            write_page_checksum=True,
        )
        writer.write_batch(rows, row_group_size=rows.num_rows)
    if writer is not None:
        writer.close()

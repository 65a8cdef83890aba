"""Write rows in the formats of trainers: tables, and rows one behind another.

Every writer takes batches with `input_ids`, `labels` (unshifted), `position_ids` and `seq_lengths`,
as `packhouse.load.copies.read_rows` gives them, and writes one split into a folder. Arrays
are handled whole, a batch of packs at a time; `mds.py` has MosaicML's format, `megatron.py`
Megatron-Bridge's.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.records.lists import flat_list, list_array, zero_based
from packhouse.system.plugins import import_extra

Batches = Iterator[pa.RecordBatch]


def write_trl(batches: Batches, split: str, folder: Path) -> None:
    """`<split>.parquet` of packs, for TRL and transformers: boundaries as lengths and as positions.

    Labels stay unshifted: the model shifts. No `attention_mask`: all ones, it would undo packing.
    Preferences have the columns of `load_preferences`.
    """
    columns = (
        *("input_ids", "labels", "seq_lengths", "position_ids", "loss_weights"),
        *("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "label", "record_id"),
    )
    write_parquet(
        batches,
        folder / f"{split}.parquet",
        lambda batch: batch.select([name for name in columns if name in batch.schema.names]),
    )


def write_axolotl(batches: Batches, split: str, folder: Path) -> None:
    """`<split>.parquet` of records, one a row."""
    write_parquet(batches, folder / f"{split}.parquet", to_records)


def write_arrow(batches: Batches, split: str, folder: Path) -> None:
    """`<split>.arrow`, the stream that `datasets.Dataset.from_file` maps; all columns."""
    writer = None
    with pa.OSFile(str(folder / f"{split}.arrow"), "wb") as sink:
        for batch in batches:
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


def write_jsonl(batches: Batches, split: str, folder: Path) -> None:
    """`<split>.jsonl`: `input_ids`, `labels`, `position_ids`, and `loss_weights` if there are."""
    import orjson

    option = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    with (folder / f"{split}.jsonl").open("wb") as file:
        for row in split_rows(batches, _SMALL):
            file.write(orjson.dumps(row, option=option))


def write_msgpack(batches: Batches, split: str, folder: Path) -> None:
    """`<split>.msgpack`: maps of the columns of `jsonl`, for a streaming unpacker.

    Raises:
        ConfigError: the msgpack package is not installed.
    """
    msgpack = import_extra("msgpack", "msgpack", "export format 'msgpack'")
    packer = msgpack.Packer(use_single_float=True)
    with (folder / f"{split}.msgpack").open("wb") as file:
        for row in split_rows(batches, _SMALL):
            file.write(packer.pack({name: values.tolist() for name, values in row.items()}))


_SMALL = ("input_ids", "labels", "position_ids", "loss_weights")


def split_rows(batches: Batches, columns: tuple[str, ...]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield each row as its columns, those that there are, as views of the batch."""
    for batch in batches:
        names = [name for name in columns if name in batch.schema.names]
        flat = {name: zero_based(*flat_list(batch[name])) for name in names}
        for row in range(batch.num_rows):
            yield {
                name: values[offsets[row] : offsets[row + 1]]
                for name, (values, offsets) in flat.items()
            }


def to_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """One record a row for Axolotl, which packs by itself and keeps those packs apart.

    Its pre-tokenized rows need an `attention_mask`; of a single record it may be all ones.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9], "labels": [-100, 8, -100],
        ...     "seq_lengths": [2, 1]}])
        >>> to_records(batch.cast(PACK)).to_pylist()[0]
        {'input_ids': [7, 8], 'attention_mask': [1, 1], 'labels': [-100, 8]}
    """
    ids, labels, lengths = (
        zero_based(*flat_list(batch[name]))[0] for name in ("input_ids", "labels", "seq_lengths")
    )
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ones = pa.array(np.ones(len(ids), dtype=np.int8))
    columns = {
        "input_ids": list_array(pa.array(ids), offsets, pa.int32()),
        "attention_mask": list_array(ones, offsets, pa.int8()),
        "labels": list_array(pa.array(labels), offsets, pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


PACK = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels", "seq_lengths")])
"""Columns of a pack; examples give batches these types, which Python's numbers do not have."""


def write_parquet(
    batches: Batches, path: Path, convert: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> None:
    """Write a row group for each batch, with the settings of published files."""
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

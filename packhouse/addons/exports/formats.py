"""Write rows in the formats of trainers: tables, or one row after another.

Each writer takes batches with `input_ids`, `labels` (unshifted), `position_ids` and `seq_lengths`
from `packhouse.load.versions.read_rows` and writes one split to a folder. Holds one batch of packs
in memory. Labels are shifted only in formats whose readers expect it.
"""

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.pack.layout import IGNORE_INDEX
from packhouse.pack.plan import round_up
from packhouse.records.lists import count_up, flat_list, list_array, zero_based
from packhouse.system.plugins import import_extra

Batches = Iterator[pa.RecordBatch]


def write_trl(batches: Batches, split: str, folder: Path) -> None:
    """Write packs to `<split>.parquet` for TRL and transformers, with lengths and positions.

    Labels stay unshifted, because the model shifts them. There is no `attention_mask`: a mask of
    ones would undo packing. Preferences have the columns of `load_preferences`.
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
    """Write records to `<split>.parquet`, one per row."""
    write_parquet(batches, folder / f"{split}.parquet", to_records)


def write_arrow(batches: Batches, split: str, folder: Path) -> None:
    """Write all columns to `<split>.arrow`, a stream that `datasets.Dataset.from_file` maps."""
    writer = None
    with pa.OSFile(str(folder / f"{split}.arrow"), "wb") as sink:
        for batch in batches:
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


def write_jsonl(batches: Batches, split: str, folder: Path) -> None:
    """Write `input_ids`, `labels`, `position_ids` and any `loss_weights` to `<split>.jsonl`."""
    import orjson

    option = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    with (folder / f"{split}.jsonl").open("wb") as file:
        for row in split_rows(batches, _SMALL):
            file.write(orjson.dumps(row, option=option))


def write_msgpack(batches: Batches, split: str, folder: Path) -> None:
    """Write maps of the `jsonl` columns to `<split>.msgpack`, for a streaming unpacker.

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
    """Yield each row as a dictionary of the columns that exist, as views of the batch."""
    for batch in batches:
        names = [name for name in columns if name in batch.schema.names]
        flat = {name: zero_based(*flat_list(batch[name])) for name in names}
        for row in range(batch.num_rows):
            yield {
                name: values[offsets[row] : offsets[row + 1]]
                for name, (values, offsets) in flat.items()
            }


def to_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert packs to one record per row for Axolotl, which packs records itself.

    Its pretokenized rows need an `attention_mask`, which may be all ones for a single record.

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
"""Column types of a pack; the examples cast batches to it, because Python integers become int64."""


def write_parquet(
    batches: Batches, path: Path, convert: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> None:
    """Write one row group per batch, with the settings of published files."""
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


_COLUMNS = ("input_ids", "labels", "loss_weights", "position_ids", "seq_lengths")  # sorted by name
_SHARD_BYTES = 64 * 2**20


def write_mds(batches: Iterator[pa.RecordBatch], split: str, folder: Path) -> None:
    """Write `<split>/shard.00000.mds`, ... and `<split>/index.json`."""
    place = folder / split
    place.mkdir()
    first = next(batches, None)
    columns = () if first is None else first.schema.names
    names = [name for name in _COLUMNS if name in columns]
    settings = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": _SHARD_BYTES,
        "column_names": names,
        "column_encodings": [
            f"ndarray:{'float32' if name == 'loss_weights' else 'int32'}" for name in names
        ],
        "column_sizes": [None] * len(names),
    }
    shards: list[dict[str, object]] = []
    samples: list[bytes] = []
    num_bytes = 0
    for row in split_rows(chain([] if first is None else [first], batches), _COLUMNS):
        coded = [_encode(values) for values in row.values()]
        sizes = np.array([len(each) for each in coded], dtype="<u4")
        sample = sizes.tobytes() + b"".join(coded)
        if samples and num_bytes + len(sample) > _SHARD_BYTES:
            shards.append(_write_shard(place, len(shards), samples, settings))
            samples, num_bytes = [], 0
        samples.append(sample)
        num_bytes += len(sample) + 4
    if samples:
        shards.append(_write_shard(place, len(shards), samples, settings))
    index = json.dumps({"version": 2, "shards": shards}, sort_keys=True)
    (place / "index.json").write_text(index, encoding="utf-8")


def _encode(values: npt.NDArray[Any]) -> bytes:
    """Encode an array: dimensions, its length in the smallest of uint8, uint16, uint32, values."""
    # [7, 8] as int32: 04 (1 dimension, length in 1 byte), 02, 07 00 00 00, 08 00 00 00.
    code = 0 if len(values) < 2**8 else 1 if len(values) < 2**16 else 2
    length = len(values).to_bytes(1 << code, "little")
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return bytes([1 << 2 | code]) + length + little.tobytes()


def _write_shard(
    folder: Path, number: int, samples: list[bytes], settings: dict[str, object]
) -> dict[str, object]:
    header = json.dumps(settings, sort_keys=True).encode()
    offsets = np.cumsum([0, *(len(sample) for sample in samples)], dtype=np.int64)
    # Offsets count from the file's start: after the number of samples, the offsets and the header.
    offsets += 4 + 4 * len(offsets) + len(header)
    parts = [len(samples).to_bytes(4, "little"), offsets.astype("<u4").tobytes(), header, *samples]
    name = f"shard.{number:05d}.mds"
    data = b"".join(parts)
    (folder / name).write_bytes(data)
    raw = {"basename": name, "bytes": len(data), "hashes": {}}
    return settings | {"samples": len(samples), "raw_data": raw, "zip_data": None}


def write_megatron(
    batches: Batches, split: str, folder: Path, *, multiple: int = 1, seq_len: int | None = None
) -> None:
    """Write `<split>.idx.parquet` (the suffix marks packed data) and `<split>.metadata.json`.

    The metadata is a list of one object, with the keys and rounding of Megatron-Bridge. It reads
    the longest record, the maximum number of records per pack and the shortest pack from it, in
    inputs.
    """
    records: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    packs: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    in_pack: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]

    def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = to_megatron(batch, multiple=multiple)
        starts, offsets = zero_based(*flat_list(rows["seq_start_id"]))
        num_ids = np.diff(flat_list(rows["input_ids"])[1]).astype(np.int64)
        # Starts [0, 3 | 0] in packs of 5 and 4 ids: ends [3, 5 | 4], inputs [2, 1 | 3].
        ends = np.append(starts[1:], 0)
        ends[offsets[1:] - 1] = num_ids
        records.append((ends - starts - 1).astype(np.int64))
        in_pack.append(np.diff(offsets).astype(np.int64))
        packs.append(num_ids - in_pack[-1])
        return rows

    write_parquet(batches, folder / f"{split}.idx.parquet", convert)
    lengths, sizes, counts = (np.concatenate(each) for each in (records, packs, in_pack))
    pack_size = int(sizes.max(initial=0)) if seq_len is None else seq_len
    metadata = {
        "dataset_max_seqlen": int(lengths.max(initial=0)),
        "max_samples_per_bin": int(counts.max(initial=0)),
        "packing_factor": round(len(lengths) / max(1, len(sizes)), 2),
        "packing_efficiency": round(100 * float(sizes.sum()) / max(1, len(sizes) * pack_size), 2),
        "pack_size": pack_size,
        "min_packed_seqlen": int(sizes.min(initial=pack_size)),
    }
    path = folder / f"{split}.metadata.json"
    path.write_text(json.dumps([metadata], indent=2) + "\n", encoding="utf-8")


def to_megatron(batch: pa.RecordBatch, *, multiple: int = 1) -> pa.RecordBatch:
    """Convert packs for Megatron-Bridge: unshifted ids, and a loss mask at the predicting tokens.

    With `multiple`, each record is padded until its inputs are a multiple, that is, to `k *
    multiple + 1` ids. The padding repeats its last trained token, which ends an answer, because the
    reader treats all EOS tokens at the end of a record as padding. `seq_start_id` then counts
    padded records, and `cu_seqlens` and `cu_seqlens_padded` are the boundaries of inputs without
    and with padding.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9, 5, 6],
        ...     "labels": [-100, 8, 9, -100, 6], "seq_lengths": [3, 2]}])
        >>> to_megatron(batch.cast(PACK)).to_pylist()[0]
        {'input_ids': [7, 8, 9, 5, 6], 'loss_mask': [1, 1, 0, 1, 0], 'seq_start_id': [0, 3]}
    """
    labels, offsets = zero_based(*flat_list(batch["labels"]))
    lengths, pack_offsets = zero_based(*flat_list(batch["seq_lengths"]))
    # A record's last token gets the mask of the next record's first token, which is never trained.
    mask = np.append(labels[1:] != IGNORE_INDEX, False).astype(np.uint8)
    ids, _ = zero_based(*flat_list(batch["input_ids"]))
    real = lengths
    if multiple > 1 and len(real):
        # Multiple 4, lengths 3 2: inputs of 2 and 1 tokens become 4, so both records get 5 ids:
        # 7 8 9 5 6 -> 7 8 9 9 9 5 6 6 6 6.
        lengths = round_up(real - 1, multiple) + 1
        first = np.cumsum(real, dtype=np.int64) - real
        # Source of each id: the record's own tokens, then its last trained one (else its last).
        trained = np.where(labels == IGNORE_INDEX, -1, np.arange(len(ids)))
        pad = np.maximum.reduceat(trained, first)
        pad = np.where(pad < 0, first + real - 1, pad)
        place = count_up(lengths)
        is_pad = place >= np.repeat(real, lengths)
        token = np.where(is_pad, np.repeat(pad, lengths), np.repeat(first, lengths) + place)
        ids, mask = ids[token], np.where(is_pad, np.uint8(0), mask[token])
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        offsets = ends[pack_offsets]
    # Starts within a pack: lengths [3, 2 | 4] -> [0, 3, 5], minus the pack's start [0, 0, 5].
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    starts -= np.repeat(offsets[:-1], np.diff(pack_offsets))
    columns = {
        "input_ids": list_array(pa.array(ids), offsets, pa.int32()),
        "loss_mask": list_array(pa.array(mask), offsets, pa.uint8()),
        "seq_start_id": list_array(pa.array(starts.astype(np.int32)), pack_offsets, pa.int32()),
    }
    if multiple > 1:
        columns["cu_seqlens"] = _input_bounds(real, pack_offsets)
        columns["cu_seqlens_padded"] = _input_bounds(lengths, pack_offsets)
    return pa.RecordBatch.from_pydict(columns)


def _input_bounds(lengths: npt.NDArray[Any], pack_offsets: npt.NDArray[Any]) -> pa.Array:
    """Return the boundaries of the inputs (one less than the ids) of each pack's records, from 0.

    Lengths [3, 2 | 4] in packs [0, 2, 3] -> [0, 2, 3], [0, 3].
    """
    packs = np.split(lengths - 1, pack_offsets[1:-1])
    bounds = [np.concatenate([[0], np.cumsum(pack)]).astype(np.int32) for pack in packs]
    return pa.array([each.tolist() for each in bounds], pa.list_(pa.int32()))

"""Export as MosaicML Streaming's MDS shards, written from the format itself.

A shard is: number of samples, offsets (uint32), a JSON header, samples; a sample is the byte size
of each of its columns (in order of name) and then the columns. A column here is a one-dimensional
array of int32 (float32: `loss_weights`, if there are any): one byte for number of dimensions and
width of the length, the length, the values. `index.json` is written last, so that a folder with one
is whole.

Written here because no release of mosaicml-streaming installs beside our pins.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.addons.exports.formats import split_rows

_COLUMNS = ("input_ids", "labels", "loss_weights", "position_ids", "seq_lengths")  # by name
_SHARD_BYTES = 64 * 2**20


def write_mds(batches: Iterator[pa.RecordBatch], split: str, folder: Path) -> None:
    """`<split>/shard.00000.mds`, ... and `<split>/index.json`."""
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
    """One dimension, its length in the narrowest of uint8, uint16, uint32, the values."""
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
    offsets += 4 + 4 * len(offsets) + len(header)
    parts = [len(samples).to_bytes(4, "little"), offsets.astype("<u4").tobytes(), header, *samples]
    name = f"shard.{number:05d}.mds"
    data = b"".join(parts)
    (folder / name).write_bytes(data)
    raw = {"basename": name, "bytes": len(data), "hashes": {}}
    return settings | {"samples": len(samples), "raw_data": raw, "zip_data": None}

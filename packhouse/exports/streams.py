"""Exports that are one row behind another: JSON Lines and MessagePack.

Each row is a map of `input_ids`, `labels`, `position_ids`, and `loss_weights` where there are some.
MessagePack is written by numpy, an array at a time in the narrowest of three fixed widths (3 to 5
bytes a number): valid for every reader, and without a dependency.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.packing.lists import flat_list, zero_based

__all__ = ["pack_floats", "pack_ints", "write_jsonl", "write_msgpack"]

_COLUMNS = ("input_ids", "labels", "position_ids", "loss_weights")


def write_jsonl(batches: Iterator[pa.RecordBatch], split: str, folder: Path) -> None:
    """`<split>.jsonl`."""
    import orjson

    option = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    with (folder / f"{split}.jsonl").open("wb") as file:
        for row in _rows(batches):
            file.write(orjson.dumps(row, option=option))


def write_msgpack(batches: Iterator[pa.RecordBatch], split: str, folder: Path) -> None:
    """`<split>.msgpack`: maps behind one another, for a streaming unpacker."""
    with (folder / f"{split}.msgpack").open("wb") as file:
        for row in _rows(batches):
            parts = [bytes([0x80 | len(row)])]
            for name, values in row.items():
                pack = pack_floats if values.dtype == np.float32 else pack_ints
                parts += [bytes([0xA0 | len(name)]), name.encode(), pack(values)]
            file.write(b"".join(parts))


def pack_ints(values: npt.NDArray[np.int32]) -> bytes:
    """A MessagePack array of integers.

    Example:
        >>> pack_ints(np.array([1, 2], dtype=np.int32)).hex(" ")
        'dd 00 00 00 02 cd 00 01 cd 00 02'
    """
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if low >= 0 and high < 2**16:
        tag, kind = 0xCD, ">u2"
    elif low >= -(2**15) and high < 2**15:
        tag, kind = 0xD1, ">i2"
    else:
        tag, kind = 0xD2, ">i4"
    coded = np.empty(len(values), dtype=[("tag", "u1"), ("value", kind)])
    coded["tag"], coded["value"] = tag, values
    return b"\xdd" + len(values).to_bytes(4, "big") + coded.tobytes()


def pack_floats(values: npt.NDArray[np.float32]) -> bytes:
    """A MessagePack array of single-precision numbers.

    Example:
        >>> pack_floats(np.array([0.5], dtype=np.float32)).hex(" ")
        'dd 00 00 00 01 ca 3f 00 00 00'
    """
    coded = np.empty(len(values), dtype=[("tag", "u1"), ("value", ">f4")])
    coded["tag"], coded["value"] = 0xCA, values
    return b"\xdd" + len(values).to_bytes(4, "big") + coded.tobytes()


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    for batch in batches:
        names = [name for name in _COLUMNS if name in batch.schema.names]
        columns = {name: zero_based(*flat_list(batch[name])) for name in names}
        for row in range(batch.num_rows):
            yield {
                name: values[offsets[row] : offsets[row + 1]]
                for name, (values, offsets) in columns.items()
            }

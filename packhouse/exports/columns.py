"""From published rows to what each trainer's reader wants: one flat pass over a batch of packs.

Every function takes a batch with `input_ids`, `labels` (unshifted), `position_ids` and
`seq_lengths`, as `packhouse.loaders.versions.expand_rows` makes it.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.packing.layout import IGNORE_INDEX
from packhouse.packing.lists import flat_list, list_array, zero_based

__all__ = ["flat_int32s", "to_megatron", "to_records", "to_sequences"]


def flat_int32s(
    batch: pa.RecordBatch, name: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Values and offsets from 0 of a list column."""
    values, offsets = zero_based(*flat_list(batch[name]))
    return values, offsets.astype(np.int64)


def to_sequences(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Packs for TRL and transformers: boundaries as lengths and as positions.

    Labels stay unshifted: the model shifts. No `attention_mask`: all ones, it would undo packing.
    """
    columns = ["input_ids", "labels", "seq_lengths", "position_ids"]
    return batch.select([*columns, *(n for n in ("loss_weights",) if n in batch.schema.names)])


def to_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """One record a row for Axolotl, which packs by itself and keeps those packs apart.

    Its pre-tokenized rows need an `attention_mask`; of a single record it may be all ones.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9], "labels": [-100, 8, -100],
        ...     "seq_lengths": [2, 1]}])
        >>> to_records(batch.cast(_PACK)).to_pylist()[0]
        {'input_ids': [7, 8], 'attention_mask': [1, 1], 'labels': [-100, 8]}
    """
    ids, _ = flat_int32s(batch, "input_ids")
    labels, _ = flat_int32s(batch, "labels")
    lengths, _ = flat_int32s(batch, "seq_lengths")
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ones = pa.array(np.ones(len(ids), dtype=np.int8))
    columns = {
        "input_ids": list_array(pa.array(ids), offsets, pa.int32()),
        "attention_mask": list_array(ones, offsets, pa.int8()),
        "labels": list_array(pa.array(labels), offsets, pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


def to_megatron(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Packs for Megatron-Bridge: unshifted ids, a loss mask already moved to the predicting token.

    Its reader makes inputs `ids[:-1]` and targets `ids[1:]` of each sequence, with `mask[:-1]`: so
    `mask[t]` says whether token `t + 1` is trained; with loss weights, how much.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9, 5, 6],
        ...     "labels": [-100, 8, 9, -100, 6], "seq_lengths": [3, 2]}])
        >>> to_megatron(batch.cast(_PACK)).to_pylist()[0]
        {'input_ids': [7, 8, 9, 5, 6], 'loss_mask': [1, 1, 0, 1, 0], 'seq_start_id': [0, 3]}
    """
    labels, offsets = flat_int32s(batch, "labels")
    trained = labels != IGNORE_INDEX
    # A record's last token gets the mark of the next record's first one, which is never trained.
    mask = np.append(trained[1:], False).astype(np.uint8)
    if "loss_weights" in batch.schema.names:
        weights, _ = zero_based(*flat_list(batch["loss_weights"]))
        mask = np.append(weights[1:], np.float32(0)).astype(np.float32)
    lengths, pack_offsets = flat_int32s(batch, "seq_lengths")
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths - np.repeat(offsets[:-1], np.diff(pack_offsets))
    columns = {
        "input_ids": batch["input_ids"],
        "loss_mask": list_array(pa.array(mask), offsets, pa.from_numpy_dtype(mask.dtype)),
        "seq_start_id": list_array(pa.array(starts.astype(np.int32)), pack_offsets, pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


_PACK = pa.schema(
    [(name, pa.list_(pa.int32())) for name in ("input_ids", "labels", "seq_lengths")]
)  # of the examples

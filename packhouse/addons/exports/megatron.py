"""Packed Parquet of Megatron-Bridge, and the metadata that it needs for CUDA graphs.

Its reader makes inputs `ids[:-1]` and targets `ids[1:]` of each record of a pack, with `mask[:-1]`:
so `mask[t]` says whether token `t + 1` is trained. Lengths in its settings are those of inputs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.addons.exports.formats import Batches, write_parquet
from packhouse.pack.layout import IGNORE_INDEX
from packhouse.pack.plan import round_up
from packhouse.records.lists import count_up, flat_list, list_array, zero_based


def write_megatron(
    batches: Batches, split: str, folder: Path, *, multiple: int = 1, seq_len: int | None = None
) -> None:
    """`<split>.idx.parquet`, which says by its name that it is packed, and `<split>.metadata.json`.

    The metadata is a list of one object with the names and roundings of Megatron-Bridge, which
    reads the longest record, the most records of a pack and the shortest pack of it, in inputs.
    """
    records: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    packs: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    in_pack: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]

    def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = to_megatron(batch, multiple=multiple)
        starts, offsets = zero_based(*flat_list(rows["seq_start_id"]))
        num_ids = np.diff(flat_list(rows["input_ids"])[1]).astype(np.int64)
        # Starts [0, 3 | 0] of packs of 5 and 4 ids: ends [3, 5 | 4], inputs [2, 1 | 3].
        ends = np.append(starts[1:], 0)
        ends[offsets[1:] - 1] = num_ids
        records.append((ends - starts - 1).astype(np.int64))
        in_pack.append(np.diff(offsets).astype(np.int64))
        packs.append(num_ids - in_pack[-1])
        return rows

    write_parquet(batches, folder / f"{split}.idx.parquet", convert)
    lengths, sizes, counts = (np.concatenate(each) for each in (records, packs, in_pack))
    pack_size = int(sizes.max(initial=0)) if seq_len is None else seq_len
    told = {
        "dataset_max_seqlen": int(lengths.max(initial=0)),
        "max_samples_per_bin": int(counts.max(initial=0)),
        "packing_factor": round(len(lengths) / max(1, len(sizes)), 2),
        "packing_efficiency": round(100 * float(sizes.sum()) / max(1, len(sizes) * pack_size), 2),
        "pack_size": pack_size,
        "min_packed_seqlen": int(sizes.min(initial=pack_size)),
    }
    path = folder / f"{split}.metadata.json"
    path.write_text(json.dumps([told], indent=2) + "\n", encoding="utf-8")


def to_megatron(batch: pa.RecordBatch, *, multiple: int = 1) -> pa.RecordBatch:
    """Packs for Megatron-Bridge: unshifted ids, a loss mask already moved to the predicting token.

    With `multiple`, each record is padded until its inputs are a multiple, that is to
    `k * multiple + 1` ids. Pads are its last trained token, which ends an answer: the reader takes
    all tokens of the tokenizer's EOS at a record's end for pads. `seq_start_id` is that of the
    padded records then, and `cu_seqlens` and `cu_seqlens_padded` are the bounds of all inputs
    without and with pads.

    Example:
        >>> from packhouse.addons.exports.formats import PACK
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9, 5, 6],
        ...     "labels": [-100, 8, 9, -100, 6], "seq_lengths": [3, 2]}])
        >>> to_megatron(batch.cast(PACK)).to_pylist()[0]
        {'input_ids': [7, 8, 9, 5, 6], 'loss_mask': [1, 1, 0, 1, 0], 'seq_start_id': [0, 3]}
    """
    labels, offsets = zero_based(*flat_list(batch["labels"]))
    lengths, pack_offsets = zero_based(*flat_list(batch["seq_lengths"]))
    # A record's last token gets the mark of the next record's first one, which is never trained.
    mask = np.append(labels[1:] != IGNORE_INDEX, False).astype(np.uint8)
    ids, _ = zero_based(*flat_list(batch["input_ids"]))
    real = lengths
    if multiple > 1 and len(real):
        # Multiple 4, lengths 3 2: inputs of 2 and 1 tokens become 4, so ids become 5 and 5:
        # 7 8 9 5 6 -> 7 8 9 9 9 5 6 6 6 6.
        lengths = round_up(real - 1, multiple) + 1
        first = np.cumsum(real, dtype=np.int64) - real
        # Token of each place: those of the record, then its last trained one (none: its last).
        trained = np.where(labels == IGNORE_INDEX, -1, np.arange(len(ids)))
        pad = np.maximum.reduceat(trained, first)
        pad = np.where(pad < 0, first + real - 1, pad)
        place = count_up(lengths)
        is_pad = place >= np.repeat(real, lengths)
        token = np.where(is_pad, np.repeat(pad, lengths), np.repeat(first, lengths) + place)
        ids, mask = ids[token], np.where(is_pad, np.uint8(0), mask[token])
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        offsets = ends[pack_offsets]
    # Starts in a row: lengths [3, 2 | 4] -> starts [0, 3, 5], less the row's own [0, 0, 5].
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
    """Bounds of the inputs (a token less than the ids) of each pack's records, from 0.

    Lengths [3, 2 | 4] in packs [0, 2, 3] -> [0, 2, 3], [0, 3].
    """
    packs = np.split(lengths - 1, pack_offsets[1:-1])
    bounds = [np.concatenate([[0], np.cumsum(pack)]).astype(np.int32) for pack in packs]
    return pa.array([each.tolist() for each in bounds], pa.list_(pa.int32()))

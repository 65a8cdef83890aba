"""Where each record lies in the packs, and its tokens: data files laid beside the records.

A record's row says how many tokens one copy has and how many copies are packed. A pack says which
record each of its sequences is of: a record is one sequence, or several where `concat` cuts it. All
sequences of a record id, in the order of packs, are its copies one behind another. So rows of equal
content get one copy each, and a record that goes on in the next pack is put together.

    sequences of x: pack 3 [a b c], pack 9 [a b c]     two rows x of 3 tokens: pack 3, pack 9
    sequences of y: pack 0 [d e],   pack 1 [f]         one row y of 3 tokens:  pack 0

Holds 40 bytes a record, and all tokens (5 bytes each) only where ids, text or masks are asked for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import IntegrityError
from packhouse.packing.layout import trained_tokens
from packhouse.store.contracts import read_batches

__all__ = ["Places", "Sequences", "locate_records", "read_sequences"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """All sequences of the packs, in their order: train first, then eval."""

    record_ids: pa.Array
    """Empty where not asked for, as `num_trained` is zeros."""
    splits: pa.Array
    """Dictionary array, one value for each sequence."""
    pack: Ints
    """Number of the pack in its split."""
    position: Ints
    """Of its first token in the pack."""
    num_tokens: Ints
    num_trained: Ints
    ids: npt.NDArray[np.int32]
    """Tokens of all sequences behind one another; empty where not asked for."""
    mask: npt.NDArray[np.bool_]
    """Which of them are trained; empty where not asked for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Places:
    """What the packs say of each row of the records; -1 and empty for rows that are in none."""

    is_packed: npt.NDArray[np.bool_]
    pack: Ints
    position: Ints
    num_trained: Ints
    input_ids: pa.ListArray | None
    trained: pa.ListArray | None


def read_sequences(files: Iterable[tuple[Path, str]], columns: list[str]) -> Sequences:
    """Read the sequences of data files.

    Args:
        files: with their splits, in published order.
        columns: those of the files that are read: `seq_lengths`, and what else is wanted of
            `record_ids`, `input_ids`, and `labels` and `trained_ranges`, of which a file has one.

    Raises:
        IntegrityError: a file is damaged, or its rows do not add up.
    """
    found: list[dict[str, Any]] = []
    first: dict[str, int] = {}
    for path, split in files:
        for batch in read_batches(path, columns):
            try:
                read = _sequences_of(batch, {*columns})
            except (KeyError, ValueError, IndexError, TypeError, pa.ArrowException) as error:
                raise IntegrityError(
                    f"'{path.name}' holds no packs of records: {type(error).__name__}"
                ) from None
            read["pack"] += first.get(split, 0)
            read["split"] = split
            first[split] = first.get(split, 0) + batch.num_rows
            found.append(read)
    return _joined(found)


def _sequences_of(batch: pa.RecordBatch, columns: set[str]) -> dict[str, Any]:
    with_masks = "labels" in columns
    lengths = batch["seq_lengths"].flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    per_pack = pc.list_value_length(batch["seq_lengths"]).to_numpy(zero_copy_only=False)
    pack = np.repeat(np.arange(batch.num_rows), per_pack)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # Tokens before each pack: what ends before its first sequence.
    first_sequence = np.cumsum(per_pack) - per_pack
    before = np.concatenate([[0], ends])[first_sequence]
    num_tokens = int(ends[-1]) if len(ends) else 0
    if (lengths < 0).any():
        raise ValueError("a length below 0")
    record_ids = pa.array([], pa.string())
    if "record_ids" in columns:
        record_ids = batch["record_ids"].flatten().cast(pa.string())
        if len(record_ids) != len(lengths) or record_ids.null_count:
            raise ValueError("not one id for each sequence")
    mask = np.zeros(0, np.bool_)
    if with_masks:
        mask = trained_tokens(batch, np.append(before, num_tokens))
        if len(mask) != num_tokens:
            raise ValueError("labels do not add up")
    summed = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)]) if with_masks else None
    ids = np.zeros(0, np.int32)
    if "input_ids" in columns:
        ids = batch["input_ids"].flatten().to_numpy(zero_copy_only=False).astype(np.int32)
        if len(ids) != num_tokens:
            raise ValueError("lengths do not add up")
    return {
        "record_ids": record_ids,
        "pack": pack.astype(np.int64),
        "position": starts - before[pack],
        "num_tokens": lengths,
        "num_trained": np.zeros_like(starts) if summed is None else summed[ends] - summed[starts],
        "ids": ids,
        "mask": mask,
    }


def _joined(found: list[dict[str, Any]]) -> Sequences:
    def every(name: str, kind: Any) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, kind), *(each[name] for each in found)])

    splits = pa.array(sorted({each["split"] for each in found}), pa.string())
    codes = [np.full(len(e["pack"]), splits.index(e["split"]).as_py(), np.int32) for e in found]
    return Sequences(
        record_ids=pa.concat_arrays([pa.array([], pa.string()), *(e["record_ids"] for e in found)]),
        splits=pa.DictionaryArray.from_arrays(
            np.concatenate([np.zeros(0, np.int32), *codes]), splits
        ),
        pack=every("pack", np.int64),
        position=every("position", np.int64),
        num_tokens=every("num_tokens", np.int64),
        num_trained=every("num_trained", np.int64),
        ids=every("ids", np.int32),
        mask=every("mask", np.bool_),
    )


def locate_records(
    record_ids: pa.Array, num_tokens: Ints, times: Ints, sequences: Sequences
) -> Places:
    """Give each row of the records its sequences.

    Args:
        record_ids: of the rows.
        num_tokens: of one copy of each.
        times: copies of each in the packs; 0: dropped.
        sequences: of the data files.
    """
    names = pc.unique(record_ids)
    row_code = _codes(record_ids, names)
    code = _codes(sequences.record_ids, names)
    order = np.argsort(code, kind="stable")
    edges = np.concatenate([[0], np.cumsum(sequences.num_tokens[order])])
    # Tokens before the first sequence, and behind the last one, of each id.
    low = edges[np.searchsorted(code[order], np.arange(len(names)), "left")]
    high = edges[np.searchsorted(code[order], np.arange(len(names)), "right")]
    start = low[row_code] + _before(row_code, num_tokens * times)
    end = start + num_tokens
    is_packed = np.asarray((times > 0) & (num_tokens > 0) & (end <= high[row_code]))
    start, end = np.where(is_packed, start, 0), np.where(is_packed, end, 0)
    if not len(order):
        nothing = np.full(len(row_code), -1, np.int64)
        return Places(
            is_packed=np.zeros(len(row_code), np.bool_),
            pack=nothing,
            position=nothing,
            num_trained=nothing,
            input_ids=None,
            trained=None,
        )
    sequence = np.clip(np.searchsorted(edges, start, "right") - 1, 0, len(order) - 1)
    last = np.searchsorted(edges, end, "left")
    trained = np.concatenate([[0], np.cumsum(sequences.num_trained[order])])
    at = order[sequence]
    tokens = _token_order(sequences, order) if len(sequences.ids) or len(sequences.mask) else None
    return Places(
        is_packed=is_packed,
        pack=np.where(is_packed, sequences.pack[at], -1),
        position=np.where(is_packed, sequences.position[at] + start - edges[sequence], -1),
        num_trained=np.where(is_packed, trained[last] - trained[sequence], -1),
        input_ids=_lists(sequences.ids, tokens, start, end) if len(sequences.ids) else None,
        trained=_lists(sequences.mask, tokens, start, end) if len(sequences.mask) else None,
    )


def _codes(values: pa.Array, names: pa.Array) -> Ints:
    codes = pc.fill_null(pc.index_in(values, names), len(names))
    return np.asarray(codes.to_numpy(zero_copy_only=False), np.int64)


def _before(code: Ints, tokens: Ints) -> Ints:
    """Sum of `tokens` over the rows before each that have its code.

    Example:
        >>> _before(np.array([0, 1, 0]), np.array([5, 7, 5])).tolist()
        [0, 0, 5]
    """
    order = np.argsort(code, kind="stable")
    summed = np.cumsum(tokens[order]) - tokens[order]
    first = np.searchsorted(code[order], code[order], "left")
    before = np.zeros_like(summed)
    before[order] = summed - summed[first] if len(summed) else summed
    return before


def _token_order(sequences: Sequences, order: Ints) -> Ints:
    """Place of each token, sequence by sequence in `order`."""
    starts = np.cumsum(sequences.num_tokens) - sequences.num_tokens
    return _ranges(starts[order], sequences.num_tokens[order])


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """[5, 9], [2, 3] -> [5, 6, 9, 10, 11]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    places: Ints = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return places


def _lists(values: npt.NDArray[Any], tokens: Ints | None, start: Ints, end: Ints) -> pa.ListArray:
    assert tokens is not None, "there are ids or masks"
    taken = values[tokens[_ranges(start, end - start)]]
    offsets = np.concatenate([[0], np.cumsum(end - start)])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(taken))

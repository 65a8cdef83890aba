"""Where each record lies in the packs, and its tokens: data files laid beside the records.

A record's row says how many tokens one copy has and how many copies are packed. A pack says which
record each of its sequences is of: a record is one sequence, or several where `concat` cuts it. All
sequences of a record id, in the order of packs, are its copies one behind another. So rows of equal
content get one copy each, and a record that goes on in the next pack is put together.

    sequences of x: pack 3 [a b c], pack 9 [a b c]     two rows x of 3 tokens: pack 3, pack 9
    sequences of y: pack 0 [d e],   pack 1 [f]         one row y of 3 tokens:  pack 0

Holds 40 bytes a record, and all tokens (5 bytes each) only where ids, text or masks are asked for.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ContractError, IntegrityError
from packhouse.pack.layout import trained_tokens
from packhouse.store.contracts import check_rows, read_batches
from packhouse.store.manifest import Manifest

Ints = npt.NDArray[np.int64]

_PER_TOKEN = ("ids", "mask", "weights")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """Sequences of packs, in their order; of what was not asked for, zeros or nothing."""

    record_ids: pa.Array
    splits: pa.Array
    """Dictionary array, one value for each sequence."""
    pack: Ints
    """Number of the pack in its split."""
    position: Ints
    """Of its first token in the pack."""
    num_tokens: Ints
    num_trained: Ints
    total_weight: npt.NDArray[np.float64]
    """Loss weights of its trained tokens, added up; each is 1 where packs have no weights."""
    label: pa.Array
    """Of its row in the packs: nulls but for verdicts and classes."""
    ids: npt.NDArray[np.int32]
    """Tokens of all sequences behind one another."""
    mask: npt.NDArray[np.bool_]
    """Which of them are trained."""
    weights: npt.NDArray[np.float32]
    """What each of them counts in the loss; 0: not trained."""

    def of(self, record_ids: Collection[str]) -> "Sequences":
        """Return those of some records."""
        chosen = pc.is_in(self.record_ids, pa.array(record_ids, pa.string()))
        at = np.flatnonzero(chosen.to_numpy(zero_copy_only=False))
        tokens = _token_order(self, at)

        def chosen_of(name: str) -> Any:
            values = getattr(self, name)
            if not isinstance(values, np.ndarray):
                return values.take(pa.array(at))
            if name in _PER_TOKEN:
                return values[tokens] if len(values) else values
            return values[at]

        return Sequences(**{each.name: chosen_of(each.name) for each in fields(Sequences)})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Places:
    """What the packs say of each row of the records; -1 and empty for rows that are in none."""

    is_packed: npt.NDArray[np.bool_]
    pack: Ints
    position: Ints
    num_trained: Ints
    total_weight: npt.NDArray[np.float64]
    label: pa.Array
    input_ids: pa.ListArray | None
    trained: pa.ListArray | None
    loss_weights: pa.ListArray | None


def each_sequences(
    files: Iterable[tuple[Path, str]],
    columns: Sequence[str],
    keeps: Collection[str] = ("trained", "loss_weights"),
    rules: Manifest | None = None,
) -> Iterator[Sequences]:
    """Yield the sequences of data files, some packs at a time.

    Args:
        files: with their splits, in published order.
        columns: those of the files that are read: `seq_lengths`, and what else is wanted of
            `record_ids`, `input_ids`, `label`, `loss_weights`, and `labels` and `trained_ranges`,
            of which a file has one. Weights are read beside masks.
        keeps: masks and weights of single tokens, which are not needed to add them up.
        rules: packs are read whole and held against these; None: as far as they are read.

    Raises:
        ContractError: packs have no record ids, or break the rules.
        IntegrityError: a file is damaged, or its rows do not add up.
    """
    first: dict[str, int] = {}
    for path, split in files:
        start = first.get(split, 0)
        for batch in read_batches(path, None if rules else [*columns]):
            if rules is not None:
                check_rows(batch, start, rules)
            if "record_ids" in columns and "record_ids" not in batch.schema.names:
                raise ContractError(f"'{path.name}' has no record_ids")
            try:
                yield _sequences_of(batch, split, start, {*columns}, keeps)
            except MemoryError:  # of Arrow, too
                raise
            except (KeyError, ValueError, IndexError, TypeError, pa.ArrowException) as error:
                raise IntegrityError(
                    f"'{path.name}' holds no packs of records: {type(error).__name__}"
                ) from None
            start += batch.num_rows
        first[split] = start


def _sequences_of(
    batch: pa.RecordBatch, split: str, first: int, columns: Collection[str], keeps: Collection[str]
) -> Sequences:
    lengths = batch["seq_lengths"].flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    per_pack = pc.list_value_length(batch["seq_lengths"]).to_numpy(zero_copy_only=False)
    pack = np.repeat(np.arange(batch.num_rows), per_pack)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # Lengths [3 2 | 3] of two packs: pack 0 0 1, ends 3 5 8, starts 0 3 5. Tokens before each pack
    # are what ends before its first sequence, 0 and 5, so positions are 0 3 0.
    first_sequence = np.cumsum(per_pack) - per_pack
    before = np.concatenate([[0], ends])[first_sequence]
    num_tokens = int(ends[-1]) if len(ends) else 0
    if (lengths < 0).any():
        raise ValueError("a length below 0")

    def summed(values: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
        sums = np.concatenate([[0], np.cumsum(values, dtype=kind)])
        return np.asarray(sums[ends] - sums[starts])

    record_ids = pa.array([], pa.string())
    if "record_ids" in columns:
        record_ids = batch["record_ids"].flatten().cast(pa.string())
        if len(record_ids) != len(lengths) or record_ids.null_count:
            raise ValueError("not one id for each sequence")
    ids, mask, weights = np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.float32)
    num_trained = np.zeros_like(starts)
    total_weight = np.zeros(len(starts))
    if "input_ids" in columns:
        ids = batch["input_ids"].flatten().to_numpy(zero_copy_only=False).astype(np.int32)
    if "labels" in columns:
        mask = trained_tokens(batch, np.append(before, num_tokens))
        num_trained = summed(mask, np.int64)
    if "loss_weights" in columns:
        weights, total_weight = mask.astype(np.float32), num_trained.astype(np.float64)
        if "loss_weights" in batch.schema.names:
            weights = batch["loss_weights"].flatten().to_numpy(zero_copy_only=False)
            total_weight = summed(weights, np.float64)
    if any(len(values) not in (0, num_tokens) for values in (ids, mask, weights)):
        raise ValueError("lengths do not add up")
    has_label = "label" in columns and "label" in batch.schema.names
    label = batch["label"].cast(pa.int64()) if has_label else pa.nulls(batch.num_rows, pa.int64())
    return Sequences(
        record_ids=record_ids,
        splits=pa.DictionaryArray.from_arrays(np.zeros(len(lengths), np.int32), [split]),
        pack=pack + first,
        position=starts - before[pack],
        num_tokens=lengths,
        num_trained=num_trained,
        total_weight=total_weight,
        label=label.take(pa.array(pack)),
        ids=ids,
        mask=mask if "trained" in keeps else mask[:0],
        weights=weights if "loss_weights" in keeps else weights[:0],
    )


_NO_PACKS = pa.record_batch(
    {
        "record_ids": pa.array([], pa.list_(pa.string())),
        "seq_lengths": pa.array([], pa.list_(pa.int32())),
    }
)


def join_sequences(parts: Iterable[Sequences]) -> Sequences:
    """Put the sequences of parts behind one another."""
    found = [*parts] or [_sequences_of(_NO_PACKS, "", 0, (), ())]
    made: dict[str, Any] = {}
    for each in fields(Sequences):
        values = [getattr(part, each.name) for part in found]
        is_numbers = isinstance(values[0], np.ndarray)
        made[each.name] = (
            np.concatenate(values)
            if is_numbers
            else pa.chunked_array(values).unify_dictionaries().combine_chunks()
        )
    return Sequences(**made)


def locate_records(
    record_ids: pa.Array, num_tokens: Ints, times: Ints, sequences: Sequences
) -> Places:
    """Give each row of the records its sequences.

    Args:
        record_ids: of the rows.
        num_tokens: of one copy of each.
        times: copies of each in the packs; 0: dropped.
        sequences: of the data files.

    Raises:
        IntegrityError: there are more copies than numbers can count.
    """
    if float(num_tokens.astype(np.float64) @ times) >= 2**62:
        raise IntegrityError("the files of 'records' count over 2**62 tokens in column 'times'")
    # Sequences x y x of 3, 2 and 3 tokens are put in the order of their ids, x x y: tokens of x lie
    # from 0 to 6, of y from 6 to 8. Rows x y x of one copy each take 0 to 3, 6 to 8 and 3 to 6.
    names = pc.unique(record_ids)
    row_code = _codes(record_ids, names)
    code = _codes(sequences.record_ids, names)
    order = np.argsort(code, kind="stable")
    edges = np.concatenate([[0], np.cumsum(sequences.num_tokens[order])])
    # Tokens before the first sequence, and behind the last one, of each id.
    low = edges[np.searchsorted(code[order], np.arange(len(names)), "left")]
    high = edges[np.searchsorted(code[order], np.arange(len(names)), "right")]
    start = low[row_code] + sum_before(row_code, num_tokens * times)
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
            total_weight=nothing.astype(np.float64),
            label=pa.nulls(len(row_code), pa.int64()),
            input_ids=None,
            trained=None,
            loss_weights=None,
        )
    sequence = np.clip(np.searchsorted(edges, start, "right") - 1, 0, len(order) - 1)
    last = np.searchsorted(edges, end, "left")
    trained = np.concatenate([[0], np.cumsum(sequences.num_trained[order])])
    weights = np.concatenate([[0], np.cumsum(sequences.total_weight[order])])
    at = order[sequence]
    per_token = (sequences.ids, sequences.mask, sequences.weights)
    tokens = _token_order(sequences, order) if any(map(len, per_token)) else None
    return Places(
        is_packed=is_packed,
        pack=np.where(is_packed, sequences.pack[at], -1),
        position=np.where(is_packed, sequences.position[at] + start - edges[sequence], -1),
        num_trained=np.where(is_packed, trained[last] - trained[sequence], -1),
        # Sums of millions of weights: what rounding leaves of one record's is not shown.
        total_weight=np.where(is_packed, np.round(weights[last] - weights[sequence], 4), -1),
        label=sequences.label.take(pa.array(at)),
        input_ids=_lists(sequences.ids, tokens, start, end),
        trained=_lists(sequences.mask, tokens, start, end),
        loss_weights=_lists(sequences.weights, tokens, start, end),
    )


def _codes(values: pa.Array, names: pa.Array) -> Ints:
    codes = pc.fill_null(pc.index_in(values, names), len(names))
    return np.asarray(codes.to_numpy(zero_copy_only=False), np.int64)


def sum_before(code: Ints, tokens: Ints) -> Ints:
    """Sum of `tokens` over the rows before each that have its code.

    Example:
        >>> sum_before(np.array([0, 1, 0]), np.array([5, 7, 5])).tolist()
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


def _lists(
    values: npt.NDArray[Any], tokens: Ints | None, start: Ints, end: Ints
) -> pa.ListArray | None:
    if tokens is None or not len(values):
        return None
    taken = values[tokens[_ranges(start, end - start)]]
    offsets = np.concatenate([[0], np.cumsum(end - start)])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(taken))

"""Pack tokenized rows in memory, with packhouse's strategies or TRL's.

Use it for rows that need no version: only their shape is checked, and nothing is published.
Packhouse's strategies never cut a record, except `concat`. TRL's strategies do, under TRL's names:
`bfd` loses tokens over `seq_length`, `bfd_split` and `wrapped` cut records into pieces. A
`PackTally` counts the losses, and a warning reports them.

A dataset is planned as a whole: Alpaca fits into 2,501 packs of 2,048 tokens, compared with 2,536
in TRL, which plans 1,000 rows at a time. Cost: 40 ns per token, and 8 bytes for each of 2 million
tokens at a time.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ConfigError, ContractError, SequenceTooLongError
from packhouse.load.known_packs import users_level, warn_of_packs, watch_table
from packhouse.pack.pack_columns import IGNORE_INDEX
from packhouse.pack.strategies import STRATEGIES, PackPlan, plan_packs
from packhouse.records.arrays import Int64s, count_up, list_items, list_offsets, one_chunk
from packhouse.system.wording import counted

OverLength = Literal["error", "drop", "truncate", "split"]

_OF_TRL: Mapping[str, tuple[str, OverLength]] = {
    "bfd": ("best_fit", "truncate"),
    "bfd_split": ("best_fit", "split"),
    "wrapped": ("concat", "error"),  # concat always cuts
}
_KNOWN = (*(name for name in STRATEGIES if name != "none"), *_OF_TRL)
_BLOCK_TOKENS = 2**21


@dataclass(slots=True)
class PackTally:
    """Counts of packed rows. Several calls with the same tally add up.

    Example:
        >>> tally = PackTally()
        >>> rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8]}]
        >>> packed = pack_dataset(rows, 4, over_length="drop", tally=tally)
        >>> print(tally)
        2 rows, 8 tokens: 0 empty, 1 dropped, 0 cut into 0 pieces, 5 tokens lost
    """

    num_rows: int = 0
    num_tokens: int = 0
    """Tokens of all rows."""
    num_empty: int = 0
    """Rows without tokens, which are left out."""
    num_dropped: int = 0
    """Rows over `seq_length` that `over_length="drop"` left out."""
    num_cut: int = 0
    """Rows that lost their end or were cut into several pieces."""
    num_pieces: int = 0
    """Pieces of the rows that were cut."""
    num_lost_tokens: int = 0
    """Tokens of dropped rows, and tokens that were cut off."""

    def __str__(self) -> str:
        return (
            f"{counted(self.num_rows, 'row')}, {counted(self.num_tokens, 'token')}: "
            f"{self.num_empty:,} empty, {self.num_dropped:,} dropped, {self.num_cut:,} cut into "
            f"{counted(self.num_pieces, 'piece')}, {counted(self.num_lost_tokens, 'token')} lost"
        )


def pack_dataset(
    dataset: Any,
    seq_length: int,
    strategy: str = "best_fit",
    map_kwargs: Mapping[str, object] | None = None,
    *,
    over_length: OverLength | None = None,
    seed: int | None = None,
    balance: int = 1,
    tally: PackTally | None = None,
) -> Any:
    """Pack tokenized rows. Every column must be a list, and all lists of a row equally long.

    | `strategy` | packs | a row over `seq_length` |
    |---|---|---|
    | `best_fit` and others of packhouse | whole rows | is an error, or follows `over_length` |
    | `concat` | one stream, cut every `seq_length` tokens | is cut, like any other |
    | TRL's `bfd` | as `best_fit` | loses its end: `over_length="truncate"` |
    | TRL's `bfd_split` | as `best_fit` | is cut into pieces: `over_length="split"` |
    | TRL's `wrapped` | as `concat`, without `seq_lengths` | is cut, like any other |

    A row without its end teaches a model not to stop, and a later piece answers a question that it
    does not contain. Only these strategies and settings cut rows, and each call that does warns
    with the counts.

    Args:
        dataset: a `datasets.Dataset`, `DatasetDict` or `IterableDataset`, an Arrow table, or any
            iterable of rows. Rows without tokens are left out and counted.
        seq_length: maximum number of tokens per pack.
        strategy: see the table. Batches of an `IterableDataset` are packed separately.
        map_kwargs: arguments for `map` of `datasets`, such as `batch_size` and `num_proc`. Default:
            a dataset is one batch; batches of an `IterableDataset` have 1,000 rows.
        over_length: policy for rows over `seq_length`. Default: see the table.
        seed: shuffles packs or rows (`packhouse.pack.strategies`). Default: longest rows first, or
            input order.
        balance: number of packs per step over all ranks, which get about equal attention costs.
        tally: the counts are added to it; for an `IterableDataset`, while it is read.

    Returns:
        The same type as `dataset` (a `datasets.Dataset` for an Arrow table or rows), with a column
        `seq_lengths`, except for `wrapped`. If there are `labels`, the first token of each piece
        has label -100.

    Raises:
        SequenceTooLongError: a row is over `seq_length`, and there is no policy for it.
        ContractError: a column is not a list, or lists differ in length.
        ConfigError: a setting is invalid.

    Example:
        >>> rows = [{"input_ids": [1, 2, 3]}, {"input_ids": []}, {"input_ids": [4, 5, 6, 7, 8]}]
        >>> tally = PackTally()
        >>> pack_dataset(rows, 5, tally=tally).to_dict()
        {'input_ids': [[4, 5, 6, 7, 8], [1, 2, 3]], 'seq_lengths': [[5], [3]]}
        >>> tally.num_empty
        1
    """
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        settings: Any = {"over_length": over_length, "seed": seed, "balance": balance}
        settings |= {"seq_length": seq_length, "strategy": strategy, "map_kwargs": map_kwargs}
        pack: Any = partial(pack_dataset, tally=tally, **settings)
        return type(dataset)({name: pack(part) for name, part in dataset.items()})
    packing = _packing(seq_length, strategy, over_length, seed, balance)
    tally = PackTally() if tally is None else tally
    options: dict[str, object] = dict(map_kwargs or {}) | {"batched": True}
    if isinstance(dataset, IterableDataset):
        kind = dataset._formatting and dataset._formatting.format_type
        warn_of_packs()
        counting = replace(packing, tally=tally)
        return dataset.with_format("arrow").map(counting, **options).with_format(kind)
    if isinstance(dataset, pa.Table):
        dataset = Dataset(dataset)
    elif not isinstance(dataset, Dataset):
        if isinstance(dataset, str | Mapping) or not isinstance(dataset, Iterable):
            raise ConfigError(
                f"a {type(dataset).__name__} is not an iterable of rows. Pass a list of rows."
            )
        plain = ({name: np.asarray(own).tolist() for name, own in row.items()} for row in dataset)
        dataset = Dataset.from_list([*plain])
    if not len(dataset):
        raise ContractError("there are no rows to pack. Check the dataset")
    form = dataset.format
    rows = dataset.with_format("arrow")
    packing.count(_lengths(rows[:]), tally)  # not in `map`, whose result may come from its cache
    packed = rows.map(packing, **{"batch_size": None} | options)
    if "seq_lengths" in packed.column_names:
        # So that a model with `enable_packing` notices lost record boundaries.
        watch_table(packed.data.table)
    else:
        warn_of_packs()
    columns = packed.column_names
    # Keep the format of the dataset: the same columns, plus `seq_lengths`.
    if len(form["columns"]) < len(rows.column_names):
        columns = [*form["columns"], *({"seq_lengths"} & set(columns))]
    return packed.with_format(form["type"], columns, **form["format_kwargs"])


@dataclass(frozen=True)
class _Packing:
    """Packs one batch of rows; its settings are part of the fingerprint of `map`."""

    seq_length: int
    strategy: str
    over_length: OverLength
    seed: int | None
    balance: int
    name: str
    """Strategy name as passed by the caller."""
    version: int = 1
    """Increase it whenever the same rows give other packs: `map` caches results by it."""
    tally: PackTally | None = None
    """Counts each batch, if `map` reads rows only once, as with an `IterableDataset`."""

    def __call__(self, table: pa.Table) -> pa.Table:
        lengths = _lengths(table)
        if self.tally is not None:
            self.count(lengths, self.tally)
        plan, rows, starts, sizes = self.plan(lengths)
        begin = starts[plan.order] if plan.starts is None else plan.starts.astype(np.int64)
        length = sizes[plan.order] if plan.ends is None else (plan.ends - begin).astype(np.int64)
        # So far `begin` counts within a row. Add the position of the row in the flat column.
        begin += (np.cumsum(lengths) - lengths)[rows[plan.order]]
        values = {name: list_items(table[name])[0] for name in table.column_names}
        parts: dict[str, list[pa.Array]] = {name: [] for name in values}
        step = max(1, _BLOCK_TOKENS // plan.seq_len)
        for first in range(0, max(plan.num_packs, 1), step):
            bounds = plan.pack_offsets[first : first + step + 1]
            own = slice(int(bounds[0]), int(bounds[-1]))
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(length[own])])
            # Pieces of 3 and 2 tokens at 10 and 4: tokens 10, 11, 12, 4, 5.
            index = np.repeat(begin[own] - ends[:-1], length[own])
            index += np.arange(len(index))
            of_packs = pa.array(ends[bounds - bounds[0]])
            for name, flat in values.items():
                taken = flat.take(pa.array(index))
                # A first token must not be a target: it would be predicted across a boundary.
                if name == "labels":
                    is_first = np.zeros(len(index), np.bool_)
                    is_first[ends[:-1]] = True
                    ignored = pa.scalar(IGNORE_INDEX, taken.type)
                    taken = pc.if_else(pa.array(is_first), ignored, taken)
                is_large = pa.types.is_large_list(table.schema.field(name).type)
                lists = pa.LargeListArray if is_large else pa.ListArray
                offsets = of_packs.cast(pa.int64() if is_large else pa.int32())
                parts[name].append(lists.from_arrays(offsets, taken))
        columns = {name: pa.chunked_array(arrays) for name, arrays in parts.items()}
        if self.name != "wrapped":
            packs = pa.array(plan.pack_offsets.astype(np.int32))
            columns["seq_lengths"] = pa.ListArray.from_arrays(packs, length.astype(np.int32))
        return pa.table(columns)

    def plan(self, lengths: Int64s) -> tuple[PackPlan, Int64s, Int64s, Int64s]:
        """Return a plan over pieces, and the row, first token and length of each piece."""
        rows = np.flatnonzero(lengths)
        sizes = lengths[rows]
        over = sizes > self.seq_length
        is_cut = self.strategy != "concat" and over.any()
        if is_cut and self.over_length == "error":
            row = int(rows[np.argmax(over)])
            raise SequenceTooLongError(
                f"row {row} has {lengths[row]:,} tokens, more than seq_length {self.seq_length:,}. "
                "Raise seq_length, or set over_length to 'drop', 'truncate' or 'split'.",
                index=row,
                num_tokens=int(lengths[row]),
                seq_len=self.seq_length,
            )
        if is_cut and self.over_length == "drop":
            rows, sizes = rows[~over], sizes[~over]
        starts = np.zeros(len(rows), np.int64)
        if is_cut and self.over_length == "split":
            pieces = -(-sizes // self.seq_length)  # 5 tokens in pieces of 2: starts 0, 2, 4
            starts = count_up(pieces) * self.seq_length
            rows, sizes = np.repeat(rows, pieces), np.repeat(sizes, pieces) - starts
        if is_cut:
            sizes = np.minimum(sizes, self.seq_length)
        plan = plan_packs(sizes, self.seq_length, self.strategy, self.seed, balance=self.balance)
        return plan, rows, starts, sizes

    def count(self, lengths: Int64s, tally: PackTally) -> None:
        """Add the results of packing these lengths to a tally, and warn if any row is cut."""
        plan, rows, _, sizes = self.plan(lengths)
        num_pieces = np.bincount(rows[plan.order], minlength=len(lengths))
        kept = lengths  # `concat` cuts rows, but loses no tokens
        if plan.starts is None:
            kept = np.bincount(rows, sizes, len(lengths)).astype(np.int64)
        is_cut = (num_pieces > 1) | ((kept < lengths) & (num_pieces > 0))
        found = PackTally(
            num_rows=len(lengths),
            num_tokens=int(lengths.sum()),
            num_empty=int((lengths == 0).sum()),
            num_dropped=int(((lengths > 0) & (num_pieces == 0)).sum()),
            num_cut=int(is_cut.sum()),
            num_pieces=int(num_pieces[is_cut].sum()),
            num_lost_tokens=int(lengths.sum()) - plan.num_tokens,
        )
        for each in fields(PackTally):
            setattr(tally, each.name, getattr(tally, each.name) + getattr(found, each.name))
        if found.num_cut:
            warnings.warn(
                f"{self.name} cuts records, so some answers are trained without their end or "
                f"their question: {found}. Use best_fit with over_length='drop' to avoid cuts.",
                stacklevel=users_level(),
            )


def _packing(
    seq_length: int, name: str, over_length: OverLength | None, seed: int | None, balance: int
) -> _Packing:
    if name not in _KNOWN:
        raise ConfigError(f"unknown strategy '{name}'; known: {', '.join(_KNOWN)}")
    if over_length not in (None, "error", "drop", "truncate", "split"):
        raise ConfigError(
            f"over_length '{over_length}' is unknown. Use error, drop, truncate or split."
        )
    if over_length and name in ("concat", *_OF_TRL):
        raise ConfigError(
            f"over_length cannot be used with strategy '{name}', which has its own rule for "
            "cutting. Remove over_length."
        )
    if seq_length < 1:
        raise ConfigError(f"seq_length must be positive, got {seq_length}")
    strategy, policy = _OF_TRL.get(name, (name, over_length or "error"))
    return _Packing(seq_length, strategy, policy, seed, balance, name)


def _lengths(table: pa.Table) -> Int64s:
    """Return the number of values in each row, which must be the same in all columns."""
    lengths: Int64s | None = None
    for name in table.column_names:
        column = one_chunk(table[name])
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise ContractError(
                f"column '{name}' holds {column.type} instead of lists. Leave it out with "
                "select_columns(['input_ids', 'labels'])."
            )
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise ContractError(f"row {row} has no list in column '{name}'")
        own = np.diff(list_offsets(column))
        if lengths is not None and not np.array_equal(own, lengths):
            row = int(np.argmax(own != lengths))
            raise ContractError(
                f"row {row} has {own[row]:,} values in column '{name}' and {lengths[row]:,} "
                f"in '{table.column_names[0]}'. All columns of a row need the same length."
            )
        lengths = own.astype(np.int64)
    if lengths is None:
        raise ContractError("there are no columns to pack")
    return lengths

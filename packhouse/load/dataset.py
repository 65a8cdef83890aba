"""Provide a map-style torch dataset of packs, or of tokenized records to pack.

Rows are read from mapped Arrow buffers, several times faster than with `datasets` in torch format
(numbers in docs/how-to/load.md): a batch of packs is checked once as a whole, so reading a row
costs little more than copying it. Items have `position_ids` and `seq_lengths` but never an
`attention_mask`, so that `PackedCollator` and transformers both know where records end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from packhouse.errors import ConfigError, ContractError, EmptyRowError
from packhouse.load.mapped_rows import MOST_PACKS, watch_packs
from packhouse.load.rows import ArrowRows, Row, open_rows
from packhouse.pack.pack_columns import IGNORE_INDEX
from packhouse.pack.shuffle import splitmix64
from packhouse.pack.strategies import PackPlan, plan_packs
from packhouse.records.ledger import LedgerLine
from packhouse.system.wording import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class PackStat:
    """Counts returned by `PackedDataset.stat`."""

    num_rows: int
    num_records: int
    num_tokens: int
    num_trained: int
    num_dropped: int
    """Records that were dropped because they exceed `seq_len`."""
    longest_row: int
    """Tokens of the longest row."""
    seq_len: int
    """Pack size in tokens; the longest row if unknown."""

    @property
    def fill(self) -> float:
        """Share of `num_rows * seq_len` that is tokens."""
        return self.num_tokens / max(1, self.num_rows * self.seq_len)

    @property
    def padded_ratio(self) -> float:
        """Records per row: the size of padding every record to `seq_len`, relative to packing."""
        return self.num_records / max(1, self.num_rows)

    def __str__(self) -> str:
        return (
            f"{counted(self.num_records, 'record')} in {counted(self.num_rows, 'row')} of up to "
            f"{self.seq_len:,} "
            f"tokens: {counted(self.num_tokens, 'token')}, {100 * self.fill:.2f}% full, "
            f"{self.num_trained:,} trained; {counted(self.num_dropped, 'record')} dropped; "
            f"{self.padded_ratio:.1f}x fewer rows than with one record per row"
        )


class PackedDataset(torch.utils.data.Dataset):
    """Rows as int64 tensors: `input_ids`, `labels`, `position_ids`, `seq_lengths`.

    Args:
        rows: packs from `load_packed`; or, with `seq_len`, tokenized records to pack, one per row:
            a `datasets.Dataset`, an Arrow table, the path of an Arrow file or a tuple of such
            paths, or a sequence or iterator of mappings with `input_ids` and optionally `labels` or
            masks, `attention_mask` and `loss_weights`. Padding is removed, and so are rows without
            tokens, which `num_empty` counts.
        seq_len: pack size in tokens; None keeps rows unchanged.
        strategy: one of `packhouse.pack.strategies.STRATEGIES`, except `concat`.
        seed: seed for the order of packs; None: longest records first, or records in input order
            (see `packhouse.pack.strategies`), in every epoch.
        over_length: raise an error for a record over `seq_len`, or drop and count it.
        repack: with `seq_len`, pack the records of existing packs again, with a different
            `seq_len`, strategy, multiple or epoch over the same files. Reads a whole pack for each
            record (40 us for packs of 2,048) and keeps 24 bytes per record in memory.
        epoch: together with `seed`, decides which records share a pack, and their order; see
            `set_epoch`.
        pad_record_to_multiple_of: leave room for `PackedCollator` to pad each record to a multiple;
            `seq_len` must be a multiple too.
        balance: number of packs in a training step over all ranks; the packs of a step have about
            the same attention cost. Read them in order: a shuffling sampler undoes this, `epoch`
            does not.

    Raises:
        SequenceTooLongError: a record exceeds `seq_len`.
        ContractError: a row is not valid.
        ConfigError: `rows` is not a sequence of rows, or another argument is invalid.

    Example:
        >>> records = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8]}]
        >>> packs = PackedDataset(records, seq_len=5)
        >>> len(packs), sorted(packs[i]["seq_lengths"].tolist() for i in range(2))
        (2, [[3], [3, 2]])
        >>> packs.stat().fill
        0.8
    """

    def __init__(
        self,
        rows: Any,
        *,
        seq_len: int | None = None,
        strategy: str = "best_fit",
        seed: int | None = 0,
        over_length: Literal["error", "drop"] = "error",
        pad_record_to_multiple_of: int = 1,
        balance: int = 1,
        repack: bool = False,
        epoch: int = 0,
    ) -> None:
        if strategy == "concat":
            raise ConfigError("PackedDataset cannot cut records. Prepare a version with concat.")
        if seq_len is not None and seq_len < 1:
            raise ConfigError(f"seq_len is {seq_len}. Set it to 1 or more, or to None for packs.")
        if over_length not in ("error", "drop"):
            raise ConfigError(f"over_length '{over_length}' is unknown. Use error or drop.")
        if seq_len is None and (repack or epoch):
            raise ConfigError("repack and epoch require packing. Set seq_len.")
        rows = list(rows) if seq_len is not None and isinstance(rows, Iterator) else rows
        self._source, self._repack, self.seq_len = rows, repack, seq_len
        self._rows = self._open()
        self.num_dropped = 0
        self.num_empty = 0
        self.ledger: list[LedgerLine] = []
        self._plan: PackPlan | None = None
        self._settings: tuple[int, str, int | None, int, int] | None = None
        """Arguments for planning; None if rows are already packs."""
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Row numbers, pack after pack, if there is a plan."""
        if seq_len is not None:
            lengths = _record_lengths(self._rows)
            self.num_empty = int((lengths == 0).sum())
            is_kept = (lengths > 0) & ((lengths <= seq_len) | (over_length == "error"))
            kept = np.flatnonzero(is_kept)
            self.num_dropped = len(lengths) - len(kept) - self.num_empty
            self._lengths, self._kept = lengths[kept], kept
            self._settings = (seq_len, strategy, seed, pad_record_to_multiple_of, balance)
            self.set_epoch(epoch)
        _refuse_shifted(self._rows, range(len(self._rows)) if self._plan is None else self._kept)
        first = map(self._row, range(min(len(self), MOST_PACKS)))
        watch_packs((row.input_ids, row.seq_lengths) for row in first)

    def set_epoch(self, epoch: int) -> None:
        """Pack the records again for an epoch; does nothing if rows are already packs.

        `best_fit` and `first_fit` make the same number of packs in every epoch. Running DataLoader
        workers keep their current packs.
        """
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}. Set it to 0 or more.")
        if self._settings is None:
            return
        seq_len, strategy, seed, multiple, balance = self._settings
        if epoch and seed is not None:  # epoch 0 keeps `seed`, and so the packs of a version
            seed = splitmix64(splitmix64(seed & (2**64 - 1)) ^ epoch) >> 1
        self._plan = plan_packs(self._lengths, seq_len, strategy, seed, multiple, balance)
        self._order = self._kept[self._plan.order]

    def _open(self) -> Sequence[Row]:
        rows = open_rows(self._source, whole_rows=self.seq_len is not None and not self._repack)
        return RecordRows(rows) if self._repack else rows

    def __len__(self) -> int:
        return len(self._rows) if self._plan is None else self._plan.num_packs

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._row(index).to_tensors()

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return the rows of a batch; torch's DataLoader calls this."""
        return [self[index] for index in indices]

    def stat(self) -> PackStat:
        """Count rows, records and tokens in one pass over all rows."""
        records = tokens = trained = longest = 0
        for index in range(len(self)):
            row = self._row(index)
            records += len(row.seq_lengths)
            tokens += len(row.input_ids)
            trained += int(np.count_nonzero(row.labels != IGNORE_INDEX))
            longest = max(longest, len(row.input_ids))
        return PackStat(
            num_rows=len(self),
            num_records=records,
            num_tokens=tokens,
            num_trained=trained,
            num_dropped=self.num_dropped,
            longest_row=longest,
            seq_len=self.seq_len or longest,
        )

    def _row(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} is out of range for {len(self)} rows")
        index %= len(self)
        if self._plan is None:
            return self._rows[index]
        first, last = self._plan.pack_offsets[index : index + 2]
        rows = [self._rows[int(number)] for number in self._order[first:last]]
        is_weighted = any(row.loss_weights is not None for row in rows)
        weights = [
            np.ones(len(row.input_ids), np.float32)
            if row.loss_weights is None
            else row.loss_weights
            for row in rows
        ]
        return Row(
            np.concatenate([row.input_ids for row in rows]),
            np.concatenate([row.labels for row in rows]),
            np.concatenate([row.seq_lengths for row in rows]),
            np.concatenate(weights) if is_weighted else None,
        )

    def __getstate__(self) -> dict[str, object]:
        # Leave out mapped tables, which would be copied into every worker; they are mapped again.
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._rows = self._open()


class RecordRows(Sequence[Row]):
    """The records of packs, one per row, as views of their packs."""

    def __init__(self, packs: Sequence[Row]) -> None:
        self._packs = packs
        of_packs = [packs[index].seq_lengths for index in range(len(packs))]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *of_packs]).astype(np.int64)
        sizes = np.array([len(each) for each in of_packs], dtype=np.int64)
        # Packs of lengths [3, 2] and [4]: the records are in packs 0 0 1, after 0 3 5 tokens. Minus
        # the tokens before their pack, 0 0 5, they start at 0 3 0.
        self._pack = np.repeat(np.arange(len(packs)), sizes)
        first = np.cumsum(self.lengths) - self.lengths
        self._starts = first - np.repeat(first[np.cumsum(sizes) - sizes], sizes)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # one row: no slices
        pack, start = self._packs[int(self._pack[index])], int(self._starts[index])
        part = slice(start, start + int(self.lengths[index]))
        return Row(
            pack.input_ids[part],
            pack.labels[part],
            self.lengths[index : index + 1],
            None if pack.loss_weights is None else pack.loss_weights[part],
        )


def _record_lengths(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    """Return the tokens of each row, which must be a single record; 0 for an empty row."""
    if isinstance(rows, RecordRows):
        return rows.lengths
    if isinstance(rows, ArrowRows) and rows.is_plain:
        return rows.num_tokens()
    lengths = np.zeros(len(rows), dtype=np.int64)
    for index in range(len(rows)):
        try:
            row = rows[index]
        except EmptyRowError:
            continue
        if len(row.seq_lengths) > 1:
            raise ContractError(
                f"row {index} is a pack of {len(row.seq_lengths)} records. Remove seq_len, or set "
                "repack=True to pack its records again."
            )
        lengths[index] = len(row.input_ids)
    return lengths


def _refuse_shifted(rows: Sequence[Row], numbers: Sequence[int] | npt.NDArray[np.int64]) -> None:
    """Reject labels that are already shifted, because the model would shift them again."""
    num_trained = 0
    for index in numbers[:8]:
        row = rows[int(index)]
        trained = np.flatnonzero(row.labels[:-1] != IGNORE_INDEX)
        num_trained += len(trained)
        if (row.labels[trained] != row.input_ids[trained + 1]).any():
            return
        if (row.labels[trained] == row.input_ids[trained]).all():
            return  # nothing is trained, or the same token repeats, which looks the same shifted
    if num_trained:
        raise ContractError(
            "labels are already shifted (each is the id of the next token), but the model shifts "
            "them again. Pass unshifted labels: each is the id of its own token, or -100."
        )

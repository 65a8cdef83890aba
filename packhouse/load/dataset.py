"""A map-style torch dataset of packs, or of tokenized records to be packed.

Rows are read from mapped Arrow buffers, several times as fast as by `datasets` in torch format, one
by one and in batches (docs/how-to/load.md has numbers): a batch of packs is checked once as a
whole, so a row costs little more than its copy. Items of a `PackedDataset` carry `position_ids` and
`seq_lengths` and never an `attention_mask`, so that `PackedCollator` and transformers both know
where records end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from packhouse.errors import ConfigError, ContractError, EmptyRowError
from packhouse.load.boundaries import MOST_PACKS, watch_packs
from packhouse.load.rows import ArrowRows, Row, open_rows
from packhouse.pack.layout import IGNORE_INDEX
from packhouse.pack.plan import PackPlan, plan_packs
from packhouse.pack.shuffle import splitmix64
from packhouse.records.ledger import LedgerLine
from packhouse.system.wording import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class PackStat:
    """What `PackedDataset.stat` counts."""

    num_rows: int
    num_records: int
    num_tokens: int
    num_trained: int
    num_dropped: int
    """Records over `seq_len`, left out."""
    longest_row: int
    """Tokens; of the longest row."""
    seq_len: int
    """Pack size in tokens; the longest row where none is known."""

    @property
    def fill(self) -> float:
        """Share of `num_rows * seq_len` that is tokens."""
        return self.num_tokens / max(1, self.num_rows * self.seq_len)

    @property
    def padded_ratio(self) -> float:
        """Tokens that padding every record to `seq_len` would take, against those of the rows."""
        return self.num_records / max(1, self.num_rows)

    def __str__(self) -> str:
        return (
            f"{counted(self.num_records, 'record')} in {counted(self.num_rows, 'row')} of up to "
            f"{self.seq_len:,} "
            f"tokens: {counted(self.num_tokens, 'token')}, {100 * self.fill:.2f}% full, "
            f"{self.num_trained:,} trained; {counted(self.num_dropped, 'record')} dropped; "
            f"{self.padded_ratio:.1f}x fewer rows than one record a row"
        )


class PackedDataset(torch.utils.data.Dataset):
    """Rows as int64 tensors: `input_ids`, `labels`, `position_ids`, `seq_lengths`.

    Args:
        rows: packs (a dataset of `load_packed`) as they are; or, with `seq_len`, tokenized records,
            one a row, to be packed: a `datasets.Dataset`, an Arrow table, the path of an Arrow
            file or a tuple of such paths, or a sequence or iterator of mappings with `input_ids`
            and optionally `labels` or masks, `attention_mask`, `loss_weights`. What is marked as
            padding is left out; so are rows without a token, which `num_empty` counts.
        seq_len: pack size in tokens; None leaves rows as they are.
        strategy: of `packhouse.pack.plan.STRATEGIES`, `concat` excepted.
        seed: order of packs; None: longest records first, or records as given
            (`packhouse.pack.plan`), in every epoch alike.
        over_length: a record over `seq_len` is an error, or dropped and counted.
        repack: with `seq_len`, take packs apart and pack their records anew: another `seq_len`,
            strategy, multiple or epoch over the same files. Reads a whole pack for each record
            (40 us, packs of 2,048) and holds 24 bytes of it.
        epoch: together with `seed`, which records lie together, and in what order; `set_epoch`
            changes it.
        pad_record_to_multiple_of: leave room for `PackedCollator` to pad each record to a multiple;
            `seq_len` must be one.
        balance: packs of a step over all ranks; each so many neighbours cost about the same
            attention. Read them in order: a sampler that shuffles undoes it, `epoch` does not.

    Raises:
        SequenceTooLongError: a record exceeds `seq_len`.
        ContractError: a row is not as it must be.
        ConfigError: `rows` is no sequence of rows, or another argument makes no sense.

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
            raise ConfigError("PackedDataset does not cut records; prepare a version with concat")
        if seq_len is not None and seq_len < 1:
            raise ConfigError(f"seq_len is {seq_len}; it must be at least 1, or None for packs")
        if over_length not in ("error", "drop"):
            raise ConfigError(f"over_length '{over_length}' is not known; use error or drop")
        if seq_len is None and (repack or epoch):
            raise ConfigError("repack and epoch decide how records are packed: give seq_len")
        rows = list(rows) if seq_len is not None and isinstance(rows, Iterator) else rows
        self._source, self._repack, self.seq_len = rows, repack, seq_len
        self._rows = self._open()
        self.num_dropped = 0
        self.num_empty = 0
        self.ledger: list[LedgerLine] = []
        self._plan: PackPlan | None = None
        self._settings: tuple[int, str, int | None, int, int] | None = None
        """What plans follow from: None where the packs are given."""
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """With a plan: row numbers, pack after pack."""
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
        """Pack the records anew, as `epoch` and the seed decide; packs that are given stay.

        `best_fit` and `first_fit` make as many packs in every epoch. Workers of a DataLoader that
        are running go on with the packs that they have.
        """
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}; it must not be negative")
        if self._settings is None:
            return
        seq_len, strategy, seed, multiple, balance = self._settings
        if epoch and seed is not None:
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
        """Return the rows of a batch, as torch's DataLoader asks for them."""
        return [self[index] for index in indices]

    def stat(self) -> PackStat:
        """Count rows, records and tokens; one pass over all rows."""
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
            raise IndexError(f"row {index} of {len(self)}")
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
        # A mapped table would be copied into every worker; a datasets.Dataset is mapped again.
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._rows = self._open()


class RecordRows(Sequence[Row]):
    """The records of packs, one a row; a record is a view of its pack."""

    def __init__(self, packs: Sequence[Row]) -> None:
        self._packs = packs
        of_packs = [packs[index].seq_lengths for index in range(len(packs))]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *of_packs]).astype(np.int64)
        sizes = np.array([len(each) for each in of_packs], dtype=np.int64)
        # Packs of lengths [3, 2] and [4]: pack 0 0 1; tokens before each record 0 3 5, less those
        # before its pack 0 0 5, so records start at 0 3 0.
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
    """Return the tokens of each row, all of which must be single records; 0: an empty one."""
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
                f"row {index} is a pack of {len(row.seq_lengths)} records; leave out seq_len, or "
                "set repack=True to pack its records anew"
            )
        lengths[index] = len(row.input_ids)
    return lengths


def _refuse_shifted(rows: Sequence[Row], numbers: Sequence[int] | npt.NDArray[np.int64]) -> None:
    """Refuse labels that name the next token already: the model would shift them once more."""
    num_trained = 0
    for index in numbers[:8]:
        row = rows[int(index)]
        trained = np.flatnonzero(row.labels[:-1] != IGNORE_INDEX)
        num_trained += len(trained)
        if (row.labels[trained] != row.input_ids[trained + 1]).any():
            return
        if (row.labels[trained] == row.input_ids[trained]).all():
            return  # nothing, or the same token again and again
    if num_trained:
        raise ContractError(
            "labels are shifted already: each is the id of the next token, and the model would "
            "shift them once more. Give unshifted labels, each the id of its own token or -100"
        )

"""Map-style torch dataset over packs, or over tokenized rows that it packs itself.

Rows are read from mapped Arrow buffers, several times as fast as by `datasets` in torch format, one
by one and in batches (docs/training.md has numbers): a batch of packs is checked once as a whole,
so a row costs little more than its copy. Each item carries
`position_ids` and `seq_lengths` and never an `attention_mask`, so that `PackedCollator` and
transformers both know where records end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from packhouse.errors import ConfigError, ContractError
from packhouse.ledger import LedgerLine
from packhouse.loaders.rows import ArrowRows, Row, read_row
from packhouse.packing.layout import IGNORE_INDEX
from packhouse.packing.plan import PackPlan, plan_packs
from packhouse.workspace import read_table

__all__ = ["PackStat", "PackedDataset", "row_to_tensors"]


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
            f"{self.num_records:,} records in {self.num_rows:,} rows of up to {self.seq_len:,} "
            f"tokens: {self.num_tokens:,} tokens, {100 * self.fill:.2f}% full, "
            f"{self.num_trained:,} trained; {self.num_dropped:,} records dropped; "
            f"{self.padded_ratio:.1f}x fewer rows than one record a row"
        )


class PackedDataset(torch.utils.data.Dataset):  # type: ignore[misc]
    """Rows as int64 tensors: `input_ids`, `labels`, `position_ids`, `seq_lengths`.

    Args:
        rows: packs (a dataset of `load_packed`) as they are; or, with `seq_len`, tokenized records,
            one a row, to be packed: a `datasets.Dataset`, an Arrow table, the path of an Arrow
            file or a tuple of such paths, or a sequence of mappings with `input_ids` and optionally
            `labels`, `attention_mask`, `loss_weights`. What a mask marks as padding is left out.
        seq_len: pack size in tokens; None leaves rows as they are.
        strategy: of `packhouse.packing.STRATEGIES`, `concat` excepted.
        seed: order of packs.
        over_length: a record over `seq_len` is an error, or dropped and counted.

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
        seed: int = 0,
        over_length: Literal["error", "drop"] = "error",
    ) -> None:
        if strategy == "concat":
            raise ConfigError("PackedDataset does not cut records; prepare a version with concat")
        if seq_len is not None and seq_len < 1:
            raise ConfigError(f"seq_len is {seq_len}; it must be at least 1, or None for packs")
        if over_length not in ("error", "drop"):
            raise ConfigError(f"over_length '{over_length}' is not known; use error or drop")
        self._source = rows
        self._rows = _readable(rows, whole_rows=seq_len is not None)
        self.seq_len = seq_len
        self.num_dropped = 0
        self.ledger: list[LedgerLine] = []
        self._plan: PackPlan | None = None
        self._kept: npt.NDArray[np.int64] | None = None
        if seq_len is not None:
            lengths = _lengths(self._rows)
            if not lengths.all():
                raise ContractError(
                    f"row {int(np.argmin(lengths))} has no token; leave empty rows out"
                )
            fits = lengths <= seq_len if over_length == "drop" else lengths > 0
            self._kept = np.flatnonzero(fits)
            self.num_dropped = len(lengths) - len(self._kept)
            self._plan = plan_packs(lengths[self._kept], seq_len, strategy, seed)
        _refuse_shifted(self._rows)

    def __len__(self) -> int:
        return len(self._rows) if self._plan is None else self._plan.num_packs

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return row_to_tensors(self._row(index))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Rows of a batch, as torch's DataLoader asks for them."""
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
        if self._plan is None or self._kept is None:
            return self._rows[index]
        low, high = self._plan.pack_offsets[index : index + 2]
        return _joined([self._rows[int(i)] for i in self._kept[self._plan.order[low:high]]])

    def __getstate__(self) -> dict[str, Any]:
        # A mapped table would be copied into every worker; a datasets.Dataset is mapped again.
        return {key: value for key, value in self.__dict__.items() if key != "_rows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows = _readable(self._source, whole_rows=self._plan is not None)


def row_to_tensors(row: Row) -> dict[str, torch.Tensor]:
    """A row as int64 tensors, with `position_ids` that restart at each record."""
    item = {
        "input_ids": _tensor(row.input_ids),
        "labels": _tensor(row.labels),
        "position_ids": torch.from_numpy(_positions(row.seq_lengths)),
        "seq_lengths": _tensor(row.seq_lengths),
    }
    if row.loss_weights is not None:
        item["loss_weights"] = _tensor(row.loss_weights)
    if row.label is not None:
        item["label"] = torch.tensor(row.label)
    return item


def _positions(seq_lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions as int64 at once: [3, 2] -> [0, 1, 2, 0, 1]."""
    ends = np.cumsum(seq_lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - seq_lengths, seq_lengths)


def _tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor that may be written to; copies what is a view of a mapped file."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


class _MappingRows(Sequence[Row]):
    """Rows of anything indexable that gives mappings."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, whole_rows: bool) -> None:
        self._rows, self._whole_rows = rows, whole_rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return read_row(self._rows[index], whole_rows=self._whole_rows, where=f"row {index}")


class _SelectedRows(Sequence[Row]):
    """Rows of a shuffled or selected `datasets.Dataset`, without making it anew."""

    def __init__(self, rows: ArrowRows, indices: npt.NDArray[Any]) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return self._rows[int(self._indices[index])]


def _readable(rows: Any, *, whole_rows: bool) -> Sequence[Row]:
    if isinstance(rows, Path):
        rows = read_table(rows)
    if isinstance(rows, tuple) and rows and all(isinstance(part, Path) for part in rows):
        rows = pa.concat_tables([read_table(part) for part in rows])
    if isinstance(rows, pa.Table):
        return ArrowRows(rows, whole_rows=whole_rows)
    _refuse_unindexed(rows)
    is_dataset = type(rows).__name__ == "Dataset" and type(rows).__module__.startswith("datasets.")
    if not is_dataset or rows.format["type"] == "custom":
        return _MappingRows(rows, whole_rows=whole_rows)
    table = ArrowRows(rows.data.table, whole_rows=whole_rows)
    if rows._indices is None:
        return table
    return _SelectedRows(table, rows._indices.column(0).to_numpy())


def _refuse_unindexed(rows: Any) -> None:
    if isinstance(rows, str):
        raise ConfigError(f"'{rows}' is a text and no rows; give load_packed('{rows}')")
    if isinstance(rows, Mapping):
        raise ConfigError(
            f"a {type(rows).__name__} of {', '.join(map(str, rows))} is no sequence of rows; give "
            "one split, or a list of rows"
        )
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ConfigError(
            f"a {type(rows).__name__} has no length or no row by number; give a list of its rows, "
            "or stream a version with StreamingPackedDataset"
        )


def _lengths(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    if isinstance(rows, ArrowRows) and rows.is_plain:
        return rows.num_tokens()
    lengths = np.empty(len(rows), dtype=np.int64)
    for index in range(len(rows)):
        row = rows[index]
        if len(row.seq_lengths) > 1:
            raise ContractError(
                f"row {index} is a pack of {len(row.seq_lengths)} records; leave out seq_len"
            )
        lengths[index] = len(row.input_ids)
    return lengths


def _refuse_shifted(rows: Sequence[Row]) -> None:
    """Labels that name the next token already would be shifted once more by the model."""
    num_trained = 0
    for row in (rows[number] for number in range(min(len(rows), _ROWS_LOOKED_AT))):
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


_ROWS_LOOKED_AT = 8


def _joined(rows: Sequence[Row]) -> Row:
    weights = [row.loss_weights for row in rows if row.loss_weights is not None]
    return Row(
        np.concatenate([row.input_ids for row in rows]),
        np.concatenate([row.labels for row in rows]),
        np.concatenate([row.seq_lengths for row in rows]),
        np.concatenate(weights) if len(weights) == len(rows) else None,
    )

"""One row of token data, whoever made it, as numpy arrays: what collators and datasets agree on.

Rows come from a published version (`labels` or `compact` layout), from `datasets.Dataset`, from
torch or as plain lists. A row that does not say where its records end is refused, because reading
it as one record is how packed attention leaks: `transformers.Trainer` drops the columns that a
model's `forward` does not name, `seq_lengths` among them, and nothing else would notice.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.errors import ContractError
from packhouse.packing.layout import IGNORE_INDEX, trained_mask
from packhouse.packing.lists import flat_list, list_offsets, read_ranges

__all__ = [
    "ArrowRows",
    "Row",
    "position_ids_to_seq_lengths",
    "read_row",
]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training row: whole records behind one another, without padding."""

    input_ids: Ints
    labels: Ints
    """Unshifted; the first token of each record and all that is not trained is -100."""
    seq_lengths: Ints
    """Tokens of each record; they add up to `len(input_ids)`."""
    loss_weights: npt.NDArray[np.float32] | None = None
    """Weight of each token as a target, unshifted, where the row brings them."""
    label: int | None = None
    """Class of a classification row."""


def read_row(row: Mapping[str, Any], *, whole_rows: bool = False, where: str = "row") -> Row:
    """Read one row of any layout and check it.

    Records end where `seq_lengths` says, else where `position_ids` restart, else, with
    `whole_rows`, at the end of the row. Labels come from `labels`, else from `trained_ranges`,
    else every token is trained. Tokens with `attention_mask` 0 are padding and are taken off.

    Args:
        row: `input_ids` and the columns above: lists, numpy arrays or tensors.
        whole_rows: take a row without boundaries for one record.
        where: what errors call the row.

    Raises:
        ContractError: no boundaries, or lengths that do not fit.

    Example:
        >>> row = read_row({"input_ids": [7, 8, 9, 5, 6], "seq_lengths": [3, 2]})
        >>> row.labels.tolist()
        [-100, 8, 9, -100, 6]
    """
    if "input_ids" not in row:
        raise ContractError(f"{where} has no input_ids; its columns are {', '.join(row)}")
    ids = _ints(row["input_ids"])
    keep = _unpadded(row, ids, where)
    lengths = _boundaries(row, ids, whole_rows, where) if keep is None else None
    labels = _labels(row, ids, where)
    weights = row.get("loss_weights")
    weights = None if weights is None else np.asarray(weights, dtype=np.float32)
    if keep is not None:
        ids, labels = ids[keep], labels[keep]
        weights = None if weights is None else weights[keep]
        lengths = np.array([len(ids)], dtype=np.int64)
    assert lengths is not None
    _check_lengths(ids, lengths, weights, where)
    labels[np.cumsum(lengths) - lengths] = IGNORE_INDEX
    label = row.get("label")
    return Row(ids, labels, lengths, weights, None if label is None else int(label))


def position_ids_to_seq_lengths(position_ids: Sequence[int] | npt.NDArray[Any]) -> Ints:
    """Lengths of the runs in which positions rise by one: the boundaries that transformers sees.

    Example:
        >>> position_ids_to_seq_lengths([0, 1, 2, 0, 1]).tolist()
        [3, 2]
    """
    positions = _ints(position_ids)
    starts = np.flatnonzero(np.diff(positions, prepend=positions[:1] - 2) != 1)
    return np.diff(starts, append=len(positions))


def _ints(values: Any) -> Ints:
    return np.asarray(values, dtype=np.int64)


def _unpadded(row: Mapping[str, Any], ids: Ints, where: str) -> npt.NDArray[np.bool_] | None:
    """Which tokens a row with padding keeps; None for a row without."""
    if row.get("attention_mask") is None:
        return None
    mask = np.asarray(row["attention_mask"])
    if len(mask) != len(ids):
        raise ContractError(
            f"{where} has {len(ids):,} input_ids and an attention_mask of {len(mask):,}"
        )
    keep: npt.NDArray[np.bool_] = mask != 0
    if keep.all():
        return None
    if len(row.get("seq_lengths", ())) > 1:
        raise ContractError(f"{where} is packed and padded; packed rows carry no attention_mask")
    return keep


def _boundaries(row: Mapping[str, Any], ids: Ints, whole_rows: bool, where: str) -> Ints:
    if row.get("seq_lengths") is not None:
        return _ints(row["seq_lengths"])
    if row.get("position_ids") is not None:
        return position_ids_to_seq_lengths(row["position_ids"])
    if whole_rows:
        return np.array([len(ids)], dtype=np.int64)
    raise ContractError(
        f"{where} does not say where its records end: it has neither seq_lengths nor position_ids. "
        "If transformers.Trainer dropped them, set remove_unused_columns=False; if each row is one "
        "record, set whole_rows=True"
    )


def _labels(row: Mapping[str, Any], ids: Ints, where: str) -> Ints:
    if row.get("labels") is not None:
        labels = _ints(row["labels"]).copy()
        if labels.shape != ids.shape:
            raise ContractError(f"{where} has {len(ids):,} input_ids and {labels.size:,} labels")
        return labels
    if row.get("trained_ranges") is None:
        return ids.copy()
    spans = row["trained_ranges"]
    starts, ends = spans if isinstance(spans, tuple) else _starts_and_ends(spans)
    return np.where(trained_mask(starts, ends, len(ids)), ids, IGNORE_INDEX)


def _starts_and_ends(spans: Any) -> tuple[Ints, Ints]:
    return _ints([span["start"] for span in spans]), _ints([span["end"] for span in spans])


def _check_lengths(ids: Ints, lengths: Ints, weights: Any, where: str) -> None:
    if lengths.sum() != len(ids) or (len(lengths) and lengths.min() < 1):
        raise ContractError(
            f"{where} has {len(ids):,} input_ids and seq_lengths {lengths[:8].tolist()} that add "
            f"up to {int(lengths.sum()):,}; each must be at least 1 and they must fit"
        )
    if weights is not None and len(weights) != len(ids):
        raise ContractError(f"{where} has {len(ids):,} input_ids and {len(weights):,} loss_weights")


class ArrowRows(Sequence[Row]):
    """Rows of an Arrow table read in place: no Python list of ids, no copy but the one to int64.

    Args:
        table: columns as published, in any number of chunks; kept mapped, never combined.
        whole_rows: as for `read_row`.

    Example:
        >>> table = pa.table({"input_ids": [[7, 8, 9]], "seq_lengths": [[2, 1]]})
        >>> ArrowRows(table)[0].labels.tolist()
        [-100, 8, -100]
    """

    def __init__(self, table: pa.Table, *, whole_rows: bool = False) -> None:
        names = [n for n in table.column_names if n in _COLUMNS]
        self._batches = [b for b in table.select(names).to_batches() if b.num_rows]
        self._starts = np.cumsum([0, *(b.num_rows for b in self._batches)]).tolist()
        self._flat: dict[int, dict[str, Any]] = {}
        self._whole_rows = whole_rows

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def is_plain(self) -> bool:
        """Whether each row is one record without padding, for all that the columns say."""
        marks = {"seq_lengths", "position_ids", "attention_mask"}
        return not self._batches or not marks & set(self._batches[0].schema.names)

    def num_tokens(self) -> Ints:
        """Tokens of each row, from the offsets alone; padding counts."""
        lengths = [np.diff(list_offsets(batch["input_ids"])) for batch in self._batches]
        return np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        number = bisect_right(self._starts, index) - 1
        columns = self._flat.get(number)
        if columns is None:
            columns = self._flat[number] = _columns(self._batches[number])
        local = index - self._starts[number]
        row = {name: _cell(column, local) for name, column in columns.items()}
        return read_row(row, whole_rows=self._whole_rows, where=f"row {index}")


_COLUMNS = (
    "input_ids",
    "labels",
    "trained_ranges",
    "seq_lengths",
    "position_ids",
    "attention_mask",
    "loss_weights",
    "label",
)


def _columns(batch: pa.RecordBatch) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "trained_ranges":
            columns[name] = read_ranges(column)
        elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            columns[name] = flat_list(column)
        else:
            columns[name] = column
    return columns


def _cell(column: Any, row: int) -> Any:
    if isinstance(column, pa.Array):
        return column[row].as_py()
    if isinstance(column, tuple):
        values, offsets = column
        return values[offsets[row] : offsets[row + 1]]
    low, high = column.offsets[row], column.offsets[row + 1]
    return column.starts[low:high], column.ends[low:high]

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
from packhouse.packing.layout import IGNORE_INDEX, position_ids, trained_mask
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

    Ids, labels and the like must be whole numbers in one flat list: floats are refused, not cut.

    Records end where `seq_lengths` says, where `position_ids` restart, and where an
    `attention_mask` of record numbers (1, 1, 2, 2, 0) changes; what is given must agree. Without
    any of them and with `whole_rows`, they end at the end of the row. Labels come from `labels`,
    else from `trained_ranges`, else every token is trained. Tokens with `attention_mask` 0 are
    padding and are taken off.

    Args:
        row: `input_ids` and the columns above: lists, numpy arrays or tensors.
        whole_rows: take a row without boundaries for one record.
        where: what errors call the row.

    Raises:
        ContractError: no boundaries, boundaries that contradict each other, or lengths that do
            not fit.

    Example:
        >>> row = read_row({"input_ids": [7, 8, 9, 5, 6], "seq_lengths": [3, 2]})
        >>> row.labels.tolist()
        [-100, 8, 9, -100, 6]
    """
    if "input_ids" not in row:
        raise ContractError(f"{where} has no input_ids; its columns are {', '.join(row)}")
    ids = _ints(row, "input_ids", where)
    keep = _unpadded(row, ids, where)
    if not keep.any():
        raise ContractError(f"{where} has no token; leave empty rows out")
    lengths = _boundaries(row, keep, whole_rows, where)
    labels = _labels(row, ids, where)
    weights = _weights(row, ids, where)
    if not keep.all():
        ids, labels = ids[keep], labels[keep]
        weights = None if weights is None else weights[keep]
    _check_lengths(ids, lengths, where)
    labels[np.cumsum(lengths) - lengths] = IGNORE_INDEX
    label = row.get("label")
    return Row(ids, labels, lengths, weights, None if label is None else int(label))


def position_ids_to_seq_lengths(positions: Sequence[int] | npt.NDArray[Any]) -> Ints:
    """Lengths of the runs in which positions rise by one: the boundaries that transformers sees.

    Example:
        >>> position_ids_to_seq_lengths([0, 1, 2, 0, 1]).tolist()
        [3, 2]
    """
    positions = np.asarray(positions, dtype=np.int64)
    starts = np.flatnonzero(np.diff(positions, prepend=positions[:1] - 2) != 1)
    return np.diff(starts, append=len(positions))


def _ints(row: Mapping[str, Any], name: str, where: str) -> Ints:
    """A column of a row as int64, if it is a flat list of whole numbers."""
    values = row[name]
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(values, dtype=object)
    if array.ndim != 1:
        raise ContractError(f"{where} has {name} of shape {array.shape}; it must be one flat list")
    if array.size and array.dtype.kind not in "iub":
        raise ContractError(
            f"{where} has {name} that are no whole numbers ({array.dtype}, the first is "
            f"{array[0]!r}); cast them to integers"
        )
    return array.astype(np.int64, copy=False)


def _weights(row: Mapping[str, Any], ids: Ints, where: str) -> npt.NDArray[np.float32] | None:
    """Weight of each token, from `loss_weights` or from those of the trained ranges."""
    if row.get("loss_weights") is not None:
        weights = np.asarray(row["loss_weights"], dtype=np.float32)
        if weights.shape != ids.shape:
            raise ContractError(
                f"{where} has {len(ids):,} input_ids and {weights.size:,} loss_weights"
            )
        if not (np.isfinite(weights).all() and weights.min(initial=0) >= 0):
            raise ContractError(f"{where} has loss_weights that are negative or no numbers")
        return weights
    if "range_weights" not in row or row.get("trained_ranges") is None:
        return None
    weights = np.zeros(len(ids), dtype=np.float32)
    starts, ends = _range_bounds(row["trained_ranges"])
    given = row["range_weights"]  # none: each is 1
    given = np.ones(len(starts)) if given is None else given
    for start, end, weight in zip(starts, ends, given, strict=True):
        weights[start:end] = weight
    return weights


def _unpadded(row: Mapping[str, Any], ids: Ints, where: str) -> npt.NDArray[np.bool_]:
    """Which tokens a row keeps: all but its padding."""
    if row.get("attention_mask") is None:
        return np.ones(len(ids), dtype=np.bool_)
    mask = np.asarray(row["attention_mask"])
    if mask.shape != ids.shape:
        raise ContractError(
            f"{where} has {len(ids):,} input_ids and an attention_mask of {mask.size:,}"
        )
    keep: npt.NDArray[np.bool_] = mask != 0
    return keep


def _boundaries(
    row: Mapping[str, Any], keep: npt.NDArray[np.bool_], whole_rows: bool, where: str
) -> Ints:
    """Lengths of the records of the kept tokens, as every column that speaks of them says."""
    said = {
        "seq_lengths": _given_lengths(row, keep, where),
        "position_ids": _position_lengths(row, keep, where),
        "attention_mask": _numbered_lengths(row, keep),
    }
    told = {name: lengths for name, lengths in said.items() if lengths is not None}
    for name, lengths in told.items():
        first, agreed = next(iter(told.items()))
        if not np.array_equal(lengths, agreed):
            raise ContractError(
                f"{where}: {first} and {name} disagree where records end, {agreed[:8].tolist()} "
                f"and {lengths[:8].tolist()} tokens; leave out the one that is wrong"
            )
    if told:
        return next(iter(told.values()))
    is_one_run = np.count_nonzero(np.diff(keep.astype(np.int8), prepend=0) > 0) <= 1
    if whole_rows and is_one_run:
        return np.array([np.count_nonzero(keep)], dtype=np.int64)
    if whole_rows:
        raise ContractError(
            f"{where} has padding between its tokens; say with seq_lengths whether these are "
            "several records"
        )
    raise ContractError(
        f"{where} does not say where its records end: it has neither seq_lengths nor position_ids. "
        "If transformers.Trainer dropped them, set remove_unused_columns=False; if each row is one "
        "record, set whole_rows=True"
    )


def _given_lengths(row: Mapping[str, Any], keep: npt.NDArray[np.bool_], where: str) -> Ints | None:
    """`seq_lengths`; of a single record they may count its padding."""
    if row.get("seq_lengths") is None:
        return None
    lengths = _ints(row, "seq_lengths", where)
    num_real = np.count_nonzero(keep)
    if num_real == len(keep) or lengths.sum() == num_real:
        return lengths
    if len(lengths) > 1:
        raise ContractError(
            f"{where} is packed and padded, and its seq_lengths count the padding; packed rows "
            "carry no attention_mask"
        )
    return np.array([num_real], dtype=np.int64)


def _position_lengths(
    row: Mapping[str, Any], keep: npt.NDArray[np.bool_], where: str
) -> Ints | None:
    if row.get("position_ids") is None:
        return None
    positions = _ints(row, "position_ids", where)
    if positions.shape != keep.shape:
        raise ContractError(
            f"{where} has {len(keep):,} input_ids and {positions.size:,} position_ids"
        )
    return position_ids_to_seq_lengths(positions[keep])


def _numbered_lengths(row: Mapping[str, Any], keep: npt.NDArray[np.bool_]) -> Ints | None:
    """Lengths of the runs of a mask that numbers records; None for a mask of ones."""
    if row.get("attention_mask") is None:
        return None
    numbers = np.asarray(row["attention_mask"], dtype=np.int64)[keep]
    if not (numbers > 1).any():
        return None
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1))
    return np.diff(starts, append=len(numbers))


def _labels(row: Mapping[str, Any], ids: Ints, where: str) -> Ints:
    if row.get("labels") is not None:
        labels = _ints(row, "labels", where).copy()
        if labels.shape != ids.shape:
            raise ContractError(f"{where} has {len(ids):,} input_ids and {labels.size:,} labels")
        return labels
    if row.get("trained_ranges") is None:
        return ids.copy()
    starts, ends = _range_bounds(row["trained_ranges"])
    return np.where(trained_mask(starts, ends, len(ids)), ids, IGNORE_INDEX)


def _range_bounds(spans: Any) -> tuple[Ints, Ints]:
    """Starts and ends of trained ranges, given as such or as a list of both."""
    if isinstance(spans, tuple):
        return spans
    bounds = [(span["start"], span["end"]) for span in spans]
    starts, ends = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
    return starts, ends


def _check_lengths(ids: Ints, lengths: Ints, where: str) -> None:
    if lengths.sum() != len(ids) or (len(lengths) and lengths.min() < 1):
        raise ContractError(
            f"{where} has {len(ids):,} input_ids and seq_lengths {lengths[:8].tolist()} that add "
            f"up to {int(lengths.sum()):,}; each must be at least 1 and they must fit"
        )


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
        if "range_weights" in names and table["range_weights"].null_count == len(table):
            names.remove("range_weights")  # all are 1
        self._batches = [b for b in table.select(names).to_batches() if b.num_rows]
        self._starts = np.cumsum([0, *(b.num_rows for b in self._batches)]).tolist()
        # Columns of a batch, and whether all of its rows are known to be sound.
        self._flat: dict[int, tuple[dict[str, Any], bool]] = {}
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
        if number not in self._flat:
            columns = _columns(self._batches[number])
            self._flat[number] = columns, _is_sound(columns)
        columns, is_sound = self._flat[number]
        local = index - self._starts[number]
        if is_sound:
            return Row(*(_cell(columns[name], local).astype(np.int64) for name in _PACK))
        row = {name: _cell(column, local) for name, column in columns.items()}
        return read_row(row, whole_rows=self._whole_rows, where=f"row {index}")


_COLUMNS = (
    "input_ids",
    "labels",
    "trained_ranges",
    "range_weights",
    "seq_lengths",
    "position_ids",
    "attention_mask",
    "loss_weights",
    "label",
)


def _columns(batch: pa.RecordBatch) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "range_weights":
            columns[name] = column
        elif pa.types.is_nested(column.type) and (column.null_count or _has_nulls(column)):
            raise ContractError(
                f"column '{name}' has nulls; every row needs its own list of numbers"
            )
        elif name == "trained_ranges":
            columns[name] = read_ranges(column)
        elif pa.types.is_nested(column.type):
            columns[name] = flat_list(column)
        else:
            columns[name] = column
    return columns


_PACK = ("input_ids", "labels", "seq_lengths")


def _is_sound(columns: Mapping[str, Any]) -> bool:
    """Whether a batch holds packs and nothing else, as `read_row` would find each of its rows.

    One pass over all tokens (about 5 ns each) that spares every row its own checks.
    """
    if set(columns) - {"position_ids"} != set(_PACK):
        return False
    if any(values.dtype.kind not in "iu" for values, _ in columns.values()):
        return False
    (_, starts), (labels, label_starts), (lengths, pack_starts) = (columns[n] for n in _PACK)
    if not np.array_equal(starts, label_starts) or (len(lengths) and lengths.min() < 1):
        return False
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    first, last = pack_starts[0], pack_starts[-1]
    totals = ends[pack_starts[1:]] - ends[pack_starts[:-1]]
    if not np.array_equal(np.diff(starts), totals):
        return False
    begins = ends[first:last] - ends[first] + starts[0]
    if (labels[begins] != IGNORE_INDEX).any():
        return False
    if "position_ids" not in columns:
        return True
    positions, position_starts = columns["position_ids"]
    given = positions[position_starts[0] : position_starts[-1]]
    return np.array_equal(starts, position_starts) and np.array_equal(
        given, position_ids(lengths[first:last])
    )


def _has_nulls(column: pa.Array) -> bool:
    return hasattr(column, "values") and bool(column.values.null_count)


def _cell(column: Any, row: int) -> Any:
    if isinstance(column, pa.Array):
        return column[row].as_py()
    if isinstance(column, tuple):
        values, offsets = column
        return values[offsets[row] : offsets[row + 1]]
    low, high = column.offsets[row], column.offsets[row + 1]
    return column.starts[low:high], column.ends[low:high]

"""Read one row of token data, whoever made it: what datasets and collators agree on.

Rows come from a published version (`labels` or `compact` layout), from `datasets.Dataset`, from
torch or as plain lists. A row that does not say where its records end is refused, because reading
it as one record is how packed attention leaks: `transformers.Trainer` drops the columns that a
model's `forward` does not name, `seq_lengths` among them, and nothing else would notice.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from packhouse.errors import ConfigError, ContractError, EmptyRowError
from packhouse.pack.layout import IGNORE_INDEX, MASK_COLUMNS, position_ids, trained_mask
from packhouse.records.lists import flat_list, list_offsets, read_ranges, zero_based
from packhouse.records.tables import read_table

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

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return int64 tensors, with `position_ids` that restart at each record.

        Example:
            >>> row = read_row({"input_ids": [7, 8, 9, 5, 6], "seq_lengths": [3, 2]})
            >>> row.to_tensors()["position_ids"].tolist()
            [0, 1, 2, 0, 1]
        """
        tensors = {
            "input_ids": _to_tensor(self.input_ids),
            "labels": _to_tensor(self.labels),
            "position_ids": torch.from_numpy(position_ids(self.seq_lengths, np.int64)),
            "seq_lengths": _to_tensor(self.seq_lengths),
        }
        if self.loss_weights is not None:
            tensors["loss_weights"] = _to_tensor(self.loss_weights)
        if self.label is not None:
            tensors["label"] = torch.tensor(self.label)
        return tensors


def _to_tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor that may be written to; copies what is a view of a mapped file."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def read_row(row: Mapping[str, Any], *, whole_rows: bool = False, where: str = "row") -> Row:
    """Read one row of any layout and check it.

    Ids, labels and the like must be whole numbers in one flat list: floats are refused, not cut.

    Records end where `seq_lengths` says, where `position_ids` restart, and where an
    `attention_mask` of record numbers (1, 1, 2, 2, 0) changes; what is given must agree. Without
    any of them and with `whole_rows`, they end at the end of the row. Labels come from `labels`,
    else from `trained_ranges`, else every token is trained, but for those that `completion_mask`,
    `assistant_masks` or `loss_mask` calls 0. Tokens with `attention_mask` 0 are padding, taken off.

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
    ids = _read_column(row, "input_ids", where)
    if ids is None:
        raise ContractError(f"{where} has no input_ids; its columns are {', '.join(row)}")
    mask = _read_column(row, "attention_mask", where, len(ids), kinds="iubf")
    keep = slice(None) if mask is None else mask != 0  # without a mask nothing is copied
    if not len(ids[keep]):
        raise EmptyRowError(f"{where} has no token; leave empty rows out")
    lengths = _record_lengths(row, len(ids), mask, whole_rows, where)
    spans = row.get("trained_ranges")
    ranges = None if spans is None else _range_bounds(spans)
    given = _read_column(row, "labels", where, len(ids))
    if given is not None:
        labels = given.copy()
        if mask is not None and (labels[mask == 0] != IGNORE_INDEX).any():
            raise ContractError(
                f"{where} trains tokens that attention_mask calls padding: an EOS that is the pad "
                "token would be lost. Set their mask to 1, or their labels to -100"
            )
    elif ranges is not None:
        labels = np.where(trained_mask(*ranges, len(ids)), ids, IGNORE_INDEX)
    else:
        labels = ids.copy()
    for name in MASK_COLUMNS:
        trained = _read_column(row, name, where, len(ids))
        if trained is not None:
            labels[trained == 0] = IGNORE_INDEX
    weights = _read_column(row, "loss_weights", where, len(ids), kinds="iubf")
    if weights is not None:
        weights = weights.astype(np.float32, copy=False)
        if not (np.isfinite(weights).all() and weights.min() >= 0):
            raise ContractError(f"{where} has loss_weights that are negative or no numbers")
    elif ranges is not None and "range_weights" in row:
        weights = np.zeros(len(ids), dtype=np.float32)
        of_each = row["range_weights"]
        of_each = np.ones(len(ranges[0])) if of_each is None else of_each
        for start, end, weight in zip(*ranges, of_each, strict=True):
            weights[start:end] = weight
    ids, labels = ids[keep], labels[keep]
    weights = None if weights is None else weights[keep]
    if lengths.sum() != len(ids) or lengths.min() < 1:
        raise ContractError(
            f"{where} has {len(ids):,} input_ids and seq_lengths {lengths[:8].tolist()} that add "
            f"up to {int(lengths.sum()):,}; each must be at least 1 and they must fit"
        )
    labels[np.cumsum(lengths) - lengths] = IGNORE_INDEX
    label = row.get("label")
    return Row(ids, labels, lengths, weights, None if label is None else int(label))


def _read_column(
    row: Mapping[str, Any], name: str, where: str, size: int | None = None, kinds: str = "iub"
) -> npt.NDArray[Any] | None:
    """Return a column of a row as a flat array of `size` numbers; None if the row has none.

    Whole numbers come as int64; `kinds` "iubf" lets other numbers through as they are.
    """
    values = row.get(name)
    if values is None:
        return None
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(values, dtype=object)
    if array.ndim != 1:
        raise ContractError(f"{where} has {name} of shape {array.shape}; it must be one flat list")
    if array.size and array.dtype.kind not in kinds:
        raise ContractError(
            f"{where} has {name} that are no {'' if 'f' in kinds else 'whole '}numbers "
            f"({array.dtype}, the first is {array[0]!r}); cast them"
        )
    if size is not None and len(array) != size:
        raise ContractError(f"{where} has {size:,} input_ids and {len(array):,} {name}")
    return array if "f" in kinds else array.astype(np.int64, copy=False)


def _record_lengths(
    row: Mapping[str, Any],
    num_tokens: int,
    mask: npt.NDArray[Any] | None,
    whole_rows: bool,
    where: str,
) -> Ints:
    """Return the tokens of each record without padding, on which all columns must agree.

    Tokens 7 8 9 5 6 and a pad: seq_lengths [3, 2], position_ids [0, 1, 2, 0, 1, 0] and
    attention_mask [1, 1, 1, 2, 2, 0] all say [3, 2].
    """
    is_token = np.ones(num_tokens, dtype=np.bool_) if mask is None else mask != 0
    keep = slice(None) if mask is None else is_token
    num_kept = np.count_nonzero(is_token)
    by_column: dict[str, Ints] = {}
    lengths = _read_column(row, "seq_lengths", where)
    if lengths is not None:
        if num_kept < num_tokens and lengths.sum() != num_kept:  # they count the padding
            if len(lengths) > 1:
                raise ContractError(
                    f"{where} is packed and padded, and its seq_lengths count the padding; packed "
                    "rows carry no attention_mask"
                )
            lengths = np.array([num_kept])
        by_column["seq_lengths"] = lengths
    positions = _read_column(row, "position_ids", where, num_tokens)
    if positions is not None:
        by_column["position_ids"] = _run_lengths(np.diff(positions[keep]) != 1)
    if mask is not None and (mask > 1).any():
        by_column["attention_mask"] = _run_lengths(np.diff(mask[keep]) != 0)
    for name, lengths in by_column.items():
        first, agreed = next(iter(by_column.items()))
        if not np.array_equal(lengths, agreed):
            raise ContractError(
                f"{where}: {first} and {name} disagree where records end, {agreed[:8].tolist()} "
                f"and {lengths[:8].tolist()} tokens; leave out the one that is wrong"
            )
    if by_column:
        return agreed
    if not whole_rows:
        raise ContractError(
            f"{where} does not say where its records end: it has neither seq_lengths nor "
            "position_ids. If transformers.Trainer dropped them, set remove_unused_columns=False; "
            "if each row is one record, set whole_rows=True"
        )
    if np.count_nonzero(np.diff(is_token.astype(np.int8), prepend=0) > 0) > 1:
        raise ContractError(
            f"{where} has padding between its tokens; say with seq_lengths whether these are "
            "several records"
        )
    return np.array([num_kept])


def _run_lengths(is_cut: npt.NDArray[np.bool_]) -> Ints:
    """Lengths of the runs between cuts: no, no, cut, no -> [3, 2]."""
    return np.diff(np.flatnonzero(is_cut) + 1, prepend=0, append=len(is_cut) + 1)


def _range_bounds(ranges: Any) -> tuple[Ints, Ints]:
    """Starts and ends of trained ranges, given as such or as a list of both."""
    if isinstance(ranges, tuple):
        return ranges
    bounds = [(each["start"], each["end"]) for each in ranges]
    starts, ends = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
    return starts, ends


def open_rows(rows: Any, *, whole_rows: bool = False) -> Sequence[Row]:
    """Make rows of any kind readable by number; nothing is copied.

    Args:
        rows: a `datasets.Dataset`, an Arrow table, the path of an Arrow file or a tuple of such
            paths, or a sequence of mappings.
        whole_rows: as for `read_row`.

    Raises:
        ConfigError: `rows` is no sequence of rows.
    """
    if isinstance(rows, Path):
        rows = (rows,)
    if isinstance(rows, tuple) and rows and all(isinstance(part, Path) for part in rows):
        rows = pa.concat_tables([read_table(part) for part in rows])
    if isinstance(rows, pa.Table):
        return ArrowRows(rows, whole_rows=whole_rows)
    if isinstance(rows, str):
        raise ConfigError(f"'{rows}' is a text and no rows; give load_packed('{rows}')")
    kind = type(rows)
    if isinstance(rows, Mapping):
        raise ConfigError(
            f"a {kind.__name__} of {', '.join(map(str, rows))} is no sequence of rows; give one "
            "split, or a list of rows"
        )
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ConfigError(
            f"a {kind.__name__} has no length or no row by number; give a list of its rows, or "
            "stream a version with StreamingPackedDataset"
        )
    is_dataset = kind.__name__ == "Dataset" and kind.__module__.startswith("datasets.")
    if is_dataset and rows.format["type"] != "custom":
        chosen = None if rows._indices is None else rows._indices.column(0).to_numpy()
        return ArrowRows(rows.data.table, whole_rows=whole_rows, indices=chosen)
    return _MappingRows(rows, whole_rows)


@dataclass(frozen=True)
class _MappingRows(Sequence[Row]):
    """Rows of anything that gives mappings by number."""

    rows: Sequence[Mapping[str, Any]]
    whole_rows: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # one row: no slices
        return read_row(self.rows[index], whole_rows=self.whole_rows, where=f"row {index}")


_PACK = ("input_ids", "labels", "seq_lengths")
_OTHERS = {"trained_ranges", "range_weights", "position_ids", "attention_mask"}
_OTHERS |= {"loss_weights", "label", *MASK_COLUMNS}


class ArrowRows(Sequence[Row]):
    """Rows of an Arrow table read in place: no Python list of ids, no copy but the one to int64.

    Args:
        table: columns as published, in any number of chunks; kept mapped, never combined.
        whole_rows: as for `read_row`.
        indices: rows of the table to read, in this order; by default all.

    Example:
        >>> table = pa.table({"input_ids": [[7, 8, 9]], "seq_lengths": [[2, 1]]})
        >>> ArrowRows(table)[0].labels.tolist()
        [-100, 8, -100]
    """

    def __init__(
        self,
        table: pa.Table,
        *,
        whole_rows: bool = False,
        indices: npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        names = [n for n in table.column_names if n in _PACK or n in _OTHERS]
        if "range_weights" in names and table["range_weights"].null_count == len(table):
            names.remove("range_weights")  # all are 1
        self._batches = [b for b in table.select(names).to_batches() if b.num_rows]
        # Batches of 100 and 50 rows begin at 0 100 150: row 120 is row 20 of the second.
        self._starts = np.cumsum([0, *(b.num_rows for b in self._batches)]).tolist()
        # How to read each column of a batch, and whether all of its rows are known to be sound.
        self._cells: dict[int, tuple[dict[str, Callable[[int], Any]], bool]] = {}
        self._whole_rows = whole_rows
        self._indices = indices

    def __len__(self) -> int:
        return int(self._starts[-1] if self._indices is None else len(self._indices))

    @property
    def is_plain(self) -> bool:
        """Return True if each row is one record without padding, for all that the columns say."""
        marks = {"seq_lengths", "position_ids", "attention_mask"}
        return not self._batches or not marks & set(self._batches[0].schema.names)

    def num_tokens(self) -> Ints:
        """Return the tokens of each row, from the offsets alone; padding counts."""
        lengths = [np.diff(list_offsets(batch["input_ids"])) for batch in self._batches]
        of_all = np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)
        return of_all if self._indices is None else of_all[self._indices]

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # one row: no slices
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        place = index if self._indices is None else int(self._indices[index])
        number = bisect_right(self._starts, place) - 1
        if number not in self._cells:
            batch = self._batches[number]
            cells = {name: _cells(name, batch[name]) for name in batch.schema.names}
            self._cells[number] = cells, _is_sound(batch)
        cells, is_sound = self._cells[number]
        local = place - self._starts[number]
        if is_sound:
            return Row(*(cells[name](local).astype(np.int64) for name in _PACK))
        row = {name: cell(local) for name, cell in cells.items()}
        return read_row(row, whole_rows=self._whole_rows, where=f"row {index}")


def _cells(name: str, column: pa.Array) -> Callable[[int], Any]:
    """Return a function from a row's number to its cell, a view of the column."""
    if name == "range_weights" or not pa.types.is_nested(column.type):
        return lambda row: column[row].as_py()
    if column.null_count or (hasattr(column, "values") and column.values.null_count):
        raise ContractError(f"column '{name}' has nulls; every row needs its own list of numbers")
    if name == "trained_ranges":
        ranges = read_ranges(column)
        starts, ends, bounds = ranges.starts, ranges.ends, ranges.offsets
        return lambda row: (
            starts[bounds[row] : bounds[row + 1]],
            ends[bounds[row] : bounds[row + 1]],
        )
    values, offsets = flat_list(column)  # [[5, 6, 7], [8, 9]]: 5 6 7 8 9 and 0 3 5; row 1 is 8 9
    return lambda row: values[offsets[row] : offsets[row + 1]]


def _is_sound(batch: pa.RecordBatch) -> bool:
    """Return True if a batch holds packs and nothing else, as `read_row` would find each row.

    One pass over all tokens (about 5 ns each) that spares every row its own checks.
    """
    names = batch.schema.names
    if set(names) - {"position_ids"} != set(_PACK):
        return False
    flat = {name: zero_based(*flat_list(batch[name])) for name in names}
    if any(values.dtype.kind not in "iu" for values, _ in flat.values()):
        return False
    (_, offsets), (labels, label_offsets), (lengths, pack_offsets) = (flat[n] for n in _PACK)
    # Packs [3 2] and [4]: records are bounded by 0 3 5 9, and packs by sequences 0 2 3. So packs
    # have 5 and 4 tokens, which the offsets of ids must say too, and labels -100 at 0 3 5.
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    num_tokens = np.diff(offsets)
    if min(lengths.min(initial=1), num_tokens.min(initial=1)) < 1:
        return False
    due = [(label_offsets, offsets), (np.diff(bounds[pack_offsets]), num_tokens)]
    if "position_ids" in flat:
        positions, position_offsets = flat["position_ids"]
        due += [(position_offsets, offsets), (positions, position_ids(lengths))]
    # Labels are looked up only where the lengths fit them.
    return all(np.array_equal(*pair) for pair in due) and bool(
        (labels[bounds[:-1]] == IGNORE_INDEX).all()
    )

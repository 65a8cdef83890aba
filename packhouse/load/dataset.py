"""Provide a map-style torch dataset of packs, or of tokenized records to pack.

Rows are read from mapped Arrow buffers, several times faster than with `datasets` in torch format
(numbers in docs/how-to/load.md): a batch of packs is checked once as a whole, so reading a row
costs little more than copying it. Items have `position_ids` and `seq_lengths` but never an
`attention_mask`, so that `PackedCollator` and transformers both know where records end.

Rows come from a published version (`labels` or `compact` layout), from `datasets.Dataset`, from
torch, or as plain lists (`read_row`). A row without record boundaries is rejected, because reading
it as one record would let records attend to each other: `transformers.Trainer` drops columns that a
model's `forward` does not name, including `seq_lengths`, and nothing else would notice.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from packhouse.errors import ConfigError, ContractError, EmptyRowError
from packhouse.load.known_packs import MOST_ROWS, watch_read, watch_rows
from packhouse.pack.pack_columns import IGNORE_INDEX, MASK_COLUMNS, position_ids, trained_mask
from packhouse.pack.shuffle import splitmix64
from packhouse.pack.strategies import PackPlan, plan_packs
from packhouse.records.arrays import flat_list, list_offsets, read_ranges
from packhouse.records.ledger import LedgerLine
from packhouse.records.table_schemas import read_table
from packhouse.system.wording import counted

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training row: whole records, one after another, without padding."""

    input_ids: Ints
    labels: Ints
    """Unshifted; -100 for the first token of each record and for tokens that are not trained."""
    seq_lengths: Ints
    """Tokens of each record; they add up to `len(input_ids)`."""
    loss_weights: npt.NDArray[np.float32] | None = None
    """Weight of each token as a target, unshifted; None if the row has no weights."""
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
    """Return a writable tensor; copies views of mapped files, which are read-only."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def read_row(row: Mapping[str, Any], *, whole_rows: bool = False, where: str = "row") -> Row:
    """Read and check one row of any layout.

    Ids, labels and masks must be flat lists of integers; floats are rejected, not truncated.

    Record boundaries come from `seq_lengths`, from restarts in `position_ids`, and from changes in
    an `attention_mask` of record numbers (1, 1, 2, 2, 0); if several are present, they must agree.
    If there are none, `whole_rows` treats the row as one record. Labels come from `labels`, else
    from `trained_ranges`, else every token is trained, except those with 0 in `completion_mask`,
    `assistant_masks` or `loss_mask`. Tokens with `attention_mask` 0 are padding and are removed.

    Args:
        row: `input_ids` and the columns above, as lists, numpy arrays or tensors.
        whole_rows: treat a row without boundaries as one record.
        where: name of the row in errors.

    Raises:
        ConfigError: `row` is not a mapping.
        ContractError: boundaries are missing or contradict each other, or lengths do not match.

    Example:
        >>> row = read_row({"input_ids": [7, 8, 9, 5, 6], "seq_lengths": [3, 2]})
        >>> row.labels.tolist()
        [-100, 8, 9, -100, 6]
    """
    if not hasattr(row, "keys"):
        raise ConfigError(f"{where} is a {type(row).__name__} instead of a dict. {_FILES}")
    ids = _read_column(row, "input_ids", where)
    if ids is None:
        raise ContractError(f"{where} has no input_ids; its columns are {', '.join(row)}")
    mask = _read_column(row, "attention_mask", where, len(ids), kinds="iubf")
    keep = slice(None) if mask is None else mask != 0  # without a mask nothing is copied
    if not len(ids[keep]):
        raise EmptyRowError(f"{where} has no tokens. Remove empty rows.")
    lengths = _record_lengths(row, len(ids), mask, whole_rows, where)
    spans = row.get("trained_ranges")
    ranges: tuple[Ints, Ints] | None = spans if isinstance(spans, tuple) else None
    if spans is not None and ranges is None:  # a list of dicts
        bounds = [(each["start"], each["end"]) for each in spans]
        starts, ends = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
        ranges = starts, ends
    given = _read_column(row, "labels", where, len(ids))
    if given is not None:
        labels = given.copy()
        if mask is not None and (labels[mask == 0] != IGNORE_INDEX).any():
            raise ContractError(
                f"{where} trains tokens that attention_mask marks as padding; an EOS that is also "
                "the pad token would be lost. Set their mask to 1, or their labels to -100."
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
            raise ContractError(f"{where} has loss_weights that are negative or not finite")
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
            f"{where} has {len(ids):,} input_ids but seq_lengths {lengths[:8].tolist()} add up to "
            f"{int(lengths.sum()):,}. Each length must be at least 1, and their sum must match."
        )
    # The model would predict the first token of a record from the record before it.
    labels[np.cumsum(lengths) - lengths] = IGNORE_INDEX
    label = row.get("label")
    return Row(ids, labels, lengths, weights, None if label is None else int(label))


_FILES = (
    "For a version, pass load_packed('STORE/DATASET'); for Parquet files, "
    "datasets.load_dataset('parquet', data_files=FILES, split='train')."
)


def _read_column(
    row: Mapping[str, Any], name: str, where: str, size: int | None = None, kinds: str = "iub"
) -> npt.NDArray[Any] | None:
    """Return a column of a row as a flat array of `size` numbers, or None if the row lacks it.

    Integers are returned as int64; with `kinds` "iubf", floats are allowed and types do not change.
    """
    values = row.get(name)
    if values is None:
        return None
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(values, dtype=object)
    if array.ndim != 1:
        raise ContractError(f"{where} has {name} of shape {array.shape}. Pass one flat list.")
    # numpy makes floats of an empty list.
    if array.size and array.dtype.kind not in kinds:
        due = "numbers" if "f" in kinds else "integers"
        raise ContractError(
            f"{where} has {name} of type {array.dtype} instead of {due}. Cast them."
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
    """Return the tokens of each record without padding; all columns must agree.

    For tokens 7 8 9 5 6 and a pad token, seq_lengths [3, 2], position_ids [0, 1, 2, 0, 1, 0] and
    attention_mask [1, 1, 1, 2, 2, 0] all give [3, 2].
    """
    is_token = np.ones(num_tokens, dtype=np.bool_) if mask is None else mask != 0
    keep = slice(None) if mask is None else is_token
    num_kept = np.count_nonzero(is_token)
    by_column: dict[str, Ints] = {}
    lengths = _read_column(row, "seq_lengths", where)
    if lengths is not None:
        if num_kept < num_tokens and lengths.sum() != num_kept:  # the lengths include padding
            if len(lengths) > 1:
                raise ContractError(
                    f"{where} is packed and padded, and its seq_lengths include the padding. "
                    "Remove the padding and the attention_mask from packed rows."
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
                f"{where}: {first} and {name} give different record lengths, "
                f"{agreed[:8].tolist()} and {lengths[:8].tolist()}. Remove the one that is wrong."
            )
    if by_column:
        return agreed
    if not whole_rows:
        raise ContractError(
            f"{where} has no record boundaries: it has neither seq_lengths nor position_ids. If "
            "transformers.Trainer dropped them, set remove_unused_columns=False; if each row is "
            "one record, set whole_rows=True."
        )
    if np.count_nonzero(np.diff(is_token.astype(np.int8), prepend=0) > 0) > 1:
        raise ContractError(
            f"{where} has padding between its tokens. If these are several records, add "
            "seq_lengths."
        )
    return np.array([num_kept])


def _run_lengths(is_cut: npt.NDArray[np.bool_]) -> Ints:
    """Return the lengths of the runs between cuts: no, no, cut, no -> [3, 2]."""
    return np.diff(np.flatnonzero(is_cut) + 1, prepend=0, append=len(is_cut) + 1)


def open_rows(rows: Any, *, whole_rows: bool = False) -> Sequence[Row]:
    """Open rows of any kind for reading by number, without copying.

    Args:
        rows: a `datasets.Dataset`, an Arrow table, the path of an Arrow file or a tuple of such
            paths, or a sequence of mappings.
        whole_rows: as for `read_row`.

    Raises:
        ConfigError: `rows` is not a sequence of rows, or a file is not an Arrow file.
    """
    if isinstance(rows, Path):
        rows = (rows,)
    if isinstance(rows, tuple) and rows and all(isinstance(part, Path) for part in rows):
        rows = pa.concat_tables([_read_arrow(part) for part in rows])
    if isinstance(rows, pa.Table):
        return ArrowRows(rows, whole_rows=whole_rows)
    if isinstance(rows, str):
        raise ConfigError(f"'{rows}' is a string instead of rows. {_FILES}")
    kind = type(rows)
    if isinstance(rows, Mapping):
        raise ConfigError(
            f"a {kind.__name__} of {', '.join(map(str, rows))} is not a sequence of rows. Pass one "
            "split, or a list of rows."
        )
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ConfigError(
            f"a {kind.__name__} has no length or cannot be indexed. Pass a list of its rows, or "
            "stream a version with StreamingPackedDataset."
        )
    is_dataset = kind.__name__ == "Dataset" and kind.__module__.startswith("datasets.")
    if is_dataset and rows.format["type"] != "custom":
        # `select` and `shuffle` keep the table and add row numbers.
        chosen = None if rows._indices is None else rows._indices.column(0).to_numpy()
        return ArrowRows(rows.data.table, whole_rows=whole_rows, indices=chosen)
    return _MappingRows(rows, whole_rows)


def _read_arrow(path: Path) -> pa.Table:
    try:
        return read_table(path)
    except pa.ArrowInvalid:
        raise ConfigError(f"'{path}' is not an Arrow file. {_FILES}") from None


@dataclass(frozen=True)
class _MappingRows(Sequence[Row]):
    """Rows of any sequence of mappings."""

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
    """Rows of an Arrow table, read in place; the only copy is the conversion to int64.

    Args:
        table: columns as published, in any number of chunks; it stays mapped.
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
        # Batches of 100 and 50 rows: starts 0 100 150, so row 120 is row 20 of the second batch.
        self._starts = np.cumsum([0, *(b.num_rows for b in self._batches)]).tolist()
        # Per batch: functions that read its columns, and True if all of its rows are known to be
        # valid.
        self._cells: dict[int, tuple[dict[str, Callable[[int], Any]], bool]] = {}
        self._whole_rows = whole_rows
        self._indices = indices

    def __len__(self) -> int:
        return int(self._starts[-1] if self._indices is None else len(self._indices))

    @property
    def is_plain(self) -> bool:
        """Return True if no column marks boundaries or padding, so that each row is one record."""
        marks = {"seq_lengths", "position_ids", "attention_mask"}
        return not self._batches or not marks & set(self._batches[0].schema.names)

    def num_tokens(self) -> Ints:
        """Return the tokens of each row, including padding, from the offsets alone."""
        lengths = [np.diff(list_offsets(batch["input_ids"])) for batch in self._batches]
        of_all = np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)
        return of_all if self._indices is None else of_all[self._indices]

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # one row: no slices
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} is out of range for {len(self)} rows")
        index %= len(self)
        place = index if self._indices is None else int(self._indices[index])
        number = bisect_right(self._starts, place) - 1
        # At the first row of a batch, so that opening a dataset reads nothing.
        if number not in self._cells:
            batch = self._batches[number]
            cells = {name: _cells(name, batch[name]) for name in batch.schema.names}
            self._cells[number] = cells, _is_sound(batch)
        cells, is_sound = self._cells[number]
        local = place - self._starts[number]
        # Batches are checked once, so that rows are read 5 to 9 times as fast as by `datasets` in
        # torch format.
        if is_sound:
            return Row(*(cells[name](local).astype(np.int64) for name in _PACK))
        row = {name: cell(local) for name, cell in cells.items()}
        return read_row(row, whole_rows=self._whole_rows, where=f"row {index}")


def _cells(name: str, column: pa.Array) -> Callable[[int], Any]:
    """Return a function that returns the cell of a row as a view of the column."""
    if name == "range_weights" or not pa.types.is_nested(column.type):
        return lambda row: column[row].as_py()
    if column.null_count or (hasattr(column, "values") and column.values.null_count):
        raise ContractError(f"column '{name}' has nulls. Every row needs a list of numbers.")
    if name == "trained_ranges":
        ranges = read_ranges(column)
        bounds, sides = ranges.offsets, (ranges.starts, ranges.ends)
        return lambda row: tuple(side[bounds[row] : bounds[row + 1]] for side in sides)
    values, offsets = flat_list(column)  # [[5, 6, 7], [8, 9]]: 5 6 7 8 9 and 0 3 5; row 1 is 8 9
    return lambda row: values[offsets[row] : offsets[row + 1]]


def _is_sound(batch: pa.RecordBatch) -> bool:
    """Return True if a batch has only valid packs, which saves `read_row` the checks.

    One pass over all tokens takes about 5 ns each and saves the checks of every row.
    """
    names = batch.schema.names
    if set(names) - {"position_ids"} != set(_PACK):
        return False
    flat = {name: flat_list(batch[name]) for name in names}
    if any(values.dtype.kind not in "iu" for values, _ in flat.values()):
        return False
    (_, offsets), (labels, label_offsets), (lengths, pack_offsets) = (flat[n] for n in _PACK)
    # Packs [3 2] and [4]: record bounds are 0 3 5 9, pack offsets 0 2 3. So packs must have 5 and 4
    # tokens in the offsets of ids too, and labels must be -100 at 0 3 5.
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    num_tokens = np.diff(offsets)
    if min(lengths.min(initial=1), num_tokens.min(initial=1)) < 1:
        return False
    due = [(label_offsets, offsets), (np.diff(bounds[pack_offsets]), num_tokens)]
    if "position_ids" in flat:
        positions, position_offsets = flat["position_ids"]
        due += [(position_offsets, offsets), (positions, position_ids(lengths))]
    # Check labels only if lengths match; otherwise the bounds may be out of range.
    return all(np.array_equal(*pair) for pair in due) and bool(
        (labels[bounds[:-1]] == IGNORE_INDEX).all()
    )


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
            f"{self.seq_len:,} tokens: {counted(self.num_tokens, 'token')}, {self.fill:.2%} full, "
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
        self._order: Ints = np.empty(0, np.int64)
        """Row numbers, pack after pack, if there is a plan."""
        if seq_len is not None:
            lengths = _lengths_of_records(self._rows)
            self.num_empty = int((lengths == 0).sum())
            is_kept = (lengths > 0) & ((lengths <= seq_len) | (over_length == "error"))
            kept = np.flatnonzero(is_kept)
            self.num_dropped = len(lengths) - len(kept) - self.num_empty
            self._lengths, self._kept = lengths[kept], kept
            self._settings = (seq_len, strategy, seed, pad_record_to_multiple_of, balance)
            self.set_epoch(epoch)
        _refuse_shifted(self._rows, range(len(self._rows)) if self._plan is None else self._kept)
        first = map(self._row, range(min(len(self), MOST_ROWS)))
        watch_rows((row.input_ids, row.seq_lengths) for row in first)

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
        return self._watched(index).to_tensors()

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

    def _watched(self, index: int) -> Row:
        row = self._row(index)
        watch_read([(row.input_ids, row.seq_lengths)])
        return row

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
        weights = None if pack.loss_weights is None else pack.loss_weights[part]
        return Row(
            pack.input_ids[part], pack.labels[part], self.lengths[index : index + 1], weights
        )


def _lengths_of_records(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
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
    # Eight rows are enough: labels of a tool are all shifted, or none is.
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

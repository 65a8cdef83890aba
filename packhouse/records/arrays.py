"""Types of numpy arrays; convert Arrow list columns to flat arrays with offsets, without copying.

`Bools` are masks; `Int64s` are positions, offsets and counts.

An Arrow list array is one flat buffer of values with `num_rows + 1` offsets into it. Everything in
this package works on these two arrays; ids are never in Python lists.

Loss weights of spans, token ranges and pack ranges have one form (`flat_weights`,
`weights_column`): a list of numbers per row, or null if all are 1. So data without fractional
weights costs only a null bitmap, and has the same bytes however it was rendered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Uint32s = npt.NDArray[np.uint32]
Uint64s = npt.NDArray[np.uint64]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Objects = npt.NDArray[np.object_]


# [start, end) in bytes of `text`, or in tokens of `input_ids`.
SPAN = pa.struct([pa.field(name, pa.int32(), nullable=False) for name in ("start", "end")])

# Loss weight of each trained span or range, never 0; null if all are 1.
WEIGHTS = pa.list_(pa.field("item", pa.float32(), nullable=False))

Offsets = npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Runs:
    """Items of many rows in one flat array; row `i` has the items `offsets[i]:offsets[i + 1]`.

    Example:
        >>> runs = Runs(np.array([0, 2, 3]))
        >>> runs.counts.tolist(), runs.rows.tolist(), runs.sums(np.array([5, 1, 2])).tolist()
        ([2, 1], [0, 0, 1], [6, 2])
    """

    offsets: Offsets
    """Start of each row and the end of the last, shape [num_rows + 1]."""

    @cached_property
    def counts(self) -> Offsets:
        """Number of items of each row."""
        return np.diff(self.offsets)

    @cached_property
    def rows(self) -> Int64s:
        """Row of each item."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def sums(self, values: Offsets | Bools) -> Int64s:
        """Add up values of items within each row."""
        # Values [5 1 2], offsets [0 2 3]: the running sums [0 5 6 8] at the offsets are [0 6 8], so
        # the rows have 6 and 2.
        return np.diff(np.append(0, np.cumsum(values, dtype=np.int64))[self.offsets])


@dataclass(frozen=True, eq=False)
class Ranges(Runs):
    """Half-open ranges of many rows."""

    starts: Int32s
    ends: Int32s


def one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return the column as one array; copies only if there are several chunks.

    List views and lists of fixed size are converted to plain lists, which also copies.
    """
    kind = column.type
    is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    if is_view or pa.types.is_fixed_size_list(kind):
        plain = []
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            # Not with pyarrow's cast, which loses the rows of a sliced view.
            lengths = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False)
            offsets = pa.array(np.append(0, np.cumsum(lengths, dtype=np.int64)))
            plain.append(pa.LargeListArray.from_arrays(offsets, chunk.flatten()))
        column = pa.chunked_array(plain, pa.large_list(column.type.value_type))
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def list_offsets(array: pa.Array) -> Offsets:
    """Return the offsets of a list or string array into its values; works for slices too."""
    array = one_chunk(array)
    is_large = pa.types.is_large_list(array.type) or pa.types.is_large_string(array.type)
    width = np.dtype(np.int64 if is_large else np.int32)
    # Arrow allows an empty array to have an offsets buffer of 0 bytes.
    if len(array) == 0:
        return np.zeros(1, width)
    buffer = array.buffers()[1]
    return np.frombuffer(buffer, width)[array.offset : array.offset + len(array) + 1]


def flat_list(column: pa.ChunkedArray | pa.Array) -> tuple[np.ndarray, Offsets]:
    """Return the values of a list column of numbers, and the offsets of its rows, starting at 0.

    Copies the values only if the column has several chunks.

    Example:
        >>> values, offsets = flat_list(pa.array([[7, 8, 9], [5, 6]], pa.list_(pa.int32())))
        >>> values.tolist(), offsets.tolist()
        ([7, 8, 9, 5, 6], [0, 3, 5])
    """
    array = one_chunk(column)
    values, offsets = array.values.to_numpy(zero_copy_only=True), list_offsets(array)
    # A slice shares the buffers of the whole array, so its offsets begin anywhere.
    return values[offsets[0] : offsets[-1]], offsets - offsets[0]


def list_items(column: pa.ChunkedArray | pa.Array) -> tuple[pa.Array, Int64s]:
    """Return the items of a list column and the offsets of its rows, starting at 0.

    Example:
        >>> items, offsets = list_items(pa.array([["a"], ["b", "c"], ["d"]]).slice(1))
        >>> items.to_pylist(), offsets.tolist()
        (['b', 'c', 'd'], [0, 2, 3])
    """
    array = one_chunk(column)
    offsets = list_offsets(array).astype(np.int64)
    # `values` are all items, whatever slice the array is: of [[1], [2], null, [3]] without its
    # first row they are 1 2 3, and `flatten()` gives 2 3. The offsets count from the start of
    # `values`.
    return array.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0]


def string_bytes(column: pa.ChunkedArray | pa.Array) -> tuple[Bytes, Offsets]:
    """Return the UTF-8 bytes of a string column, and the offsets of its rows, starting at 0.

    Copies the bytes only if the column has several chunks.
    """
    array = one_chunk(column)
    data = array.buffers()[2] if len(array) else None
    values = np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, np.uint8)
    offsets = list_offsets(array)
    return values[offsets[0] : offsets[-1]], offsets - offsets[0]


def read_ranges(column: pa.ChunkedArray | pa.Array) -> Ranges:
    """Read a column of type list<SPAN>; offsets start at 0.

    Example:
        >>> column = pa.array([[{"start": 1, "end": 3}], []], pa.list_(SPAN))
        >>> ranges = read_ranges(column)
        >>> ranges.starts.tolist(), ranges.ends.tolist(), ranges.offsets.tolist()
        ([1], [3], [0, 1, 1])
    """
    spans, offsets = list_items(column)
    starts, ends = (field.to_numpy(zero_copy_only=True) for field in spans.flatten())
    return Ranges(offsets, starts, ends)


class TokenColumns(NamedTuple):
    """Ids and trained ranges of records or packs as flat arrays."""

    ids: Int32s
    offsets: Offsets
    """Start of each row in `ids` and the end of the last, shape [num_rows + 1]."""
    ranges: Ranges
    """Relative to the start of their row."""

    @classmethod
    def of(cls, rows: pa.Table | pa.RecordBatch) -> "TokenColumns":
        """Read rows with schema `table_schemas.TOKENIZED` or `PACKED`."""
        return cls(*flat_list(rows["input_ids"]), read_ranges(rows["trained_ranges"]))


def count_up(counts: npt.NDArray[np.integer], dtype: type[np.integer] = np.int64) -> np.ndarray:
    """Count from 0 within each run.

    Example:
        >>> count_up(np.array([3, 1, 2])).tolist()
        [0, 1, 2, 0, 0, 1]
    """
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    within = np.arange(total, dtype=dtype)
    within -= np.repeat((ends - counts).astype(dtype), counts)
    return within


def list_array(values: pa.Array, offsets: np.ndarray, item: pa.DataType) -> pa.Array:
    """Build a list array with non-null items from `values`, without copying them."""
    kind = pa.list_(pa.field("item", item, nullable=False))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)


def ranges_array(starts: Int32s, ends: Int32s, counts: Sequence[int] | np.ndarray) -> pa.Array:
    """Build a list<SPAN> array whose row `i` has `counts[i]` ranges.

    Example:
        >>> array = ranges_array(np.array([1], np.int32), np.array([3], np.int32), [1, 0])
        >>> array.to_pylist()
        [[{'start': 1, 'end': 3}], []]
    """
    offsets = np.concatenate([[0], np.cumsum(counts)])
    edges = [pa.array(each, pa.int32()) for each in (starts, ends)]
    return list_array(pa.StructArray.from_arrays(edges, fields=list(SPAN)), offsets, SPAN)


def flat_weights(column: pa.Array, counts: npt.NDArray[np.integer]) -> Float32s | None:
    """Return the weights of all spans as one flat array, or None if all are 1.

    Args:
        column: weights, type WEIGHTS.
        counts: number of spans of each row, shape [num_rows].

    Example:
        >>> column = pa.array([[0.5, 1.0], None], WEIGHTS)
        >>> flat_weights(column, np.array([2, 1])).tolist()
        [0.5, 1.0, 1.0]
    """
    column = one_chunk(column)
    if column.null_count == len(column):
        return None
    weights = np.ones(int(counts.sum()), np.float32)
    given = np.repeat(column.is_valid().to_numpy(zero_copy_only=False), counts)
    weights[given] = column.drop_null().flatten().to_numpy(zero_copy_only=False)
    return weights


def weights_column(weights: Float32s | None, counts: npt.NDArray[np.integer]) -> pa.Array:
    """Build an array of type WEIGHTS with `counts[i]` weights in row i; null if all are 1.

    Example:
        >>> weights_column(np.array([0.5, 1, 1], np.float32), np.array([2, 1])).to_pylist()
        [[0.5, 1.0], None]
    """
    if weights is None:
        return pa.nulls(len(counts), WEIGHTS)
    row = np.repeat(np.arange(len(counts)), counts)
    is_scaled = np.zeros(len(counts), np.bool_)
    is_scaled[row[weights != 1]] = True
    # Without fractional weights, a column costs only a null bitmap.
    if not is_scaled.any():
        return pa.nulls(len(counts), WEIGHTS)
    ends = np.cumsum(np.where(is_scaled, counts, 0))
    offsets = pa.array(np.append(0, ends).astype(np.int32))
    values = pa.array(weights[is_scaled[row]].astype(np.float32))
    return pa.ListArray.from_arrays(offsets, values, type=WEIGHTS, mask=pa.array(~is_scaled))

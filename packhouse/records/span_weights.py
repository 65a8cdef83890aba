"""Loss weights of trained spans: a list of numbers a row, or null where each of them is 1.

Spans, ranges of tokens and ranges of packs carry their weights beside them in this one form, so
that data without fractional weights costs a null bitmap and the same data has the same bytes
whichever way it was rendered.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.records.tables import WEIGHTS
from packhouse.system.arrays import Float32s


def flat_weights(column: pa.Array, counts: npt.NDArray[np.integer]) -> Float32s | None:
    """Weights of all spans behind one another; None where all of them are 1.

    Args:
        column: type WEIGHTS.
        counts: spans of each row, shape [num_rows].

    Example:
        >>> column = pa.array([[0.5, 1.0], None], WEIGHTS)
        >>> flat_weights(column, np.array([2, 1])).tolist()
        [0.5, 1.0, 1.0]
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if column.null_count == len(column):
        return None
    weights = np.ones(int(counts.sum()), np.float32)
    given = np.repeat(column.is_valid().to_numpy(zero_copy_only=False), counts)
    weights[given] = column.drop_null().flatten().to_numpy(zero_copy_only=False)
    return weights


def weights_column(weights: Float32s | None, counts: npt.NDArray[np.integer]) -> pa.Array:
    """Array of type WEIGHTS with `counts[i]` weights in row i; null in rows where all are 1.

    Example:
        >>> weights_column(np.array([0.5, 1, 1], np.float32), np.array([2, 1])).to_pylist()
        [[0.5, 1.0], None]
    """
    if weights is None:
        return pa.nulls(len(counts), WEIGHTS)
    row = np.repeat(np.arange(len(counts)), counts)
    is_scaled = np.zeros(len(counts), np.bool_)
    is_scaled[row[weights != 1]] = True
    if not is_scaled.any():
        return pa.nulls(len(counts), WEIGHTS)
    offsets = np.concatenate([[0], np.cumsum(np.where(is_scaled, counts, 0))])
    values = pa.array(weights[is_scaled[row]].astype(np.float32))
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), values, type=WEIGHTS, mask=pa.array(~is_scaled)
    )

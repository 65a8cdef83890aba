"""Conversations that were split: their examples are described as one, so that alike ones are found.

Examples of single turns repeat all that stands before their answer, so those of one conversation
are near one another by nature. Compared are therefore conversations: a unit is all records of one
row, as `packhouse.records.rows` numbers them, and what is found of it holds for all of them.
"""

import numpy as np
import pyarrow as pa

from packhouse.records.lists import flat_list, list_array
from packhouse.system.arrays import Int64s


def merged(fingerprints: pa.Table, units: Int64s) -> pa.Table:
    """Fingerprints of whole units: all shingles of their rows, and the MinHash of those.

    Args:
        fingerprints: schema `FINGERPRINTS`, of a shard's rows.
        units: the unit of each row, rising from 0.

    Returns:
        The same columns but for `normal_id`, a row for each unit.
    """
    num_units = int(units[-1]) + 1 if len(units) else 0
    if num_units == len(units):
        return fingerprints.select(["shingles", "minhash"])
    shingles, offsets = flat_list(fingerprints["shingles"])
    sizes = np.diff(offsets).astype(np.int64)
    # Rows with [3 2] shingles, both of unit 0: the unit of each shingle is [0 0 0 0 0].
    of_unit = np.repeat(units, sizes).astype(np.uint64)
    own = shingles[offsets[0] : offsets[-1]].astype(np.uint64)
    keys = np.unique((of_unit << np.uint64(32)) | own)
    bounds = np.searchsorted(keys, np.arange(num_units + 1, dtype=np.uint64) << np.uint64(32))
    union = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    hashes, bands = flat_list(fingerprints["minhash"])
    width = int(bands[1] - bands[0])
    starts = np.flatnonzero(np.diff(units, prepend=-1))
    # The MinHash of a union has the lesser of each two numbers.
    least = np.minimum.reduceat(hashes[bands[0] : bands[-1]].reshape(-1, width), starts)
    columns = {
        "shingles": list_array(pa.array(union), bounds.astype(np.int64), pa.uint32()),
        "minhash": list_array(
            pa.array(least.ravel()), np.arange(num_units + 1) * width, pa.uint32()
        ),
    }
    return pa.table(columns)


def spread(pairs: Int64s, leaders: Int64s, rows: Int64s) -> Int64s:
    """Pairs of leaders as pairs of the first one's leader with every row that the second leads.

    Args:
        pairs: shape [num_pairs, 2]; each second one occurs once.
        leaders: leader of each of `rows`.
        rows: numbers of rows.

    Example:
        >>> spread(np.array([[0, 3]]), np.array([0, 0, 3, 3]), np.array([0, 1, 3, 4])).tolist()
        [[0, 3], [0, 4]]
    """
    order = np.argsort(pairs[:, 1], kind="stable")
    sought = pairs[order, 1]
    place = np.minimum(np.searchsorted(sought, leaders), max(0, len(sought) - 1))
    is_led = sought[place] == leaders if len(sought) else np.zeros(len(leaders), np.bool_)
    return np.stack([pairs[order[place[is_led]], 0], rows[is_led]], axis=1).astype(np.int64)

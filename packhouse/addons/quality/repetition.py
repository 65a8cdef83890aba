"""How much of a text repeats what it has said: loops, and runs of one sign.

From each word and sign on, 16 bytes are compared with those from all earlier ones: the share that
occurs again. No word list is needed, so a loop of Chinese, of code or of one character is found
too. Prose has 3% of such places, tables and code up to half. Cost: 15 ns a byte.
"""

from itertools import chain, repeat

import numpy as np
import pyarrow as pa

from packhouse.records.lists import string_bytes
from packhouse.system.arrays import Bools, Bytes, Float64s, Int64s

REPETITIVE = 0.6
"""More than that is counted as repetition: a text said three times has 0.67."""

_WINDOW = 16
_MIN_BYTES = 100
_BATCH_BYTES = 2**16  # what is compared at a time fits into a core's cache

_ROW_BITS = np.uint64(11)  # of the texts of a batch: at most 2**16 / 100, and one more

_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)

_BETWEEN = np.zeros(2, np.uint8)
"""Parts texts: equal to no byte at which something begins."""


_IS_WORD = np.array([bytes([each]).isalnum() for each in range(256)])  # ASCII letters and digits
_IS_INNER = np.array([each <= 32 or 128 <= each < 192 for each in range(256)])
"""Bytes at which nothing begins: white space, and all but the first of a character."""


def repetition(text: pa.StringArray) -> pa.DoubleArray:
    """Share of a text that repeats what it said before, from 0 to 1; 0 under 100 bytes.

    Example:
        >>> looped = "I am here. " * 20
        >>> repetition(pa.array([looped, "Short. " * 3, None])).to_pylist()
        [0.946236559139785, 0.0, None]
    """
    values, offsets = string_bytes(text)
    sizes = np.diff(offsets).astype(np.int64)
    shares = np.zeros(len(text))
    rows = np.flatnonzero(sizes >= _MIN_BYTES)
    ends = np.cumsum(sizes[rows])
    first = 0
    while first < len(rows):
        start = int(ends[first] - sizes[rows[first]])
        last = max(first + 1, int(np.searchsorted(ends, start + _BATCH_BYTES, "right")))
        own = rows[first:last]
        parts = [values[offsets[row] : offsets[row + 1]] for row in own.tolist()]
        apart = chain.from_iterable(zip(parts, repeat(_BETWEEN)))
        shares[own] = _shares(np.concatenate([*apart]), sizes[own])
        first = last
    return pa.array(shares, mask=np.asarray(text.is_null(), np.bool_))


def _shares(values: Bytes, sizes: Int64s) -> Float64s:
    """The share of each text of a batch; `_BETWEEN` stands behind each."""
    ends = np.cumsum(sizes + len(_BETWEEN)) - len(_BETWEEN)
    places = np.flatnonzero(_begins(values))
    row = np.searchsorted(ends, places, "right")
    # Texts of 100 and 120 bytes end at [100 222], with 2 bytes behind each. Place 90 is of the
    # first one, and 16 bytes from there reach beyond its end.
    is_whole = places + _WINDOW <= ends[row]
    places, row = places[is_whole], row[is_whole]
    words = np.ndarray((len(values) - 7,), np.uint64, values, 0, (1,))  # 8 bytes from each byte on
    hashes = words[places] * _FACTORS[0]
    hashes ^= hashes >> np.uint64(32)
    hashes += words[places + 8]
    hashes *= _FACTORS[1]
    hashes ^= hashes >> np.uint64(29)
    keys = (row.astype(np.uint64) << (np.uint64(64) - _ROW_BITS)) | (hashes >> _ROW_BITS)
    keys.sort()
    rows_again = keys[1:][keys[1:] == keys[:-1]] >> (np.uint64(64) - _ROW_BITS)
    num_again = np.bincount(rows_again.astype(np.int64), minlength=len(sizes))
    num_places = np.bincount(row, minlength=len(sizes))
    return np.asarray(num_again / np.maximum(num_places, 1))


def _begins(values: Bytes) -> Bools:
    """Marks where a word, sign or character begins; of runs such as `aaaa` and `haha`, each byte.

    `Ha! 1.5` -> 1 0 1 0 1 1 1
    """
    is_word = _IS_WORD[values]
    begins = ~is_word
    begins[0] = True
    begins[1:] |= begins[:-1] | (values[1:] == values[:-1])
    begins[2:] |= values[2:] == values[:-2]
    begins &= ~_IS_INNER[values]
    return begins

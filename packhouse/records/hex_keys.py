"""Names of records and groups, 20 hex digits each, as bytes and numbers."""

from collections.abc import Iterable
from typing import NoReturn, TypeAlias

import numpy as np
import pyarrow as pa

from packhouse.errors import ContractError
from packhouse.records.lists import one_chunk, string_bytes
from packhouse.system.arrays import Bools, Bytes, Uint64s

NUM_DIGITS = 20

Keys: TypeAlias = pa.Array | pa.ChunkedArray | np.ndarray
"""Arrow or numpy strings."""


def as_arrow(keys: Keys) -> pa.Array | pa.ChunkedArray:
    """The keys as an Arrow array."""
    return pa.array(keys, pa.string()) if isinstance(keys, np.ndarray) else keys


def leading_bits(keys: Keys) -> Uint64s:
    """The first 16 digits of each key, as an integer.

    Raises:
        ContractError: a key is not 20 lower-case hex digits.

    Example:
        >>> leading_bits(pa.array(["000000000000000f0001"])).tolist()
        [15]
    """
    leading = np.ascontiguousarray(_parsed(keys)[:, :8])
    return leading.view(">u8").reshape(-1).astype(np.uint64)


def is_among(bits: Uint64s, some: Uint64s) -> Bools:
    """Which of `bits` are among some others, which ascend.

    Example:
        >>> is_among(np.array([3, 9], np.uint64), np.array([1, 3], np.uint64)).tolist()
        [True, False]
    """
    found = np.zeros(len(bits), np.bool_)
    if len(some):
        # Of their first 20 bits: it fits the cache, and spares most searches.
        begins = np.zeros(2**20, np.bool_)
        begins[some >> np.uint64(44)] = True
        likely = np.flatnonzero(begins[bits >> np.uint64(44)])
        places = np.minimum(np.searchsorted(some, bits[likely]), len(some) - 1)
        found[likely] = some[places] == bits[likely]
    return found


def key_bytes(keys: Keys) -> np.ndarray:
    """Each key as 10 bytes that compare as one value."""
    return _parsed(keys).view("S10").reshape(-1)


def sort_leading_bits(parts: Iterable[Keys], at_most: int) -> Uint64s:
    """`leading_bits` of all parts, ascending; memory: 8 bytes a key and one part.

    Args:
        parts: keys.
        at_most: how many there may be; memory is taken for those there are.

    Example:
        >>> sort_leading_bits([pa.array(["1" * 20, "0" * 20])], at_most=9).tolist()
        [0, 1229782938247303441]
    """
    bits = np.empty(at_most, np.uint64)
    end = 0
    for part in parts:
        bits[end : end + len(part)] = leading_bits(part)
        end += len(part)
    bits[:end].sort()
    return bits[:end]


def num_different(parts: Iterable[Keys], at_most: int) -> int:
    """Count different keys, by their leading bits; memory: 9 bytes a key and one part.

    Example:
        >>> num_different([pa.array(["0" * 20, "1" * 20]), pa.array(["0" * 20])], at_most=9)
        2
    """
    # [3 5 5 9]: two differ from the one before, and the first is one, too.
    bits = sort_leading_bits(parts, at_most)
    return int(np.count_nonzero(bits[1:] != bits[:-1])) + bool(len(bits))


def _parsed(keys: Keys) -> Bytes:
    """The 10 bytes that the digits of each key stand for, shape [num_keys, 10]."""
    digits = _digits(keys)
    try:
        parsed = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        parsed = b""
    if parsed.hex().encode() != digits:  # it reads capitals, and spaces between bytes, too
        _refuse_first(digits)
    return np.frombuffer(parsed, np.uint8).reshape(-1, NUM_DIGITS // 2)


def _digits(keys: Keys) -> bytes:
    """The keys' characters, one key behind another."""
    keys = as_arrow(keys)
    values, offsets = string_bytes(keys)
    if one_chunk(keys).null_count:
        _refuse(int(np.argmax(one_chunk(keys).is_null().to_numpy(zero_copy_only=False))), "null")
    sizes = np.diff(offsets)
    if (sizes != NUM_DIGITS).any():
        index = int(np.argmax(sizes != NUM_DIGITS))
        _refuse(index, str(keys[index]))
    return values[offsets[0] : offsets[-1]].tobytes()


def _refuse_first(digits: bytes) -> NoReturn:
    is_digit = np.isin(np.frombuffer(digits, np.uint8), list(b"0123456789abcdef"))
    index = int(np.argmin(is_digit)) // NUM_DIGITS
    key = digits[index * NUM_DIGITS : (index + 1) * NUM_DIGITS]
    _refuse(index, key.decode("ascii", "replace"))


def _refuse(index: int, key: str) -> NoReturn:
    raise ContractError(
        f"key {index:,} is '{key}', not {NUM_DIGITS} lower-case hex digits", index=index, key=key
    )

"""What orjson lets pass and no row may hold.

orjson reads about 240,000 rows a second but keeps the last of duplicate keys, turns integers over
64 bits into floats, and admits NUL and deep nesting. What it hides shows in cheap totals: the
colons left when its values are written again, the types it made, the depth of the containers.
Where a total disagrees, rows are looked at one by one with the standard library's parser, which
has hooks for all of it.
"""

import json
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from packhouse.sources.rows import Rows

__all__ = ["MAX_DEPTH", "are_suspect", "find_fault", "is_suspect", "strict_fault"]

MAX_DEPTH = 32
"""Containers within one another, the row itself included."""
MAX_FIELDS = 1000
"""Fields of one row."""


class _RefusedError(ValueError):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def strict_fault(text: str) -> tuple[str, str] | None:
    """What is wrong with a row by the strictest reading; None: nothing."""
    try:
        _STRICT.decode(text)
    except _RefusedError as refused:
        return refused.reason, refused.detail
    except RecursionError:
        return "depth", f"nested deeper than {MAX_DEPTH}"
    except ValueError as error:
        return "json", f"not JSON: {error}"
    return None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RefusedError("duplicate_key", f"the key {twice[:100]!r} occurs twice in one object")
    return found


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise _RefusedError("number", f"integer over 64 bits: {digits[:40]}")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _RefusedError("number", f"number too large for a float: {digits[:40]}")
    return value


def _no_constant(name: str) -> None:
    raise _RefusedError("number", f"{name} is not JSON")


_STRICT = json.JSONDecoder(
    object_pairs_hook=_no_duplicates,
    parse_int=_int64,
    parse_float=_finite,
    parse_constant=_no_constant,
)


def is_suspect(data: bytes, row: Any) -> bool:
    r"""Whether a value parsed from `data` may hide something; never False when it does.

    Colons: every key brings one, and a lost duplicate takes its own away. `\u003a` escapes would
    upset the count, so they are suspect by themselves.
    """
    if b"\\u00" in data and (b"\\u0000" in data or b"\\u003" in data):
        return True
    if _is_deep_or_large([row]):  # first, for orjson does not write what nests over 254 deep
        return True
    return data.count(b":") != orjson.dumps(row).count(b":")


def are_suspect(data: bytes, rows: Rows) -> bool:
    """Whether `is_suspect` may be true of a row, said of all rows at once."""
    raw = np.frombuffer(data, np.uint8)
    if _escapes_ascii(raw) and (b"\\u0000" in data or b"\\u003" in data):
        return True
    if not _are_flat(rows) and _is_deep_or_large(rows):
        return True
    return _num_colons(raw) != _num_colons(np.frombuffer(orjson.dumps(rows), np.uint8))


def _are_flat(rows: Rows) -> bool:
    """Whether all rows are objects of some fields without anything inside, or odd numbers."""
    is_plain = rows.are_objects and rows.value_types <= {str, int, bool, type(None)}
    return is_plain and max(map(len, rows.layouts), default=0) <= MAX_FIELDS


def _escapes_ascii(raw: npt.NDArray[np.uint8]) -> bool:
    r"""Whether `\u00` occurs."""
    places = np.flatnonzero(raw[:-3] == ord("\\"))
    places = places[raw[places + 1] == ord("u")]
    return bool(((raw[places + 2] == ord("0")) & (raw[places + 3] == ord("0"))).any())


def _num_colons(raw: npt.NDArray[np.uint8]) -> int:
    return int(np.count_nonzero(raw == ord(":")))


def _is_deep_or_large(rows: list[Any]) -> bool:
    """Whether containers nest too deep, an object is too wide, or an integer became a float."""
    level = rows
    for _ in range(MAX_DEPTH):
        types = set(map(type, level))
        if float in types and any(type(x) is float and not -9e18 < x < 9e18 for x in level):
            return True
        if dict not in types and list not in types:
            return False
        objects = level if types == {dict} else [x for x in level if type(x) is dict]
        if max(map(len, objects), default=0) > MAX_FIELDS:
            return True
        lists = [x for x in level if type(x) is list] if list in types else []
        level = [*chain.from_iterable(map(dict.values, objects)), *chain.from_iterable(lists)]
    return any(type(x) is dict or type(x) is list for x in level)


def find_fault(piece: bytes, row: Any) -> tuple[str, str] | None:
    """Reason and sentence for a row that orjson should not have let pass; None: it may."""
    if _depth_exceeds(row, MAX_DEPTH):
        return "depth", f"nested deeper than {MAX_DEPTH}"
    found = strict_fault(piece.decode("utf-8"))
    if found is not None:
        return found
    if _holds_nul(row):
        return "control", "a string holds the NUL character (\\u0000)"
    if isinstance(row, dict) and len(row) > MAX_FIELDS:
        return "too_many_fields", f"the row has {len(row):,} fields, over {MAX_FIELDS:,}"
    return None


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [x for x in level if type(x) is dict or type(x) is list]
        if not level:
            return False
        level = [v for x in level for v in (x.values() if type(x) is dict else x)]
    return True


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in key or _holds_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_holds_nul, value))

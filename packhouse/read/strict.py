"""What orjson lets pass and no row may hold.

orjson reads about 240,000 rows a second but keeps the last of duplicate keys, turns integers over
64 bits into floats, and admits NUL and deep nesting. What it hides shows in cheap totals: the
colons left when its values are written again, the types it made, the depth of the containers.
Where a total disagrees, rows are looked at one by one with the standard library's parser, which
has hooks for all of it.
"""

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from packhouse.system.plugins import BadRowError

if TYPE_CHECKING:
    from packhouse.read.records import Rows

MAX_DEPTH = 32
"""Containers within one another, the row itself included."""
MAX_FIELDS = 1000
"""Fields of one row."""
CUT_OFF = "; the file ends inside this row"


def parse_text(text: str) -> tuple[Any, tuple[str, str] | None]:
    """Parse JSON in the text of a field, as strictly as a row: its value, or why it is bad.

    Example:
        >>> parse_text('[1]'), parse_text('{"a": 1, "a": 2}')[1][0]
        (([1], None), 'duplicate_key')
    """
    data = text.encode("utf-8", "surrogatepass").replace(b"\n", b" ").replace(b"\r", b" ")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not data.strip():
            return None, ("json", "not JSON: no text")
        reason, detail = why_not_json(data, error)
        return None, (reason, detail + CUT_OFF if reason == "json" else detail)
    bad = hidden_fault(data, value)
    return (value, None) if bad is None else (None, bad)


def why_not_json(piece: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    """Return reason code and sentence for bytes that orjson refuses."""
    said = error.msg
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as bad:
        byte = piece[bad.start]
        return "encoding", f"byte 0x{byte:02x} at offset {bad.start} of the row is not UTF-8"
    if "surrogate" in said:
        return "encoding", f"a \\u escape is half of a surrogate pair ({said})"
    if "depth" in said:
        return "depth", f"nested deeper than {MAX_DEPTH}"
    if "control character" in said or "\0" in text:
        return "control", f"a raw control character inside a string ({said})"
    reason, detail = strict_fault(text) or ("json", "")
    return (reason, detail) if reason != "json" else ("json", f"not JSON: {said}")


def strict_fault(text: str) -> tuple[str, str] | None:
    """Return what is wrong with a row by the strictest reading, None if nothing is."""
    try:
        _STRICT.decode(text)
    except BadRowError as refused:
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
        raise BadRowError("duplicate_key", f"the key {twice[:100]!r} occurs twice in one object")
    return found


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise BadRowError("number", f"integer over 64 bits: {digits[:40]}")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise BadRowError("number", f"number too large for a float: {digits[:40]}")
    return value


def _no_constant(name: str) -> None:
    raise BadRowError("number", f"{name} is not JSON")


_STRICT = json.JSONDecoder(
    object_pairs_hook=_no_duplicates,
    parse_int=_int64,
    parse_float=_finite,
    parse_constant=_no_constant,
)


_HARMLESS = bytes(set(range(256)) - set(b"0123456789{["))
"""Bytes that can neither nest a value nor make a number large."""


def hidden_fault(data: bytes, value: Any) -> tuple[str, str] | None:
    r"""Return reason and sentence if orjson should not have let `data` pass as `value`, else None.

    Example:
        >>> data = b'{"a": 1, "a": 2}'
        >>> hidden_fault(data, orjson.loads(data))
        ('duplicate_key', "the key 'a' occurs twice in one object")
    """
    return find_fault(data, value) if is_suspect(data, value) else None


def is_suspect(data: bytes, row: Any) -> bool:
    r"""Return True if a value parsed from `data` may hide something; never False when it does.

    Most texts are small, so counts of bytes settle most of them: it takes 33 open brackets to nest
    too deep, 19 digits for an integer over 64 bits, 1,001 colons for too many fields. And a lost
    duplicate takes its colon away: `{"a": 1, "a": 2}` has two, written again as `{"a":2}` one.
    `\u003a` escapes would upset that count, so they are suspect by themselves.
    """
    if b"\\u00" in data and (b"\\u0000" in data or b"\\u003" in data):
        return True
    num_colons = data.count(b":")
    left = data.translate(None, _HARMLESS)
    num_open = left.count(b"{") + left.count(b"[")
    is_small = num_open <= MAX_DEPTH and len(left) - num_open < 19 and num_colons <= MAX_FIELDS
    if not is_small and _is_deep_or_large([row]):
        return True  # before the next line, for orjson does not write what nests over 254 deep
    return num_colons != orjson.dumps(row).count(b":")


def are_suspect(data: bytes, rows: "Rows") -> bool:
    """Return True if `is_suspect` may be true of a row: the same counts, of all rows at once."""
    raw = np.frombuffer(data, np.uint8)
    places = np.flatnonzero(raw[:-3] == ord("\\"))
    for offset, letter in enumerate(b"u00", start=1):
        places = places[raw[places + offset] == letter]
    if len(places) and (b"\\u0000" in data or b"\\u003" in data):
        return True
    is_plain = rows.are_objects and rows.value_types <= {str, int, bool, type(None)}
    is_flat = is_plain and max(map(len, rows.layouts), default=0) <= MAX_FIELDS
    if not is_flat and _is_deep_or_large(rows):
        return True
    written = np.frombuffer(orjson.dumps(rows), np.uint8)
    return bool(np.count_nonzero(raw == ord(":")) != np.count_nonzero(written == ord(":")))


def _is_deep_or_large(rows: list[Any]) -> bool:
    """Return True if containers nest too deep, an object is too wide, or an integer is a float."""
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
    """Return reason and sentence for a row that orjson should have refused, else None."""
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

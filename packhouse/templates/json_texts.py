r"""JSON of whole columns, parsed and written in bulk: as `json` would, at three times its speed.

orjson parses and writes; what it would do otherwise than `json` is found in the bytes, and left to
`json`. It writes without spaces, and these are put in behind the commas and colons that stand
outside of strings:

    {"q":"a, \"b\"","n":[1,2]}     quotes count but those that a backslash escapes
    {"q": "a, \"b\"", "n": [1, 2]}
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.arrays import Bools, Bytes, Int64s
from packhouse.templates.provenance import JsonForm, encoder

_BLOCK_ITEMS = 1024  # some 400 KB: what is made of them stays in the cache
_PLAIN_FORMS = (JsonForm(), JsonForm(ensure_ascii=True))
_HUGE_DIGITS = 19  # orjson makes floats of integers of over 64 bits
_LONG_DIGITS = 16  # floats as long as this have an exponent, in `json` at least


def parse_texts(texts: list[str]) -> list[Any]:
    """What `json.loads` makes of each text; orjson where it makes the same.

    Example:
        >>> parse_texts(['{"a": 1}', "[12345678901234567890]"])
        [{'a': 1}, [12345678901234567890]]
    """
    try:
        whole = f"[{','.join(texts)}]".encode()
        if not _runs(_digits(np.frombuffer(whole, np.uint8)), _HUGE_DIGITS).any():
            parsed = orjson.loads(whole)
            if len(parsed) == len(texts):
                return list(parsed)
    except ValueError:  # NaN, say, or half a surrogate pair
        pass
    return [json.loads(text) for text in texts]


def json_texts(values: Iterable[object], form: JsonForm) -> pa.Array:
    """Values as JSON of a form.

    Example:
        >>> json_texts([{"a": [1, 1e20]}, {}], JsonForm()).to_pylist()
        ['{"a": [1, 1e+20]}', '{}']
    """
    items = list(values)
    parts = (items[first : first + _BLOCK_ITEMS] for first in range(0, len(items), _BLOCK_ITEMS))
    blocks = [_write_plain(part, form) for part in parts]
    return pa.concat_arrays(blocks) if blocks else pa.array([], pa.string())


def _write(items: Sequence[object], form: JsonForm) -> pa.Array:
    return pa.array(list(map(encoder(form), items)), pa.string())


def _write_plain(items: Sequence[object], form: JsonForm) -> pa.Array:
    if form not in _PLAIN_FORMS:
        return _write(items, form)
    try:
        compact = [orjson.dumps(item) for item in items]
    except orjson.JSONEncodeError:  # over 64 bits, half a surrogate pair, nested over 254 deep
        return _write(items, form)
    ends = np.cumsum([len(text) for text in compact])
    data = np.frombuffer(b"".join(compact), np.uint8)
    texts = _spaced(data, ends)
    odd = _items_at(_odd_places(data, form), ends)
    nulls = _items_at(np.flatnonzero(_holds(data, b"null")), ends)  # what orjson writes for NaN
    odd += [number for number in nulls if orjson.loads(compact[number]) != items[number]]
    if not odd:
        return texts
    is_odd = np.zeros(len(items), np.bool_)
    is_odd[odd] = True
    own = _write([items[number] for number in np.flatnonzero(is_odd).tolist()], form)
    return pc.replace_with_mask(texts, pa.array(is_odd), own)


def _opens_or_closes(data: Bytes) -> Bools:
    r"""Which bytes of JSON are quotes that open or close a string.

    Example:
        >>> data = np.frombuffer(rb'["a\"", "\\"]', np.uint8)
        >>> np.flatnonzero(_opens_or_closes(data)).tolist()
        [1, 5, 8, 11]
    """
    quotes: Bools = data == ord('"')
    slashes = np.flatnonzero(data == ord("\\"))
    if len(slashes):
        # Of a run of backslashes the 1st, 3rd, ... escape what follows: \\" ends a string.
        begins = np.append(True, np.diff(slashes) > 1)
        run = np.maximum.accumulate(np.where(begins, slashes, 0))
        quotes[slashes[(slashes - run) % 2 == 0] + 1] = False
    return quotes


def _spaced(data: Bytes, ends: Int64s) -> pa.Array:
    """Texts that end at `ends`, with a space behind each comma and colon outside of strings."""
    is_inside = np.bitwise_xor.accumulate(_opens_or_closes(data).view(np.uint8))
    is_parting = (data == ord(",")) | (data == ord(":"))
    places = np.flatnonzero(is_parting & (is_inside == 0))
    spaced = np.insert(data, places + 1, ord(" "))
    offsets = np.append(0, ends + np.searchsorted(places, ends))
    assert offsets[-1] < 2**31, "parts are of bounded size"
    return pa.StringArray.from_buffers(
        len(ends), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(spaced)
    )


def _odd_places(data: Bytes, form: JsonForm) -> Int64s:
    """Where orjson wrote what `json` may write in another way; none in most texts."""
    digits = _digits(data)
    odd = [
        digits[:-1] & (data[1:] == ord("e")),  # 1e-7, where `json` writes 1e-07
        _runs(digits, _LONG_DIGITS),  # 10000000000000000.0, where it writes 1e+16
        (data[:-4] == ord(".")) & _runs(data == ord("0"), 4)[1:],  # 0.00001: 1e-05
    ]
    if form.ensure_ascii:
        odd.append(data > ord("~"))
    return np.concatenate([np.flatnonzero(flags) for flags in odd])


def _items_at(places: Int64s, ends: Int64s) -> list[int]:
    """Numbers of the items that hold the bytes."""
    return np.unique(np.searchsorted(ends, places, side="right")).tolist() if len(places) else []


def _holds(data: Bytes, text: bytes) -> Bools:
    """Where a text begins."""
    size = max(len(data) - len(text) + 1, 0)
    found: Bools = data[:size] == text[0]
    for at in range(1, len(text)):
        found &= data[at : at + size] == text[at]
    return found


def _digits(data: Bytes) -> Bools:
    return np.asarray((data - ord("0")) < 10)  # less than "0" wraps around


def _runs(flags: Bools, length: int) -> Bools:
    """Where `length` flags and more follow one another; some 0.1 ms for a megabyte."""
    known = 1
    while known < length:
        step = min(known, length - known)
        flags = flags[: max(len(flags) - step, 0)] & flags[step:]
        known += step
    return flags

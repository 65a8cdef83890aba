"""What templates ask of texts, answered for whole columns.

A trace takes down questions (`'</think>' in content`) and the answers that one row gave (see
tracing.py); here the other rows are asked the same. Some 5 ns a text and question.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Check", "answers"]


class Check(NamedTuple):
    """One question about a text and the answer it got."""

    kind: str
    """`contains`, `equals`, `startswith`, `endswith`, `filled`, `length`, or `strip`, `lstrip`,
    `rstrip`: whether that takes anything off."""
    argument: str | None
    answer: bool | int


def answers(check: Check, texts: pa.Array) -> npt.NDArray[Any]:
    """Each text's answer to the question.

    Example:
        >>> answers(Check("contains", "a", True), pa.array(["ab", "b"])).tolist()
        [True, False]
    """
    kind, argument = check.kind, check.argument
    if kind == "filled":
        return np.asarray(pc.binary_length(texts).to_numpy() > 0)
    if kind == "length":
        return np.asarray(pc.utf8_length(texts).to_numpy())
    if kind in ("strip", "lstrip", "rstrip"):
        return _strippable(texts, argument, left=kind != "rstrip", right=kind != "lstrip")
    asked: dict[str, Callable[[], pa.Array]] = {
        "contains": lambda: pc.match_substring_regex(texts, _literally(argument or "")),
        "equals": lambda: pc.equal(texts, argument),
        "startswith": lambda: pc.starts_with(texts, argument),
        "endswith": lambda: pc.ends_with(texts, argument),
    }
    return np.asarray(asked[kind]().to_numpy(zero_copy_only=False))


def _literally(argument: str) -> str:
    """A pattern of RE2 for just this text: ten times as fast as Arrow's own search for a text."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in argument)


def _strippable(
    texts: pa.Array, chars: str | None, *, left: bool, right: bool
) -> npt.NDArray[np.bool_]:
    """Whether stripping changes a text: does it begin or end with one of the characters?"""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]
    begins, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    found = np.zeros(len(texts), dtype=bool)
    data = texts.buffers()[2]
    if data is None or not len(data):
        return found
    text = np.frombuffer(data, np.uint8)
    for size, codes in _codes_by_size(chars if chars is not None else _WHITESPACE):
        long_enough = ends - begins >= size
        if left:
            found |= long_enough & np.isin(_code_at(text, begins, size), codes)
        if right:
            found |= long_enough & np.isin(_code_at(text, ends - size, size), codes)
    return found


def _codes_by_size(chars: str) -> list[tuple[int, list[int]]]:
    """UTF-8 of the characters as big-endian numbers, by number of bytes."""
    encoded = [char.encode() for char in chars]
    sizes = sorted({len(data) for data in encoded})
    return [(n, [int.from_bytes(d, "big") for d in encoded if len(d) == n]) for n in sizes]


def _code_at(
    text: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.int64]:
    code = np.zeros(len(positions), dtype=np.int64)
    for step in range(size):
        code = code << 8 | text[np.clip(positions + step, 0, len(text) - 1)]
    return code


# Everything that str.strip() takes off.
_WHITESPACE = "".join(chr(point) for point in range(0x3001) if chr(point).isspace())

"""What templates ask of texts, answered for whole columns.

A trace takes down questions (`'</think>' in content`) and the answers that one row gave (see
tracing.py); here the other rows are asked the same. Some 5 ns a text and question.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["AnyOf", "Check", "answers"]


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


class AnyOf:
    """Which texts hold one of many literals, such as the 771 control tokens of Mistral.

    RE2 takes 2.4 ns a byte for these. It is given only texts in which two bytes begin a literal,
    which takes 0.3 ns a byte to know.

    Example:
        >>> AnyOf(["<s>", "[INST]"]).found_in(pa.array(["<s", "a[INST]", "[]"])).tolist()
        [False, True, False]
    """

    def __init__(self, literals: Iterable[str]) -> None:
        wanted = sorted(literals, key=lambda text: (-len(text), text))
        self._pattern = "|".join(map(_literally, wanted))
        encoded = [text.encode() for text in wanted]
        self._seconds = {
            first: [own[1] for own in encoded if own[:1] == bytes([first]) and len(own) > 1]
            for first in {own[0] for own in encoded}
        }
        self._are_long = all(len(own) > 1 for own in encoded)

    def found_in(self, texts: pa.Array) -> npt.NDArray[np.bool_]:
        """Of each text (type string) whether it holds one."""
        found = np.zeros(len(texts), np.bool_)
        if not self._pattern or not len(texts):
            return found
        near = self._begun_in(texts) if self._are_long else np.arange(len(texts))
        some = pc.match_substring_regex(texts.take(pa.array(near)), self._pattern)
        found[near] = some.to_numpy(zero_copy_only=False)
        return found

    def _begun_in(self, texts: pa.Array) -> npt.NDArray[np.int64]:
        """Numbers of the texts that may hold one, ascending."""
        offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]
        data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
        begun = [np.zeros(0, np.int64)]
        for first, seconds in self._seconds.items():
            places = np.flatnonzero(data[:-1] == first)
            begun.append(places[np.isin(data[places + 1], seconds)])
        places = np.concatenate(begun) + offsets[0]
        return np.unique(np.searchsorted(offsets, places, side="right") - 1)


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

"""The bytes of all tokens as one table, and whether they are what a text holds.

Eight bytes of table and text are loaded as one number and compared at once, some ten thousand
tokens at a time, so that all that is at hand fits the processor's second cache: 11 ns a token, 18
on a million at once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["TokenTexts"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

_WORD = 8
_BLOCK = 2**15  # tokens
# The first n bytes of a little-endian word, for n = 0 .. 8.
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTexts:
    """Bytes of every token of a vocabulary."""

    data: npt.NDArray[np.uint8]
    """Bytes of all tokens behind one another, and eight zeros."""

    begins: Int64s
    """Where each token's begin in `data`, shape [vocab_size]."""

    widths: Int32s
    """Bytes of each token, shape [vocab_size]."""

    is_spaced: npt.NDArray[np.bool_]
    """Tokens that begin with a space, shape [vocab_size]."""

    words: tuple[tuple[Words, Words], ...]
    """First and second word of every token, each with the mask of the bytes that are its own."""

    @staticmethod
    def of(tokens: pa.BinaryArray) -> "TokenTexts":
        """Make the table.

        Example:
            >>> table = TokenTexts.of(pa.array([b"a", b" to", b""]))
            >>> table.begins.tolist(), table.widths.tolist(), table.is_spaced.tolist()
            ([0, 1, 4], [1, 3, 0], [False, True, False])
        """
        joined = pa.concat_arrays([tokens])  # from offset 0
        edges = np.frombuffer(joined.buffers()[1], np.int32, len(joined) + 1)
        held = joined.buffers()[2]
        own = np.zeros(0, np.uint8) if held is None else np.frombuffer(held, np.uint8)
        data = _padded(own[edges[0] : edges[-1]])
        begins = (edges[:-1] - edges[0]).astype(np.int64)
        widths = np.diff(edges)
        return TokenTexts(
            data=data,
            begins=begins,
            widths=widths,
            is_spaced=(data[begins] == ord(" ")) & (widths > 0),
            words=tuple(_nth_words(data, begins, widths, number) for number in range(2)),
        )

    def edges(self, ids: Int32s) -> Int64s:
        """Where each token begins when all are joined, and their end; shape [num_tokens + 1].

        Example:
            >>> TokenTexts.of(pa.array([b"a", b" to"])).edges(np.array([1, 0, 1])).tolist()
            [0, 3, 4, 7]
        """
        edges = np.zeros(len(ids) + 1, np.int64)
        for start in range(0, len(ids), _BLOCK):
            own = edges[start + 1 : start + 1 + _BLOCK]
            np.cumsum(self.widths.take(ids[start : start + _BLOCK]), out=own)
            own += edges[start]
        return edges

    def differing(
        self,
        ids: Int32s,
        places: Int64s,
        text: npt.NDArray[np.uint8],
        shortened: Int64s | None = None,
    ) -> Int64s:
        """Find the tokens that are not what the text holds at their place.

        Args:
            ids: tokens.
            places: where in `text` each should stand, never falling, its last byte inside.
            text: bytes.
            shortened: numbers of tokens that should stand there without their first byte.

        Returns:
            Their numbers, not in order; a number may come twice.

        Example:
            >>> table = TokenTexts.of(pa.array([b"a", b"to be or not"]))
            >>> text = np.frombuffer(b"ato be or but", np.uint8)
            >>> table.differing(np.array([0, 1]), np.array([0, 1]), text).tolist()
            [1]
        """
        found = [np.zeros(0, np.int64)]
        for start in range(0, len(ids), _BLOCK):
            block = slice(start, start + _BLOCK)
            found.append(start + self._differing_block(ids[block], places[block], text))
        differing = np.concatenate(found)
        if shortened is None or not len(shortened):
            return differing
        own = ids[shortened]
        begins, widths = self.begins[own] + 1, self.widths[own] - 1
        parts = self._differing_parts(begins, widths, _words(_padded(text)), places[shortened])
        whole = differing[~np.isin(differing, shortened)]
        return np.concatenate([whole, shortened[parts]])

    def _differing_block(self, ids: Int32s, places: Int64s, text: npt.NDArray[np.uint8]) -> Int64s:
        end = places[-1] + self.widths[ids[-1]]
        theirs = _words(_padded(text[places[0] : end]))
        places = places - places[0]
        ids = ids.astype(np.intp)  # once, and not at every look into a table
        numbers = np.arange(len(ids))
        found = []
        for width, (words, masks) in zip((_WORD, 2 * _WORD), self.words, strict=True):
            apart = theirs[places]
            apart ^= words.take(ids)
            apart &= masks.take(ids)
            found.append(numbers[np.flatnonzero(apart)])
            longer = np.flatnonzero(self.widths.take(ids) > width)
            ids, numbers, places = ids[longer], numbers[longer], places[longer] + _WORD
        done = _WORD * len(self.words)
        begins, widths = self.begins[ids] + done, self.widths[ids] - done
        found.append(numbers[self._differing_parts(begins, widths, theirs, places)])
        return np.concatenate(found)

    def _differing_parts(
        self, begins: Int64s, widths: Int32s, theirs: Words, places: Int64s
    ) -> Int64s:
        """The same for bytes `begins` to `begins + widths` of `data`, whatever tokens they are."""
        ours = _words(self.data)
        numbers = np.arange(len(places))
        found = [np.zeros(0, np.int64)]
        while len(numbers):
            apart = ours[begins] ^ theirs[places]
            apart &= _MASKS[np.minimum(widths, _WORD)]
            found.append(numbers[np.flatnonzero(apart)])
            longer = np.flatnonzero(widths > _WORD)
            numbers, widths = numbers[longer], widths[longer] - _WORD
            begins, places = begins[longer] + _WORD, places[longer] + _WORD
        return np.concatenate(found)


def _nth_words(
    data: npt.NDArray[np.uint8], begins: Int64s, widths: Int32s, number: int
) -> tuple[Words, Words]:
    """Bytes `8 * number` to `8 * number + 8` of every token, and the mask of its own of these."""
    places = np.minimum(begins + number * _WORD, len(data) - _WORD)
    own = np.clip(widths - number * _WORD, 0, _WORD)
    return _words(data)[places], _MASKS[own]


def _padded(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.concatenate([data, np.zeros(_WORD, np.uint8)])


def _words(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The eight bytes from every byte on, as numbers; nothing is copied."""
    return np.ndarray((len(data) - _WORD + 1,), np.dtype("<u8"), data, strides=(1,))

"""Spaces that SentencePiece puts before words and that the text does not hold.

Newer files do so before a whole text, older ones also behind every added token, some of them
only where there is no space already. None says so in the ids; how long a row's tokens are
compared to its text, and what the text holds at their place, does.
"""

import numpy as np

from packhouse.arrays import Bools, Bytes, Int64s

_SPACE = ord(" ")
_MAX_RANK = 1000  # segments of one row that are looked at one by one


def dummy_prefixes(
    is_spaced: Bools,
    edges: Int64s,
    offsets: Int64s,
    text: Bytes,
    bases: Int64s,
    is_added: Bools,
) -> Int64s:
    """Find tokens whose first byte is a space that is not in the text.

    A proposal: whether the bytes without these spaces are the text is for the caller to see.

    Args:
        is_spaced: which tokens begin with a space, shape [num_tokens].
        edges: where each token begins in the bytes of all, shape [num_tokens + 1].
        offsets: where each row's tokens begin, shape [num_rows + 1].
        text: bytes of all rows' texts.
        bases: where each row's text begins, shape [num_rows + 1].
        is_added: which tokens are added tokens, shape [num_tokens].

    Returns:
        Numbers of these tokens, rising.

    Example:
        >>> text = b"a<s>b"  # one row of three tokens: " a", "<s>", " b"
        >>> is_added = np.array([False, True, False])
        >>> dummy_prefixes(~is_added, np.array([0, 2, 5, 7]), np.array([0, 3]),
        ...                np.frombuffer(text, np.uint8), np.array([0, 5]), is_added).tolist()
        [0, 2]
    """
    begins_segment = np.zeros(len(is_added), np.bool_)
    begins_segment[offsets[:-1][np.diff(offsets) > 0]] = True
    begins_segment[1:] |= is_added[:-1]
    spaced = np.flatnonzero(begins_segment & ~is_added & is_spaced)
    rows = np.searchsorted(offsets, spaced, "right") - 1
    # Bytes that a row's tokens have too many: as many as it has such spaces, none is in the text;
    # fewer, some are; others (below 0, say) are no spaces' doing.
    excess = np.diff(edges[offsets]) - np.diff(bases)
    num_spaced = np.bincount(rows, minlength=len(excess))
    is_dummy = (excess == num_spaced)[rows]
    mixed = np.flatnonzero(((excess > 0) & (excess < num_spaced))[rows])
    places = bases[rows] + edges[spaced] - edges[offsets[rows]]
    is_dummy[mixed] |= _where_text_has_none(rows[mixed], places[mixed], text, bases)
    dummies: Int64s = spaced[is_dummy]
    return dummies


def _where_text_has_none(rows: Int64s, places: Int64s, text: Bytes, bases: Int64s) -> Bools:
    """Decide space by space, since each one that is not in the text moves the places behind it.

    Goes by rank: the first of every row, then the second of every row, ...
    """
    starts = np.searchsorted(rows, rows)
    ranks = np.arange(len(rows)) - starts
    by_rank = np.argsort(ranks, kind="stable")
    borders = np.searchsorted(ranks[by_rank], np.arange(min(ranks.max(initial=-1), _MAX_RANK) + 2))
    moved = np.zeros(len(bases), np.int64)
    is_dummy = np.zeros(len(rows), np.bool_)
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        chosen = by_rank[begin:end]
        place = places[chosen] - moved[rows[chosen]]
        holds_space = (place < bases[rows[chosen] + 1]) & (
            np.take(text, place, mode="clip") == _SPACE
        )
        is_dummy[chosen] = ~holds_space
        moved[rows[chosen]] += ~holds_space
    return is_dummy

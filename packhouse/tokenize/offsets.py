"""Find the bytes of each token in the text, and the tokens that are trained.

Each id has known bytes. They are joined and compared with the text, all rows at once. If they are
equal, the round trip is *proven*, and widths add up to exact offsets (5.4 M tokens in 0.1 s;
offsets of HF encodings take 15 s). If they differ (a normaliser changes the text, WordPiece, lossy
Unigram), only HF knows the offsets; see `packhouse.tokenize.text_to_tokens`.

A token is trained if and only if it *begins* inside a trained span: the model predicts a token from
the text before it, so a token that begins in the prompt belongs to the prompt. This takes two
binary searches per span and no work per token.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from packhouse.records.arrays import Bools, Bytes, Int32s, Int64s, list_items, string_bytes
from packhouse.tokenize.encoders import Pipeline

_SPACE = ord(" ")
# Segments of a row that are examined separately: each rank is a pass over all rows. A row with more
# is not exact, so HF encodes it.
_MAX_RANK = 1000
_BLOCK = 512  # spans


def flat_texts(texts: pa.ChunkedArray | pa.StringArray) -> tuple[Bytes, Int64s]:
    r"""Return the bytes of all texts (not copied), and the offset of each text in them.

    Example:
        >>> data, bases = flat_texts(pa.array(["a", "", "\u00e9"]))
        >>> data.tobytes(), bases.tolist()
        (b'a\xc3\xa9', [0, 1, 1, 3])
    """
    data, bases = string_bytes(texts)
    return data, bases.astype(np.int64)


def dummy_prefixes(
    is_spaced: Bools, edges: Int64s, offsets: Int64s, text: Bytes, bases: Int64s, is_added: Bools
) -> Int64s:
    """Find tokens whose first byte is a space that SentencePiece added and the text lacks.

    Newer tokenizers add one before the whole text; older ones also after every added token, some
    only if there is no space already. The ids do not show this, but the length of a row's tokens
    compared with its text does, together with the bytes at their place. The result is a proposal:
    the caller has to compare the bytes without these spaces with the text.

    Args:
        is_spaced: True for tokens that begin with a space, shape [num_tokens].
        edges: first byte of each token in the joined bytes of all, shape [num_tokens + 1].
        offsets: index of each row's first token, shape [num_rows + 1].
        text: bytes of all rows' texts.
        bases: first byte of each row's text, shape [num_rows + 1].
        is_added: True for added tokens, shape [num_tokens].

    Returns:
        Indices of these tokens, ascending.

    Example:
        >>> text = b"a<s>b"  # one row of three tokens: " a", "<s>", " b"
        >>> is_added = np.array([False, True, False])
        >>> dummy_prefixes(~is_added, np.array([0, 2, 5, 7]), np.array([0, 3]),
        ...                np.frombuffer(text, np.uint8), np.array([0, 5]), is_added).tolist()
        [0, 2]
    """
    # Rows that are not proven go to HF, which made Llama 2 and Phi 3, whose files add a space after
    # every added token, forty times slower.
    begins_segment = np.zeros(len(is_added), np.bool_)
    begins_segment[offsets[:-1][np.diff(offsets) > 0]] = True
    begins_segment[1:] |= is_added[:-1]
    spaced = np.flatnonzero(begins_segment & ~is_added & is_spaced)
    rows = np.searchsorted(offsets, spaced, "right") - 1
    # Excess bytes of a row's tokens over its text. If there are as many as such spaces, none of the
    # spaces is in the text; if fewer, some are. Other numbers (such as below 0) have other causes.
    excess = np.diff(edges[offsets]) - np.diff(bases)
    num_spaced = np.bincount(rows, minlength=len(excess))
    is_dummy = (excess == num_spaced)[rows]
    mixed = np.flatnonzero(((excess > 0) & (excess < num_spaced))[rows])
    places = bases[rows] + edges[spaced] - edges[offsets[rows]]
    is_dummy[mixed] |= _where_text_has_none(rows[mixed], places[mixed], text, bases)
    return np.asarray(spaced[is_dummy])


def _where_text_has_none(rows: Int64s, places: Int64s, text: Bytes, bases: Int64s) -> Bools:
    """Decide for each space in turn, since each one missing from the text shifts those after it."""
    # First the first space of every row, then the second of every row, and so on.
    # Rows [0 0 1] have ranks [0 1 0], in the order [0 2 1]: [0, 2) of it first, then [2, 3).
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


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRow:
    """Ids of one row, and the bytes of its text that each of them covers."""

    ids: Int32s
    starts: Int64s
    """First byte of each token; never decreases."""

    ends: Int64s
    """Byte after each token."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRows:
    """Texts of rows and their ids, both concatenated, and the bytes that each id covers."""

    text: Bytes
    """Bytes of the texts of all rows."""

    bases: Int64s
    """First byte of each row's text, shape [num_rows + 1]."""

    ids: Int32s
    """Ids of all rows, shape [num_tokens]."""

    offsets: Int64s
    """Index of each row's first id, shape [num_rows + 1]."""

    starts: Int64s
    """First byte of each token, counted over the texts of all rows; never decreases."""

    ends: Int64s
    """Byte after each token; a token may be zero bytes wide."""

    is_exact: Bools
    """Rows whose tokens' bytes, joined, are the text. Shape [num_rows]."""

    def text_of(self, row: int) -> str:
        """Return the text of one row."""
        return self.text[self.bases[row] : self.bases[row + 1]].tobytes().decode()

    def ids_of(self, row: int) -> Int32s:
        """Return the ids of one row."""
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def with_rows(self, rows: dict[int, EncodedRow], pipeline: Pipeline) -> "EncodedRows":
        """Replace some rows, given by index in ascending order."""
        if not rows:
            return self
        ids, starts, ends = [], [], []
        lengths = np.diff(self.offsets)
        behind = 0
        for row, new in rows.items():
            kept = slice(behind, self.offsets[row])
            ids += [self.ids[kept], new.ids]
            starts += [self.starts[kept], new.starts + self.bases[row]]
            ends += [self.ends[kept], new.ends + self.bases[row]]
            lengths[row] = len(new.ids)
            behind = self.offsets[row + 1]
        numbers = list(rows)
        is_exact = self.is_exact.copy()
        is_exact[numbers] = locate_by_widths(
            np.concatenate([self.text[self.bases[row] : self.bases[row + 1]] for row in numbers]),
            np.append(0, np.cumsum(np.diff(self.bases)[numbers])),
            np.concatenate([new.ids for new in rows.values()]),
            np.append(0, np.cumsum(lengths[numbers])),
            pipeline,
        ).is_exact
        return replace(
            self,
            ids=np.concatenate([*ids, self.ids[behind:]]),
            offsets=np.append(0, np.cumsum(lengths)),
            starts=np.concatenate([*starts, self.starts[behind:]]),
            ends=np.concatenate([*ends, self.ends[behind:]]),
            is_exact=is_exact,
        )


def locate_by_widths(
    text: Bytes,
    bases: Int64s,
    ids: Int32s,
    offsets: Int64s,
    pipeline: Pipeline,
    *,
    compares: bool = True,
) -> EncodedRows:
    """Find the bytes of each token by adding up widths.

    Args:
        text: bytes of the texts that were encoded.
        bases: first byte of each text, shape [num_texts + 1].
        ids: their concatenated ids.
        offsets: index of each text's first id, shape [num_texts + 1].
        pipeline: has the bytes of each id.
        compares: if false, the caller knows that rows whose widths add up are exact, and their
            bytes are not compared, which is three quarters of the time.

    Returns:
        The rows. In those that are not exact, the bytes of tokens are unusable.
    """
    tokens, row_lengths, num_ids = pipeline.token_texts, np.diff(bases), np.diff(offsets)
    if tokens is None:
        nowhere = np.repeat(bases[:-1], num_ids)
        is_empty = (row_lengths == 0) & (num_ids == 0)
        return EncodedRows(text, bases, ids, offsets, nowhere, nowhere, is_empty)
    edges = tokens.edges(ids)
    # Tokens of [2 3 | 4] bytes have edges [0 2 5 9], and [0 5 9] at the rows' offsets [0 2 3]. So
    # rows of 5 and 4 bytes may be exact; their bytes are compared below.
    is_exact = np.diff(edges[offsets]) == row_lengths
    shortened = np.zeros(0, np.int64)
    if not is_exact.all() and pipeline.has_word_marks:
        is_spaced, is_added = tokens.is_spaced[ids], pipeline.is_added[ids]
        shortened = dummy_prefixes(is_spaced, edges, offsets, text, bases, is_added)
        is_shortened = np.zeros(len(ids), np.int64)
        is_shortened[shortened] = 1
        edges[1:] -= np.cumsum(is_shortened)
        is_exact = np.diff(edges[offsets]) == row_lengths
    if is_exact.all():
        starts, ends = edges[:-1], edges[1:]
        differing = tokens.differing(ids, text, shortened) if compares else shortened[:0]
    else:
        shift = np.repeat(bases[:-1] - edges[offsets[:-1]], num_ids)
        starts, ends = edges[:-1] + shift, edges[1:] + shift
        is_known = np.repeat(is_exact, num_ids)
        known = np.flatnonzero(is_known)
        shortened = np.searchsorted(known, shortened[is_known[shortened]])
        # Exact rows [1 1 0 1] are rows [0, 2) and [3, 4): their texts are two pieces.
        runs = np.flatnonzero(np.diff(is_exact, prepend=False, append=False)).reshape(-1, 2)
        own = [text[:0], *(text[start:end] for start, end in bases[runs].tolist())]
        differing = known[tokens.differing(ids[known], np.concatenate(own), shortened)]
    # Equal lengths do not prove equal bytes: a normaliser may turn `A` into `a`.
    is_exact[np.searchsorted(offsets, differing, "right") - 1] = False
    return EncodedRows(text, bases, ids, offsets, starts, ends, is_exact)


def byte_ranges(text: str, character_ranges: list[tuple[int, int]]) -> tuple[Int64s, Int64s]:
    """Turn HF's character ranges into byte ranges whose starts never decrease.

    Example:
        >>> starts, ends = byte_ranges("\u00e9a", [(0, 1), (0, 1), (1, 2)])
        >>> starts.tolist(), ends.tolist()
        ([0, 0, 2], [2, 2, 3])
    """
    ranges = np.array(character_ranges, np.int64).reshape(-1, 2)
    if not text.isascii():
        data = np.frombuffer(text.encode(), np.uint8)
        # First bytes of characters: "\u00e9a" is C3 A9 61, so characters begin at bytes 0 and 2.
        edges = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))
        ranges = edges[ranges]
    # The binary searches of `_tokens_before` need ascending starts.
    starts = np.maximum.accumulate(ranges[:, 0])
    return starts, np.maximum(ranges[:, 1], starts)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Byte spans of all rows, counted over the texts of all rows."""

    starts: Int64s
    """First byte of each span."""

    ends: Int64s
    """Byte after each span."""

    offsets: Int64s
    """Index of each row's first span, shape [num_rows + 1]."""

    @staticmethod
    def of(column: pa.ListArray, bases: Int64s) -> "Spans":
        """Flatten a column of spans that are relative to the start of each text."""
        values, offsets = list_items(column)
        shift = np.repeat(bases[:-1], np.diff(offsets))
        starts = values.field("start").to_numpy() + shift
        ends = values.field("end").to_numpy() + shift
        assert (starts <= ends).all(), "a span ends before it begins"
        return Spans(starts, ends, offsets)

    @property
    def rows(self) -> Int64s:
        """Return the row of each span."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def within(self, row: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return a row's spans, clipped to [start, end) of the text and relative to `start`."""
        own = slice(self.offsets[row], self.offsets[row + 1])
        starts = np.maximum(self.starts[own], start) - start
        ends = np.minimum(self.ends[own], end) - start
        is_inside = starts < ends
        return list(zip(starts[is_inside].tolist(), ends[is_inside].tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRanges:
    """Trained tokens of each row, as half-open ranges of its tokens."""

    starts: Int64s
    """First token of each range, relative to its row's first. Ranges are never empty."""

    ends: Int64s
    """Token after each range."""

    offsets: Int64s
    """Index of each row's first range, shape [num_rows + 1]."""

    num_trained: Int64s
    """Trained tokens per row."""

    is_kept: Bools
    """True for spans that have a range because a token begins in them."""

    straddles_start: int
    """Number of spans whose first bytes are in a token that begins earlier, so is not trained."""

    straddles_end: int
    """Number of spans whose last token, which is trained, ends after them."""


def train_ranges(encoded: EncodedRows, spans: Spans) -> TrainedRanges:
    """Find the tokens that begin inside each trained span.

    Returns:
        One range per span in which a token begins; adjacent ranges are not merged.

    Example:
        >>> edges, row = np.array([0, 2, 3, 7, 9]), np.array([0, 4])  # four tokens of one row
        >>> text, bases, ids = np.zeros(9, np.uint8), np.array([0, 9]), np.zeros(4, np.int32)
        >>> encoded = EncodedRows(text, bases, ids, row, edges[:-1], edges[1:], row[:1] == 0)
        >>> ranges = train_ranges(encoded, Spans(np.array([1]), np.array([8]), np.array([0, 1])))
        >>> ranges.starts.tolist(), ranges.ends.tolist()  # [0, 2) begins before byte 1
        ([1], [4])
        >>> ranges.straddles_start, ranges.straddles_end
        (1, 1)
    """
    rows, num_rows = spans.rows, len(spans.offsets) - 1
    lower = encoded.offsets[rows]
    first = _tokens_before(spans.starts, rows, encoded)
    last = _tokens_before(spans.ends, rows, encoded)
    is_filled = last > first
    straddles_start = int(_is_crossed(spans.starts, first, lower, encoded).sum())
    straddles_end = int((encoded.ends[last[is_filled] - 1] > spans.ends[is_filled]).sum())
    counts = np.bincount(rows[is_filled], minlength=num_rows)
    # `bincount` adds up floats, which are exact up to 2**53.
    trained = np.bincount(rows, weights=(last - first).astype(np.float64), minlength=num_rows)
    return TrainedRanges(
        starts=(first - lower)[is_filled],
        ends=(last - lower)[is_filled],
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        num_trained=trained.astype(np.int64),
        is_kept=np.asarray(is_filled),
        straddles_start=straddles_start,
        straddles_end=straddles_end,
    )


def prompt_ends(spans: Spans, written: Spans) -> Int64s:
    """Return the indices, ascending, of the trained spans at whose start a prompt ends.

    Adjacent spans, such as separately weighted parts of an answer, are one completion.

    Args:
        spans: trained spans.
        written: spans of the row's own texts, in which no prompt ends.

    Example:
        >>> spans = Spans(np.array([1, 3, 5]), np.array([2, 5, 7]), np.array([0, 3]))
        >>> none = Spans(*np.zeros((3, 0), np.int64))
        >>> prompt_ends(spans, none).tolist()  # [5, 7) goes on where [3, 5) ends
        [0, 1]
    """
    starts, rows = spans.starts, spans.rows
    is_end = spans.ends > starts
    is_end[1:] &= (starts[1:] != spans.ends[:-1]) | (rows[1:] != rows[:-1])
    # Text [10, 20) is the row's: a span that begins at 14 is a weighted part of an answer. So is
    # one that begins at 20 if another one ends at 10: the text between may be a thought.
    before = np.searchsorted(written.starts, starts, "left") - 1
    text_ends = np.append(written.ends, -1)[before]
    goes_on = np.isin(np.append(written.starts, -1)[before], spans.ends)
    is_end &= (starts > text_ends) | ((starts == text_ends) & ~goes_on)
    return np.flatnonzero(is_end)


def are_crossed(encoded: EncodedRows, spans: Spans) -> Bools:
    """Return, for each span, if a token begins before it and ends after its start.

    Example:
        >>> edges, row = np.array([0, 2, 3, 7]), np.array([0, 3])  # three tokens of one row
        >>> text, bases, ids = np.zeros(7, np.uint8), np.array([0, 7]), np.zeros(3, np.int32)
        >>> encoded = EncodedRows(text, bases, ids, row, edges[:-1], edges[1:], row[:1] == 0)
        >>> spans = Spans(np.array([1, 3, 5]), np.array([2, 5, 7]), np.array([0, 3]))
        >>> are_crossed(encoded, spans).tolist()
        [True, False, True]
    """
    first = _tokens_before(spans.starts, spans.rows, encoded)
    return _is_crossed(spans.starts, first, encoded.offsets[spans.rows], encoded)


def _is_crossed(places: Int64s, first: Int64s, lower: Int64s, encoded: EncodedRows) -> Bools:
    """Return, for each place, if the token before its first token (of its row) ends after it."""
    is_crossed = first > lower
    is_crossed[is_crossed] = encoded.ends[first[is_crossed] - 1] > places[is_crossed]
    return is_crossed


def _tokens_before(places: Int64s, rows: Int64s, encoded: EncodedRows) -> Int64s:
    """Return the first token of a place's row that does not begin before it, or the row's end."""
    # A few hundred rows are searched at a time, so that their tokens fit the processor's cache.
    found = np.empty(len(places), np.int64)
    for start in range(0, len(places), _BLOCK):
        block = slice(start, start + _BLOCK)
        own = slice(encoded.offsets[rows[start]], encoded.offsets[rows[block][-1] + 1])
        found[block] = np.searchsorted(encoded.starts[own], places[block], "left") + own.start
    return np.clip(found, encoded.offsets[rows], encoded.offsets[rows + 1])

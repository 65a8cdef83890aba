"""Records whose prompt ends inside a token: prompt and completion are encoded apart.

At inference the prompt is encoded alone, and the model continues it. If one encoding of the record
has a token that crosses the end of the prompt, it begins with other ids than inference gives. Such
a record is encoded in pieces cut there; others (all, of most templates) cost two binary searches.

    text            a the</s>      trained span [2, 9): the prompt ends with a space
    one encoding    a  _the  </s>
    in pieces       a  _  |  the  </s>

Without such a token, only white space at the end of the prompt can be encoded otherwise: GPT-2's
pattern leaves the last of several to the word after them, so that two line breaks are one token at
the end of a text and two before an answer.

A later piece goes on in the middle of a text: it gets none of the spaces that SentencePiece puts
before a text, up to its first added token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from packhouse.recipe import Recipe
from packhouse.recipe.rows import CHAT_TEMPLATES, TEMPLATES
from packhouse.system.arrays import Bools, Int64s
from packhouse.tokenize.control_text import encode_plain
from packhouse.tokenize.encoders import load_tokenizer, text_bases, text_bytes
from packhouse.tokenize.memo import memo
from packhouse.tokenize.offsets import EncodedRow, EncodedRows, locate_by_widths
from packhouse.tokenize.pipeline import read_pipeline
from packhouse.tokenize.spans import Spans, are_crossed, prompt_ends

_BEFORE, _AFTER = 8, 4  # bytes around the end of a prompt


def cuts_prompts(recipe: Recipe) -> bool:
    """Return True if prompts are encoded apart where a token crosses their end.

    That is so where a prompt at inference is rendered by a chat template, which ends with the
    header of the answer; other templates say how to write the border themselves.
    """
    config = recipe.format
    is_chat = config.template not in set(TEMPLATES) - set(CHAT_TEMPLATES)
    return is_chat and config.turns != "whole" and config.train_on != "all"


def split_prompts(
    encoded: EncodedRows,
    texts: pa.StringArray,
    spans: Spans,
    written: Spans,
    contents: Spans | None,
    backend: str,
) -> tuple[EncodedRows, int]:
    """Encode records in pieces where a token crosses the end of a prompt.

    Args:
        encoded: one encoding of each text.
        texts: texts of the rows.
        spans: trained spans. A prompt ends where one follows text that is not trained; spans that
            touch, such as parts of an answer with weights of their own, are one completion.
        written: spans of the row's own texts, in which no prompt ends.
        contents: spans in which control-token text is plain text; None if there are none.
        backend: the pipeline.

    Returns:
        The rows, and the number of prompts that were cut off. A row that the tokenizer cannot
        encode with plain contents stays as it is.
    """
    bases = text_bases(texts)
    ends = prompt_ends(spans)
    # Text [10, 20) is the row's: a span that begins at 14 is a part of an answer with weights, and
    # so is one that begins at 20 if another one ends at 10: the text between is a thought, say.
    before = np.searchsorted(written.starts, spans.starts[ends], "left") - 1
    text_ends = np.append(written.ends, -1)[before]
    goes_on = np.isin(np.append(written.starts, -1)[before], spans.ends)
    is_inside = spans.starts[ends] < text_ends
    is_inside |= (spans.starts[ends] == text_ends) & goes_on
    ends = ends[~is_inside]
    rows = np.searchsorted(spans.offsets, ends, "right") - 1
    places = spans.starts[ends] - bases[rows]
    is_due = _ends_otherwise(texts, spans.starts[ends], backend) & (places > 0)
    is_due |= are_crossed(encoded, spans)[ends]
    cuts: dict[int, set[int]] = {}
    num_split = 0
    while is_due.any():
        changed: dict[int, set[int]] = {}
        for row, place in zip(rows[is_due].tolist(), places[is_due].tolist(), strict=True):
            if place not in cuts.setdefault(row, set()):
                cuts[row].add(place)
                changed.setdefault(row, set()).add(place)
        new = _encode_pieces(
            [
                piece
                for row in changed
                for piece in _pieces_of(row, sorted(cuts[row]), encoded, bases, backend)
            ],
            texts,
            contents,
            backend,
        )
        new = {row: found for row, found in new.items() if _differs(found, row, encoded)}
        num_split += sum(len(changed[row]) for row in new)
        encoded = _with_rows(encoded, new, texts, backend)
        if not new:
            break
        # Pieces hold other tokens than the whole had: one may cross another prompt's end.
        is_due = are_crossed(encoded, spans)[ends] & np.isin(rows, list(new))
    return encoded, num_split


def _differs(found: EncodedRow, row: int, encoded: EncodedRows) -> bool:
    own = slice(encoded.offsets[row], encoded.offsets[row + 1])
    return not np.array_equal(found.ids, encoded.ids[own])


def _ends_otherwise(texts: pa.StringArray, places: Int64s, backend: str) -> Bools:
    """Return, for each place, if white space before it is encoded otherwise at the end of a text.

    Tried on the white space and the character after it, once for all places that have the same.
    """
    text = text_bytes(texts)
    is_white = np.zeros(256, np.bool_)
    is_white[list(b" \t\n\v\f\r")] = True
    is_otherwise = (places > 1) & is_white[text[places - 1]] & is_white[text[places - 2]]
    if read_pipeline(backend).has_word_marks:  # SentencePiece has no pattern that looks ahead
        is_otherwise[:] = False
    tried = np.flatnonzero(is_otherwise)
    if not len(tried):
        return is_otherwise
    # "hi \n\nYes", at "Y": the bytes before it are 0 0 0 0 0 32 10 10, those from it on 89 0 0 0.
    before = text.take(places[tried, None] + np.arange(-_BEFORE, 0), mode="clip")
    after = text.take(places[tried, None] + np.arange(_AFTER), mode="clip")
    before[~np.logical_and.accumulate(is_white[before][:, ::-1], axis=1)[:, ::-1]] = 0
    after[after[:, 0] < 0x80, 1:] = 0
    around = np.ascontiguousarray(np.concatenate([before, after], axis=1))
    kinds, which = np.unique(around.view(f"V{_BEFORE + _AFTER}"), return_inverse=True)
    pairs = []
    for kind in kinds.tolist():
        white, rest = (
            part.strip(b"\0").decode(errors="ignore") for part in (kind[:_BEFORE], kind[_BEFORE:])
        )
        pairs.append((white, rest[:1]))
    tokenizer = load_tokenizer(backend)
    whole, apart, rest = (
        [each.ids for each in tokenizer.encode_batch_fast(parts, add_special_tokens=False)]
        for parts in ([a + b for a, b in pairs], [a for a, _ in pairs], [b for _, b in pairs])
    )
    differs = [w != a + r for w, a, r in zip(whole, apart, rest, strict=True)]
    is_otherwise[tried] = np.array(differs)[which.reshape(-1)]
    return is_otherwise


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a row's text that is encoded alone."""

    row: int
    start: int
    """First byte, counted from the row's own."""
    end: int
    is_inner: bool
    """True if it goes on where a piece ended, so that nothing is put before it."""


def _pieces_of(
    row: int, cuts: Sequence[int], encoded: EncodedRows, bases: Int64s, backend: str
) -> list[_Piece]:
    """Cut a row; text between a cut and the next added token is a piece of its own.

    `a the</s>[INST] b`, cut at 2: `a ` and `the`, which is inner, and `</s>[INST] b`.
    """
    own = slice(encoded.offsets[row], encoded.offsets[row + 1])
    base = bases[row]
    is_added = read_pipeline(backend).is_added[encoded.ids[own]]
    added = encoded.starts[own][is_added] - base
    edges = [0, *cuts, int(bases[row + 1] - base)]
    pieces = [_Piece(row, 0, edges[1], is_inner=False)]
    for start, end in pairwise(edges[1:]):
        after = np.searchsorted(added, start)
        middle = min(int(added[after]), end) if after < len(added) else end
        pieces.append(_Piece(row, start, middle, is_inner=True))
        pieces.append(_Piece(row, middle, end, is_inner=False))
    return [piece for piece in pieces if piece.end > piece.start]


def _encode_pieces(
    pieces: Sequence[_Piece], texts: pa.StringArray, contents: Spans | None, backend: str
) -> dict[int, EncodedRow]:
    """Encode rows of which all pieces can be encoded, and join these."""
    bases = text_bases(texts)
    data = {row: texts[row].as_py().encode() for row in {piece.row for piece in pieces}}
    encoded: dict[_Piece, EncodedRow | None] = {}
    for is_inner, its_backend in ((False, backend), (True, _without_prefix(backend))):
        group = [piece for piece in pieces if piece.is_inner == is_inner]
        parts = [data[piece.row][piece.start : piece.end].decode() for piece in group]
        inside = [_contents_of(piece, contents, int(bases[piece.row])) for piece in group]
        rows = encode_plain(pa.array(parts, pa.string()), inside, its_backend)
        encoded.update(zip(group, rows, strict=True))
    joined = {}
    for row, own in groupby(pieces, key=lambda piece: piece.row):
        parts_of_row = [(piece.start, encoded[piece]) for piece in own]
        found = [(start, part) for start, part in parts_of_row if part is not None]
        if len(found) == len(parts_of_row):
            joined[row] = EncodedRow(
                np.concatenate([part.ids for _, part in found]),
                np.concatenate([part.starts + start for start, part in found]),
                np.concatenate([part.ends + start for start, part in found]),
            )
    return joined


def _contents_of(piece: _Piece, contents: Spans | None, base: int) -> list[tuple[int, int]]:
    """Spans of contents inside a piece, counted from its first byte."""
    if contents is None:
        return []
    own = slice(contents.offsets[piece.row], contents.offsets[piece.row + 1])
    starts = np.maximum(contents.starts[own] - base, piece.start)
    ends = np.minimum(contents.ends[own] - base, piece.end)
    is_inside = starts < ends
    shifted = (edges[is_inside] - piece.start for edges in (starts, ends))
    return list(zip(*(edges.tolist() for edges in shifted), strict=True))


def _with_rows(
    encoded: EncodedRows, rows: dict[int, EncodedRow], texts: pa.StringArray, backend: str
) -> EncodedRows:
    """Put rows in place of others, and say which of them decode to their very text."""
    if not rows:
        return encoded
    numbers = list(rows)
    ids = np.concatenate([row.ids for row in rows.values()])
    offsets = np.cumsum([0, *(len(row.ids) for row in rows.values())])
    own_texts = texts.take(pa.array(numbers))
    is_exact = encoded.is_exact.copy()
    is_exact[numbers] = locate_by_widths(own_texts, ids, offsets, read_pipeline(backend)).is_exact
    return encoded.with_rows(rows, text_bases(texts), is_exact)


@memo
def _without_prefix(backend: str) -> str:
    """The pipeline without spaces before the text; most have none."""
    parsed = orjson.loads(backend)
    before = orjson.dumps([parsed["normalizer"], parsed["pre_tokenizer"]])
    parsed["normalizer"] = _plain_normalizer(parsed["normalizer"])
    _set_no_prefix(parsed["pre_tokenizer"])
    if orjson.dumps([parsed["normalizer"], parsed["pre_tokenizer"]]) == before:
        return backend
    return orjson.dumps(parsed).decode()


def _plain_normalizer(step: Any) -> Any:
    """A normalizer without `Prepend`; None if nothing is left."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        inner = [_plain_normalizer(each) for each in step["normalizers"]]
        return {**step, "normalizers": [each for each in inner if each is not None]}
    return step


def _set_no_prefix(step: Any) -> None:
    """Change a pre-tokenizer in place, and those inside it."""
    if step is None:
        return
    if step["type"] == "Metaspace":
        step["prepend_scheme"] = "never"
    if "add_prefix_space" in step:
        step["add_prefix_space"] = False
    for each in step.get("pretokenizers", ()):
        _set_no_prefix(each)

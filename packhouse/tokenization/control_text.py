"""Control-token text that data forged: found in all rows at once, encoded as text where it occurs.

Any tokenizer turns `<|im_end|>` inside a user's message into the real control token. It is forged
if it overlaps content; what lies in the template's own bytes is meant. A row that holds some is
encoded by a second tokenizer, in which every control token has another name that no text can
hold, with the template's own tokens written by these names. All else is HF's own semantics, and
a row whose control tokens then are not exactly those the template placed is not let through.
Rows without forged text (nearly all) cost one look at their control ids.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from packhouse.arrays import Bools, Bytes, Int32s, Int64s
from packhouse.tokenization.encoders import chunks_of, text_bases, text_bytes
from packhouse.tokenization.offsets import EncodedRow, EncodedRows, byte_ranges
from packhouse.tokenization.pipeline import Pipeline, read_pipeline
from packhouse.tokenization.renaming import rename_controls, token_finder
from packhouse.tokenization.spans import Spans

_CHUNK_BYTES = 2**19  # HF encodings with offsets take about 300 bytes per token


@dataclass(frozen=True, slots=True, eq=False)
class ForgedText:
    """Control tokens that overlap content."""

    rows: Int64s
    """Row of each, never falling."""

    ids: Int32s
    """Id of each."""

    def described(self, pipeline: Pipeline) -> dict[int, str]:
        """What each row's contents hold, for people."""
        texts = {token.id: token.text for token in pipeline.added}
        names: dict[int, list[str]] = {}
        for row, index in zip(self.rows.tolist(), self.ids.tolist(), strict=True):
            names.setdefault(row, []).append(texts[index])
        return {
            row: f"contents hold the control token '{held[0]}'"
            + (f" and {len(held) - 1} more" if len(held) > 1 else "")
            for row, held in names.items()
        }


def find_forged(
    encoded: EncodedRows, texts: pa.StringArray, content: Spans, pipeline: Pipeline
) -> ForgedText:
    """Find control tokens that overlap content, in all rows at once."""
    found = np.flatnonzero(pipeline.is_control.take(encoded.ids))
    begin, end = _own_text(found, encoded, text_bytes(texts), pipeline)
    found = found[_overlaps(begin, end, content) & (end > begin)]
    rows = np.searchsorted(encoded.offsets, found, "right") - 1
    return ForgedText(rows=rows, ids=encoded.ids[found])


def with_plain_contents(
    encoded: EncodedRows, rows: Int64s, texts: pa.StringArray, content: Spans, backend: str
) -> tuple[EncodedRows, set[int]]:
    """Encode some rows again, with all control-token text in their contents as ordinary text.

    Returns:
        The rows, these replaced; and rows that the tokenizer has no way to encode so, unchanged.
    """
    bases, numbers = text_bases(texts), rows.tolist()
    contents = [content.of_row(row, bases[row]) for row in numbers]
    plain = encode_plain(texts.take(pa.array(rows)), contents, backend)
    replaced = {row: new for row, new in zip(numbers, plain, strict=True) if new is not None}
    return encoded.with_rows(replaced, bases), set(numbers) - replaced.keys()


def encode_plain(
    texts: pa.StringArray, contents: Sequence[Sequence[tuple[int, int]]], backend: str
) -> list[EncodedRow | None]:
    """Encode texts with contents as plain text; None where the tokenizer has no way to do so.

    Args:
        texts: renderings.
        contents: byte spans of each that came from data.
        backend: the pipeline.
    """
    return [
        row
        for start, end in chunks_of(texts, _CHUNK_BYTES)
        for row in _encode_chunk(texts[start:end].to_pylist(), contents[start:end], backend)
    ]


def _own_text(
    found: Int64s, encoded: EncodedRows, text: Bytes, pipeline: Pipeline
) -> tuple[Int64s, Int64s]:
    """Bytes of control tokens without white space they swallowed; empty for an unknown word."""
    begin, end = encoded.starts[found].copy(), encoded.ends[found].copy()
    ids = encoded.ids[found]
    added = {token.id: token for token in pipeline.added}
    own_width = np.zeros(len(pipeline.is_control), np.int64)
    for token in pipeline.added:
        own_width[token.id] = len(token.text.encode())
    # Nearly all cover just their own text, and are not looked at one by one.
    odd = (end - begin != own_width[ids]) | (ids == pipeline.unk_id)
    for place in np.flatnonzero(odd).tolist():
        token = added[int(ids[place])]
        covered = text[begin[place] : end[place]].tobytes()
        if token.id == pipeline.unk_id and covered.strip() != token.text.encode():
            end[place] = begin[place]
        elif token.strips:
            begin[place], end[place] = _stripped(covered, int(begin[place]))
    return begin, end


def _stripped(covered: bytes, begin: int) -> tuple[int, int]:
    text = covered.decode()
    left = len(text) - len(text.lstrip())
    begin += len(text[:left].encode())
    return begin, begin + len(text.strip().encode())


def _overlaps(begin: Int64s, end: Int64s, spans: Spans) -> Bools:
    """Return, for each range, if it shares a byte with any span; spans may come in any order.

    Spans [0, 4) and [6, 8): two begin before byte 7, and these reach byte 8; so [5, 7) overlaps.
    One begins before byte 6, and it reaches byte 4: [5, 6) does not.
    """
    filled = spans.ends > spans.starts
    order = np.argsort(spans.starts[filled], kind="stable")
    sorted_starts = spans.starts[filled][order]
    furthest = np.maximum.accumulate(np.append(-1, spans.ends[filled][order]))
    num_before = np.searchsorted(sorted_starts, end, "left")
    overlaps: Bools = furthest[num_before] > begin
    return overlaps


def _encode_chunk(
    texts: Sequence[str], contents: Sequence[Sequence[tuple[int, int]]], backend: str
) -> list[EncodedRow | None]:
    """Do the work of `encode_plain` for one chunk."""
    pipeline = read_pipeline(backend)
    names = _unforgeable_names(texts, pipeline)
    renamed = rename_controls(backend, names)
    placed = _template_tokens(texts, contents, backend)
    marked = [_Marked.of(text, tokens, names) for text, tokens in zip(texts, placed, strict=True)]
    encodings = renamed.tokenizer.encode_batch(
        [row.text for row in marked], add_special_tokens=False
    )
    rows: list[EncodedRow | None] = []
    for row, tokens, encoding in zip(marked, placed, encodings, strict=True):
        raw = np.array(encoding.ids, np.int64)
        ids = renamed.to_id[raw]
        is_faithful = ids[renamed.is_name[raw]].tolist() == [token.id for token in tokens]
        if is_faithful and not renamed.forges(raw, pipeline):
            starts, ends = byte_ranges(row.text, encoding.offsets)
            rows.append(EncodedRow(ids, row.original(starts), row.original(ends)))
        else:
            rows.append(None)
    return rows


@dataclass(frozen=True, slots=True)
class _Placed:
    """A control token that the template put into a text."""

    id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class _Marked:
    """A text whose template tokens are written by their unforgeable names."""

    text: str
    starts: Int64s
    """First byte of each name in the marked text."""

    ends: Int64s
    original_starts: Int64s
    original_ends: Int64s

    @staticmethod
    def of(text: str, tokens: Sequence[_Placed], names: dict[int, str]) -> "_Marked":
        data = text.encode()
        pieces = []
        starts, ends = [], []
        behind = length = 0
        for token in tokens:
            name = names[token.id].encode()
            pieces += [data[behind : token.start], name]
            length += token.start - behind
            starts.append(length)
            length += len(name)
            ends.append(length)
            behind = token.end
        joined = b"".join([*pieces, data[behind:]]).decode()
        originals = [token.start for token in tokens], [token.end for token in tokens]
        return _Marked(joined, *(np.array(list_, np.int64) for list_ in (starts, ends, *originals)))

    def original(self, offsets: Int64s) -> Int64s:
        """Bytes of the marked text to bytes of the original one.

        "<s>hi" marked as "zQhi": bytes 0, 2 and 3 of it are bytes 0, 3 and 4.
        """
        if not len(self.starts):
            return offsets
        place = np.searchsorted(self.starts, offsets, "right") - 1
        token = np.maximum(place, 0)
        behind = offsets - self.ends[token] + self.original_ends[token]
        inside = np.where(offsets < self.ends[token], self.original_starts[token], behind)
        return np.where(place < 0, offsets, inside)


def _unforgeable_names(texts: Sequence[str], pipeline: Pipeline) -> dict[int, str]:
    """A name for each control token that holds a hash of the texts, so that none can hold it.

    Letters and digits pass every normaliser unchanged. `z` comes first and nowhere else: no
    name can begin within another, nor come about from a part of one and the text beside it.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}".encode())
    nonce = digest.hexdigest()[:32]
    return {token.id: f"z{nonce}x{token.id}y" for token in pipeline.added if token.is_control}


def _template_tokens(
    texts: Sequence[str], contents: Sequence[Sequence[tuple[int, int]]], backend: str
) -> list[list[_Placed]]:
    """Control tokens of each text that are there whatever its contents say."""
    masked = [_mask(text, spans) for text, spans in zip(texts, contents, strict=True)]
    finder, tokens = token_finder(backend)
    rows = []
    encodings = finder.encode_batch(masked, add_special_tokens=False)
    for text, encoding in zip(masked, encodings, strict=True):
        starts, ends = byte_ranges(text, encoding.offsets)
        row = []
        for index, start, end in zip(encoding.ids, starts.tolist(), ends.tolist(), strict=True):
            token = tokens[index]
            if token.strips:
                start, end = _stripped(text.encode()[start:end], start)
            if token.is_control:
                row.append(_Placed(token.id, start, end))
        rows.append(row)
    return rows


def _mask(text: str, spans: Sequence[tuple[int, int]]) -> str:
    data = bytearray(text.encode())
    for start, end in spans:
        data[start:end] = b"x" * (end - start)
    return data.decode()

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
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pyarrow as pa

from packhouse.system.arrays import Bools, Bytes, Int32s, Int64s
from packhouse.tokenize.encoders import chunks_of, load_tokenizer, text_bases, text_bytes
from packhouse.tokenize.memo import memo
from packhouse.tokenize.offsets import EncodedRow, EncodedRows, byte_ranges
from packhouse.tokenize.pipeline import AddedToken, Pipeline, read_pipeline
from packhouse.tokenize.spans import Spans

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# Variants of a tokenizer that differ in its added tokens only.
#
# They share the model of the loaded tokenizer, so that one is made in milliseconds.


@memo
def token_finder(backend: str) -> tuple["Tokenizer", dict[int, AddedToken]]:
    """A tokenizer without a vocabulary: it finds added tokens as HF does, and nothing else."""
    from tokenizers import Tokenizer, models

    full = load_tokenizer(backend)
    finder = Tokenizer(models.BPE())
    if full.normalizer is not None:
        finder.normalizer = full.normalizer
    _add_tokens(finder, full, {})
    added = read_pipeline(backend).added
    return finder, {_id_of(finder, token.text): token for token in added}


def _add_tokens(to: "Tokenizer", full: "Tokenizer", names: dict[int, str]) -> None:
    """Add the added tokens of `full`, with their flags, some of them under other names."""
    from tokenizers import AddedToken

    to.add_tokens(
        [
            AddedToken(
                names.get(index, token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            for index, token in sorted(full.get_added_tokens_decoder().items())
        ]
    )


def _id_of(tokenizer: "Tokenizer", text: str) -> int:
    index = tokenizer.token_to_id(text)
    assert index is not None, f"{text!r} was not added"
    return index


@dataclass(frozen=True, slots=True, eq=False)
class RenamedTokenizer:
    """The tokenizer with other names for its control tokens."""

    tokenizer: "Tokenizer"
    to_id: Int32s
    """Its ids -> ours. Names are not in the vocabulary, so that they get ids above it."""

    is_name: Bools
    """True where an id is that of such a name."""

    def forges(self, ids: Int64s, pipeline: Pipeline) -> bool:
        """Return True if plain text became a control token other than the unknown token."""
        plain = self.to_id[ids[~self.is_name[ids]]]
        return any(index != pipeline.unk_id for index in plain[pipeline.is_control[plain]])


def rename_controls(backend: str, names: dict[int, str]) -> RenamedTokenizer:
    """Make a tokenizer that knows control tokens by other names only.

    Args:
        backend: the pipeline.
        names: id of each control token -> its name, which no text may hold.
    """
    return _rename(backend, _base_tokenizer(backend), names)


def _rename(backend: str, base: "Tokenizer", names: dict[int, str]) -> RenamedTokenizer:
    """Build a tokenizer with other names from the parts of `base`, whose model it shares."""
    from tokenizers import Tokenizer

    pipeline = read_pipeline(backend)
    tokenizer = Tokenizer(base.model)
    if base.normalizer is not None:
        tokenizer.normalizer = base.normalizer
    if base.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = base.pre_tokenizer
    # New ids count on from the number of entries: where ids have gaps, fill up to the last one.
    gaps = pipeline.model_size - tokenizer.get_vocab_size(with_added_tokens=False)
    tokenizer.add_tokens([f"\ue000{number}\ue000" for number in range(gaps)])
    _add_tokens(tokenizer, load_tokenizer(backend), names)
    new_ids = {
        _id_of(tokenizer, names.get(token.id, token.text)): token.id for token in pipeline.added
    }
    # A vocabulary of 5 ids with the control token 2, which is called otherwise now, at id 5:
    # to_id [0 1 2 3 4 2], is_name [0 0 0 0 0 1].
    to_id = np.arange(max(pipeline.model_size, *(new + 1 for new in new_ids)), dtype=np.int32)
    to_id[list(new_ids)] = list(new_ids.values())
    is_name = np.zeros(len(to_id), np.bool_)
    is_name[[new for new, index in new_ids.items() if index in names]] = True
    assert not is_name[: pipeline.model_size].any(), "a name took an id of the vocabulary"
    return RenamedTokenizer(tokenizer, to_id, is_name)


@memo
def _base_tokenizer(backend: str) -> "Tokenizer":
    """The tokenizer whose model gives no control token for plain text.

    That is the tokenizer itself, unless its model reaches such an entry of its vocabulary without
    an added token (Unigram does): then the entry gets another name there too.
    """
    from tokenizers import Tokenizer

    pipeline = read_pipeline(backend)
    full = load_tokenizer(backend)
    controls = [token for token in pipeline.added if token.is_control]
    renamed = _rename(backend, full, {token.id: f"z{token.id}y" for token in controls})
    probes = [form.format(t.text) for t in controls for form in ("{}", "a{}a", " {} ")]
    encodings = renamed.tokenizer.encode_batch(probes, add_special_tokens=False)
    ids = np.array([index for encoding in encodings for index in encoding.ids], np.int64)
    if not renamed.forges(ids, pipeline):
        return full
    return Tokenizer.from_str(_hide_controls(backend, {token.text for token in controls}))


def _hide_controls(backend: str, controls: set[str]) -> str:
    """Rename vocabulary entries, and drop the merges that lead to them."""
    parsed = orjson.loads(backend)
    model = parsed["model"]
    hidden = {text: f"\ue000{text}\ue000" for text in controls}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(text, text): id_ for text, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if "merges" in model:
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if not {pair[0], pair[1], "".join(pair)} & controls
        ]
    parsed["added_tokens"] = []
    parsed["post_processor"] = None
    return orjson.dumps(parsed).decode()


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

"""Find control tokens forged by data, in all rows at once, and encode them as plain text.

Any tokenizer turns `<|im_end|>` inside a user's message into the real control token. A control
token is forged if it overlaps content; in the template's own bytes it is intended. A row with
forged tokens is encoded by a second tokenizer, in which every control token has a name that no text
can contain, and the template's tokens are written with these names. Otherwise it works like HF. A
row whose control tokens are then not exactly those of the template is refused. For rows without
forged text (nearly all), only their control ids are checked.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import orjson

from packhouse.records.arrays import Bools, Int32s, Int64s
from packhouse.tokenize import encoders
from packhouse.tokenize.encoders import AddedToken, Pipeline, load_tokenizer, read_pipeline
from packhouse.tokenize.offsets import EncodedRow, EncodedRows, Spans, byte_ranges

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CHUNK_CHARACTERS = 2**19  # HF encodings with offsets take about 300 bytes per token


def any_of(literals: Iterable[str], escape: Callable[[str], str] = re.escape) -> str:
    """Return a pattern that finds the longest of many literals, such as 771 control tokens.

    Literals share what they have in common, so even 300,000 take a short pattern and little time.

    Args:
        literals: texts.
        escape: returns a pattern for exactly one text.

    Example:
        >>> any_of(["<s>", "<s2>", "<s3>", "<s"])
        '<s(?:[23]>|>)?'
    """
    texts = sorted({*literals})
    return _pattern(texts, escape, 0) if texts else r"[^\s\S]"


_MAX_NESTED = 50
"""Libraries limit how deep a pattern may be nested."""


def _pattern(texts: Sequence[str], escape: Callable[[str], str], depth: int) -> str:
    """Return the pattern for sorted, different texts."""
    first, last = texts[0], texts[-1]
    size = next(
        (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    start, rests = first[:size], [text[size:] for text in texts]
    if depth > _MAX_NESTED:
        longest_first = sorted(rests, key=len, reverse=True)
        return f"{escape(start)}(?:{'|'.join(map(escape, longest_first))})"
    chars: dict[str, list[str]] = {}  # of the same rest: 0, 1, 2 of 0>, 1>, 2>
    for char, of_char in groupby(filter(None, rests), key=itemgetter(0)):
        rest = _pattern([text[1:] for text in of_char], escape, depth + 1)
        chars.setdefault(rest, []).append(escape(char))
    if not chars:
        return escape(start)
    ways = [(of[0] if len(of) == 1 else f"[{''.join(of)}]") + rest for rest, of in chars.items()]
    return f"{escape(start)}(?:{'|'.join(ways)}){'' if rests[0] else '?'}"


def find_forged(encoded: EncodedRows, content: Spans, pipeline: Pipeline) -> dict[int, list[str]]:
    """Find control tokens that overlap content, in all rows at once: row -> their texts."""
    found = np.flatnonzero(pipeline.is_control.take(encoded.ids))
    ids, begin, end = encoded.ids[found], encoded.starts[found], encoded.ends[found]
    added = {token.id: token for token in pipeline.added}
    own_width = np.zeros(len(pipeline.is_control), np.int64)
    own_width[list(added)] = [len(token.text.encode()) for token in pipeline.added]
    # Nearly all cover exactly their text. The others include white space around it, or are the
    # unknown token of a word that is not in the vocabulary.
    odd = (end - begin != own_width[ids]) | (ids == pipeline.unk_id)
    for place in np.flatnonzero(odd).tolist():
        token = added[int(ids[place])]
        covered = encoded.text[begin[place] : end[place]].tobytes()
        if token.id == pipeline.unk_id and covered.strip() != token.text.encode():
            end[place] = begin[place]
        elif token.strips:
            begin[place], end[place] = _stripped(covered, int(begin[place]))
    is_forged = (end > begin) & _overlaps(begin, end, content)
    rows = np.searchsorted(encoded.offsets, found[is_forged], "right") - 1
    forged: dict[int, list[str]] = {}
    for row, index in zip(rows.tolist(), ids[is_forged].tolist(), strict=True):
        forged.setdefault(row, []).append(added[index].text)
    return forged


def _stripped(covered: bytes, begin: int) -> tuple[int, int]:
    """Return the range of the bytes, which start at `begin`, without surrounding white space."""
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
    return np.asarray(furthest[num_before] > begin)


def encode_plain(
    texts: Sequence[str], contents: Sequence[Sequence[tuple[int, int]]], backend: str
) -> list[EncodedRow | None]:
    """Encode texts with contents as plain text; None where the tokenizer cannot do so.

    Args:
        texts: renderings.
        contents: byte spans of each that came from data.
        backend: the pipeline.
    """
    pipeline, rows = read_pipeline(backend), list[EncodedRow | None]()
    places = np.cumsum([0, *map(len, texts)])
    for start, end in encoders.chunks_of(places, _CHUNK_CHARACTERS):
        chunk = texts[start:end]
        # Each control token gets a name with a hash of the texts, so that no text can contain it.
        # Letters and digits pass every normaliser unchanged. `z` occurs only at the start, so no
        # name can begin inside another, or arise from a part of one and the text next to it.
        digest = hashlib.sha256()
        for text in chunk:
            digest.update(f"{len(text)} {text}".encode())
        nonce = digest.hexdigest()[:32]
        names = {token.id: f"z{nonce}x{token.id}y" for token in pipeline.added if token.is_control}
        renamed = _rename(backend, _base_tokenizer(backend), names)
        placed = _template_tokens(chunk, contents[start:end], backend)
        marked = [_mark(text, tokens, names) for text, tokens in zip(chunk, placed, strict=True)]
        encodings = renamed.tokenizer.encode_batch(
            [text for text, _, _ in marked], add_special_tokens=False
        )
        for (text, at, original), tokens, encoding in zip(marked, placed, encodings, strict=True):
            raw = np.array(encoding.ids, np.int64)
            ids = renamed.to_id[raw]
            is_faithful = ids[renamed.is_name[raw]].tolist() == [index for index, _, _ in tokens]
            if not is_faithful or renamed.forges(raw, pipeline):
                rows.append(None)
                continue
            edges = np.stack(byte_ranges(text, encoding.offsets))
            # "<s>hi" marked as "zQhi": pieces "", "zQ" and "hi" at [0 0 2], in the original at
            # [0 0 3]. Bytes 0, 2 and 3 of it are bytes 0, 3 and 4; all of a name, an odd piece, is
            # its first.
            piece = np.searchsorted(at, edges, "right") - 1
            starts, ends = original[piece] + (edges - at[piece]) * (piece % 2 == 0)
            rows.append(EncodedRow(ids, starts, ends))
    return rows


def _template_tokens(
    texts: Sequence[str], contents: Sequence[Sequence[tuple[int, int]]], backend: str
) -> list[list[tuple[int, int, int]]]:
    """Return id, start and end of the template's control tokens, ignoring those in contents."""
    masked = []
    for text, spans in zip(texts, contents, strict=True):
        data = bytearray(text.encode())
        for start, end in spans:
            # Byte by byte, so that offsets in the masked text are offsets in the text.
            data[start:end] = b"x" * (end - start)
        masked.append(data.decode())
    finder, tokens = _token_finder(backend)
    encodings = finder.encode_batch(masked, add_special_tokens=False)
    rows = []
    for text, encoding in zip(masked, encodings, strict=True):
        starts, ends = byte_ranges(text, encoding.offsets)
        row = []
        for index, start, end in zip(encoding.ids, starts.tolist(), ends.tolist(), strict=True):
            token = tokens[index]
            if token.strips:
                start, end = _stripped(text.encode()[start:end], start)
            if token.is_control:
                row.append((token.id, start, end))
        rows.append(row)
    return rows


def _mark(
    text: str, tokens: Sequence[tuple[int, int, int]], names: dict[int, str]
) -> tuple[str, Int64s, Int64s]:
    """Replace template tokens by their names: text, name, text, and so on.

    Returns:
        The marked text; the first byte of each piece in it, and in the original text.
    """
    data = text.encode()
    pieces: list[bytes] = []
    original = [0]
    for index, start, end in tokens:
        pieces += [data[original[-1] : start], names[index].encode()]
        original += [start, end]
    pieces.append(data[original[-1] :])
    at = np.cumsum([0, *map(len, pieces[:-1])])
    return b"".join(pieces).decode(), at, np.array(original)


# Variants of a tokenizer that differ in its added tokens only. They share the model of the loaded
# tokenizer, so that one is made in milliseconds.


@lru_cache(maxsize=4)
def _token_finder(backend: str) -> tuple["Tokenizer", dict[int, AddedToken]]:
    """Make a tokenizer without a vocabulary, which only finds added tokens, as HF does."""
    from tokenizers import Tokenizer, models

    full = load_tokenizer(backend)
    finder = Tokenizer(models.BPE())
    if full.normalizer is not None:
        finder.normalizer = full.normalizer
    # With the normalizer and all flags of the original, because `normalized`, `lstrip` and
    # `single_word` decide where a token is found.
    _add_tokens(finder, full, {})
    added = read_pipeline(backend).added
    return finder, {_id_of(finder, token.text): token for token in added}


def _add_tokens(to: "Tokenizer", full: "Tokenizer", names: dict[int, str]) -> None:
    """Add the added tokens of `full` with their flags, some of them under other names."""
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
class _RenamedTokenizer:
    """The tokenizer with other names for its control tokens."""

    tokenizer: "Tokenizer"
    to_id: Int32s
    """Its ids -> original ids. Names are not in the vocabulary, so they get ids above it."""

    is_name: Bools
    """True where an id is that of such a name."""

    def forges(self, ids: Int64s, pipeline: Pipeline) -> bool:
        """Return True if plain text became a control token other than the unknown token."""
        plain = self.to_id[ids[~self.is_name[ids]]]
        return any(index != pipeline.unk_id for index in plain[pipeline.is_control[plain]])


def _rename(backend: str, base: "Tokenizer", names: dict[int, str]) -> _RenamedTokenizer:
    """Make a tokenizer with other names for these control tokens (id -> name).

    No text may contain the names. The tokenizer shares the model of `base`.
    """
    from tokenizers import Tokenizer

    pipeline = read_pipeline(backend)
    tokenizer = Tokenizer(base.model)
    if base.normalizer is not None:
        tokenizer.normalizer = base.normalizer
    if base.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = base.pre_tokenizer
    # New ids continue from the number of entries, so fill gaps in the ids up to the last one.
    gaps = pipeline.model_size - tokenizer.get_vocab_size(with_added_tokens=False)
    tokenizer.add_tokens([f"\ue000{number}\ue000" for number in range(gaps)])
    _add_tokens(tokenizer, load_tokenizer(backend), names)
    new_ids = {
        _id_of(tokenizer, names.get(token.id, token.text)): token.id for token in pipeline.added
    }
    # A vocabulary of 5 ids, in which control token 2 was renamed and now has id 5:
    # to_id [0 1 2 3 4 2], is_name [0 0 0 0 0 1].
    to_id = np.arange(max(pipeline.model_size, *(new + 1 for new in new_ids)), dtype=np.int32)
    to_id[list(new_ids)] = list(new_ids.values())
    is_name = np.zeros(len(to_id), np.bool_)
    is_name[[new for new, index in new_ids.items() if index in names]] = True
    assert not is_name[: pipeline.model_size].any(), "a name took an id of the vocabulary"
    return _RenamedTokenizer(tokenizer, to_id, is_name)


@lru_cache(maxsize=4)
def _base_tokenizer(backend: str) -> "Tokenizer":
    """Return a tokenizer whose model gives no control token for plain text.

    This is the tokenizer itself, unless its model can produce the entry from the vocabulary without
    an added token (as Unigram does); then the entry is renamed in the vocabulary too.
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
    # Rename the vocabulary's entries, and drop the merges that produce them.
    parsed = orjson.loads(backend)
    model = parsed["model"]
    vocab = model["vocab"]
    hidden = {token.text: f"\ue000{token.text}\ue000" for token in controls}
    model["vocab"] = (
        {hidden.get(text, text): id_ for text, id_ in vocab.items()}
        if isinstance(vocab, dict)
        else [[hidden.get(text, text), score] for text, score in vocab]
    )
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if "merges" in model:
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if hidden.keys().isdisjoint((pair[0], pair[1], "".join(pair)))
        ]
    parsed["added_tokens"] = []
    parsed["post_processor"] = None
    return Tokenizer.from_str(orjson.dumps(parsed).decode())

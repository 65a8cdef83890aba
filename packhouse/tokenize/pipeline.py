"""The JSON of a `tokenizers` pipeline as arrays: the bytes each token stands for, and its flags.

Merges are most of the JSON and are not needed, so they are cut off before parsing (Qwen: 4.6 MB,
0.06 s instead of 0.14). Tables are kept per process; a table takes about 10 bytes
per token plus its text.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import TokenizerError
from packhouse.records.lists import string_bytes, zero_based
from packhouse.system.arrays import Bools, Bytes, Int32s, Int64s
from packhouse.tokenize.memo import memo

# The bytes of each token of a vocabulary, and where tokens differ from a text they are laid on.
#
# Tokens are joined in blocks that fit the processor's second cache and compared with the text at
# once: Arrow's `take` is two thirds of the time of comparing them one by one, a word at a time.


_BLOCK = 2**17  # tokens


@dataclass(frozen=True, slots=True, eq=False)
class TokenTexts:
    """Bytes of every token of a vocabulary."""

    tokens: pa.BinaryArray
    """Bytes of each token."""

    widths: Int32s
    """How many these are, shape [vocab_size]."""

    is_spaced: Bools
    """Tokens that begin with a space, shape [vocab_size]."""

    @staticmethod
    def of(tokens: pa.BinaryArray) -> "TokenTexts":
        """Make the table.

        Example:
            >>> table = TokenTexts.of(pa.array([b"a", b" to", b""]))
            >>> table.widths.tolist(), table.is_spaced.tolist()
            ([1, 3, 0], [False, True, False])
        """
        data, edges = zero_based(*string_bytes(tokens))
        widths = np.diff(edges)
        is_spaced = widths > 0
        is_spaced[is_spaced] = data[edges[:-1][is_spaced]] == ord(" ")
        return TokenTexts(tokens, widths, is_spaced)

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

    def differing(self, ids: Int32s, text: Bytes, shortened: Int64s | None = None) -> Int64s:
        """Find the tokens that are not what the text holds where they come when all are joined.

        Args:
            ids: tokens.
            text: as many bytes as they have, joined.
            shortened: numbers of tokens that stand there without their first byte, ascending.

        Returns:
            Their numbers, ascending.

        Example:
            >>> table = TokenTexts.of(pa.array([b"a", b"to be or not"]))
            >>> text = np.frombuffer(b"ato be or but", np.uint8)
            >>> table.differing(np.array([0, 1]), text).tolist()
            [1]
        """
        shortened = np.zeros(0, np.int64) if shortened is None else shortened
        found = [np.zeros(0, np.int64)]
        num_compared = 0
        for start in range(0, len(ids), _BLOCK):
            low, high = np.searchsorted(shortened, [start, start + _BLOCK])
            edges, joined = self._join(ids[start : start + _BLOCK], shortened[low:high] - start)
            theirs = text[num_compared : num_compared + len(joined)]
            num_compared += len(joined)
            if not np.array_equal(joined, theirs):
                places = np.flatnonzero(joined != theirs)
                found.append(start + np.unique(np.searchsorted(edges, places, "right") - 1))
        return np.concatenate(found)

    def _join(self, ids: Int32s, shortened: Int64s) -> tuple[np.ndarray, np.ndarray]:
        """Where each token begins when they are joined, and their bytes; `shortened` lose one.

        Tokens " a" and " b", the second one shortened: [0, 2, 3], b" ab".
        """
        joined, edges = zero_based(*string_bytes(self.tokens.take(pa.array(ids))))
        if not len(shortened):
            return edges, joined
        is_cut = np.zeros(len(edges), np.int32)
        is_cut[shortened + 1] = 1
        return edges - np.cumsum(is_cut, dtype=np.int32), np.delete(joined, edges[shortened])


MAX_IDS = 2**24
"""Ids must be under this; the largest vocabularies have a million."""

WORD_MARK = "\u2581"  # SentencePiece writes a space as this


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedToken:
    """One entry of `added_tokens`: text that is recognised before the model sees it."""

    id: int
    text: str
    is_special: bool
    strips: bool
    """Swallows white space beside it, so that it covers more than its own text."""

    @property
    def is_control(self) -> bool:
        """True if contents that hold this text would steer the model: `<|im_end|>`, `<think>`.

        Special or not, but for ordinary writing: runs of white space (GPT-2 for code has 24 of
        them) and, unless special, texts under 3 characters.
        """
        if self.is_special:
            return True
        return len(self.text) >= 3 and not self.text.isspace()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """What a pipeline says about its tokens, without the means to encode."""

    added: tuple[AddedToken, ...]
    """Added tokens by id."""

    model_type: str
    """`BPE`, `WordPiece`, `Unigram` or `WordLevel`."""

    dropout: float | None
    """BPE dropout; any but None or 0 makes ids random."""

    model_size: int
    """Ids of the model's own vocabulary are in [0, model_size); other added tokens are above."""

    unk_id: int | None
    """Id of the unknown token, if the model has one."""

    has_word_marks: bool
    """True if a space may be put before the text (SentencePiece's dummy prefix)."""

    token_bytes: pa.BinaryArray | None
    """Bytes that each id stands for, if token texts can be turned back to bytes at all."""

    shown: pa.BinaryArray
    """Bytes that people are shown for each id: `token_bytes`, or else the vocabulary's own texts,
    where those of WordPiece have a space for the missing `##`."""

    token_texts: TokenTexts | None
    """The same, ready to be compared with texts."""

    is_added: Bools
    """True where an id is of an added token, shape [vocab_size]."""

    is_control: Bools
    """True where an id is of a control token, shape [vocab_size]."""


@memo
def read_pipeline(backend: str) -> Pipeline:
    """Read the JSON of a pipeline (`Tokenizer.to_str()`) into a table of tokens."""
    # A quote inside a JSON string is escaped, so this text is the key itself and no token's.
    cut = backend.rfind('},"merges":[')
    parsed = orjson.loads(backend if cut < 0 else backend[:cut] + "}}}")
    model = parsed["model"]
    added = _added_tokens(parsed["added_tokens"])
    tokens = _tokens_by_id(model["vocab"], added)
    normalizers, pre_tokenizers = map(_step_types, (parsed["normalizer"], parsed["pre_tokenizer"]))
    # Newer files of SentencePiece have a step for it, older ones replace " " by the mark.
    has_word_marks = "Metaspace" in pre_tokenizers or (
        "Replace" in normalizers and WORD_MARK in str(parsed["normalizer"])
    )
    token_bytes = None
    if "ByteLevel" in (*normalizers, *pre_tokenizers):
        token_bytes = _byte_level(tokens)
    elif has_word_marks:
        token_bytes = _word_marked(tokens)
    if token_bytes is not None:
        shown = token_bytes = _with_added(token_bytes, added)
    else:
        shown = _with_added(_spaced(tokens, model.get("continuing_subword_prefix")), added)
    return Pipeline(
        added=added,
        model_type=model["type"],
        dropout=model.get("dropout"),
        model_size=1 + _max_id(model["vocab"]),
        unk_id=_unk_id(model, tokens),
        has_word_marks=has_word_marks,
        token_bytes=token_bytes,
        shown=shown,
        token_texts=None if token_bytes is None else TokenTexts.of(token_bytes),
        is_added=_mask([token.id for token in added], len(tokens)),
        is_control=_mask([token.id for token in added if token.is_control], len(tokens)),
    )


def _added_tokens(entries: list[dict[str, Any]]) -> tuple[AddedToken, ...]:
    tokens = [
        AddedToken(
            id=entry["id"],
            text=entry["content"],
            is_special=entry["special"],
            strips=entry["lstrip"] or entry["rstrip"],
        )
        for entry in entries
    ]
    return tuple(sorted(tokens, key=lambda token: token.id))


def _max_id(vocab: Any) -> int:
    # Unigram's vocabulary is [[piece, score], ...] in the order of ids.
    return max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1


def _tokens_by_id(vocab: Any, added: tuple[AddedToken, ...]) -> list[str]:
    largest = max(_max_id(vocab), *(token.id for token in added), -1)
    if largest >= MAX_IDS:
        raise TokenizerError(
            f"tokenizer.json gives a token the id {largest:,}; ids must be under {MAX_IDS:,}, for "
            "there is a table of all of them. Number the tokens from 0 on",
            limit=MAX_IDS,
        )
    tokens = [""] * (1 + largest)
    if isinstance(vocab, dict):
        for text, index in vocab.items():
            tokens[index] = text
    else:
        tokens[: len(vocab)] = [piece for piece, _ in vocab]
    return tokens


def _step_types(step: dict[str, Any] | None) -> list[str]:
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [step["type"], *(kind for part in inner for kind in _step_types(part))]


def _unk_id(model: dict[str, Any], tokens: list[str]) -> int | None:
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    text = model.get("unk_token")
    return tokens.index(text) if text is not None and text in tokens else None


def _byte_level(tokens: list[str]) -> pa.BinaryArray:
    """GPT-2's alphabet back to bytes; a character outside it stands for its own UTF-8.

    It writes byte 0x20 as character 0x120, so the token "\u0120the" is b" the".
    """
    codes = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32)
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    table = _byte_alphabet()
    foreign = codes >= len(table)
    foreign |= table[np.minimum(codes, len(table) - 1)] < 0
    data = table[np.minimum(codes, len(table) - 1)].astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    array = pa.BinaryArray.from_buffers(
        pa.binary(), len(tokens), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    rows = np.searchsorted(offsets, np.flatnonzero(foreign), "right") - 1
    own = {int(row): tokens[row].encode() for row in np.unique(rows)}
    return _replaced(array, own)


def _byte_alphabet() -> npt.NDArray[np.int16]:
    """Code point -> byte, -1 where none: printable Latin-1 is itself, the others are 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = np.full(256 + len(others), -1, np.int16)
    table[printable] = printable
    table[256:] = others
    return table


def _word_marked(tokens: list[str]) -> pa.BinaryArray:
    """SentencePiece texts to bytes: word marks are spaces, `<0xAB>` is one byte."""
    array = pc.replace_substring(pa.array(tokens, pa.string()), WORD_MARK, " ").cast(pa.binary())
    hexadecimal = re.compile(r"<0x([0-9A-F]{2})>")
    found = ((i, hexadecimal.fullmatch(t)) for i, t in enumerate(tokens) if t.startswith("<0x"))
    return _replaced(array, {i: bytes.fromhex(match[1]) for i, match in found if match})


def _spaced(tokens: list[str], prefix: str | None) -> pa.BinaryArray:
    """WordPiece texts for people: "say", "##ing" -> b" say", b"ing"; others as they are."""
    if prefix:
        tokens = [t.removeprefix(prefix) if t.startswith(prefix) else f" {t}" for t in tokens]
    return pa.array(tokens, pa.string()).cast(pa.binary())


def _with_added(array: pa.BinaryArray, added: tuple[AddedToken, ...]) -> pa.BinaryArray:
    return _replaced(array, {token.id: token.text.encode() for token in added})


def _replaced(array: pa.BinaryArray, values: dict[int, bytes]) -> pa.BinaryArray:
    if not values:
        return array
    mask = _mask(list(values), len(array))
    ordered = pa.array([values[index] for index in sorted(values)], pa.binary())
    return pc.replace_with_mask(array, pa.array(mask), ordered)


def _mask(ids: list[int], size: int) -> Bools:
    mask = np.zeros(size, np.bool_)
    mask[ids] = True
    return mask

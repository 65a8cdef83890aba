"""What packhouse knows of a tokenizer: a snapshot, and tables of the bytes that tokens stand for.

A snapshot is read once (`packhouse.tokenize.loading`) and then independent of transformers. Merges
are most of its JSON and are not needed for tables, so they are cut off before parsing (Qwen:
4.6 MB, 0.06 s instead of 0.14). Tables are kept per process; a table takes about 10 bytes per token
plus its text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import TokenizerError
from packhouse.recipe.rows import PipelineChoice
from packhouse.records.lists import string_bytes, zero_based
from packhouse.system.arrays import Bools, Bytes, Int32s, Int64s

MAX_IDS = 2**24
"""Ids must be under this; the largest vocabularies have a million."""

WORD_MARK = "\u2581"  # SentencePiece writes a space as this

_BLOCK = 2**17  # tokens that are joined at once: they fit the processor's second cache


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSnapshot:
    """A tokenizer as plain data: what decides ids, and what templates may ask for."""

    fingerprint: str
    """sha256 over the tokenizer's files and the versions of the libraries that read it."""

    class_name: str
    """Class that `AutoTokenizer` chose. It can change ids, so it belongs to the identity."""

    backend: str
    """The whole pipeline as JSON, loadable by `tokenizers` alone: `backend_tokenizer.to_str()`."""

    vocab_size: int
    """Ids are in [0, vocab_size), added tokens included."""

    added_tokens: Mapping[str, int]
    """Text of every added token (control tokens, `<think>`, ...) to its id."""

    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, `pad_token`, `unk_token`, `cls_token`, `sep_token` -> its text."""

    adds_bos: bool
    """True if encoding with special tokens puts BOS (or CLS) first."""

    chat_template: str | None
    """Jinja source of the default chat template, if any."""

    pipeline: PipelineChoice = "class"
    """Whose pipeline `backend` is: the class's, or that of tokenizer.json alone."""

    difference: str | None = None
    """How ids of the class differ from those of tokenizer.json; None if they do not."""

    stop_tokens: Mapping[str, str] = field(default_factory=dict)
    """Text of every token that stops generation -> the file that says so: first those of
    `generation_config.json`, in its order, then the tokenizer's EOS (`tokenizer`)."""

    def __post_init__(self) -> None:
        """Add the EOS, which stops generation wherever nothing else does."""
        eos = self.special_tokens.get("eos_token")
        if eos is not None and eos not in self.stop_tokens:
            object.__setattr__(self, "stop_tokens", {**self.stop_tokens, eos: "tokenizer"})


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

        Arrow's `take` is two thirds of the time of comparing them one by one, a word at a time.

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
            tokens = self.tokens.take(pa.array(ids[start : start + _BLOCK]))
            joined, edges = zero_based(*string_bytes(tokens))
            if high > low:
                # Tokens " a" and " b", the second one shortened: edges [0 2 3], bytes b" ab".
                is_cut = np.zeros(len(edges), np.int32)
                is_cut[shortened[low:high] - start + 1] = 1
                joined = np.delete(joined, edges[shortened[low:high] - start])
                edges = edges - np.cumsum(is_cut, dtype=np.int32)
            theirs = text[num_compared : num_compared + len(joined)]
            num_compared += len(joined)
            if not np.array_equal(joined, theirs):
                places = np.flatnonzero(joined != theirs)
                found.append(start + np.unique(np.searchsorted(edges, places, "right") - 1))
        return np.concatenate(found)


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


@lru_cache(maxsize=4)
def read_pipeline(backend: str) -> Pipeline:
    """Read the JSON of a pipeline (`Tokenizer.to_str()`) into a table of tokens.

    Raises:
        TokenizerError: an id is over `MAX_IDS`.
    """
    # A quote inside a JSON string is escaped, so this text is the key itself and no token's.
    cut = backend.rfind('},"merges":[')
    parsed = orjson.loads(backend if cut < 0 else backend[:cut] + "}}}")
    model, vocab = parsed["model"], parsed["model"]["vocab"]
    added = [
        AddedToken(
            id=entry["id"],
            text=entry["content"],
            is_special=entry["special"],
            strips=entry["lstrip"] or entry["rstrip"],
        )
        for entry in sorted(parsed["added_tokens"], key=lambda entry: entry["id"])
    ]
    if isinstance(vocab, list):  # Unigram's is [[piece, score], ...] in the order of ids
        model_size, pieces = len(vocab), ((index, piece) for index, (piece, _) in enumerate(vocab))
    else:
        model_size = 1 + max(vocab.values(), default=-1)
        pieces = ((index, piece) for piece, index in vocab.items())
    size = max(model_size, *(1 + token.id for token in added), 0)
    if size > MAX_IDS:
        raise TokenizerError(
            f"tokenizer.json gives a token the id {size - 1:,}; ids must be under {MAX_IDS:,}, for "
            "there is a table of all of them. Number the tokens from 0 on",
            limit=MAX_IDS,
        )
    tokens = [""] * size
    for index, piece in pieces:
        tokens[index] = piece
    unk_id, unk_token = model.get("unk_id"), model.get("unk_token")
    if unk_id is None and unk_token in tokens:
        unk_id = tokens.index(unk_token)
    normalizers, pre_tokenizers = map(_step_types, (parsed["normalizer"], parsed["pre_tokenizer"]))
    # Newer files of SentencePiece have a step for it, older ones replace " " by the mark.
    has_word_marks = "Metaspace" in pre_tokenizers or (
        "Replace" in normalizers and WORD_MARK in str(parsed["normalizer"])
    )
    is_byte_level = "ByteLevel" in (*normalizers, *pre_tokenizers)
    own = {token.id: token.text.encode() for token in added}
    if is_byte_level:
        shown = _replaced(_byte_level(tokens), own)
    elif has_word_marks:
        shown = _replaced(_word_marked(tokens), own)
    else:  # WordPiece, for people: "say", "##ing" -> b" say", b"ing"
        if prefix := model.get("continuing_subword_prefix"):
            tokens = [t.removeprefix(prefix) if t.startswith(prefix) else f" {t}" for t in tokens]
        shown = _replaced(pa.array(tokens, pa.string()).cast(pa.binary()), own)
    token_bytes = shown if is_byte_level or has_word_marks else None
    return Pipeline(
        added=tuple(added),
        model_type=model["type"],
        dropout=model.get("dropout"),
        model_size=model_size,
        unk_id=unk_id,
        has_word_marks=has_word_marks,
        token_bytes=token_bytes,
        shown=shown,
        token_texts=None if token_bytes is None else TokenTexts.of(token_bytes),
        is_added=_mask([token.id for token in added], size),
        is_control=_mask([token.id for token in added if token.is_control], size),
    )


def _step_types(step: dict[str, Any] | None) -> list[str]:
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [step["type"], *(kind for part in inner for kind in _step_types(part))]


def _byte_level(tokens: list[str]) -> pa.BinaryArray:
    """GPT-2's alphabet back to bytes; a character outside it stands for its own UTF-8.

    It writes byte 0x20 as character 0x120, so the token "\u0120the" is b" the".
    """
    # Printable Latin-1 is itself, the other bytes are characters 256 and up: a table by code point.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = np.full(256 + len(others) + 1, -1, np.int16)  # the last stands for all beyond it
    table[printable] = printable
    table[256:-1] = others
    codes = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32)
    data = table[np.minimum(codes, len(table) - 1)]
    offsets = np.append(0, np.cumsum([len(token) for token in tokens])).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data.astype(np.uint8))]
    array = pa.BinaryArray.from_buffers(pa.binary(), len(tokens), buffers)
    foreign = np.unique(np.searchsorted(offsets, np.flatnonzero(data < 0), "right") - 1)
    return _replaced(array, {row: tokens[row].encode() for row in foreign.tolist()})


def _word_marked(tokens: list[str]) -> pa.BinaryArray:
    """SentencePiece texts to bytes: word marks are spaces, `<0xAB>` is one byte."""
    array = pc.replace_substring(pa.array(tokens, pa.string()), WORD_MARK, " ").cast(pa.binary())
    hexadecimal = re.compile(r"<0x([0-9A-F]{2})>")
    found = ((i, hexadecimal.fullmatch(t)) for i, t in enumerate(tokens) if t.startswith("<0x"))
    return _replaced(array, {i: bytes.fromhex(match[1]) for i, match in found if match})


def _replaced(array: pa.BinaryArray, values: dict[int, bytes]) -> pa.BinaryArray:
    if not values:
        return array
    ordered = pa.array([values[index] for index in sorted(values)], pa.binary())
    return pc.replace_with_mask(array, pa.array(_mask(list(values), len(array))), ordered)


def _mask(ids: list[int], size: int) -> Bools:
    mask = np.zeros(size, np.bool_)
    mask[ids] = True
    return mask

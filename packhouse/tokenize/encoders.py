"""Convert texts to ids and back with HF `tokenizers`, the reference, or with a faster equivalent.

An encoder takes whole texts, recognises added tokens in them and adds no other tokens. HF encodes
2 to 3 MB/s per core; `packhouse.tokenize.encoder_choice` decides when another encoder is used.

A snapshot is read once (`packhouse.tokenize.tokenizer_loading`) and is then independent of
transformers. Merges are most of its JSON and are not needed for tables, so they are cut off before
parsing (Qwen: 4.6 MB, 0.06 s instead of 0.14). Tables are kept per process and take about 10 bytes
per token plus its text.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import TokenizerError
from packhouse.recipe.sections import PipelineChoice
from packhouse.records.arrays import Bools, Bytes, Int32s, Int64s, list_offsets, string_bytes
from packhouse.system.progress import advance
from packhouse.system.terminal import check_interrupted
from packhouse.system.worker import limited, return_freed_memory

if TYPE_CHECKING:
    import gigatoken
    from tokenizers import Tokenizer


MAX_IDS = 2**24
"""Ids must be under this; the largest vocabularies have a million."""

WORD_MARK = "\u2581"  # SentencePiece writes a space as this

_BLOCK = 2**17  # tokens joined at once, so that they fit the processor's L2 cache


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSnapshot:
    """A tokenizer as plain data: everything that decides ids or is available to templates."""

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
    """Origin of the pipeline in `backend`: the tokenizer's class, or tokenizer.json alone."""

    difference: str | None = None
    """How ids of the class differ from those of tokenizer.json; None if they do not."""

    stop_tokens: Mapping[str, str] = field(default_factory=dict)
    """Text of every stop token -> its source: first those of `generation_config.json`, in its
    order, then the tokenizer's EOS (`tokenizer`)."""

    def __post_init__(self) -> None:
        """Add the EOS, which stops generation wherever nothing else does."""
        eos = self.special_tokens.get("eos_token")
        if eos is not None and eos not in self.stop_tokens:
            object.__setattr__(self, "stop_tokens", {**self.stop_tokens, eos: "tokenizer"})


class TokenTexts:
    """Bytes of every token of a vocabulary.

    Example:
        >>> table = TokenTexts(pa.array([b"a", b" to", b""]))
        >>> table.widths.tolist(), table.is_spaced.tolist()
        ([1, 3, 0], [False, True, False])
    """

    def __init__(self, tokens: pa.BinaryArray) -> None:
        data, edges = string_bytes(tokens)
        self.tokens = tokens
        self.widths: Int32s = np.diff(edges)
        """Number of bytes of each token, shape [vocab_size]."""
        self.is_spaced: Bools = self.widths > 0
        """True for tokens that begin with a space, shape [vocab_size]."""
        self.is_spaced[self.is_spaced] = data[edges[:-1][self.is_spaced]] == ord(" ")

    def edges(self, ids: Int32s) -> Int64s:
        """Return the offset of each token when all are joined, and the end; [num_tokens + 1].

        Example:
            >>> TokenTexts(pa.array([b"a", b" to"])).edges(np.array([1, 0, 1])).tolist()
            [0, 3, 4, 7]
        """
        edges = np.zeros(len(ids) + 1, np.int64)
        for start in range(0, len(ids), _BLOCK):
            own = edges[start + 1 : start + 1 + _BLOCK]
            np.cumsum(self.widths.take(ids[start : start + _BLOCK]), out=own)
            own += edges[start]
        return edges

    def differing(self, ids: Int32s, text: Bytes, shortened: Int64s) -> Int64s:
        """Find the tokens whose bytes differ from the text at their position.

        Ids are not checked; `edges` does that.

        Args:
            ids: tokens.
            text: text of the same length as the joined tokens.
            shortened: indices of tokens whose first byte is missing in the text, ascending.

        Returns:
            Indices of these tokens, ascending.

        Example:
            >>> table = TokenTexts(pa.array([b"a", b"to be or not"]))
            >>> text = np.frombuffer(b"ato be or but", np.uint8)
            >>> table.differing(np.array([0, 1]), text, np.zeros(0, np.int64)).tolist()
            [1]
        """
        found = [np.zeros(0, np.int64)]
        num_compared = 0
        for start in range(0, len(ids), _BLOCK):
            low, high = np.searchsorted(shortened, [start, start + _BLOCK])
            own = pa.array(ids[start : start + _BLOCK])
            # Joining them needs two thirds of the time of comparing one by one.
            # Comparing by words of 8 bytes is slower: numpy takes 6 ns per unaligned word.
            joined, edges = string_bytes(pc.take(self.tokens, own, boundscheck=False))
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
    """One entry of `added_tokens`: text that is recognised before the model runs."""

    id: int
    text: str
    is_special: bool
    strips: bool
    """True if it includes white space around it, so that it covers more than its text."""

    @property
    def is_control(self) -> bool:
        """True if this text in a content would steer the model, such as `<|im_end|>`, `<think>`.

        This includes tokens that are not marked as special, except ordinary text: runs of white
        space (GPT-2 for code has 24 of them) and, unless special, texts under 3 characters.
        """
        if self.is_special:
            return True
        return len(self.text) >= 3 and not self.text.isspace()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """Tables of a pipeline's tokens. Cannot encode."""

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
    """Bytes of each id; None if token texts cannot be converted to bytes."""

    shown: pa.BinaryArray
    """Bytes of each id for display: `token_bytes`, else the texts of the vocabulary, in which a
    space replaces WordPiece's missing `##`."""

    token_texts: TokenTexts | None
    """`token_bytes`, prepared for comparing with texts."""

    is_added: Bools
    """True for ids of added tokens, shape [vocab_size]."""

    is_control: Bools
    """True for ids of control tokens, shape [vocab_size]."""

    def count_unknown(self, ids: Int32s) -> int:
        """Count unknown tokens; comparing ids with None would take 25 ns each."""
        return 0 if self.unk_id is None else int(np.count_nonzero(ids == self.unk_id))


@lru_cache(maxsize=4)
def read_pipeline(backend: str) -> Pipeline:
    """Read the JSON of a pipeline (`Tokenizer.to_str()`) into a table of tokens.

    Raises:
        TokenizerError: an id is over `MAX_IDS`.
    """
    # A quote inside a JSON string is escaped, so this text is the key and not part of a token.
    cut = backend.rfind('},"merges":[')
    parsed = orjson.loads(backend if cut < 0 else backend[:cut] + "}}}")
    model = parsed["model"]
    vocab, unk_id, unk_token = map(model.get, ("vocab", "unk_id", "unk_token"))
    fields = itemgetter("id", "content", "special", "lstrip", "rstrip")
    added = [
        AddedToken(id=index, text=text, is_special=is_special, strips=any(strips))
        for index, text, is_special, *strips in map(fields, parsed["added_tokens"])
    ]
    added.sort(key=attrgetter("id"))
    if isinstance(vocab, list):  # Unigram's is [[piece, score], ...] in the order of ids
        model_size, pieces = len(vocab), ((index, piece) for index, (piece, _) in enumerate(vocab))
    else:
        model_size = 1 + max(vocab.values(), default=-1)
        pieces = ((index, piece) for piece, index in vocab.items())
    size = max(model_size, *(1 + token.id for token in added), 0)
    if size > MAX_IDS:
        raise TokenizerError(
            f"tokenizer.json gives a token the id {size - 1:,}, but ids must be below "
            f"{MAX_IDS:,}. Number the tokens from 0",
            limit=MAX_IDS,
        )
    tokens = [""] * size
    for index, piece in pieces:
        # Ids may have gaps, whose tokens stay empty.
        tokens[index] = piece
    if unk_id is None and unk_token in tokens:
        unk_id = tokens.index(unk_token)
    normalizer = parsed["normalizer"]
    normalizers, pre_tokenizers = map(_step_types, (normalizer, parsed["pre_tokenizer"]))
    # Newer files of SentencePiece have a step for it; older ones replace " " by the mark.
    has_word_marks = "Metaspace" in pre_tokenizers or (
        "Replace" in normalizers and WORD_MARK in str(normalizer)
    )
    is_byte_level = "ByteLevel" in (*normalizers, *pre_tokenizers)
    own = {token.id: token.text.encode() for token in added}
    if is_byte_level:
        shown = _replaced(_byte_level(tokens), own)
    elif has_word_marks:
        # Word marks become spaces, and `<0xAB>` the byte 0xAB.
        spaced = pc.replace_substring(pa.array(tokens, pa.string()), WORD_MARK, " ")
        hexadecimal = re.compile(r"<0x([0-9A-F]{2})>")
        found = ((i, hexadecimal.fullmatch(t)) for i, t in enumerate(tokens) if t[:3] == "<0x")
        bytes_of = {i: bytes.fromhex(match[1]) for i, match in found if match}
        shown = _replaced(spaced.cast(pa.binary()), bytes_of | own)
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
        token_texts=None if token_bytes is None else TokenTexts(token_bytes),
        is_added=_mask([token.id for token in added], size),
        is_control=_mask([token.id for token in added if token.is_control], size),
    )


def _step_types(step: dict[str, Any] | None) -> list[str]:
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [step["type"], *(kind for part in inner for kind in _step_types(part))]


def _byte_level(tokens: list[str]) -> pa.BinaryArray:
    """Convert GPT-2's alphabet to bytes; a character outside it becomes its UTF-8.

    It writes byte 0x20 as character 0x120, so the token "\u0120the" is b" the".
    """
    # A table by code point: printable Latin-1 is itself, the other bytes are characters 256 and up.
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


def _replaced(array: pa.BinaryArray, values: dict[int, bytes]) -> pa.BinaryArray:
    if not values:
        return array
    ordered = pa.array([values[index] for index in sorted(values)], pa.binary())
    return pc.replace_with_mask(array, pa.array(_mask(list(values), len(array))), ordered)


def _mask(ids: list[int], size: int) -> Bools:
    mask = np.zeros(size, np.bool_)
    mask[ids] = True
    return mask


Ids = tuple[Int32s, Int64s]
"""Concatenated ids of all texts, and the index of each text's first id, shape [num_texts + 1]."""

_MATRIX_CELLS = 2**20  # cells of 4 bytes; about a third of them are filled
_CHUNK_BYTES = 2**20  # an HF `Encoding` takes about 100 bytes per token
_LISTS = 2**12  # lists decoded at once: under 2 GB with 100,000 tokens each


class EncoderError(Exception):
    """A fast encoder cannot read a tokenizer or failed on a text; HF is used instead."""


class HFEncoder:
    """The reference: `tokenizers` itself.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
        >>> encoder = HFEncoder(tokenizer.to_str())
        >>> ids, offsets = encoder.encode(pa.array(["abb", "", "a"]))
        >>> ids.tolist(), offsets.tolist()
        ([2, 1, 0], [0, 2, 2, 3])
    """

    name = "tokenizers"
    is_reference = True

    def __init__(self, backend: str) -> None:
        self.version = version("tokenizers")
        self._tokenizer = load_tokenizer(backend)  # once per process

    def encode(self, texts: pa.StringArray) -> Ids:
        """Encode texts in chunks of 1 MiB, so that HF's objects stay few."""
        parts = [np.zeros(0, np.int32)]
        lengths = [np.zeros(1, np.int64)]
        offsets = list_offsets(texts)
        for start, end in chunks_of(offsets, _CHUNK_BYTES):
            batch = texts[start:end].to_pylist()
            with limited(int(offsets[end] - offsets[start])):
                # The fast variant computes no offsets, which `locate_by_widths` finds from the ids.
                encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                rows = [encoding.ids for encoding in encodings]
            if end - start < len(texts):  # skip the progress of a sample
                advance((end - start) / len(texts))
            lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
            parts.append(np.fromiter(chain.from_iterable(rows), np.int32, lengths[-1].sum()))
        return np.concatenate(parts), np.cumsum(np.concatenate(lengths))


class GigatokenEncoder:
    """Byte-level and SentencePiece BPE, about 60 times as fast as HF, if it passes the gate."""

    name = "gigatoken"
    is_reference = False

    def __init__(self, tokenizer: "gigatoken.Tokenizer") -> None:
        self.version = version("gigatoken")
        self._tokenizer = tokenizer

    @staticmethod
    @lru_cache(maxsize=4)
    def load(backend: str) -> "GigatokenEncoder":
        """Load a pipeline (Qwen: 0.4 s), once per process.

        Raises:
            EncoderError: gigatoken does not support it.
        """
        import gigatoken

        with _as_encoder_error("cannot read this tokenizer"):
            return GigatokenEncoder(gigatoken.Tokenizer.from_json(backend))

    def encode(self, texts: pa.StringArray) -> Ids:
        """Encode texts.

        Raises:
            EncoderError: gigatoken failed on one of them.
        """
        import gigatoken

        parts = [np.zeros(0, np.int32)]
        lengths = [np.zeros(1, np.int64)]
        binary = texts.cast(pa.binary())
        for start, end in _matrix_chunks(np.diff(list_offsets(texts))):
            source = gigatoken.BytesSource(binary[start:end].to_pylist())
            # A padded matrix, because gigatoken's flat arrays would import awkward (0.5 s).
            with _as_encoder_error("failed"):
                matrix, widths = self._tokenizer.encode_batch_padded(source, 0)
            # Rows of 2 and 1 ids in 2 columns: [[1 1] [1 0]]; row by row these are the ids.
            filled = np.arange(matrix.shape[1]) < widths[:, None]
            # gigatoken returns unsigned ids. They are below MAX_IDS, so the bits are the same.
            parts.append(matrix[filled].view(np.int32))
            lengths.append(widths)
        return np.concatenate(parts), np.cumsum(np.concatenate(lengths))


Encoder = HFEncoder | GigatokenEncoder
"""Turns texts into ids exactly as the tokenizer with `add_special_tokens=False` does."""


@contextmanager
def _as_encoder_error(what: str) -> Iterator[None]:
    """Turn everything that gigatoken raises, including panics of its Rust code, into our error."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    # A panic of Rust code is raised as pyo3's PanicException, which is not an `Exception`.
    except BaseException as error:
        check_interrupted()  # numpy's C API panics if a signal interrupts its first import
        first_line = str(error).strip().split("\n")[0]
        raise EncoderError(f"gigatoken {version('gigatoken')} {what}: {first_line}") from error


def _matrix_chunks(num_bytes: npt.NDArray[np.integer]) -> Iterator[tuple[int, int]]:
    """Yield row ranges in which the longest text times the number of rows is bounded.

    If padded to as many tokens as the longest text has bytes, a range takes at most 4 MiB.
    """
    start, longest = 0, 1
    for row, width in enumerate(num_bytes.tolist()):
        longest = max(longest, width)
        if (row + 1 - start) * longest > _MATRIX_CELLS and row > start:
            yield start, row
            start, longest = row, max(width, 1)
    if start < len(num_bytes):
        yield start, len(num_bytes)


_loaded: dict[str, "Tokenizer"] = {}  # the last four: a run has one


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """A limit on the number of tokens of a text."""

    max_tokens: int
    backend: str
    """The tokenizer, as in `TokenizerSnapshot`."""

    def fits(self, text: bytes) -> bool:
        """Return False if a text has more tokens. A token has at least one byte."""
        if len(text) <= self.max_tokens:
            return True
        # A control token in the row's own text is one token here, but several when it is trained.
        encoded = load_tokenizer(self.backend).encode(text.decode(), add_special_tokens=False)
        return len(encoded.ids) <= self.max_tokens


def load_tokenizer(backend: str) -> "Tokenizer":
    """Load a pipeline with `tokenizers` (Qwen: 0.4 s, 150 MB), once per process."""
    from tokenizers import Tokenizer

    # In this thread, because another one would save only 0.2 of 4.6 s, and take 80 MB.
    tokenizer = _loaded.get(backend)
    return keep(backend, Tokenizer.from_str(backend)) if tokenizer is None else tokenizer


@dataclass(frozen=True, slots=True)
class Ends:
    """Text at the start and end of a rendering."""

    bos: str
    eos: str
    space: str = ""
    """Space between BOS and a text that begins with none, if the tokenizer adds one before the
    first word: Mistral v0.3 encodes "Below" alone as "_Below", but "<s>Below" as "<s>", "Below".
    With "<s> Below" the ids are those of the text alone."""


def ends_of(snapshot: TokenizerSnapshot, eos: str) -> Ends:
    """Return the start and end of texts that give the IDs of the tokenizer with its BOS."""
    if not snapshot.adds_bos:
        return Ends("", eos)
    bos = snapshot.special_tokens.get("bos_token") or snapshot.special_tokens.get("cls_token") or ""
    if not read_pipeline(snapshot.backend).has_word_marks:
        return Ends(bos, eos)
    tokenizer = load_tokenizer(snapshot.backend)
    alone, behind, spaced = (
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in ("Below", f"{bos}Below", f"{bos} Below")
    )
    # Tried, because newer tokenizers add the space only before the whole text, and older ones after
    # every added token as well.
    is_kept_by_space = behind[1:] != alone and spaced[1:] == alone
    return Ends(bos, eos, " " if is_kept_by_space else "")


def keep(backend: str, tokenizer: "Tokenizer") -> "Tokenizer":
    """Keep a loaded pipeline, made bare, for `load_tokenizer`: saves 0.4 s in a first run."""
    if len(_loaded) == 4:
        _loaded.pop(next(iter(_loaded)))
    # By the JSON of the pipeline and not by folder: the same tokenizer in another folder is loaded
    # once, and a changed one is another key.
    _loaded[backend] = bare(tokenizer)
    return tokenizer


def forget_encoders() -> None:
    """Free the memory of loaded encoders (Qwen: 150 MB, 0.06 s)."""
    _loaded.clear()
    GigatokenEncoder.load.cache_clear()
    return_freed_memory()


def bare(tokenizer: "Tokenizer") -> "Tokenizer":
    """Remove everything that adds ids to those of the text, as in `load_tokenizer`."""
    # No post-processor adds ids here, but some move offsets past leading spaces.
    tokenizer.post_processor = None
    tokenizer.encode_special_tokens = False
    return tokenizer


def chunks_of(offsets: npt.NDArray[np.integer], max_bytes: int) -> list[tuple[int, int]]:
    """Cut texts into row ranges of at most `max_bytes`, or of a single row that is longer.

    Example:
        >>> chunks_of(np.array([0, 2, 4, 10, 11]), max_bytes=4)  # texts of 2, 2, 6 and 1 bytes
        [(0, 2), (2, 3), (3, 4)]
    """
    offsets = offsets.astype(np.int64)
    chunks = []
    start = 0
    while start < len(offsets) - 1:
        end = int(np.searchsorted(offsets, offsets[start] + max_bytes, "right")) - 1
        end = max(end, start + 1)
        chunks.append((start, end))
        start = end
    return chunks


def decode_lists(ids: pa.LargeListArray, snapshot: TokenizerSnapshot) -> pa.LargeStringArray:
    """Return the text of each list of ids, control tokens included.

    Invalid UTF-8, such as part of a character, becomes U+FFFD.
    """
    table = read_pipeline(snapshot.backend).token_bytes
    if table is None:
        tokenizer = load_tokenizer(snapshot.backend)
        texts = (tokenizer.decode(one, skip_special_tokens=False) for one in ids.to_pylist())
        return pa.array(texts, pa.large_string())
    parts = []
    # At least one part, because `concat_arrays` refuses an empty list.
    for start in range(0, max(len(ids), 1), _LISTS):
        part = ids.slice(start, _LISTS)
        values = part.flatten().to_numpy(zero_copy_only=False)
        tokens = table.take(pa.array(np.clip(values, 0, len(table) - 1)))
        offsets = part.offsets.to_numpy() - part.offsets[0].as_py()
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), tokens)
        joined = pc.binary_join(lists, b"")
        try:
            parts.append(joined.cast(pa.large_string()))
        except pa.ArrowInvalid:
            shown = [one.decode("utf-8", "replace") for one in joined.to_pylist()]
            parts.append(pa.array(shown, pa.large_string()))
    return pa.concat_arrays(parts)


def decode(
    load: Callable[[], TokenizerSnapshot | None], rows: Sequence[Sequence[int]]
) -> list[str]:
    """Return the text of each row of ids, control tokens included."""
    snapshot = load()
    assert snapshot is not None, "the caller loaded it before"
    tokenizer = load_tokenizer(snapshot.backend)
    return [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in rows]

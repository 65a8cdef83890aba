"""Texts to ids and back: HF `tokenizers`, the reference, and whatever reproduces it faster.

An encoder takes whole texts, recognises added tokens in them and adds none of its own.
HF encodes 2 to 3 MB/s a core; see `packhouse.tokenize.gate` for when another one is used.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.lists import list_offsets
from packhouse.system.arrays import Int32s, Int64s
from packhouse.system.progress import advance
from packhouse.system.terminal import check_interrupted
from packhouse.system.worker import limited
from packhouse.tokenize.pipeline import TokenizerSnapshot, read_pipeline

if TYPE_CHECKING:
    import gigatoken
    from tokenizers import Tokenizer

Ids = tuple[Int32s, Int64s]
"""Ids of all texts behind one another, and where each text's begin: shape [num_texts + 1]."""

_MATRIX_CELLS = 2**20  # cells of 4 bytes; about a third of them are filled
_CHUNK_BYTES = 2**20  # an HF `Encoding` takes about 100 bytes per token
_LISTS = 2**12  # lists that are decoded at once: of 100,000 tokens each, under 2 GB


class EncoderError(Exception):
    """A fast encoder cannot read a tokenizer or failed on a text; HF takes its place."""


class Encoder(Protocol):
    """Turns texts into ids exactly as the tokenizer with `add_special_tokens=False` does."""

    name: str
    """Package of the encoder."""

    version: str
    """Version of that package."""

    is_reference: bool
    """True for HF itself, which needs no check."""

    def encode(self, texts: pa.StringArray) -> Ids:
        """Encode texts; the ids are those of HF `tokenizers`."""


class HFEncoder:
    """The reference: `tokenizers` itself.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> encoder = HFEncoder(Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])))
        >>> ids, offsets = encoder.encode(pa.array(["abb", "", "a"]))
        >>> ids.tolist(), offsets.tolist()
        ([2, 1, 0], [0, 2, 2, 3])
    """

    name = "tokenizers"
    is_reference = True

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self.version = version("tokenizers")
        self._tokenizer = tokenizer

    @staticmethod
    def load(backend: str) -> "HFEncoder":
        """Load a pipeline, once per process."""
        return HFEncoder(load_tokenizer(backend))

    def encode(self, texts: pa.StringArray) -> Ids:
        """Encode texts in chunks of 1 MiB, so that HF's objects stay few."""
        parts = [np.zeros(0, np.int32)]
        lengths = [np.zeros(1, np.int64)]
        offsets = list_offsets(texts)
        for start, end in chunks_of(offsets, _CHUNK_BYTES):
            batch = texts[start:end].to_pylist()
            with limited(int(offsets[end] - offsets[start])):
                encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                rows = [encoding.ids for encoding in encodings]
            if end - start < len(texts):  # not for a sample
                advance((end - start) / len(texts))
            lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
            parts.append(np.fromiter(chain.from_iterable(rows), np.int32, lengths[-1].sum()))
        return np.concatenate(parts), np.cumsum(np.concatenate(lengths))


class GigatokenEncoder:
    """Byte-level and SentencePiece BPE about 60 times as fast as HF, where it passes the gate.

    Takes padded matrices from gigatoken (its flat arrays import awkward: 0.5 s) and cuts the
    padding off, so a batch is bounded by the size of its matrix.
    """

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
            with _as_encoder_error("failed"):
                matrix, widths = self._tokenizer.encode_batch_padded(source, 0)
            # Rows of 2 and 1 ids in 2 columns: [[1 1] [1 0]]; row by row these are the ids.
            filled = np.arange(matrix.shape[1]) < widths[:, None]
            parts.append(matrix[filled].view(np.int32))
            lengths.append(widths)
        return np.concatenate(parts), np.cumsum(np.concatenate(lengths))


@contextmanager
def _as_encoder_error(what: str) -> Iterator[None]:
    """Turn whatever gigatoken raises, a panic of its Rust code too, into our error."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        check_interrupted()  # numpy's C API panics where a signal meets its first import
        first_line = str(error).strip().split("\n")[0]
        raise EncoderError(f"gigatoken {version('gigatoken')} {what}: {first_line}") from error


def _matrix_chunks(num_bytes: npt.NDArray[np.integer]) -> Iterator[tuple[int, int]]:
    """Cut into row ranges whose longest text times their number of rows is bounded.

    Padded to as many tokens as the longest text has bytes, a range takes at most 4 MiB.
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


def load_tokenizer(backend: str) -> "Tokenizer":
    """Load a pipeline with `tokenizers` (Qwen: 0.4 s, 150 MB), once per process.

    It has no post-processor: none adds ids here, but some move offsets past leading spaces.
    """
    from tokenizers import Tokenizer

    tokenizer = _loaded.get(backend)
    return keep(backend, Tokenizer.from_str(backend)) if tokenizer is None else tokenizer


def keep(backend: str, tokenizer: "Tokenizer") -> "Tokenizer":
    """Keep a loaded pipeline for `load_tokenizer`, bare: a first run is 0.4 s shorter by it."""
    if len(_loaded) == 4:
        _loaded.pop(next(iter(_loaded)))
    _loaded[backend] = bare(tokenizer)
    return tokenizer


def bare(tokenizer: "Tokenizer") -> "Tokenizer":
    """Strip what is no part of the text's own ids, as `load_tokenizer` does."""
    tokenizer.post_processor = None
    tokenizer.encode_special_tokens = False
    return tokenizer


def chunks_of(offsets: npt.NDArray[np.integer], max_bytes: int) -> list[tuple[int, int]]:
    """Cut texts into row ranges of at most `max_bytes`, or of one row where that is longer.

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

    Bytes that are no UTF-8, such as those of a cut character, show as U+FFFD.
    """
    table = read_pipeline(snapshot.backend).token_bytes
    if table is None:
        tokenizer = load_tokenizer(snapshot.backend)
        texts = (tokenizer.decode(one, skip_special_tokens=False) for one in ids.to_pylist())
        return pa.array(texts, pa.large_string())
    parts = []
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
    """Text of each row of ids, control tokens included."""
    snapshot = load()
    assert snapshot is not None, "the caller loaded it before"
    tokenizer = load_tokenizer(snapshot.backend)
    return [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in rows]

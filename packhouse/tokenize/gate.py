"""Which encoder to use: the fast one if it gives HF's ids, else HF.

Fast encoders are young. One is used for a tokenizer only after it gave HF's ids, one by one, on a
fixed corpus of known traps (verdict kept under tokenizer and version) and, each time, on a
sample of the very data. One differing id, an error or a tokenizer that it cannot read: HF is used
and the report says why. Text of up to 100 KB goes to HF at once.
So ids never depend on the encoder, only the time does.
"""

import threading
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import TokenizerError
from packhouse.system.arrays import Bools
from packhouse.system.disks import read_checked, write_checked
from packhouse.tokenize.corpus import CORPUS_VERSION, adversarial_texts, sample_texts
from packhouse.tokenize.encoders import (
    Encoder,
    EncoderError,
    GigatokenEncoder,
    Ids,
    hf_encoder,
    text_bases,
)
from packhouse.tokenize.offsets import locate_by_widths
from packhouse.tokenize.pipeline import read_pipeline
from packhouse.tokenize.snapshot import TokenizerSnapshot

# Characters on which two libraries may disagree because they know different Unicode versions.
#
# Whether a character is a letter decides where words end, and so ids. tokenizers 0.23 goes by
# Unicode 16 (its normaliser by 9), gigatoken 0.10 by 17: all 1,112,064 characters were tried, and
# those added since are where they differ. A row that holds such a character, or one that is not
# assigned yet, is always encoded by HF. Rows in ASCII are not looked at.


# Blocks outside the basic plane that are in common use and did not change for years. Emoji are
# added every year, but are neither letters nor numbers before or after.
_SETTLED_ASTRAL = [
    (0x1D400, 0x1D7FF),  # mathematical letters, as in fancy user names
    (0x1F000, 0x1FAFF),  # emoji and pictographs
    (0x20000, 0x2A6DF),  # CJK extension B
    (0xE0000, 0xE01EF),  # tags of flags, variation selectors
    (0xF0000, 0x10FFFD),  # private use
]
# Basic plane: assigned after Unicode 14, of which older Pythons know, or next to such.
_RECENT_BASIC = [
    (0x0870, 0x089F),
    (0x0C5C, 0x0C5C),
    (0x0CDC, 0x0CDC),
    (0x0CF3, 0x0CF3),
    (0x0ECE, 0x0ECE),
    (0x1C80, 0x1C8F),
    (0xA7C0, 0xA7F1),
]


def find_unicode_drift(texts: pa.StringArray) -> Bools:
    """Find rows with a character whose nature depends on the Unicode version; shape [num_texts].

    Example:
        >>> find_unicode_drift(pa.array(["caf\u00e9 \U0001f600", "\u088f", "a"])).tolist()
        [False, True, False]
    """
    found = np.zeros(len(texts), np.bool_)
    foreign = pc.invert(pc.string_is_ascii(texts))
    rows = np.flatnonzero(foreign.to_numpy(zero_copy_only=False))
    if not len(rows):
        return found
    chosen = texts.filter(foreign)
    codes = np.frombuffer("".join(chosen.to_pylist()).encode("utf-32-le"), np.uint32)
    is_present = np.zeros(0x110000, np.bool_)
    is_present[codes] = True
    drifting = [code for code in np.flatnonzero(is_present).tolist() if _is_unsettled(code)]
    if drifting:
        places = np.flatnonzero(np.isin(codes, drifting))
        # Texts of 3 and 2 characters end at [3 5]: characters 3 and 4 are of the second one.
        ends = np.cumsum(pc.utf8_length(chosen).to_numpy())
        found[rows[np.searchsorted(ends, places, "right")]] = True
    return found


@lru_cache(maxsize=2**16)
def _is_unsettled(code: int) -> bool:
    """Unassigned, recently assigned, or a mark that Unicode 3.2 (the oldest here) did not have.

    Marks change order under normalisation, where a library knows them.
    """
    if code >= 0x10000:
        return not any(first <= code <= last for first, last in _SETTLED_ASTRAL)
    if any(first <= code <= last for first, last in _RECENT_BASIC):
        return True
    character = chr(code)
    if unicodedata.category(character) == "Cn":
        return code < 0xFFFE  # the two above are no characters and never will be
    is_mark = unicodedata.combining(character) != 0
    return is_mark and unicodedata.ucd_3_2_0.category(character) == "Cn"


_JUDGING = threading.Lock()

FEW_BYTES = 100_000
"""Text that goes to HF at once. It counts by shard alone and not by what else a process did, for
manifests name the encoders, and equal inputs must have equal manifests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An encoder and why it is used."""

    encoder: Encoder
    gate: str
    """`passed`, `not asked` or `failed: ` and why the fast encoder is not used."""

    sample_size: int = 0
    """Texts of the data on which the fast encoder was compared."""

    def report(self) -> dict[str, object]:
        """What a manifest records."""
        return {
            "name": self.encoder.name,
            "version": self.encoder.version,
            "gate": self.gate,
            "sample_size": self.sample_size,
        }


def choose_encoder(
    texts: pa.ChunkedArray,
    snapshot: TokenizerSnapshot,
    choice: Literal["auto", "hf", "fast"],
    cache: Path | None = None,
) -> Choice:
    """Choose the encoder for some texts.

    Args:
        texts: data that is to be encoded; a sample of it is compared.
        snapshot: tokenizer.
        choice: `auto`, `hf` (never another) or `fast` (never HF).
        cache: folder that keeps verdicts on the fixed corpus.

    Raises:
        TokenizerError: `fast`, and the fast encoder cannot be used; says why.
    """
    if choice == "hf":
        return Choice(encoder=hf_encoder(snapshot), gate="not asked")
    num_bytes = sum(int(text_bases(chunk)[-1]) for chunk in texts.chunks)
    if choice == "auto" and num_bytes <= FEW_BYTES:
        gate = "not asked: HF encodes this little text itself as soon as a sample of it"
        return Choice(encoder=hf_encoder(snapshot), gate=gate)
    sample = sample_texts(texts)
    try:
        fast = _load_fast(snapshot, cache)
    except EncoderError as error:
        return refuse_fast(snapshot, choice, str(error))
    fault = first_difference(fast, sample, snapshot)
    if fault is not None:
        return refuse_fast(snapshot, choice, fault)
    return Choice(encoder=fast, gate="passed", sample_size=len(sample))


def _load_fast(snapshot: TokenizerSnapshot, cache: Path | None) -> Encoder:
    """Load the fast encoder; it is compared on the corpus unless `cache` holds the verdict.

    A second thread waits for the first one's verdict.

    Raises:
        EncoderError: the fast encoder cannot be used; says why.
    """
    encoder = f"{GigatokenEncoder.name}-{version(GigatokenEncoder.name)}"
    which = "-file" if snapshot.pipeline == "file" else ""
    name = f"gate-{CORPUS_VERSION}-{snapshot.fingerprint}{which}-{encoder}.json"
    with _JUDGING:
        verdict = read_checked(cache / name) if cache else None
        if verdict is not None and verdict["fault"] is not None:
            raise EncoderError(verdict["fault"])
        pipeline = read_pipeline(snapshot.backend)
        if pipeline.token_bytes is None:
            raise EncoderError(f"a {pipeline.model_type} tokenizer does not keep its text")
        fast = GigatokenEncoder.load(snapshot.backend)
        if verdict is None:
            fault = first_difference(fast, adversarial_texts(pipeline), snapshot)
            if cache:
                write_checked(cache / name, {"fault": fault})
            if fault is not None:
                raise EncoderError(fault)
    return fast


def refuse_fast(
    snapshot: TokenizerSnapshot, choice: Literal["auto", "hf", "fast"], fault: str
) -> Choice:
    """Use HF because of a fault of the fast encoder.

    Raises:
        TokenizerError: only the fast encoder may be used.
    """
    if choice == "fast":
        raise TokenizerError(
            f"encoder 'fast' cannot be used with this {snapshot.class_name}: {fault}; "
            "set tokenize.encoder to 'auto' or 'hf'",
            fault=fault,
        )
    return Choice(encoder=hf_encoder(snapshot), gate=f"failed: {fault}")


def first_difference(encoder: Encoder, texts: list[str], snapshot: TokenizerSnapshot) -> str | None:
    """Say where an encoder's ids first differ from HF's; None if they nowhere do.

    Rows that are HF's in any case (see `packhouse.tokenize.tokenizing`) are passed over.

    Args:
        encoder: what is judged.
        texts: what it is to encode.
        snapshot: the tokenizer.
    """
    array = pa.array(texts, pa.string())
    true_ids = hf_encoder(snapshot).encode(array)
    try:
        ids, offsets = encoder.encode(array)
    except EncoderError as error:
        return str(error)
    name = f"{encoder.name} {encoder.version}"
    if len(offsets) != len(texts) + 1:
        return f"{name} gives {len(offsets) - 1} rows for {len(texts)} texts"
    for row in _differing_rows((ids, offsets), true_ids):
        text = array[row : row + 1]
        ours = ids[offsets[row] : offsets[row + 1]]
        true = true_ids[0][true_ids[1][row] : true_ids[1][row + 1]]
        pipeline = read_pipeline(snapshot.backend)
        expected = locate_by_widths(text, true, np.array([0, len(true)]), pipeline)
        if expected.is_exact[0] and not find_unicode_drift(text)[0]:
            return f"{name} {_describe(texts[row], ours.tolist(), true.tolist())}"
    return None


def _differing_rows(ours: Ids, theirs: Ids) -> list[int]:
    """Rows with other ids; usually there are none, and no row is looked at alone."""
    if np.array_equal(ours[1], theirs[1]) and np.array_equal(ours[0], theirs[0]):
        return []
    pairs = zip(*(np.split(ids, offsets[1:-1]) for ids, offsets in (ours, theirs)), strict=True)
    return [row for row, (a, b) in enumerate(pairs) if not np.array_equal(a, b)]


def _describe(text: str, ids: list[int], expected: list[int]) -> str:
    pairs = zip(ids, expected, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(expected)))
    return (
        f"gives other ids than HF for {text[:60]!r}: token {place} begins "
        f"{ids[place : place + 4]}, not {expected[place : place + 4]}"
    )

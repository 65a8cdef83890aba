"""Which encoder to use: the fast one if it gives HF's ids, else HF.

Fast encoders are young. One is used for a tokenizer only after it gave HF's ids, one by one, on a
fixed corpus of known traps (verdict kept under tokenizer and version) and, each time, on a
sample of the very data. One differing id, an error or a tokenizer that it cannot read: HF is used
and the report says why. Text of up to 100 KB goes to HF at once.
So ids never depend on the encoder, only the time does.
"""

import threading
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from packhouse.errors import TokenizerError
from packhouse.runtime.checked_files import read_checked, write_checked
from packhouse.tokenization.corpus import CORPUS_VERSION, adversarial_texts, sample_texts
from packhouse.tokenization.encoders import (
    Encoder,
    EncoderError,
    GigatokenEncoder,
    Ids,
    hf_encoder,
    text_bases,
)
from packhouse.tokenization.offsets import locate_by_widths
from packhouse.tokenization.pipeline import read_pipeline
from packhouse.tokenization.snapshot import TokenizerSnapshot
from packhouse.tokenization.unicode_drift import find_unicode_drift

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

    Rows that are HF's in any case (see `packhouse.tokenization.encoding`) are passed over.

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

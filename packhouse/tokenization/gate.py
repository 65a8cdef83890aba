"""Which encoder to use: the fast one if it gives HF's ids, else HF.

Fast encoders are young. One is used for a tokenizer only after it gave HF's ids, one by one, on a
fixed corpus of known traps (verdict kept under tokenizer and version) and, each time, on a
sample of the very data. One differing id, an error or a tokenizer that it cannot read: HF is used
and the report says why. So ids never depend on the encoder, only the time does.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from packhouse.errors import TokenizerError
from packhouse.tokenization.contested import find_contested
from packhouse.tokenization.corpus import CORPUS_VERSION, adversarial_texts, sample_texts
from packhouse.tokenization.encoders import (
    Encoder,
    EncoderError,
    GigatokenEncoder,
    hf_encoder,
)
from packhouse.tokenization.kept import read_kept, write_kept
from packhouse.tokenization.offsets import locate_by_widths
from packhouse.tokenization.pipeline import read_pipeline
from packhouse.tokenization.snapshot import TokenizerSnapshot

__all__ = ["Choice", "choose_encoder", "first_difference"]


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
    sample = sample_texts(texts)
    fault, fast = None, None
    try:
        fast = GigatokenEncoder.load(snapshot.backend)
    except EncoderError as error:
        fault = str(error)
    if read_pipeline(snapshot.backend).token_bytes is None:
        fault = fault or "this tokenizer does not keep its text, so ids cannot be checked"
    elif fast is not None:
        fault = _fixed_fault(fast, snapshot, cache)
        fault = fault or first_difference(fast, snapshot, sample)
    if fault is None and fast is not None:
        return Choice(encoder=fast, gate="passed", sample_size=len(sample))
    return refuse_fast(snapshot, choice, str(fault))


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


def first_difference(encoder: Encoder, snapshot: TokenizerSnapshot, texts: list[str]) -> str | None:
    """Say where an encoder's ids first differ from HF's; None if they nowhere do.

    Rows that are HF's in any case (see `packhouse.tokenization.encoding`) are passed over.
    """
    pipeline = read_pipeline(snapshot.backend)
    array = pa.array(texts, pa.string())
    try:
        ids, offsets = encoder.encode(array)
    except EncoderError as error:
        return str(error)
    name = f"{encoder.name} {encoder.version}"
    if len(offsets) != len(texts) + 1:
        return f"{name} gives {len(offsets) - 1} rows for {len(texts)} texts"
    expected = locate_by_widths(array, *hf_encoder(snapshot).encode(array), pipeline)
    for row in np.flatnonzero(expected.is_exact & ~find_contested(array)).tolist():
        given = ids[offsets[row] : offsets[row + 1]]
        true = expected.ids[expected.offsets[row] : expected.offsets[row + 1]]
        if not np.array_equal(given, true):
            return f"{name} {_describe(texts[row], given.tolist(), true.tolist())}"
    return None


def _describe(text: str, given: list[int], expected: list[int]) -> str:
    pairs = zip(given, expected, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(given), len(expected)))
    return (
        f"gives other ids than HF for {text[:60]!r}: token {place} begins "
        f"{given[place : place + 4]}, not {expected[place : place + 4]}"
    )


def _fixed_fault(encoder: Encoder, snapshot: TokenizerSnapshot, cache: Path | None) -> str | None:
    """What is wrong with an encoder on the fixed corpus, from the kept verdict if there is one."""
    name = f"gate-{CORPUS_VERSION}-{snapshot.fingerprint}-{encoder.name}-{encoder.version}.json"
    kept = read_kept(cache / name) if cache else None
    if kept is None:
        texts = adversarial_texts(read_pipeline(snapshot.backend))
        kept = {"fault": first_difference(encoder, snapshot, texts)}
        if cache:
            write_kept(cache / name, kept)
    fault: str | None = kept["fault"]
    return fault

"""Encode rows and say which bytes each token covers; HF has the last word on doubtful rows.

A fast encoder's ids are taken where nothing can be in doubt: the tokens' bytes, joined, are the
text, and no character is one that libraries may know differently. All other rows (of Alpaca: none)
are encoded by HF, ids and offsets.
"""

import numpy as np
import pyarrow as pa

from packhouse.arrays import Int64s
from packhouse.runtime.progress import advance
from packhouse.tokenization.encoders import (
    Encoder,
    EncoderError,
    chunks_of,
    load_tokenizer,
    text_bases,
)
from packhouse.tokenization.offsets import EncodedRow, EncodedRows, byte_ranges, locate_by_widths
from packhouse.tokenization.pipeline import read_pipeline
from packhouse.tokenization.unicode_drift import find_unicode_drift

_CHUNK_BYTES = 2**19  # HF encodings with offsets take about 300 bytes per token


def encode_rows(texts: pa.StringArray, encoder: Encoder, backend: str) -> tuple[EncodedRows, int]:
    """Encode texts with an encoder that passed the gate, or with HF.

    Returns:
        The rows, and how many of them the fast encoder is not trusted with, so that HF did them.

    Raises:
        EncoderError: the encoder failed, or gave wrong ids for a row without any doubt.
    """
    pipeline = read_pipeline(backend)
    if pipeline.token_bytes is None:  # every row is doubtful: encode once, with offsets
        nothing = np.zeros(0, np.int32), np.zeros(len(texts) + 1, np.int64)
        rows = locate_by_widths(texts, *nothing, pipeline)
    else:
        rows = locate_by_widths(texts, *encoder.encode(texts), pipeline)
    is_drifting = np.zeros(len(texts), np.bool_)
    if not encoder.is_reference:
        is_drifting = find_unicode_drift(texts)
    doubtful = np.flatnonzero(~rows.is_exact | is_drifting)
    if not len(doubtful):
        return rows, 0
    true_rows = _encode_with_hf(texts, doubtful, backend)
    # Rows of which HF's own ids decode to exactly their text are exact as well. If they were not
    # with the fast encoder's ids, those were wrong, and so may be others that nobody compared.
    ids = np.concatenate([row.ids for row in true_rows.values()])
    offsets = np.cumsum([0, *(len(row.ids) for row in true_rows.values())])
    found = locate_by_widths(texts.take(pa.array(doubtful)), ids, offsets, pipeline)
    is_exact = rows.is_exact.copy()
    is_exact[doubtful] = found.is_exact
    wrong = np.flatnonzero(is_exact & ~rows.is_exact & ~is_drifting)
    if len(wrong):
        example = texts[int(wrong[0])].as_py()[:60]
        raise EncoderError(
            f"{encoder.name} {encoder.version} gives other ids than HF for {example!r}"
        )
    merged = rows.with_rows(true_rows, text_bases(texts), is_exact)
    return merged, 0 if encoder.is_reference else len(doubtful)


def _encode_with_hf(texts: pa.StringArray, rows: Int64s, backend: str) -> dict[int, EncodedRow]:
    """Encode some rows with HF, ids and offsets, a few at a time."""
    encoded = {}
    chosen = texts.take(pa.array(rows))
    for begin, end in chunks_of(chosen, _CHUNK_BYTES):
        batch = chosen[begin:end].to_pylist()
        encodings = load_tokenizer(backend).encode_batch(batch, add_special_tokens=False)
        advance((end - begin) / len(rows))
        for row, text, encoding in zip(rows[begin:end].tolist(), batch, encodings, strict=True):
            starts, ends = byte_ranges(text, encoding.offsets)
            encoded[row] = EncodedRow(np.array(encoding.ids, np.int32), starts, ends)
    return encoded

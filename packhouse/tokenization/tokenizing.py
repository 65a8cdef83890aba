"""Formatted text to ids and trained ranges: one encoding of each whole rendering.

Prompt and answer are never encoded apart, since that changes merges at their border. What is
trained follows from where tokens begin in the text (`packhouse.tokenization.offsets`), and a
control token that data forged stays ordinary text (`packhouse.tokenization.control_text`).
Work goes through a table in slices of 8 MiB of text, so that memory does not grow with it.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.recipe import TokenizeConfig
from packhouse.tables import QUARANTINED, TOKENIZED
from packhouse.tokenization.encoders import Encoder, chunks_of, hf_encoder, text_offsets
from packhouse.tokenization.offsets import locate_tokens
from packhouse.tokenization.pipeline import read_pipeline
from packhouse.tokenization.snapshot import TokenizerSnapshot
from packhouse.tokenization.spans import TrainedRanges, train_ranges

__all__ = ["VERSION", "Tokenized", "tokenize_table"]

VERSION = 1
"""Rises whenever the same text would give other ids or ranges."""

_SLICE_BYTES = 8 * 2**20
_MAX_RAW_BYTES = 64 * 2**10

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Tokenized:
    """What became of a table of renderings; every row is in one of the two tables."""

    tokenized: pa.Table
    """Schema `packhouse.tables.TOKENIZED`, in the order of the input."""

    quarantined: pa.Table
    """Schema `packhouse.tables.QUARANTINED`; reasons `empty`, `nothing_trained`, `control_text`."""

    notes: dict[str, int]
    """Counts: `straddles_start`, `straddles_end` (spans), `inexact_round_trip`,
    `control_text_rows` (rows), `control_text` (occurrences), `unk_tokens` (tokens)."""

    encoder: dict[str, object]
    """Which encoder was used and why: name, version, gate, sample_size."""


def tokenize_table(
    formatted: pa.Table,
    snapshot: TokenizerSnapshot,
    config: TokenizeConfig,
    cache: Path | None = None,
) -> Tokenized:
    """Encode renderings and mark what is trained.

    Args:
        formatted: schema `packhouse.tables.FORMATTED`.
        snapshot: tokenizer to encode with.
        config: choice of encoder (never changes ids) and policy on control text.
        cache: folder for verdicts on the fast encoder; None judges it anew in each process.

    Raises:
        TokenizerError: `encoder: fast`, and the fast encoder does not give HF's ids.
    """
    encoder: Encoder = hf_encoder(snapshot)
    notes: Counter[str] = Counter()
    tokenized = [TOKENIZED.empty_table()]
    quarantined = [QUARANTINED.empty_table()]
    for batch in formatted.to_batches():
        for start, end in chunks_of(batch.column("text"), _SLICE_BYTES):
            done = _tokenize_slice(batch.slice(start, end - start), snapshot, encoder, notes)
            tokenized.append(done[0])
            quarantined.append(done[1])
    return Tokenized(
        tokenized=pa.concat_tables(tokenized),
        quarantined=pa.concat_tables(quarantined),
        notes={name: count for name, count in sorted(notes.items()) if count},
        encoder={"name": encoder.name, "version": encoder.version},
    )


def _tokenize_slice(
    batch: pa.RecordBatch, snapshot: TokenizerSnapshot, encoder: Encoder, notes: Counter[str]
) -> tuple[pa.Table, pa.Table]:
    texts = batch.column("text")
    pipeline = read_pipeline(snapshot.backend)
    ids, offsets = encoder.encode(texts)
    located = locate_tokens(texts, ids, offsets, pipeline, snapshot.backend)
    spans = _flat_spans(batch.column("trained_spans"), texts)
    ranges = train_ranges(located.starts, located.ends, offsets, *spans)
    notes["inexact_round_trip"] += int((~located.is_exact).sum())
    notes["straddles_start"] += ranges.straddles_start
    notes["straddles_end"] += ranges.straddles_end
    if pipeline.unk_id is not None:
        notes["unk_tokens"] += int((ids == pipeline.unk_id).sum())
    is_empty = np.diff(offsets) == 0
    is_idle = (ranges.num_trained == 0) & batch.column("label").is_null().to_numpy(False)
    table = _tokenized_table(batch, ids, offsets, ranges)
    reasons = np.where(is_empty, "empty", np.where(is_idle, "nothing_trained", ""))
    is_good = reasons == ""
    if is_good.all():
        return table, QUARANTINED.empty_table()
    return table.filter(pa.array(is_good)), _quarantine(batch, reasons)


def _flat_spans(spans: pa.ListArray, texts: pa.StringArray) -> tuple[Int64s, Int64s, Int64s]:
    """Starts and ends of spans, counted in bytes of all texts, and where each row's begin."""
    offsets = spans.offsets.to_numpy().astype(np.int64)
    values = spans.values.slice(offsets[0], offsets[-1] - offsets[0])
    offsets -= offsets[0]
    bases = text_offsets(texts).astype(np.int64)
    shift = np.repeat(bases[:-1] - bases[0], np.diff(offsets))
    starts = values.field("start").to_numpy().astype(np.int64) + shift
    ends = values.field("end").to_numpy().astype(np.int64) + shift
    assert (starts <= ends).all(), "a span ends before it starts"
    return starts, ends, offsets


def _tokenized_table(
    batch: pa.RecordBatch, ids: npt.NDArray[np.int32], offsets: Int64s, ranges: TrainedRanges
) -> pa.Table:
    spans = pa.StructArray.from_arrays(
        [pa.array(ranges.starts.astype(np.int32)), pa.array(ranges.ends.astype(np.int32))],
        fields=list(TOKENIZED.field("trained_ranges").type.value_type),
    )
    columns = {
        "input_ids": _lists(offsets, pa.array(ids), "input_ids"),
        "trained_ranges": _lists(ranges.offsets, spans, "trained_ranges"),
        "num_tokens": pa.array(np.diff(offsets).astype(np.int32)),
        "num_trained": pa.array(ranges.num_trained.astype(np.int32)),
    }
    arrays = [columns[name] if name in columns else batch.column(name) for name in TOKENIZED.names]
    return pa.Table.from_arrays(arrays, schema=TOKENIZED)


def _lists(offsets: Int64s, values: pa.Array, column: str) -> pa.ListArray:
    kind = TOKENIZED.field(column).type
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, type=kind)


_DETAILS = {
    "empty": "the rendering has no tokens",
    "nothing_trained": "no token begins inside a trained span",
}


def _quarantine(batch: pa.RecordBatch, reasons: npt.NDArray[np.str_]) -> pa.Table:
    rows = []
    for index in np.flatnonzero(reasons != "").tolist():
        raw = batch.column("text")[index].as_py().encode()
        reason = str(reasons[index])
        rows.append(
            {
                "source": batch.column("source")[index].as_py(),
                "row": batch.column("row")[index].as_py(),
                "byte_offset": None,
                "step": "tokenize",
                "reason": reason,
                "detail": _DETAILS[reason],
                "raw": raw[:_MAX_RAW_BYTES],
                "raw_size": len(raw),
                "raw_sha256": hashlib.sha256(raw).hexdigest(),
            }
        )
    return pa.Table.from_pylist(rows, schema=QUARANTINED)

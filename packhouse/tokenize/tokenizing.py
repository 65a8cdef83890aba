"""Formatted text to ids and trained ranges: one encoding of each whole rendering.

Prompt and answer are not encoded apart, since that changes merges at their border, unless inference
does so and a token crosses it (`packhouse.tokenize.split_prompts`). What is trained follows
from where tokens begin in the text (`packhouse.tokenize.offsets`), and a control token that
data forged stays ordinary text (`packhouse.tokenize.control_text`).
Work goes through a table in slices of 8 MiB of text, so that memory does not grow with it.

    text            Q: hi A: yes</s>                    trained span [8, 16)
    tokens          Q  :  _hi  _A  :  _yes  </s>        (_ is a space)
    begin at bytes  0  1  2    5   7  8     12          trained range [5, 7)
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from packhouse.recipe import Recipe, TokenizeConfig
from packhouse.records.lists import (
    flat_list,
    flat_weights,
    list_array,
    ranges_array,
    weights_column,
)
from packhouse.records.pairs import REJECTED, check_answers, join_sides, keep_both
from packhouse.records.tables import (
    QUARANTINED,
    REFUSED,
    TOKENIZED,
    read_table,
    refused_rows,
    write_table,
)
from packhouse.system.arrays import Int64s
from packhouse.system.progress import advance
from packhouse.system.worker import at, limited
from packhouse.tokenize.control_text import find_forged, with_plain_contents
from packhouse.tokenize.encoders import (
    Encoder,
    EncoderError,
    chunks_of,
    load_tokenizer,
    text_bases,
)
from packhouse.tokenize.gate import choose_encoder, find_unicode_drift, refuse_fast
from packhouse.tokenize.given import GIVEN_VERSION
from packhouse.tokenize.loading import load_snapshot
from packhouse.tokenize.offsets import EncodedRow, EncodedRows, byte_ranges, locate_by_widths
from packhouse.tokenize.pipeline import read_pipeline
from packhouse.tokenize.snapshot import TokenizerSnapshot
from packhouse.tokenize.spans import Spans, TrainedRanges, train_ranges
from packhouse.tokenize.split_prompts import cuts_prompts, split_prompts

# Encode rows and say which bytes each token covers; HF has the last word on doubtful rows.
#
# A fast encoder's ids are taken where nothing can be in doubt: the tokens' bytes, joined, are the
# text, and no character is one that libraries may know differently. All other rows (of Alpaca:
# none) are encoded by HF, ids and offsets.


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


VERSION = 1
"""Rises whenever the same text would give other ids or ranges."""

_SLICE_BYTES = 8 * 2**20

Fault = tuple[str, str]
"""Reason code and a sentence."""

_EMPTY = ("empty", "the rendering has no tokens")
_NOTHING_TRAINED = ("nothing_trained", "no token begins inside a trained span")


@dataclass(frozen=True, slots=True, eq=False)
class Tokenized:
    """Result of tokenizing a table; every row is in one of the two tables."""

    tokenized: pa.Table
    """Schema `packhouse.records.tables.TOKENIZED`, in the order of the input."""

    quarantined: pa.Table
    """Schema `tables.QUARANTINED` without raw bytes; reasons `empty`, `nothing_trained`,
    `control_text`."""

    notes: dict[str, int]
    """Counts: `straddles_start`, `straddles_end`, `split_prompts` (spans), `inexact_round_trip`,
    `control_text_rows` (rows), `control_text` (occurrences), `unk_tokens` (tokens)."""

    encoder: dict[str, object]
    """Which encoder was used and why: name, version, gate, sample_size; `rows_by_hf` counts the
    rows that a fast encoder is not trusted with."""


def tokenize_shard(
    formatted: Path, recipe: Recipe, cache: Path | None, folder: Path, given: Path | None = None
) -> dict[str, object]:
    """Write `tokenized.arrow` and `refused.arrow`; both sides of a pair become one record.

    `given` holds ids that rows came with.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    options = {"cut_at_spans": cuts_prompts(recipe)}
    if given is None:
        result = tokenize_table(read_table(formatted), snapshot, recipe.tokenize, cache, **options)
    else:
        result = pass_tokens(read_table(given), snapshot)
    tokenized, refused, notes = result.tokenized, result.quarantined, Counter(result.notes)
    if recipe.preferences == "pairs":
        rejected_texts = read_table(formatted.with_name(REJECTED))
        other = tokenize_table(rejected_texts, snapshot, recipe.tokenize, cache, **options)
        both = (refused, other.quarantined)
        chosen, rejected, refused = keep_both(tokenized, other.tokenized, both)
        tokenized, faults = join_sides(chosen, rejected)
        bad = refused_rows(chosen, faults, "tokenize")
        refused = pa.concat_tables([refused, bad]).sort_by("row")
        notes.update(other.notes)
    elif recipe.preferences:
        faults = check_answers(tokenized)
        bad = refused_rows(tokenized, faults, "tokenize")
        refused = pa.concat_tables([refused, bad]).sort_by("row")
        tokenized = tokenized.take(np.setdiff1d(np.arange(tokenized.num_rows), list(faults)))
    write_table(folder / "tokenized.arrow", tokenized)
    write_table(folder / REFUSED, refused)
    tokenizer = {
        "fingerprint": snapshot.fingerprint,
        "class": snapshot.class_name,
        "vocab_size": snapshot.vocab_size,
    }
    return {"notes": dict(notes), "encoder": result.encoder, "tokenizer": tokenizer}


def tokenize_table(
    formatted: pa.Table,
    snapshot: TokenizerSnapshot,
    config: TokenizeConfig,
    cache: Path | None = None,
    *,
    cut_at_spans: bool = False,
) -> Tokenized:
    """Encode renderings and mark what is trained.

    Args:
        formatted: schema `packhouse.records.tables.FORMATTED`.
        snapshot: tokenizer to encode with.
        config: choice of encoder (never changes ids) and policy on control text.
        cache: folder for verdicts on the fast encoder; None judges it anew in each process.
        cut_at_spans: encode a record in pieces where a token crosses the end of a prompt, as
            inference does. A prompt ends where a trained span follows text that is not trained;
            answers of which a part is not trained are not cut apart.

    Raises:
        TokenizerError: `encoder: fast`, and the fast encoder does not give HF's ids.
    """
    choice = choose_encoder(formatted.column("text"), snapshot, config.encoder, cache)
    try:
        slices = _tokenize_slices(formatted, snapshot, config, choice.encoder, cut_at_spans)
    except EncoderError as error:  # seen on a row that the sample does not hold
        choice = refuse_fast(snapshot, config.encoder, str(error))
        slices = _tokenize_slices(formatted, snapshot, config, choice.encoder, cut_at_spans)
    return Tokenized(
        tokenized=pa.concat_tables([TOKENIZED.empty_table(), *slices.tokenized]),
        quarantined=pa.concat_tables([QUARANTINED.empty_table(), *slices.quarantined]),
        notes={name: count for name, count in sorted(slices.notes.items()) if count},
        encoder={**choice.report(), "rows_by_hf": slices.by_hf},
    )


def pass_tokens(tokenized: pa.Table, snapshot: TokenizerSnapshot) -> Tokenized:
    """Return records whose ids are given as the result of tokenizing them."""
    unk_id = read_pipeline(snapshot.backend).unk_id
    ids, _ = flat_list(tokenized["input_ids"])
    num_unknown = 0 if unk_id is None else int((ids == unk_id).sum())
    return Tokenized(
        tokenized,
        QUARANTINED.empty_table(),
        {"unk_tokens": num_unknown} if num_unknown else {},
        {"name": "none", "version": str(GIVEN_VERSION), "gate": "ids are given", "sample_size": 0},
    )


@dataclass(slots=True, eq=False)
class _Slices:
    """What has come of the slices so far."""

    tokenized: list[pa.Table] = field(default_factory=list)
    quarantined: list[pa.Table] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    by_hf: int = 0


def _tokenize_slices(
    formatted: pa.Table,
    snapshot: TokenizerSnapshot,
    config: TokenizeConfig,
    encoder: Encoder,
    cut_at_spans: bool,
) -> _Slices:
    slices = _Slices()
    for batch in formatted.to_batches():
        for start, end in chunks_of(batch.column("text"), _SLICE_BYTES):
            piece = batch.slice(start, end - start)
            source, row = piece.column("source"), piece.column("row")
            at(f"{source[0]} rows {row[0]} to {row[-1]}")
            with limited(piece.nbytes):
                _tokenize_slice(piece, snapshot, config, encoder, cut_at_spans, slices)
    return slices


def _tokenize_slice(
    batch: pa.RecordBatch,
    snapshot: TokenizerSnapshot,
    config: TokenizeConfig,
    encoder: Encoder,
    cut_at_spans: bool,
    slices: _Slices,
) -> None:
    texts = batch.column("text")
    pipeline = read_pipeline(snapshot.backend)
    notes = slices.notes
    encoded, num_by_hf = encode_rows(texts, encoder, snapshot.backend)
    slices.by_hf += num_by_hf
    encoded, faults = _settle_control_text(batch, encoded, snapshot, config, notes)
    spans = Spans.of(batch.column("trained_spans"), texts)
    if cut_at_spans:
        written = Spans.of(batch.column("content_spans"), texts)
        contents = written if config.control_text != "allow" else None
        encoded, num_split = split_prompts(
            encoded, texts, spans, written, contents, snapshot.backend
        )
        notes["split_prompts"] += num_split
    notes["inexact_round_trip"] += int((~encoded.is_exact).sum())
    ranges = train_ranges(encoded, spans)
    notes["straddles_start"] += ranges.straddles_start
    notes["straddles_end"] += ranges.straddles_end
    if pipeline.unk_id is not None:
        notes["unk_tokens"] += int((encoded.ids == pipeline.unk_id).sum())
    is_idle = (ranges.num_trained == 0) & batch.column("label").is_null().to_numpy(False)
    is_empty = np.diff(encoded.offsets) == 0
    faults = (
        dict.fromkeys(np.flatnonzero(is_idle).tolist(), _NOTHING_TRAINED)
        | faults
        | dict.fromkeys(np.flatnonzero(is_empty).tolist(), _EMPTY)
    )
    table = _tokenized_table(batch, encoded, ranges)
    slices.quarantined.append(refused_rows(table, faults, "tokenize"))
    if faults:
        table = table.take(np.setdiff1d(np.arange(table.num_rows), list(faults)))
    slices.tokenized.append(table)


def _settle_control_text(
    batch: pa.RecordBatch,
    encoded: EncodedRows,
    snapshot: TokenizerSnapshot,
    config: TokenizeConfig,
    notes: Counter[str],
) -> tuple[EncodedRows, dict[int, Fault]]:
    """Apply the policy on control text in contents; returns rows and those to quarantine."""
    texts = batch.column("text")
    pipeline = read_pipeline(snapshot.backend)
    content = Spans.of(batch.column("content_spans"), texts)
    forged = find_forged(encoded, texts, content, pipeline)
    rows = np.unique(forged.rows)
    notes["control_text"] += len(forged.rows)
    notes["control_text_rows"] += len(rows)
    if config.control_text == "allow" or not len(rows):
        return encoded, {}
    faults = {row: ("control_text", text) for row, text in forged.described(pipeline).items()}
    if config.control_text == "quarantine":
        return encoded, faults
    encoded, stubborn = with_plain_contents(encoded, rows, texts, content, snapshot.backend)
    return encoded, {
        row: (reason, f"{text}, which this tokenizer cannot encode as plain text")
        for row, (reason, text) in faults.items()
        if row in stubborn
    }


def _tokenized_table(
    batch: pa.RecordBatch, encoded: EncodedRows, ranges: TrainedRanges
) -> pa.Table:
    counts = np.diff(ranges.offsets)
    starts, ends = ranges.starts.astype(np.int32), ranges.ends.astype(np.int32)
    num_spans = batch.column("trained_spans").value_lengths().to_numpy()
    weights = flat_weights(batch.column("span_weights"), num_spans)
    kept = None if weights is None else weights[ranges.is_kept]  # of the spans that have a range
    columns = {
        "input_ids": list_array(pa.array(encoded.ids), encoded.offsets, pa.int32()),
        "trained_ranges": ranges_array(starts, ends, counts),
        "range_weights": weights_column(kept, counts),
        "num_tokens": pa.array(np.diff(encoded.offsets).astype(np.int32)),
        "num_trained": pa.array(ranges.num_trained.astype(np.int32)),
    }
    arrays = [columns[name] if name in columns else batch.column(name) for name in TOKENIZED.names]
    return pa.Table.from_arrays(arrays, schema=TOKENIZED)

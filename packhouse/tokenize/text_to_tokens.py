"""Convert formatted text to ids and trained ranges, with one encoding of each whole rendering.

Prompt and answer are not encoded separately, since that changes merges at their boundary, unless
inference does so and a token crosses the boundary (see below). The trained tokens follow from where
tokens begin in the text (`packhouse.tokenize.offsets`), and a control token forged by data stays
ordinary text (`packhouse.tokenize.control_tokens`). Tables are processed in slices of 8 MiB of
text, so memory does not grow with their size.

    text            Q: hi A: yes</s>                    trained span [8, 16)
    tokens          Q  :  _hi  _A  :  _yes  </s>        (_ is a space)
    begin at bytes  0  1  2    5   7  8     12          trained range [5, 7)

Inference encodes the prompt alone. If the encoding of a whole record has a token that crosses the
end of the prompt, the record begins with other ids than at inference. Such a record is encoded in
pieces, cut there. The others (with most templates, all) cost two binary searches.

    text            a the</s>      trained span [2, 9): the prompt ends with a space
    one encoding    a  _the  </s>
    in pieces       a  _  |  the  </s>

Without such a token, only white space at the end of the prompt can be encoded differently: GPT-2's
pattern assigns the last of several white-space characters to the word after them, so two line
breaks are one token at the end of a text and two before an answer.

A later piece continues in the middle of a text, so it does not get the space that SentencePiece
puts before a text, up to its first added token.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from packhouse.recipe import Recipe, TokenizeConfig
from packhouse.recipe.sections import CHAT_TEMPLATES, TEMPLATES
from packhouse.records import arrays
from packhouse.records.arrays import Bools, Bytes, Int64s
from packhouse.records.preference_pairs import REJECTED, check_answers, join_sides, keep_both
from packhouse.records.table_schemas import (
    QUARANTINED,
    REFUSED,
    TOKENIZED,
    read_table,
    refused_rows,
    write_table,
)
from packhouse.registry import GIVEN_VERSION
from packhouse.system.progress import advance
from packhouse.system.worker import at, limited
from packhouse.tokenize.control_tokens import encode_plain, find_forged
from packhouse.tokenize.encoder_choice import choose_encoder, find_unicode_drift, refuse_fast
from packhouse.tokenize.encoders import (
    Encoder,
    EncoderError,
    TokenizerSnapshot,
    chunks_of,
    load_tokenizer,
    read_pipeline,
)
from packhouse.tokenize.offsets import (
    EncodedRow,
    EncodedRows,
    Spans,
    are_crossed,
    byte_ranges,
    flat_texts,
    locate_by_widths,
    prompt_ends,
    train_ranges,
)
from packhouse.tokenize.tokenizer_loading import load_snapshot

VERSION = 2
"""Raise it when the same text would give other ids or ranges."""

_SLICE_BYTES = 8 * 2**20
_CHUNK_BYTES = 2**19  # HF encodings with offsets take about 300 bytes per token

_EMPTY = ("empty", "the rendering has no tokens")
_NOTHING_TRAINED = ("nothing_trained", "no token begins inside a trained span")


@dataclass(frozen=True, slots=True, eq=False)
class Tokenized:
    """Result of tokenizing a table; every row is in one of the two tables."""

    tokenized: pa.Table
    """Schema `packhouse.records.table_schemas.TOKENIZED`, in the order of the input."""

    quarantined: pa.Table
    """Schema `table_schemas.QUARANTINED` without raw bytes; reasons `empty`, `nothing_trained`,
    `control_text`."""

    notes: dict[str, int]
    """Counts: `straddles_start`, `straddles_end`, `split_prompts` (spans), `inexact_round_trip`,
    `control_text_rows` (rows), `control_text` (occurrences), `unk_tokens` (tokens)."""

    encoder: dict[str, object]
    """The encoder and the reason for it: name, version, gate, sample_size; `rows_by_hf` counts the
    rows that were left to HF because a fast encoder may be wrong on them."""


def tokenize_shard(
    formatted: Path, recipe: Recipe, cache: Path | None, folder: Path, given: Path | None = None
) -> dict[str, Any]:
    """Write `tokenized.arrow` and `refused.arrow`; both sides of a pair become one record.

    `given` contains the ids of rows that came already tokenized.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    options = {"cut_at_spans": cuts_prompts(recipe)}
    if given is None:
        result = tokenize_table(read_table(formatted), snapshot, recipe.tokenize, cache, **options)
    else:
        table = read_table(given)
        ids, _ = arrays.flat_list(table["input_ids"])
        num_unknown = read_pipeline(snapshot.backend).count_unknown(ids)
        encoder = {"name": "none", "version": str(GIVEN_VERSION), "gate": "ids are given"}
        result = Tokenized(
            table,
            QUARANTINED.empty_table(),
            {"unk_tokens": num_unknown} if num_unknown else {},
            {**encoder, "sample_size": 0},
        )
    tokenized, refused, notes = result.tokenized, result.quarantined, Counter(result.notes)
    if recipe.preferences == "pairs":
        rejected_texts = read_table(formatted.with_name(REJECTED))
        other = tokenize_table(rejected_texts, snapshot, recipe.tokenize, cache, **options)
        chosen, rejected, refused = keep_both(
            tokenized, other.tokenized, refused, other.quarantined
        )
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
    names = ("fingerprint", "class_name", "vocab_size")
    tokenizer = {name: getattr(snapshot, name) for name in names}
    return {"notes": dict(notes), "encoder": result.encoder, "tokenizer": tokenizer}


def tokenize_table(
    formatted: pa.Table,
    snapshot: TokenizerSnapshot,
    config: TokenizeConfig,
    cache: Path | None = None,
    *,
    cut_at_spans: bool = False,
) -> Tokenized:
    """Encode renderings and mark the trained tokens.

    Args:
        formatted: schema `packhouse.records.table_schemas.FORMATTED`.
        snapshot: tokenizer to encode with.
        config: choice of encoder (never changes ids) and policy on control text.
        cache: folder for verdicts on the fast encoder; None checks it again in each process.
        cut_at_spans: encode a record in pieces where a token crosses the end of a prompt, as
            inference does. A prompt ends where a trained span follows text that is not trained;
            an answer is not cut at its untrained parts.

    Raises:
        TokenizerError: `encoder: fast`, and the fast encoder does not give HF's ids.
    """
    choice = choose_encoder(formatted.column("text"), snapshot, config.encoder, cache)
    slices = [
        batch.slice(start, end - start)
        for batch in formatted.to_batches()
        for start, end in chunks_of(arrays.list_offsets(batch.column("text")), _SLICE_BYTES)
    ]
    while True:
        tokenized, quarantined = [TOKENIZED.empty_table()], [QUARANTINED.empty_table()]
        notes: Counter[str] = Counter()
        try:
            for rows in slices:
                source, row = rows.column("source"), rows.column("row")
                at(f"{source[0]} rows {row[0]} to {row[-1]}")
                with limited(rows.nbytes):
                    good, bad = _tokenize_slice(
                        rows, snapshot, config, choice.encoder, cut_at_spans, notes
                    )
                tokenized.append(good)
                quarantined.append(bad)
        # All slices again, those before this one too: their ids come from the encoder that has just
        # failed.
        except EncoderError as error:  # on a row outside the sample; HF raises none
            choice = refuse_fast(snapshot, config.encoder, str(error))
            continue
        by_hf = notes.pop("rows_by_hf", 0)
        return Tokenized(
            tokenized=pa.concat_tables(tokenized),
            quarantined=pa.concat_tables(quarantined),
            notes={name: count for name, count in sorted(notes.items()) if count},
            encoder={
                "name": choice.encoder.name,
                "version": choice.encoder.version,
                "gate": choice.gate,
                "sample_size": choice.sample_size,
                "rows_by_hf": by_hf,
            },
        )


def _tokenize_slice(
    batch: pa.RecordBatch,
    snapshot: TokenizerSnapshot,
    config: TokenizeConfig,
    encoder: Encoder,
    cut_at_spans: bool,
    notes: Counter[str],
) -> tuple[pa.Table, pa.Table]:
    """Return tokenized and quarantined rows, and add to the counts in `notes`."""
    pipeline = read_pipeline(snapshot.backend)
    encoded, by_hf = encode_rows(batch.column("text"), encoder, snapshot.backend)
    notes["rows_by_hf"] += by_hf
    trained, content = (
        Spans.of(batch.column(name), encoded.bases) for name in ("trained_spans", "content_spans")
    )
    faults: dict[int, tuple[str, str]] = {}
    forged = find_forged(encoded, content, pipeline)
    notes.update(control_text=sum(map(len, forged.values())), control_text_rows=len(forged))
    if forged and config.control_text != "allow":
        plain: dict[int, EncodedRow | None] = dict.fromkeys(forged)
        why = ""
        if config.control_text == "text":
            contents = [content.within(row, *encoded.bases[row : row + 2]) for row in forged]
            texts = [encoded.text_of(row) for row in forged]
            plain = dict(zip(forged, encode_plain(texts, contents, snapshot.backend), strict=True))
            why = ", which this tokenizer cannot encode as plain text"
        for row in [row for row, found in plain.items() if found is None]:
            held = forged[row]
            more = f" and {len(held) - 1} more" if len(held) > 1 else ""
            detail = f"a message contains the control token '{held[0]}'{more}{why}"
            faults[row] = ("control_text", detail)
        replaced = {row: found for row, found in plain.items() if found is not None}
        encoded = encoded.with_rows(replaced, pipeline)
    if cut_at_spans:
        plain_content = None if config.control_text == "allow" else content
        encoded, num_split = split_prompts(
            encoded, trained, content, plain_content, snapshot.backend
        )
        notes["split_prompts"] += num_split
    ranges = train_ranges(encoded, trained)
    notes.update(
        inexact_round_trip=int((~encoded.is_exact).sum()),
        straddles_start=ranges.straddles_start,
        straddles_end=ranges.straddles_end,
        unk_tokens=pipeline.count_unknown(encoded.ids),
    )
    num_tokens, num_ranges = np.diff(encoded.offsets), np.diff(ranges.offsets)
    weights = arrays.flat_weights(batch.column("span_weights"), np.diff(trained.offsets))
    # Spans without a token of their own have no range, so their weights must go too, or all later
    # ones would move.
    kept = None if weights is None else weights[ranges.is_kept]  # of the spans that have a range
    starts, ends = ranges.starts.astype(np.int32), ranges.ends.astype(np.int32)
    columns = {
        "input_ids": arrays.list_array(pa.array(encoded.ids), encoded.offsets, pa.int32()),
        "trained_ranges": arrays.ranges_array(starts, ends, num_ranges),
        "range_weights": arrays.weights_column(kept, num_ranges),
        "num_tokens": pa.array(num_tokens.astype(np.int32)),
        "num_trained": pa.array(ranges.num_trained.astype(np.int32)),
    }
    parts = [columns[name] if name in columns else batch.column(name) for name in TOKENIZED.names]
    table = pa.Table.from_arrays(parts, schema=TOKENIZED)
    # A record with a label trains the label, so it may train no token.
    is_idle = (ranges.num_trained == 0) & batch.column("label").is_null().to_numpy(False)
    # The last reason counts: a record without tokens is `empty`, not `nothing_trained`.
    faults = (
        dict.fromkeys(np.flatnonzero(is_idle).tolist(), _NOTHING_TRAINED)
        | faults
        | dict.fromkeys(np.flatnonzero(num_tokens == 0).tolist(), _EMPTY)
    )
    refused = refused_rows(table, faults, "tokenize")
    if faults:
        table = table.take(np.setdiff1d(np.arange(table.num_rows), list(faults)))
    return table, refused


def encode_rows(texts: pa.StringArray, encoder: Encoder, backend: str) -> tuple[EncodedRows, int]:
    """Encode texts with an encoder that passed the gate, or with HF.

    A fast encoder's ids are used only if they are beyond doubt: the joined bytes of the tokens
    equal the text, and libraries agree on all its characters. All other rows (in Alpaca, none) get
    ids and offsets from HF.

    Returns:
        The rows, and how many of them were left to HF.

    Raises:
        EncoderError: the encoder failed, or gave wrong ids for a row without any doubt.
    """
    pipeline = read_pipeline(backend)
    ids, offsets = np.zeros(0, np.int32), np.zeros(len(texts) + 1, np.int64)
    if pipeline.token_bytes is not None:  # else every row is doubtful: encode once, with offsets
        ids, offsets = encoder.encode(texts)
    rows = locate_by_widths(*flat_texts(texts), ids, offsets, pipeline)
    is_drifting = np.zeros(len(texts), np.bool_)
    if not encoder.is_reference:
        is_drifting = find_unicode_drift(texts)
    doubtful = np.flatnonzero(~rows.is_exact | is_drifting)
    if not len(doubtful):
        return rows, 0
    true_rows: dict[int, EncodedRow] = {}
    chosen = texts.take(pa.array(doubtful))
    for begin, end in chunks_of(arrays.list_offsets(chosen), _CHUNK_BYTES):
        batch = chosen[begin:end].to_pylist()
        encodings = load_tokenizer(backend).encode_batch(batch, add_special_tokens=False)
        advance((end - begin) / len(doubtful))
        for row, text, one in zip(doubtful[begin:end].tolist(), batch, encodings, strict=True):
            starts, ends = byte_ranges(text, one.offsets)
            true_rows[row] = EncodedRow(np.array(one.ids, np.int32), starts, ends)
    merged = rows.with_rows(true_rows, pipeline)
    # If HF's ids of a row decode to exactly its text and the fast encoder's did not, the latter
    # were wrong, and so may be others that were not compared.
    wrong = np.flatnonzero(merged.is_exact & ~rows.is_exact & ~is_drifting)
    if len(wrong):
        example = texts[int(wrong[0])].as_py()[:60]
        raise EncoderError(
            f"{encoder.name} {encoder.version} gives different ids than HF for {example!r}"
        )
    return merged, 0 if encoder.is_reference else len(doubtful)


def cuts_prompts(recipe: Recipe) -> bool:
    """Return True if prompts are encoded separately where a token crosses their end.

    This applies to chat templates, whose prompts at inference end with the header of the answer.
    Other templates define the boundary themselves.
    """
    config = recipe.format
    is_chat = config.template not in set(TEMPLATES) - set(CHAT_TEMPLATES)
    # With Stanford's Alpaca text and Qwen2.5, `:The` is one token in 21,822 of 51,974 rows. To cut
    # it would give other ids than encoding the text at once, as users of that template do.
    return is_chat and config.turns != "whole" and config.train_on != "all"


def split_prompts(
    encoded: EncodedRows, spans: Spans, written: Spans, contents: Spans | None, backend: str
) -> tuple[EncodedRows, int]:
    """Encode records in pieces, cut at the ends of prompts, if a token crosses one of these.

    Args:
        encoded: one encoding of each text.
        spans: trained spans; see `prompt_ends`.
        written: spans of the row's own texts.
        contents: spans in which control-token text is plain text; None if there are none.
        backend: the pipeline.

    Returns:
        The rows, and the number of prompts that are now encoded as at inference. A row that the
        tokenizer cannot encode with plain contents stays unchanged.
    """
    ends = prompt_ends(spans, written)
    ends = ends[spans.starts[ends] > encoded.bases[spans.rows[ends]]]
    rows, places = spans.rows[ends], spans.starts[ends]
    # Rare: with the thinking switch chosen as at inference, in none of 2,192 turns of real data.
    # Without the switch, Qwen3.5 merges `<think>\n` and `\n</think>` in 180 of 180 plain turns.
    is_due = are_crossed(encoded, spans)[ends] | _ends_otherwise(encoded.text, places, backend)
    if not is_due.any():
        return encoded, 0
    # Tokens of pieces may cross the end of another prompt, so a row is cut at all of them.
    # A record of several turns then has two tokens at such a border, as the model generated them. A
    # server that encodes the conversation again has one.
    changed = np.unique(rows[is_due])
    bounds = zip(*(np.searchsorted(rows, changed, side) for side in ("left", "right")), strict=True)
    cuts = {row: places[a:b] for row, (a, b) in zip(changed.tolist(), bounds, strict=True)}
    pieces = _encode_in_pieces(cuts, encoded, contents, backend)
    new = {
        row: found
        for row, found in pieces.items()
        if not np.array_equal(found.ids, encoded.ids_of(row))
    }
    num_split = int(np.isin(rows[is_due], list(new)).sum())
    return encoded.with_rows(new, read_pipeline(backend)), num_split


_WHITE = b" \t\n\v\f\r"


def _ends_otherwise(text: Bytes, places: Int64s, backend: str) -> Bools:
    """Return, for each place, if the ids of white space before it depend on what comes after."""
    is_white = np.zeros(256, np.bool_)
    is_white[list(_WHITE)] = True
    is_otherwise = (places > 1) & is_white[text[places - 1]] & is_white[text[places - 2]]
    if read_pipeline(backend).has_word_marks:  # SentencePiece has no pattern that looks ahead
        is_otherwise[:] = False
    data = text.tobytes() if is_otherwise.any() else b""
    for number in np.flatnonzero(is_otherwise).tolist():
        at = int(places[number])
        # Four bytes hold any character of UTF-8; `ignore` drops the start of the next one.
        before, after = data[max(at - 8, 0) : at], data[at : at + 4].decode(errors="ignore")
        white = before[len(before.rstrip(_WHITE)) :].decode()
        is_otherwise[number] = _depends_on_next(white, after[:1], backend)
    return is_otherwise


@lru_cache(maxsize=2**12)
def _depends_on_next(white: str, after: str, backend: str) -> bool:
    """Return True if white space has other ids by itself than before this character."""
    tokenizer = load_tokenizer(backend)
    whole, apart, rest = (
        tokenizer.encode(part, add_special_tokens=False).ids
        for part in (white + after, white, after)
    )
    return bool(whole != apart + rest)


def _encode_in_pieces(
    cuts: Mapping[int, Int64s], encoded: EncodedRows, contents: Spans | None, backend: str
) -> dict[int, EncodedRow]:
    """Encode rows in pieces and join the pieces. Leaves out rows with a piece that fails.

    Text between a cut and the next added token is a separate inner piece, which gets no space in
    front.
    """
    is_added = read_pipeline(backend).is_added
    # `a the</s>[INST] b`, cut at 2, gives `a `, the inner piece `the`, and `</s>[INST] b`.
    pieces: list[tuple[int, int, int, bool]] = []  # row, first byte, end, is it inner
    for row, places in cuts.items():
        start, end = encoded.bases[row : row + 2].tolist()
        own = slice(encoded.offsets[row], encoded.offsets[row + 1])
        added = encoded.starts[own][is_added[encoded.ids[own]]].tolist()
        edges = [start]
        for cut, next_cut in pairwise([*places.tolist(), end]):
            at_added = bisect_left(added, cut)
            edges += [cut, min([next_cut, *added[at_added : at_added + 1]])]
        numbered = enumerate(pairwise([*edges, end]))
        pieces += [(row, first, last, n % 2 == 1) for n, (first, last) in numbered if last > first]
    parts: dict[int, dict[int, EncodedRow | None]] = {row: {} for row in cuts}  # by first byte
    for is_inner, its_backend in ((False, backend), (True, _without_prefix(backend))):
        group = [place for *place, inner in pieces if inner == is_inner]
        texts = [encoded.text[first:last].tobytes().decode() for _, first, last in group]
        inside = [contents.within(*each) if contents else [] for each in group]
        encodings = encode_plain(texts, inside, its_backend)
        for (row, first, _), encoding in zip(group, encodings, strict=True):
            parts[row][first - int(encoded.bases[row])] = encoding
    joined = {}
    for row, found in parts.items():
        good = [(shift, part) for shift, part in sorted(found.items()) if part is not None]
        if len(good) == len(found):
            joined[row] = EncodedRow(
                np.concatenate([part.ids for _, part in good]),
                np.concatenate([part.starts + shift for shift, part in good]),
                np.concatenate([part.ends + shift for shift, part in good]),
            )
    return joined


@lru_cache(maxsize=4)
def _without_prefix(backend: str) -> str:
    """Return the pipeline without the step that adds a space before a text; most have none."""

    def changed(step: dict[str, Any]) -> dict[str, Any]:
        if step.get("type") == "Prepend":
            return {"type": "Sequence", "normalizers": []}
        # Three steps can add the space: `Prepend`, Metaspace (`prepend_scheme`), and ByteLevel
        # (`add_prefix_space`, which older files have at Metaspace as well).
        never = {"prepend_scheme": "never", "add_prefix_space": False}
        return step | {name: value for name, value in never.items() if name in step}

    parsed = orjson.loads(backend)
    before = {name: parsed[name] for name in ("normalizer", "pre_tokenizer")}
    after = json.loads(json.dumps(before), object_hook=changed)
    return backend if after == before else orjson.dumps(parsed | after).decode()

"""Read rows that are already tokenized, from the hex ids that row format `tokenized` gives.

Nothing is encoded: the packed ids are those of the rows. They are decoded only for readers of text
(quality counters, benchmarks, near duplicates, people).
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.arrays import (
    Int32s,
    Int64s,
    list_array,
    ranges_array,
    string_bytes,
    weights_column,
)
from packhouse.records.message_rules import ASSISTANT, FlatMessages
from packhouse.records.table_schemas import FORMATTED, QUARANTINED, TOKENIZED, refused_rows
from packhouse.tokenize.encoders import TokenizerSnapshot, decode_lists, read_pipeline

GIVEN_VERSION = 1
"""Raise it when the same ids would give other tables."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenTokens:
    """The records of a shard whose ids are given."""

    conversations: pa.Table
    """Schema `table_schemas.VALIDATED`: one message for each run of tokens with the same loss."""
    tokenized: pa.Table
    """Schema `table_schemas.TOKENIZED`: the same records with their ids."""
    quarantined: pa.Table
    """Schema `table_schemas.QUARANTINED` without raw bytes: the refused records."""


def read_given(validated: pa.Table, snapshot: TokenizerSnapshot) -> GivenTokens:
    """Return ids and text of records whose contents are ids in hex.

    Records are refused with reason `vocabulary` if the tokenizer does not have an id, or `padding`
    if they have pad tokens at either end that no mask marks.

    Args:
        validated: schema `table_schemas.VALIDATED`, from rows of format `tokenized`.
        snapshot: the tokenizer of the ids.
    """
    flat = FlatMessages.of_table(validated)
    data, bounds = string_bytes(flat.content)
    ids = np.frombuffer(bytes.fromhex(data.tobytes().decode("ascii")), ">u4").astype(np.int32)
    # Index of each message's first id: contents of 16 and 8 digits are ids [0, 2) and [2, 3).
    bounds = bounds.astype(np.int64) // 8
    of_record = bounds[flat.offsets]  # index of each record's first id
    faults = _faults(ids, of_record, snapshot)
    if faults:
        is_good = np.ones(validated.num_rows, np.bool_)
        is_good[list(faults)] = False
        rest = read_given(validated.filter(pa.array(is_good)), snapshot)
        quarantined = refused_rows(validated, faults, "validate")
        return GivenTokens(rest.conversations, rest.tokenized, quarantined)
    is_trained = flat.roles == ASSISTANT
    counts = flat.sums(is_trained)
    records = flat.rows[is_trained]
    starts, ends = (edge[is_trained] - of_record[records] for edge in (bounds[:-1], bounds[1:]))
    weights = flat.weight.filter(pa.array(is_trained))
    columns = {
        "input_ids": list_array(pa.array(ids), of_record, pa.int32()),
        "trained_ranges": ranges_array(starts.astype(np.int32), ends.astype(np.int32), counts),
        "range_weights": weights_column(np.asarray(pc.fill_null(weights, 1), np.float32), counts),
        "num_tokens": pa.array(np.diff(of_record).astype(np.int32)),
        "num_trained": pa.array(
            np.bincount(records, ends - starts, validated.num_rows).astype(np.int32)
        ),
    }
    arrays = [columns[n] if n in columns else validated[n] for n in TOKENIZED.names]
    lists = pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(ids))
    texts = decode_lists(lists, snapshot).cast(pa.string())
    return GivenTokens(
        flat.put_into(validated, content=texts),
        pa.Table.from_arrays(arrays, schema=TOKENIZED),
        QUARANTINED.empty_table(),
    )


def text_of_given(conversations: pa.Table) -> pa.Table:
    """Return the text of already tokenized records: their concatenated messages.

    Args:
        conversations: from `read_given`.

    Returns:
        Schema `table_schemas.FORMATTED`. Which text in trained runs a template wrote is unknown.
    """
    flat = FlatMessages.of_table(conversations)
    contents = flat.content
    edges = np.append(0, np.cumsum(np.asarray(pc.binary_length(contents)), dtype=np.int64))
    is_trained = flat.roles == ASSISTANT
    counts = flat.sums(is_trained)
    first = np.repeat(edges[flat.offsets[:-1]], flat.counts)[is_trained]
    spans = ranges_array(
        (edges[:-1][is_trained] - first).astype(np.int32),
        (edges[1:][is_trained] - first).astype(np.int32),
        counts,
    )
    weights = np.asarray(pc.fill_null(flat.weight, 1), np.float32)[is_trained]
    columns = {
        "text": flat.join(contents, ""),
        "content_spans": spans,
        "trained_spans": spans,
        "span_weights": weights_column(weights, counts),
    }
    arrays = [columns[n] if n in columns else conversations[n] for n in FORMATTED.names]
    return pa.Table.from_arrays(arrays, schema=FORMATTED)


def _faults(
    ids: Int32s, of_record: Int64s, snapshot: TokenizerSnapshot
) -> dict[int, tuple[str, str]]:
    """Return record -> reason and detail, for records that the tokenizer cannot have produced."""
    faults: dict[int, tuple[str, str]] = {}
    pad_id = snapshot.added_tokens.get(snapshot.special_tokens.get("pad_token", ""), -1)
    for where, edges, step in (("ends", of_record[1:] - 1, -1), ("begins", of_record[:-1], 1)):
        for row in np.flatnonzero(ids[edges] == pad_id).tolist():
            is_pad = ids[of_record[row] : of_record[row + 1]][::step] == pad_id
            number = int(np.argmin(np.append(is_pad, False)))
            if number > 1:  # one may be the end of a turn, or BOS
                faults[row] = (
                    "padding",
                    f"the record {where} with {number:,} pad tokens; set their attention_mask to "
                    "0 and their labels to -100, or remove them",
                )
    token_bytes = read_pipeline(snapshot.backend).token_bytes
    is_known = np.ones(snapshot.vocab_size, np.bool_)
    if token_bytes is not None:  # ids that the vocabulary leaves out have no text
        is_known[: len(token_bytes)] = np.asarray(pc.binary_length(token_bytes)) > 0
    is_wrong = ids >= snapshot.vocab_size
    is_wrong |= ~is_known[np.where(is_wrong, 0, ids)]
    wrong = np.flatnonzero(is_wrong)
    rows = np.searchsorted(of_record, wrong, "right") - 1
    for row, at in zip(rows[::-1].tolist(), wrong[::-1].tolist(), strict=True):  # the first wins
        faults[row] = (
            "vocabulary",
            f"token {at - of_record[row]:,} of the record is {ids[at]:,}, which the tokenizer "
            f"does not have (its ids are below {snapshot.vocab_size:,}); check that it is the one "
            "the row was made with",
        )
    return faults

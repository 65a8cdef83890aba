"""The Arrow schema of every artefact on the data's way; one row of each is said in its comment.

A table moves from step to step as an Arrow IPC file with exactly these columns, in this order.
Spans and ranges are half-open `[start, end)`. Text spans count **UTF-8 bytes** of `text`, not
characters: byte offsets add up without decoding, and Arrow strings are UTF-8 already.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

# One turn. `context` is Alpaca's `input` or Dolly's `context`: text that belongs to a user turn but
# that templates place by themselves. `tool_calls` is canonical JSON text, never an Arrow union:
# null-filled keys of other rows would leak into the prompt.
MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),  # system | user | assistant | tool
        pa.field("content", pa.string(), nullable=False),
        pa.field("context", pa.string()),
        pa.field("reasoning", pa.string()),
        pa.field("tool_calls", pa.string()),
        pa.field("tool_call_id", pa.string()),
        pa.field("name", pa.string()),
        pa.field("weight", pa.float32()),  # loss weight of this message; null: as `train_on` says
        # JSON list of [characters, factor of the weight or null] for each part of the content, or
        # of the reasoning and the content behind it
        pa.field("part_weights", pa.string()),
    ]
)

CONVERSATION = pa.list_(pa.field("item", MESSAGE, nullable=False))

# [start, end) in bytes of `text`, or in tokens of `input_ids`.
SPAN = pa.struct(
    [pa.field("start", pa.int32(), nullable=False), pa.field("end", pa.int32(), nullable=False)]
)
_SPANS = pa.list_(pa.field("item", SPAN, nullable=False))

# Loss weight of each trained span or range beside it; null: each is 1. None is 0.
WEIGHTS = pa.list_(pa.field("item", pa.float32(), nullable=False))
_INT32S = pa.list_(pa.field("item", pa.int32(), nullable=False))
_STRINGS = pa.list_(pa.field("item", pa.string(), nullable=False))

# Whence a record comes, carried to the end: a published record can be traced to its raw row.
_ORIGIN = [
    pa.field("record_id", pa.string(), nullable=False),  # 20 hex digits: 80 bits of content hash
    pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),  # source/file
    pa.field("row", pa.int64(), nullable=False),  # 0-based record number in that file
]
_GROUP = pa.field("group_key", pa.string(), nullable=False)  # 20 hex digits; decides train or eval
_LABEL = pa.field("label", pa.int64())  # class index of classification data, else null

# A conversation that passed its checks.
VALIDATED = pa.schema(
    [
        *_ORIGIN,
        pa.field("messages", CONVERSATION, nullable=False),
        pa.field("tools", pa.string()),  # canonical JSON list of tool definitions
        # JSON object: what else the row gives a chat template, {"enable_thinking": false}
        pa.field("arguments", pa.string()),
        pa.field("weight", pa.float32()),  # of the row: a factor of its messages'; null: 1
        _LABEL,
        _GROUP,
    ]
)

# A row that did not pass, at whichever step. `raw` holds its first 64 KiB, so that it can be
# repaired and driven in again.
QUARANTINED = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("byte_offset", pa.int64()),  # in the uncompressed file; null: no such notion
        pa.field("step", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),  # a code: json, encoding, type, roles, ...
        pa.field("detail", pa.string(), nullable=False),  # a sentence for people
        pa.field("raw", pa.binary(), nullable=False),
        pa.field("raw_size", pa.int64(), nullable=False),
        pa.field("raw_sha256", pa.string(), nullable=False),
    ]
)

# A row that the recipe leaves out before it is a record, with what left it out.
DROPPED = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)

# A rendered conversation. Bytes outside `content_spans` come from the template, so a control
# token found inside one was forged by data. `text` includes BOS and EOS where they are due.
FORMATTED = pa.schema(
    [
        *_ORIGIN,
        pa.field("text", pa.string(), nullable=False),
        pa.field("content_spans", _SPANS, nullable=False),
        pa.field("trained_spans", _SPANS, nullable=False),
        pa.field("span_weights", WEIGHTS),
        _LABEL,
        _GROUP,
    ]
)

# Token ids, and the token ranges that are trained. A trained range ends at the end of its turn,
# end token included, so that a cut at a range's end never leaves an answer unterminated.
TOKENIZED = pa.schema(
    [
        *_ORIGIN,
        pa.field("input_ids", _INT32S, nullable=False),
        pa.field("trained_ranges", _SPANS, nullable=False),
        pa.field("range_weights", WEIGHTS),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("num_trained", pa.int32(), nullable=False),
        _LABEL,
        _GROUP,
    ]
)

# One training row of at most `seq_len` tokens: whole records behind one another, no padding.
# Layout `labels` publishes `labels` in place of `trained_ranges`; weights, where some are not 1,
# are published a token each, as `loss_weights`.
PACKED = pa.schema(
    [
        pa.field("input_ids", _INT32S, nullable=False),
        pa.field("trained_ranges", _SPANS, nullable=False),  # in tokens of the pack
        pa.field("range_weights", WEIGHTS),
        pa.field("seq_lengths", _INT32S, nullable=False),
        pa.field("record_ids", _STRINGS, nullable=False),
        _LABEL,  # only with strategy `none`: a pack of several records has no one label
    ]
)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as an uncompressed Arrow IPC file, which readers map instead of loading."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.unify_dictionaries())  # a file holds one dictionary per column


def write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches as such a file, one after another."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_table(path: Path) -> pa.Table:
    """Map an Arrow IPC file: its pages are read when they are touched, and can be dropped again."""
    with pa.memory_map(str(path)) as source:
        # One buffer for all columns: for each one read by itself the kernel walks its pages.
        return pa.ipc.open_file(source.read_buffer()).read_all()


REFUSED = "refused.arrow"
"""Rows that a template or tokenizer refused; their raw bytes are in the source, not here."""


def refused_rows(table: pa.Table, faults: Mapping[int, tuple[str, str]], step: str) -> pa.Table:
    """Return the faulty rows of a table for quarantine, schema QUARANTINED, in its order.

    Their raw bytes are in the source: `packhouse.read.with_raw_rows` puts them in.

    Args:
        table: with columns `source` and `row`.
        faults: row of the table -> reason code and a sentence.
        step: that refuses them.
    """
    if not faults:
        return QUARANTINED.empty_table()
    rows = sorted(faults)
    places = table.select(["source", "row"]).take(pa.array(rows, pa.int64())).to_pylist()
    empty = {"step": step, "raw": b"", "raw_size": 0, "raw_sha256": ""}
    bad = [
        {**place, **empty, "reason": faults[row][0], "detail": faults[row][1]}
        for place, row in zip(places, rows, strict=True)
    ]
    return pa.Table.from_pylist(bad, schema=QUARANTINED)

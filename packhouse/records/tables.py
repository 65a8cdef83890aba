"""The Arrow schema of every artefact on the data's way; one row of each is said in its comment.

A table moves from step to step as an Arrow IPC file with exactly these columns, in this order.
Spans and ranges are half-open `[start, end)`. Text spans count **UTF-8 bytes** of `text`, not
characters: byte offsets add up without decoding, and Arrow strings are UTF-8 already.

`check` compares a table with the contract of its artefact, in every run, before a step counts as
done: names, order, types and nulls of columns, then rules for values. Packs are checked token by
token by `packhouse.pack.layout`. In the flows Pandera checks these very rules (`schemas/`); it
comes with `packhouse[flows]`, 178 MB with polars. Numpy and Arrow take 62 ms for the tables of
52,002 rows, as long as Pandera, and no import.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ContractError
from packhouse.system.arrays import Bools, Int64s

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


Rules = Iterator[tuple[str, Bools]]
"""What is wrong with the rows of a mask, and the mask."""

_HEX20, _HEX64, _CODE = r"^[0-9a-f]{20}$", r"^[0-9a-f]{64}$", r"^[a-z][a-z0-9_]*$"
_ROLES = pa.array(["system", "user", "assistant", "tool"])
_BAD_ROW_STEPS = pa.array(["validate", "format", "tokenize"])


def check(artefact: str, table: pa.Table) -> None:
    """Check a table against the contract of its artefact: `validated`, `formatted` and so on.

    Raises:
        ContractError: names the artefact, and the column that differs, or what is wrong with which
            rows.

    Example:
        >>> check("quarantined", QUARANTINED.empty_table())
        >>> check("quarantined", PACKED.empty_table())
        Traceback (most recent call last):
        ...
        packhouse.errors.ContractError: quarantined: column 'source' must be string not ...
    """
    schema, rules = CONTRACTS[artefact]
    check_columns(artefact, table, schema)
    broken = [(rule, np.flatnonzero(bad)) for rule, bad in rules(table)] if table.num_rows else []
    number = sum(len(rows) for _, rows in broken)
    if number:
        shown = "; ".join(f"{rule} in row {rows[0]:,}" for rule, rows in broken if len(rows))
        raise ContractError(
            f"{artefact}: {number:,} values break the contract: {shown}",
            artefact=artefact,
            breaches=number,
        )


def check_columns(artefact: str, table: pa.Table, schema: pa.Schema) -> None:
    """Check names, order and types of the columns, and that required ones hold no null.

    Raises:
        ContractError: the first column that differs.
    """
    if not table.schema.equals(schema):
        for expected in schema:
            index = table.schema.get_field_index(expected.name)
            if index < 0 or not table.schema.field(index).equals(expected):
                got = _type(table.schema.field(index)) if index >= 0 else "nothing"
                raise ContractError(
                    f"{artefact}: column '{expected.name}' must be {_type(expected)}, got {got}"
                )
        raise ContractError(f"{artefact}: columns must be {schema.names}, got {table.schema.names}")
    for field in schema:
        if not field.nullable and table[field.name].null_count:
            raise ContractError(f"{artefact}: column '{field.name}' holds nulls")


def _type(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"


def spans_in_order(spans: pa.ChunkedArray, sizes: pa.ChunkedArray) -> Bools:
    """Return, for each row, if its spans are inside [0, size), not empty, sorted and disjoint.

    Args:
        spans: `list<struct<start, end>>`, without nulls.
        sizes: of what each row's spans lie in.
    """
    lists = spans.combine_chunks()
    counts = lists.value_lengths().to_numpy()
    flat = lists.flatten()
    starts, ends = flat.field("start").to_numpy(), flat.field("end").to_numpy()
    # Spans (0, 4) and (3, 6) of row 0, (1, 2) of row 1: 3 is below 4, the end before it in the same
    # row, so row 0 is bad; 1 is below 6, the end of another row's, so row 1 is not.
    rows = np.repeat(np.arange(len(counts)), counts)
    bad = (starts < 0) | (starts >= ends) | (ends > sizes.to_numpy()[rows])
    bad[1:] |= (rows[1:] == rows[:-1]) & (starts[1:] < ends[:-1])
    return ~_rows_with(bad, rows, len(counts))


def _rows_with(bad: Bools, rows: Int64s, num_rows: int) -> Bools:
    """Which rows hold a bad value, of values that lie in `rows`."""
    found = np.zeros(num_rows, np.bool_)
    found[rows[bad]] = True
    return found


def _validated(table: pa.Table) -> Rules:
    yield from _keys(table)
    yield "row is below 0", _below(table["row"], 0)
    yield "label is below 0", _below(table["label"], 0)
    yield "weight is not over 0", ~_mask(pc.fill_null(pc.greater(table["weight"], 0), True))
    messages = table["messages"].combine_chunks()
    counts = messages.value_lengths().to_numpy()
    yield "messages is empty", counts == 0
    unknown = ~_mask(pc.is_in(messages.flatten().field("role"), value_set=_ROLES))
    rows = np.repeat(np.arange(len(counts)), counts)
    yield "a role is none of those known", _rows_with(unknown, rows, len(counts))


def _formatted(table: pa.Table) -> Rules:
    yield from _keys(table)
    sizes = pc.binary_length(table["text"])
    yield "text is empty", _below(sizes, 1)
    yield "content_spans are out of order", ~spans_in_order(table["content_spans"], sizes)
    yield "trained_spans are out of order", ~spans_in_order(table["trained_spans"], sizes)
    yield from _weights(table, "trained_spans", "span_weights")
    trained = _lengths(table["trained_spans"])
    yield "nothing is trained", (trained == 0) & ~_mask(table["label"].is_valid())


def _tokenized(table: pa.Table) -> Rules:
    yield from _keys(table)
    num_tokens, num_trained = table["num_tokens"].to_numpy(), table["num_trained"].to_numpy()
    yield "num_tokens is below 1", num_tokens < 1
    yield "num_tokens is not the number of ids", num_tokens != _lengths(table["input_ids"])
    ranges = table["trained_ranges"].combine_chunks()
    flat = ranges.flatten()
    sizes = flat.field("end").to_numpy().astype(np.int64) - flat.field("start").to_numpy()
    # Ranges of [2 3 1] tokens, 2 of row 0 and 1 of row 1: sums [0 2 5 6] at [0 2 3] are [0 5 6], so
    # 5 and 1 tokens are trained.
    ends = np.cumsum([0, *_lengths(ranges)])
    trained = np.diff(np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[ends])
    yield "num_trained is not the sum of trained_ranges", num_trained != trained
    in_order = spans_in_order(table["trained_ranges"], table["num_tokens"])
    yield "trained_ranges are out of order", ~in_order
    yield from _weights(table, "trained_ranges", "range_weights")
    yield "nothing is trained", (num_trained <= 0) & ~_mask(table["label"].is_valid())


def _quarantined(table: pa.Table) -> Rules:
    for name in ("row", "byte_offset", "raw_size"):
        yield f"{name} is below 0", _below(table[name], 0)
    yield "step finds no bad rows", ~_mask(pc.is_in(table["step"], value_set=_BAD_ROW_STEPS))
    yield "reason is no code", _unlike(table["reason"], _CODE)
    yield "detail is empty", _below(pc.binary_length(table["detail"]), 1)
    yield "raw_sha256 is not 64 hex digits", _unlike(table["raw_sha256"], _HEX64)


def _dropped(table: pa.Table) -> Rules:
    yield "row is below 0", _below(table["row"], 0)
    yield "reason is no code", _unlike(table["reason"], _CODE)
    yield "detail is empty", _below(pc.binary_length(table["detail"]), 1)


def _packed(table: pa.Table) -> Rules:
    """Nothing: `packhouse.pack.layout` checks each value where packs are made."""
    yield from ()


CONTRACTS: Mapping[str, tuple[pa.Schema, Callable[[pa.Table], Rules]]] = {
    "validated": (VALIDATED, _validated),
    "formatted": (FORMATTED, _formatted),
    "tokenized": (TOKENIZED, _tokenized),
    "quarantined": (QUARANTINED, _quarantined),
    "dropped": (DROPPED, _dropped),
    "packed": (PACKED, _packed),
}


def _keys(table: pa.Table) -> Rules:
    for name in ("record_id", "group_key"):
        yield f"{name} is not 20 hex digits", _unlike(table[name], _HEX20)


def _weights(table: pa.Table, spans: str, weights: str) -> Rules:
    """A weight over 0 for each span, where a row has weights."""
    given = table[weights].combine_chunks()
    has_weights = _mask(given.is_valid())
    counts = np.where(has_weights, pc.fill_null(given.value_lengths(), 0).to_numpy(), 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    values = given.flatten().to_numpy()
    wrong = _rows_with(~(np.isfinite(values) & (values > 0)), rows, len(counts))
    wrong |= has_weights & (counts != _lengths(table[spans]))
    yield f"{weights} are not a number over 0 for each of {spans}", wrong


def _lengths(lists: pa.ChunkedArray | pa.Array) -> Int64s:
    lengths: Int64s = pc.list_value_length(lists).to_numpy().astype(np.int64)
    return lengths


def _below(values: pa.ChunkedArray, least: int) -> Bools:
    return _mask(pc.fill_null(pc.less(values, least), False))


def _unlike(texts: pa.ChunkedArray, pattern: str) -> Bools:
    return ~_mask(pc.match_substring_regex(texts, pattern))


def _mask(values: pa.ChunkedArray | pa.Array) -> Bools:
    mask: Bools = np.asarray(values)
    return mask

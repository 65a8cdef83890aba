"""Define the Arrow schema of the tables that pass between steps, and check tables against it.

A table is stored as an Arrow IPC file with exactly these columns, in this order. Spans and ranges
are half-open `[start, end)`. Text spans count **UTF-8 bytes** of `text`, not characters, because
byte offsets add up without decoding and Arrow strings are UTF-8.

In every run `check` compares a table with its contract before a step counts as done: names, order,
types and nulls of columns, then rules for values. `packhouse.pack.layout` checks packs token by
token. In flows, Pandera checks the same rules (`schemas/`), but it is only installed with
`packhouse[flows]` (178 MB with polars). The checks here need only numpy and Arrow and are as fast:
62 ms for the tables of 52,002 rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ContractError
from packhouse.records.reasons import ROW_STEPS
from packhouse.system.arrays import Bools, Int64s

# One message. `context` is Alpaca's `input` or Dolly's `context`: text of a user turn that the
# template places separately. `tool_calls` is canonical JSON text rather than an Arrow struct, which
# would fill in null keys from other rows and leak them into the prompt.
MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),  # system | user | assistant | tool
        pa.field("content", pa.string(), nullable=False),
        pa.field("context", pa.string()),
        pa.field("reasoning", pa.string()),
        pa.field("tool_calls", pa.string()),
        pa.field("tool_call_id", pa.string()),
        pa.field("name", pa.string()),
        pa.field("weight", pa.float32()),  # loss weight of this message; null: `train_on` decides
        # JSON list of [number of characters, weight factor or null] for each part of the content,
        # or of the reasoning followed by the content
        pa.field("part_weights", pa.string()),
    ]
)

CONVERSATION = pa.list_(pa.field("item", MESSAGE, nullable=False))

# [start, end) in bytes of `text`, or in tokens of `input_ids`.
SPAN = pa.struct(
    [pa.field("start", pa.int32(), nullable=False), pa.field("end", pa.int32(), nullable=False)]
)
_SPANS = pa.list_(pa.field("item", SPAN, nullable=False))

# Loss weight of each trained span or range, never 0; null if all are 1.
WEIGHTS = pa.list_(pa.field("item", pa.float32(), nullable=False))
_INT32S = pa.list_(pa.field("item", pa.int32(), nullable=False))
_STRINGS = pa.list_(pa.field("item", pa.string(), nullable=False))

# Origin of a record, kept in every table, so that a published record can be traced to its raw row.
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
        # JSON object of the row's other template arguments: {"enable_thinking": false}
        pa.field("arguments", pa.string()),
        pa.field("weight", pa.float32()),  # factor for the weights of its messages; null: 1
        _LABEL,
        _GROUP,
    ]
)

# A row that some step rejected. `raw` holds its first 64 KiB, so that it can be fixed and read
# again.
QUARANTINED = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("byte_offset", pa.int64()),  # in the uncompressed file; null for Parquet etc.
        pa.field("step", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),  # a code: json, encoding, type, roles, ...
        pa.field("detail", pa.string(), nullable=False),  # a sentence that explains it
        pa.field("raw", pa.binary(), nullable=False),
        pa.field("raw_size", pa.int64(), nullable=False),
        pa.field("raw_sha256", pa.string(), nullable=False),
    ]
)

# A row that the recipe drops before it becomes a record, with the reason.
DROPPED = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)

# A rendered conversation. Bytes outside `content_spans` come from the template, so a control token
# inside a content span was forged by the data. `text` includes BOS and EOS where they apply.
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

# Token ids and trained token ranges. A trained range includes the end token of its turn, so a cut
# at the end of a range never leaves an answer without its end token.
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

# One training row of at most `seq_len` tokens: whole records, one after another, without padding.
# Layout `labels` publishes `labels` instead of `trained_ranges`. If some weights are not 1, they
# are published per token as `loss_weights`.
PACKED = pa.schema(
    [
        pa.field("input_ids", _INT32S, nullable=False),
        pa.field("trained_ranges", _SPANS, nullable=False),  # in tokens of the pack
        pa.field("range_weights", WEIGHTS),
        pa.field("seq_lengths", _INT32S, nullable=False),
        pa.field("record_ids", _STRINGS, nullable=False),
        _LABEL,  # only with strategy `none`: a pack of several records has no single label
    ]
)

# What happened to each record.
OUTCOMES = pa.schema(
    [
        pa.field("split", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("outcome", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        # Packed tokens of one copy; for a dropped record, its full length.
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("times", pa.int32(), nullable=False),  # copies in packs; 0: dropped
        # What a dropped record matches: id of another record, or row of a benchmark.
        pa.field("repeats", pa.string()),
    ]
)

# Lineage, one row per record: its raw row, its split and its outcome.
LINEAGE = pa.schema([*_ORIGIN, _GROUP, *OUTCOMES])

# Lineage as published, with the place of the record's first copy in the packs (null if it is in
# none), so that most queries on a version read no packs.
RECORDS = pa.schema(
    [
        *LINEAGE,
        pa.field("num_trained", pa.int32()),  # trained tokens of this copy
        pa.field("total_weight", pa.float64()),  # sum of the loss weights of these tokens
        _LABEL,
        pa.field("pack", pa.int64()),  # number of the pack in its split
        pa.field("position", pa.int32()),  # place of its first token in the pack
    ]
)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as an uncompressed Arrow IPC file, which can be mapped instead of loaded."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.unify_dictionaries())  # the format allows one per column


def write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches as an uncompressed Arrow IPC file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_table(path: Path) -> pa.Table:
    """Map an Arrow IPC file: the kernel reads pages on access and can drop them again."""
    with pa.memory_map(str(path)) as source:
        # Read all columns as one buffer; for every separate buffer the kernel walks its pages.
        return pa.ipc.open_file(source.read_buffer()).read_all()


REFUSED = "refused.arrow"
"""Rows that a template or tokenizer rejected, without their raw bytes."""


def refused_rows(table: pa.Table, faults: Mapping[int, tuple[str, str]], step: str) -> pa.Table:
    """Return the bad rows of a table for quarantine, schema QUARANTINED, in table order.

    `packhouse.read.with_raw_rows` adds their raw bytes, which only the source has.

    Args:
        table: table with columns `source` and `row`.
        faults: row of the table -> reason code and a sentence.
        step: name of the step that rejects them.
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
"""Problem, and mask of the rows that have it."""

_HEX20, _HEX64, _CODE = r"^[0-9a-f]{20}$", r"^[0-9a-f]{64}$", r"^[a-z][a-z0-9_]*$"
_ROLES = pa.array(["system", "user", "assistant", "tool"])
_ROW_STEPS = pa.array(ROW_STEPS)


def check(artefact: str, table: pa.Table) -> None:
    """Check a table against a contract: `validated`, `formatted` and so on.

    Raises:
        ContractError: a column differs, or a value breaks a rule; names the column, or the rule and
            its first row.

    Example:
        >>> check("quarantined", QUARANTINED.empty_table())
        >>> check("quarantined", PACKED.empty_table())
        Traceback (most recent call last):
        ...
        packhouse.errors.ContractError: quarantined: column 'source' must have type ...
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
    """Check names, order and types of the columns, and that required ones have no nulls.

    Raises:
        ContractError: a column differs; names the first one.
    """
    if not table.schema.equals(schema):
        for expected in schema:
            index = table.schema.get_field_index(expected.name)
            if index < 0 or not table.schema.field(index).equals(expected):
                fault = "is missing"
                if index >= 0:
                    fault = f"has type '{_type(table.schema.field(index))}'"
                raise ContractError(
                    f"{artefact}: column '{expected.name}' must have type '{_type(expected)}', "
                    f"but it {fault}"
                )
        raise ContractError(f"{artefact}: columns must be {schema.names}, got {table.schema.names}")
    for field in schema:
        if not field.nullable and table[field.name].null_count:
            raise ContractError(f"{artefact}: column '{field.name}' has nulls")


def _type(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"


def spans_in_order(spans: pa.ChunkedArray, sizes: pa.ChunkedArray) -> Bools:
    """Return a mask of rows whose spans are inside [0, size), not empty, sorted and disjoint.

    Args:
        spans: `list<struct<start, end>>`, without nulls.
        sizes: size of each row's text or token list.
    """
    lists = spans.combine_chunks()
    counts = lists.value_lengths().to_numpy()
    flat = lists.flatten()
    starts, ends = flat.field("start").to_numpy(), flat.field("end").to_numpy()
    # Row 0 has spans (0, 4) and (3, 6), row 1 has (1, 2). Span 3 starts before 4, the previous end
    # in the same row, so row 0 is bad. Span 1 starts before 6, but that end is in another row.
    rows = np.repeat(np.arange(len(counts)), counts)
    bad = (starts < 0) | (starts >= ends) | (ends > sizes.to_numpy()[rows])
    bad[1:] |= (rows[1:] == rows[:-1]) & (starts[1:] < ends[:-1])
    return ~_rows_with(bad, rows, len(counts))


def _rows_with(bad: Bools, rows: Int64s, num_rows: int) -> Bools:
    """Return a mask of the rows that have a bad value; `rows` is the row of each value."""
    found = np.zeros(num_rows, np.bool_)
    found[rows[bad]] = True
    return found


def _validated(table: pa.Table) -> Rules:
    yield from _keys(table)
    yield "row is below 0", _below(table["row"], 0)
    yield "label is below 0", _below(table["label"], 0)
    yield "weight is not above 0", ~_mask(pc.fill_null(pc.greater(table["weight"], 0), True))
    messages = table["messages"].combine_chunks()
    counts = messages.value_lengths().to_numpy()
    yield "messages is empty", counts == 0
    unknown = ~_mask(pc.is_in(messages.flatten().field("role"), value_set=_ROLES))
    rows = np.repeat(np.arange(len(counts)), counts)
    yield "a role is unknown", _rows_with(unknown, rows, len(counts))


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
    # Ranges of [2 3 1] tokens, two in row 0 and one in row 1: the running sums [0 2 5 6] at offsets
    # [0 2 3] are [0 5 6], so 5 and 1 tokens are trained.
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
    yield "step is unknown", ~_mask(pc.is_in(table["step"], value_set=_ROW_STEPS))
    yield "reason is not a valid code", _unlike(table["reason"], _CODE)
    yield "detail is empty", _below(pc.binary_length(table["detail"]), 1)
    yield "raw_sha256 is not 64 hex digits", _unlike(table["raw_sha256"], _HEX64)


def _dropped(table: pa.Table) -> Rules:
    yield "row is below 0", _below(table["row"], 0)
    yield "reason is not a valid code", _unlike(table["reason"], _CODE)
    yield "detail is empty", _below(pc.binary_length(table["detail"]), 1)


def _packed(table: pa.Table) -> Rules:
    """Yield nothing: `packhouse.pack.layout` checks every value when packs are made."""
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
    """Check that a row with weights has a weight over 0 for each span."""
    given = table[weights].combine_chunks()
    has_weights = _mask(given.is_valid())
    counts = np.where(has_weights, pc.fill_null(given.value_lengths(), 0).to_numpy(), 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    values = given.flatten().to_numpy()
    wrong = _rows_with(~(np.isfinite(values) & (values > 0)), rows, len(counts))
    wrong |= has_weights & (counts != _lengths(table[spans]))
    yield f"{weights} do not have one number above 0 for each of {spans}", wrong


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

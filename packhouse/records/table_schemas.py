"""Define the Arrow schema of the tables that pass between steps, and check tables against it.

A table is stored as an Arrow IPC file with exactly these columns, in this order. Spans and ranges
are half-open `[start, end)`. Text spans count **UTF-8 bytes** of `text`, not characters, because
byte offsets add up without decoding and Arrow strings are UTF-8.

In every run `check` compares a table with its contract before a step counts as done: names, order,
types and nulls of columns, then rules for values. `packhouse.pack.pack_columns` checks packs token
by token. In flows, Pandera checks the same rules (`schemas/`), but it is only installed with
`packhouse[flows]` (178 MB with polars). The checks here need only numpy and Arrow and are as fast:
62 ms for the tables of 52,002 rows.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ContractError
from packhouse.records.arrays import SPAN, WEIGHTS, Bools, Runs, list_items, one_chunk, read_ranges
from packhouse.records.reasons import ROW_STEPS

ROLES = ("system", "user", "assistant", "tool")
"""All roles that a message may have."""

# One message. `context` is Alpaca's `input` or Dolly's `context`: text of a user turn that the
# template places separately. `tool_calls` is canonical JSON text rather than an Arrow struct, which
# would fill in null keys from other rows and leak them into the prompt.
MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),  # one of ROLES
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

_SPANS = pa.list_(pa.field("item", SPAN, nullable=False))
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

_PLACE = [  # of a row that is in no record
    pa.field("source", pa.string(), nullable=False),
    pa.field("row", pa.int64(), nullable=False),
]
_WHY = [
    pa.field("reason", pa.string(), nullable=False),  # a code: json, encoding, type, roles, ...
    pa.field("detail", pa.string(), nullable=False),  # a sentence that explains it
]

# A row that some step rejected. `raw` holds its first 64 KiB, so that it can be fixed and read
# again.
QUARANTINED = pa.schema(
    [
        *_PLACE,
        pa.field("byte_offset", pa.int64()),  # in the uncompressed file; null for Parquet etc.
        pa.field("step", pa.string(), nullable=False),
        *_WHY,
        pa.field("raw", pa.binary(), nullable=False),
        pa.field("raw_size", pa.int64(), nullable=False),
        pa.field("raw_sha256", pa.string(), nullable=False),
    ]
)

# A row that the recipe drops before it becomes a record, with the reason.
DROPPED = pa.schema([*_PLACE, *_WHY])

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


def with_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return a table with a column replaced."""
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), values)


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
    bad = table.select(["source", "row"]).take(pa.array(rows, pa.int64())).to_pylist()
    for place, row in zip(bad, rows, strict=True):
        place |= {"step": step, "raw": b"", "raw_size": 0, "raw_sha256": ""}
        place["reason"], place["detail"] = faults[row]
    return pa.Table.from_pylist(bad, schema=QUARANTINED)


Rules = Iterator[tuple[str, Bools]]
"""Problem, and mask of the rows that have it."""

# A column has the same rules in every table that has it. Nulls are allowed here.
_LEAST = {"row": 0, "byte_offset": 0, "raw_size": 0, "label": 0, "num_tokens": 1}
_NEVER_EMPTY = ("messages", "text", "detail")
_PATTERNS = {
    "record_id": ("is not 20 hex digits", r"^[0-9a-f]{20}$"),
    "group_key": ("is not 20 hex digits", r"^[0-9a-f]{20}$"),
    "raw_sha256": ("is not 64 hex digits", r"^[0-9a-f]{64}$"),
    "reason": ("is not a valid code", r"^[a-z][a-z0-9_]*$"),
    "step": ("is unknown", f"^({'|'.join(ROW_STEPS)})$"),
}
_SPANS_IN = {"content_spans": "text", "trained_spans": "text", "trained_ranges": "num_tokens"}
_WEIGHTS_OF = {"trained_spans": "span_weights", "trained_ranges": "range_weights"}


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
    check_columns(artefact, table)
    broken = [(rule, np.flatnonzero(bad)) for rule, bad in broken_rules(table)]
    number = sum(len(rows) for _, rows in broken)
    if number:
        shown = "; ".join(f"{rule} in row {rows[0]:,}" for rule, rows in broken if len(rows))
        what = f"{artefact}: {number:,} values break the contract: {shown}"
        raise ContractError(what, artefact=artefact, breaches=number)


def check_columns(artefact: str, table: pa.Table) -> None:
    """Check names, order and types of the columns, and that required ones have no nulls.

    Raises:
        ContractError: a column differs; names the first one.
    """
    schema = CONTRACTS[artefact]
    if not table.schema.equals(schema):
        for expected in schema:
            index = table.schema.get_field_index(expected.name)
            own = table.schema.field(index) if index >= 0 else None
            if own is None or not own.equals(expected):
                fault = "is missing" if own is None else f"has type '{_type(own)}'"
                rule = f"column '{expected.name}' must have type '{_type(expected)}'"
                raise ContractError(f"{artefact}: {rule}, but it {fault}")
        raise ContractError(f"{artefact}: columns must be {schema.names}, got {table.schema.names}")
    for field in schema:
        if not field.nullable and table[field.name].null_count:
            raise ContractError(f"{artefact}: column '{field.name}' has nulls")


def _type(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"


def broken_rules(table: pa.Table) -> Rules:
    """Yield each rule for the values of a table, with the rows that break it.

    Rules for several columns apply if the table has all of them.
    """
    columns = dict(zip(table.schema.names, table.columns, strict=True)) if table.num_rows else {}
    for name, column in columns.items():
        if name in _LEAST:
            is_below = pc.fill_null(pc.less(column, _LEAST[name]), False)
            yield f"{name} is below {_LEAST[name]}", np.asarray(is_below)
        if name in _NEVER_EMPTY:
            is_text = pa.types.is_string(column.type)
            lengths = pc.binary_length(column) if is_text else pc.list_value_length(column)
            yield f"{name} is empty", np.asarray(lengths) == 0
        if name in _PATTERNS:
            problem, pattern = _PATTERNS[name]
            yield f"{name} {problem}", ~np.asarray(pc.match_substring_regex(column, pattern))
        if name == "weight":
            is_above = pc.fill_null(pc.greater(column, 0), True)
            yield "weight is not above 0", ~np.asarray(is_above)
        if name == "messages":
            messages, offsets = list_items(column)
            is_known = pc.is_in(messages.field("role"), value_set=pa.array(ROLES))
            yield "a role is unknown", Runs(offsets).sums(~np.asarray(is_known)) > 0
        if _SPANS_IN.get(name) in columns:
            yield from _broken_spans(name, columns)
        if name == "num_trained":
            ranges = read_ranges(columns["trained_ranges"])
            is_sum = np.asarray(column) == ranges.sums(ranges.ends - ranges.starts)
            yield "num_trained is not the sum of trained_ranges", ~is_sum
            num_ids = pc.list_value_length(columns["input_ids"])
            is_number = np.asarray(columns["num_tokens"]) == np.asarray(num_ids)
            yield "num_tokens is not the number of ids", ~is_number


def _broken_spans(name: str, columns: Mapping[str, pa.ChunkedArray]) -> Rules:
    """Check that spans are inside [0, size), not empty, sorted and disjoint; and their weights."""
    sizes = columns[_SPANS_IN[name]]
    if pa.types.is_string(sizes.type):
        sizes = pc.binary_length(sizes)
    spans = read_ranges(columns[name])
    starts, ends, rows = spans.starts, spans.ends, spans.rows
    # Row 0 has spans (0, 4) and (3, 6), row 1 has (1, 2). Span 3 starts before 4, the previous end
    # in the same row, so row 0 is bad. Span 1 starts before 6, but that end is in another row.
    bad = (starts < 0) | (starts >= ends) | (ends > np.asarray(sizes)[rows])
    bad[1:] |= (rows[1:] == rows[:-1]) & (starts[1:] < ends[:-1])
    yield f"{name} are out of order", spans.sums(bad) > 0
    if name in _WEIGHTS_OF:
        yield "nothing is trained", (spans.counts == 0) & np.asarray(columns["label"].is_null())
        given = one_chunk(columns[_WEIGHTS_OF[name]])
        counts = np.asarray(pc.fill_null(pc.list_value_length(given), 0))
        values = given.flatten().to_numpy()
        is_bad = ~(np.isfinite(values) & (values > 0))
        wrong = Runs(np.append(0, np.cumsum(counts))).sums(is_bad) > 0
        wrong |= np.asarray(given.is_valid()) & (counts != spans.counts)
        yield f"{_WEIGHTS_OF[name]} do not have one number above 0 for each of {name}", wrong


CONTRACTS: Mapping[str, pa.Schema] = {
    "validated": VALIDATED,
    "formatted": FORMATTED,
    "tokenized": TOKENIZED,
    "quarantined": QUARANTINED,
    "dropped": DROPPED,
    "packed": PACKED,  # `packhouse.pack.pack_columns` checks packs token by token
}
"""Schema of each table."""

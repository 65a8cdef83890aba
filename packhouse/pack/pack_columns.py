"""Convert packed rows to published columns (labels, positions), and check packed rows.

Labels are **unshifted**: `labels[i]` is `input_ids[i]` if token `i` is trained, else
`IGNORE_INDEX`; the model shifts them. The first token of every sequence is never trained, so that
after the shift no token is predicted from another record. Layout `compact` stores ranges instead
(1.4 instead of 2.6 bytes per token in Parquet); loaders expand them with the same function.

Cost: 2 ns per token for labels, 2 ns for positions.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.errors import ContractError
from packhouse.records import arrays
from packhouse.records.arrays import Bools, Float32s, Int32s, TokenColumns, flat_list
from packhouse.records.table_schemas import PACKED

IGNORE_INDEX = -100
"""Label of a token that is not trained; torch's cross-entropy ignores it by default."""

MASK_COLUMNS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Names of mask columns for trained tokens in other tools."""

CONTRACT_VERSION = 1
"""Version of the published columns and their guarantees; in the metadata of every schema."""

Layout = Literal["labels", "compact"]

# Under the usual names, supervised trainers trained the bad answers. All collators of transformers
# and settings of TRL's SFTTrainer that were tried stop at these names.
PREFERENCE_NAMES = {"input_ids": "preference_ids", "labels": "preference_labels"}
"""Column of supervised rows -> its name in preference data."""


def preference_names(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rename the columns of preference rows to their published names.

    With these names, no supervised trainer or collator finds ids, so none trains the bad answers.

    Example:
        >>> batch = pa.record_batch({"input_ids": [[7]], "labels": [[7]], "seq_lengths": [[1]]})
        >>> preference_names(batch).schema.names
        ['preference_ids', 'preference_labels', 'seq_lengths']
    """
    schema = _rename_fields(batch.schema, PREFERENCE_NAMES)
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def supervised_names(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rename the columns of published preference rows to those of supervised rows."""
    schema = _rename_fields(batch.schema, {new: old for old, new in PREFERENCE_NAMES.items()})
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _rename_fields(schema: pa.Schema, names: Mapping[str, str]) -> pa.Schema:
    free = {ours: theirs for ours, theirs in names.items() if theirs not in schema.names}
    fields = [field.with_name(free.get(field.name, field.name)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def published_schema(
    layout: Layout = "labels",
    position_ids: bool = False,
    with_label: bool = False,
    with_weights: bool = False,
    *,
    of_preferences: bool = False,
) -> pa.Schema:
    """Return the schema of published files, with the contract in its metadata.

    Example:
        >>> published_schema("labels", position_ids=True).names
        ['input_ids', 'labels', 'seq_lengths', 'record_ids', 'position_ids']
        >>> published_schema("compact").metadata[b"packhouse.labels"]
        b'unshifted'
    """
    int32s = PACKED.field("input_ids").type
    float32s = pa.list_(pa.field("item", pa.float32(), nullable=False))
    is_compact = layout == "compact"
    fields = [
        PACKED.field("input_ids"),
        PACKED.field("trained_ranges") if is_compact else pa.field("labels", int32s, False),
        PACKED.field("seq_lengths"),
        PACKED.field("record_ids"),
        *([pa.field("position_ids", int32s, False)] if position_ids else []),
        *([PACKED.field("label")] if with_label else []),
        *([pa.field("loss_weights", float32s, False)] if with_weights else []),
    ]
    metadata = {
        "packhouse.contract": str(CONTRACT_VERSION),
        "packhouse.layout": layout,
        "packhouse.labels": "unshifted",
        "packhouse.ignore_index": str(IGNORE_INDEX),
    }
    schema = pa.schema(fields, metadata=metadata)
    return _rename_fields(schema, PREFERENCE_NAMES) if of_preferences else schema


def to_layout(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return packed rows with the columns of a published schema.

    Labels, positions and weights that are missing are computed from ranges and lengths.

    Args:
        batch: rows of schema `table_schemas.PACKED`, or published rows of either layout.
        schema: schema from `published_schema`.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9], "labels": [-100, 8, -100],
        ...     "seq_lengths": [2, 1], "record_ids": ["a", "b"]}])
        >>> to_layout(batch, published_schema(position_ids=True))["position_ids"].to_pylist()
        [[0, 1, 0]]
    """
    _, offsets = flat_list(batch["input_ids"])
    columns = []
    for field in schema:
        if field.name in batch.schema.names:
            array = batch[field.name]
            if array.type != field.type and field.name in _PER_TOKEN:
                # Other libraries return nullable items, list views or wider integers.
                values, starts = flat_list(array)
                item = field.type.value_type
                array = arrays.list_array(pa.array(values, item), starts, item)
            columns.append(array.cast(field.type))
            continue
        of_tokens: np.ndarray
        if field.name == "labels":
            of_tokens = expand_labels(batch)
        elif field.name == "position_ids":
            of_tokens = position_ids(flat_list(batch["seq_lengths"])[0])
        else:
            of_tokens = expand_weights(batch)
        columns.append(arrays.list_array(pa.array(of_tokens), offsets, field.type.value_type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


_PER_TOKEN = ("input_ids", "labels", "seq_lengths", "position_ids", "loss_weights")


def expand_labels(batch: pa.RecordBatch) -> Int32s:
    """Return the labels of all tokens of packed or compact rows, flat, shape [num_tokens].

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{
        ...     "input_ids": [7, 8, 9, 5, 6], "trained_ranges": [{"start": 1, "end": 3},
        ...     {"start": 4, "end": 5}], "range_weights": None, "seq_lengths": [3, 2],
        ...     "record_ids": ["a", "b"], "label": None}], PACKED)
        >>> expand_labels(batch).tolist()
        [-100, 8, 9, -100, 6]
    """
    ids, offsets = flat_list(batch["input_ids"])
    return np.where(trained_tokens(batch, offsets), ids, np.int32(IGNORE_INDEX))


def trained_tokens(batch: pa.RecordBatch | pa.Table, offsets: np.ndarray) -> Bools:
    """Return a mask of trained tokens, flat, shape [num_tokens], for either layout.

    Args:
        batch: published or packed rows, or single records, with `labels` or `trained_ranges`.
        offsets: start of each row's tokens and the end of the last, shape [num_rows + 1].

    Raises:
        IndexError: a range ends after the last token.

    Example:
        >>> ranges = pa.array([[(1, 3)], [(0, 1)]], PACKED.field("trained_ranges").type)
        >>> batch = pa.record_batch({"trained_ranges": ranges})  # rows of 3 and 2 tokens
        >>> trained_tokens(batch, np.array([0, 3, 5])).tolist()
        [False, True, True, True, False]
    """
    if "labels" in batch.schema.names:
        labels, _ = flat_list(batch["labels"])
        return np.asarray(labels != IGNORE_INDEX)
    ranges = arrays.read_ranges(batch["trained_ranges"])
    base = offsets[:-1][ranges.rows]
    return trained_mask(ranges.starts + base, ranges.ends + base, int(offsets[-1]))


def expand_weights(batch: pa.RecordBatch) -> Float32s:
    """Return the loss weights of all tokens of packed rows, flat, shape [num_tokens].

    Tokens that are not trained have weight 0.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{
        ...     "input_ids": [7, 8, 9, 5, 6], "trained_ranges": [{"start": 1, "end": 3},
        ...     {"start": 4, "end": 5}], "range_weights": [0.5, 1.0], "seq_lengths": [3, 2],
        ...     "record_ids": ["a", "b"], "label": None}], PACKED)
        >>> expand_weights(batch).tolist()
        [0.0, 0.5, 0.5, 0.0, 1.0]
    """
    _, offsets, ranges = TokenColumns.of(batch)
    base = offsets[:-1][ranges.rows].astype(np.int64)
    weights = np.zeros(int(offsets[-1]), np.float32)
    of_ranges = arrays.flat_weights(batch["range_weights"], ranges.counts)
    of_ranges = np.ones(len(ranges.starts), np.float32) if of_ranges is None else of_ranges
    lengths = ranges.ends - ranges.starts
    tokens = np.repeat(ranges.starts + base, lengths) + arrays.count_up(lengths)
    weights[tokens] = np.repeat(of_ranges, lengths)
    return weights


def trained_mask(
    starts: npt.NDArray[np.integer], ends: npt.NDArray[np.integer], num_tokens: int
) -> Bools:
    """Return a mask of the tokens in disjoint ranges.

    Raises:
        IndexError: a range ends after the last token.

    Example:
        >>> trained_mask(np.array([1, 3]), np.array([3, 4]), 5).tolist()
        [False, True, True, True, False]
    """
    # Ranges [1, 3) and [3, 4) of 5 tokens: 1 untrained, 2 trained, 0 untrained, 1 trained, 1 not.
    edges = np.column_stack([starts, ends]).ravel()
    lengths = np.diff(edges, prepend=0, append=num_tokens)
    # Runs of equal flags are four times as fast as the sum below.
    if (lengths >= 0).all():
        return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    # Out of order: add 1 at starts and -1 at ends, then sum. int8 is enough for disjoint ranges.
    steps = np.zeros(num_tokens + 1, dtype=np.int8)
    steps[starts] += 1
    steps[ends] -= 1
    return np.cumsum(steps[:-1], dtype=np.int8) > 0


def position_ids(
    seq_lengths: npt.NDArray[np.integer], dtype: type[np.integer] = np.int32
) -> np.ndarray:
    """Return the positions of all tokens, restarting at 0 in each sequence.

    Args:
        seq_lengths: tokens of each sequence, shape [num_sequences].
        dtype: dtype of the positions: int32 for files, int64 for models.

    Example:
        >>> position_ids(np.array([3, 2])).tolist()
        [0, 1, 2, 0, 1]
    """
    return arrays.count_up(seq_lengths, dtype)


# Check every value of packed rows before they are published:
#
# Lists have matching lengths; ids are in the vocabulary; a label is its id or -100; seq_lengths add
# up to the number of tokens, which is at most `seq_len`; positions restart at each sequence; the
# first token of a sequence is never trained; a token has a loss weight over 0 exactly if it is
# trained; and every record, and so every pack, trains at least one token.
#
# Cost: 2 ns per token with labels, under 1 with ranges, a few more with positions. Checks are
# vectorized over a batch; the first bad row is looked up only if a check fails.


Values = np.ndarray


def check_packed(
    table: pa.Table | pa.RecordBatch,
    seq_len: int,
    vocab_size: int,
    layout: Layout = "compact",
    *,
    allow_untrained: bool = False,
    first_row: int = 0,
) -> None:
    """Check packed rows of `table_schemas.PACKED` (layout `compact`) or of a published schema.

    Args:
        table: rows; `position_ids` and `loss_weights` are checked if there are any.
        seq_len: pack size in tokens.
        vocab_size: ids must be in [0, vocab_size).
        layout: `labels` or `compact`, the latter with `trained_ranges`.
        allow_untrained: accept records, and so packs, without a trained token. For pieces of
            records (strategy `concat`) and rows with a class label.
        first_row: number of the first row in errors, for callers that read a file in batches.

    Raises:
        ContractError: a value breaks the contract; has `row`, `column`, `index` and `value`.
    """
    for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
        for fault in _faults(batch, seq_len, vocab_size, layout, allow_untrained):
            if not fault.bad.any():
                continue
            at = int(np.argmax(fault.bad))
            row, index, value = at, 0, None
            said = " " + fault.said.format(*(each[at] for each in fault.values))
            if fault.offsets is not None:
                row = int(np.searchsorted(fault.offsets, at, side="right")) - 1
                index = at - int(fault.offsets[row])
                shown = "".join(f"= {each[at]} " for each in fault.values)
                value = fault.values[0][at].item() if fault.values else None
                said = f"[{index}] {shown}{fault.said}"
            raise ContractError(
                f"packed row {first_row + row:,}: {fault.column}{said}",
                row=first_row + row,
                column=fault.column,
                index=index,
                value=value,
            )
        first_row += batch.num_rows


class _Fault(NamedTuple):
    """A rule of packed rows, with a mask of the rows or values that break it."""

    column: str
    bad: Bools
    said: str
    """Text after the column; for rows, a format string for `values`."""
    values: tuple[Values, ...] = ()
    """Numbers that the text shows, each of the shape of `bad`."""
    offsets: Values | None = None
    """Offset of each row's values; None if `bad` is a mask of rows."""


def _unequal(column: str, found: Values, due: Values, what: str) -> _Fault:
    """Return the rows whose number of values differs from the number required."""
    sums = "add up to" if column == "seq_lengths" else "are"
    return _Fault(column, found != due, f"{sums} {{:,}}, but it has {{:,}} {what}", (found, due))


def _faults(
    batch: pa.RecordBatch, seq_len: int, vocab_size: int, layout: Layout, allow_untrained: bool
) -> Iterator[_Fault]:
    """Yield each rule with its breaches; a rule may assume that all earlier ones hold."""
    for name in batch.schema.names:
        column = arrays.one_chunk(batch[name])
        if name in ("label", "range_weights"):  # null is allowed: no class; all weights are 1
            continue
        yield _Fault(name, np.asarray(column.is_null(), np.bool_), "is null")
        items, starts = column.flatten(), arrays.list_offsets(column)
        if items.null_count:
            is_null = np.asarray(items.is_null(), np.bool_)
            yield _Fault(name, is_null, "is null", offsets=starts - starts[0])
    ids, offsets = flat_list(batch["input_ids"])
    lengths, bounds = flat_list(batch["seq_lengths"])
    num_tokens = np.diff(offsets)
    said = f"has {{:,}} tokens, more than seq_len {seq_len:,}"
    yield _Fault("input_ids", num_tokens > seq_len, said, (num_tokens,))
    yield _Fault("input_ids", num_tokens == 0, "has no token")
    # Before `reduceat` below, which returns the next record's first flag for a record of 0 tokens.
    said = "is not a positive number of tokens"
    yield _Fault("seq_lengths", lengths < 1, said, (lengths,), bounds)
    totals = np.append(0, np.cumsum(lengths, dtype=np.int64))
    yield _unequal("seq_lengths", np.diff(totals[bounds]), num_tokens, "tokens")
    num_names = np.diff(arrays.list_offsets(arrays.one_chunk(batch["record_ids"])))
    yield _unequal("record_ids", num_names, np.diff(bounds), "seq_lengths")
    # As unsigned, a negative id becomes huge (-1 is 4,294,967,295), so one pass finds both.
    if int(ids.view(np.uint32).max(initial=0)) >= vocab_size:
        said = f"is outside the vocabulary of {vocab_size:,}"
        yield _Fault("input_ids", ids.view(np.uint32) >= vocab_size, said, (ids,), offsets)
    flat: dict[str, Values] = {}
    for name in ("labels", "position_ids", "loss_weights"):
        if name in batch.schema.names:
            flat[name], starts = flat_list(batch[name])
            yield _unequal(name, np.diff(starts), num_tokens, "tokens")
    ranges = None if layout == "labels" else arrays.read_ranges(batch["trained_ranges"])
    if ranges is None:
        labels = flat["labels"]
        trained = np.asarray(labels != IGNORE_INDEX)
        said = f"is neither its token's id nor {IGNORE_INDEX}"
        yield _Fault("labels", (labels != ids) & trained, said, (labels,), offsets)
    else:
        # Row 0 has ranges (1, 3) and (4, 6), row 1 has (0, 2): rows are [0 0 1], first of their row
        # [1 0 1], and previous ends in the row [0 3 0].
        row = ranges.rows
        is_first = np.diff(row, prepend=-1) != 0
        end_before = np.where(is_first, 0, np.append(0, ranges.ends)[:-1])
        for bad, said in (
            (ranges.starts < end_before, "is before the end of the previous range, or negative"),
            (ranges.starts >= ranges.ends, "starts an empty range"),
            (ranges.ends > num_tokens[row], "starts a range that ends after the row's last token"),
        ):
            yield _Fault("trained_ranges", bad, said, (ranges.starts,), ranges.offsets)
        base = offsets[:-1][row]
        trained = trained_mask(ranges.starts + base, ranges.ends + base, len(ids))
    # Lengths [3 2 4] start at tokens [0 3 5] of the batch, regardless of packs.
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    said = (
        "tokens long, has a trained first token, which would be predicted from the previous record"
    )
    yield _Fault("seq_lengths", trained[starts], said, (lengths,), bounds)
    if not allow_untrained and len(starts):  # a pack has a record, so this covers packs too
        untrained = np.add.reduceat(trained, starts, dtype=np.int64) == 0
        said = "tokens long, has no trained token"
        yield _Fault("seq_lengths", untrained, said, (lengths,), bounds)
    if "position_ids" in flat:
        positions = flat["position_ids"]
        bad = positions != position_ids(lengths)
        said = "does not count up from 0 at its sequence's first token"
        yield _Fault("position_ids", bad, said, (positions,), offsets)
    if "loss_weights" in flat:
        weights = flat["loss_weights"]
        bad = ~np.isfinite(weights) | (weights < 0)
        yield _Fault("loss_weights", bad, "is not a weight", (weights,), offsets)
        said = "is above 0 for an untrained token, or 0 for a trained one"
        yield _Fault("loss_weights", (weights > 0) != trained, said, (weights,), offsets)
    if ranges is not None and "range_weights" in batch.schema.names:
        column = arrays.one_chunk(batch["range_weights"])
        is_given = column.is_valid().to_numpy(zero_copy_only=False)
        due = np.where(is_given, ranges.counts, 0)
        num_weights = column.value_lengths().fill_null(0).to_numpy()
        yield _unequal("range_weights", num_weights, due, "trained ranges")
        weights = column.drop_null().flatten().to_numpy(zero_copy_only=False)
        bad = ~np.isfinite(weights) | (weights <= 0)
        starts = np.append(0, np.cumsum(due))
        yield _Fault("range_weights", bad, "is not a weight above 0", (weights,), starts)

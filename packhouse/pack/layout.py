"""Convert packed rows to published columns (labels, positions), and check packed rows.

Labels are **unshifted**: `labels[i]` is `input_ids[i]` if token `i` is trained, else
`IGNORE_INDEX`; the model shifts them. The first token of every sequence is never trained, so that
after the shift no token is predicted from another record. Layout `compact` stores ranges instead
(1.4 instead of 2.6 bytes per token in Parquet); loaders expand them with the same function.

Cost: 2 ns per token for labels, 2 ns for positions.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.errors import ContractError, IntegrityError
from packhouse.records.lists import (
    count_up,
    flat_list,
    flat_weights,
    list_array,
    list_offsets,
    one_chunk,
    read_ranges,
)
from packhouse.records.tables import PACKED
from packhouse.system.arrays import Bools, Float32s, Int32s

IGNORE_INDEX = -100
"""Label of a token that is not trained; torch's cross-entropy ignores it by default."""

MASK_COLUMNS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Names of mask columns for trained tokens in other tools."""

CONTRACT_VERSION = 1
"""Version of the published columns and their guarantees; in the metadata of every schema."""

Layout = Literal["labels", "compact"]

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
        batch: rows of schema `tables.PACKED`, or published rows of either layout.
        schema: schema from `published_schema`.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [7, 8, 9], "labels": [-100, 8, -100],
        ...     "seq_lengths": [2, 1], "record_ids": ["a", "b"]}])
        >>> to_layout(batch, published_schema(position_ids=True))["position_ids"].to_pylist()
        [[0, 1, 0]]
    """
    _, offsets = flat_list(batch["input_ids"])
    arrays = []
    for field in schema:
        if field.name in batch.schema.names:
            array = batch[field.name]
            if array.type != field.type and field.name in _PER_TOKEN:
                # Other libraries return nullable items, list views or wider integers.
                values, starts = flat_list(array)
                item = field.type.value_type
                array = list_array(pa.array(values, item), starts, item)
            arrays.append(array.cast(field.type))
            continue
        of_tokens: np.ndarray
        if field.name == "labels":
            of_tokens = expand_labels(batch)
        elif field.name == "position_ids":
            of_tokens = position_ids(flat_list(batch["seq_lengths"])[0])
        else:
            of_tokens = expand_weights(batch)
        arrays.append(list_array(pa.array(of_tokens), offsets, field.type.value_type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


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
    ranges = read_ranges(batch["trained_ranges"])
    base = offsets[:-1][ranges.row_of_each()]
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
    _, offsets = flat_list(batch["input_ids"])
    ranges = read_ranges(batch["trained_ranges"])
    base = offsets[:-1][ranges.row_of_each()].astype(np.int64)
    weights = np.zeros(int(offsets[-1]), np.float32)
    of_ranges = flat_weights(batch["range_weights"], ranges.counts())
    of_ranges = np.ones(len(ranges.starts), np.float32) if of_ranges is None else of_ranges
    lengths = ranges.ends - ranges.starts
    tokens = np.repeat(ranges.starts + base, lengths) + count_up(lengths)
    weights[tokens] = np.repeat(of_ranges, lengths)
    return weights


def trained_mask(
    starts: npt.NDArray[np.integer], ends: npt.NDArray[np.integer], num_tokens: int
) -> Bools:
    """Return a mask of the tokens in disjoint ranges: add 1 at starts and -1 at ends, then sum.

    Example:
        >>> trained_mask(np.array([1, 3]), np.array([3, 4]), 5).tolist()
        [False, True, True, True, False]
    """
    steps = np.zeros(num_tokens + 1, dtype=np.int8)
    steps[starts] += 1
    steps[ends] -= 1
    return np.cumsum(steps[:-1], dtype=np.int8) > 0


def records_of(
    batch: pa.RecordBatch,
) -> Iterator[tuple[str, Int32s, Bools]]:
    """Yield record id, token ids and trained mask of each record (or piece) of published packs.

    Raises:
        ContractError: a column is missing, or columns do not match.
        IntegrityError: a list contains a null.
    """
    names = set(batch.schema.names)
    if not {"input_ids", "record_ids", "seq_lengths"} <= names:
        raise ContractError("the data files have no record_ids, so records cannot be compared")
    flat = {
        name: batch[name].flatten().to_numpy(zero_copy_only=False)
        for name in ("input_ids", "seq_lengths", "record_ids")
    }
    if nulls := [name for name in flat if batch[name].flatten().null_count]:
        raise IntegrityError(f"column '{nulls[0]}' of the packs contains a null")
    # Lengths [3 2] end at [3 5]: the records are tokens [0, 3) and [3, 5) of the batch.
    ids, ends = flat["input_ids"], np.cumsum(flat["seq_lengths"])
    mask = trained_tokens(batch, flat_list(batch["input_ids"])[1])
    if not len(ids) == len(mask) == (ends[-1] if len(ends) else 0):
        raise ContractError("lengths of records do not add up to those of their packs")
    places = zip([0, *ends.tolist()], ends.tolist(), strict=False)
    for record_id, (start, end) in zip(flat["record_ids"].tolist(), places, strict=True):
        yield record_id, ids[start:end], mask[start:end]


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
    return count_up(seq_lengths, dtype)


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
    layout: Literal["labels", "compact"] = "compact",
    *,
    allow_untrained: bool = False,
    first_row: int = 0,
) -> None:
    """Check packed rows, of schema `tables.PACKED` (layout `compact`) or of a published schema.

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
        if batch.num_rows:
            rows = _Rows(batch, first_row)
            rows.check_lengths(seq_len)
            rows.check_ids(vocab_size)
            trained = rows.trained_by_labels() if layout == "labels" else rows.trained_by_ranges()
            rows.check_trained(trained, allow_untrained)
            rows.check_optional(trained)
        first_row += batch.num_rows


class _Rows:
    """A batch as flat arrays; column `x` of row `i` is `x[x_offsets[i]:x_offsets[i + 1]]`."""

    def __init__(self, batch: pa.RecordBatch, first_row: int) -> None:
        self.batch = batch
        self.names = batch.schema.names
        self.first_row = first_row
        for name in self.names:
            column = one_chunk(batch[name])
            if name in ("label", "range_weights"):  # null is allowed: no class; all weights are 1
                continue
            if column.null_count:
                row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
                self._refuse(name, row, 0, "is null")
            items = column.flatten()
            if items.null_count:
                offsets = list_offsets(column)
                is_null = items.is_null().to_numpy(zero_copy_only=False)
                self._refuse_first(name, is_null, None, offsets - offsets[0], "is null")
        self.ids, self.offsets = flat_list(batch["input_ids"])
        self.seq_lengths, self.seq_offsets = flat_list(batch["seq_lengths"])

    def check_lengths(self, seq_len: int) -> None:
        num_tokens = np.diff(self.offsets)
        if (num_tokens > seq_len).any():
            row = int(np.argmax(num_tokens > seq_len))
            said = f"has {num_tokens[row]:,} tokens, over seq_len {seq_len:,}"
            self._refuse("input_ids", row, 0, said)
        if (num_tokens == 0).any():
            self._refuse("input_ids", int(np.argmax(num_tokens == 0)), 0, "has no token")
        limit = "is not a positive number of tokens"
        self._refuse_sequences(self.seq_lengths < 1, limit)
        totals = np.concatenate([[0], np.cumsum(self.seq_lengths, dtype=np.int64)])
        self._compare("seq_lengths", np.diff(totals[self.seq_offsets]), num_tokens, "tokens")
        record_ids = list_offsets(one_chunk(self.batch["record_ids"]))
        num_sequences = np.diff(self.seq_offsets)
        self._compare("record_ids", np.diff(record_ids), num_sequences, "seq_lengths")

    def check_ids(self, vocab_size: int) -> None:
        # As unsigned, a negative id becomes huge (-1 is 4,294,967,295), so one pass finds both.
        if len(self.ids) and int(self.ids.view(np.uint32).max()) >= vocab_size:
            bad = self.ids.view(np.uint32) >= vocab_size
            limit = f"is outside the vocabulary of {vocab_size:,}"
            self._refuse_first("input_ids", bad, self.ids, self.offsets, limit)

    def trained_by_labels(self) -> Bools:
        labels = self._per_token("labels")
        trained = np.asarray(labels != IGNORE_INDEX)
        bad = (labels != self.ids) & trained
        limit = f"is neither its token's id nor {IGNORE_INDEX}"
        self._refuse_first("labels", bad, labels, self.offsets, limit)
        return trained

    def trained_by_ranges(self) -> Bools:
        ranges = read_ranges(self.batch["trained_ranges"])
        # Row 0 has ranges (1, 3) and (4, 6), row 1 has (0, 2): rows are [0 0 1], first of their row
        # [1 0 1], and previous ends in the row [0 3 0].
        row = ranges.row_of_each()
        is_first = np.diff(row, prepend=-1) != 0
        is_over = ranges.ends > np.diff(self.offsets)[row]
        end_before = np.where(is_first, 0, np.concatenate([[0], ranges.ends])[:-1])
        for bad, limit in (
            (ranges.starts < end_before, "is before the end of the previous range, or negative"),
            (ranges.starts >= ranges.ends, "starts an empty range"),
            (is_over, "starts a range that ends after the row's last token"),
        ):
            self._refuse_first("trained_ranges", bad, ranges.starts, ranges.offsets, limit)
        base = self.offsets[:-1][row]
        return trained_mask(ranges.starts + base, ranges.ends + base, len(self.ids))

    def check_trained(self, trained: Bools, allow_untrained: bool) -> None:
        # Lengths [3 2 4] start at tokens [0 3 5] of the batch, regardless of packs.
        starts = np.cumsum(self.seq_lengths, dtype=np.int64) - self.seq_lengths
        limit = "tokens long, has a trained first token, predicted from the record before it"
        self._refuse_sequences(trained[starts], limit)
        if not allow_untrained:  # a pack holds at least one record, so this covers packs too
            num_trained = np.add.reduceat(trained, starts, dtype=np.int64)
            self._refuse_sequences(num_trained == 0, "tokens long, has no trained token")

    def check_optional(self, trained: Bools) -> None:
        """Check `position_ids`, `loss_weights` and `range_weights` if the rows have them."""
        if "position_ids" in self.names:
            positions = self._per_token("position_ids")
            bad = positions != position_ids(self.seq_lengths)
            limit = "does not count up from 0 at its sequence's first token"
            self._refuse_first("position_ids", bad, positions, self.offsets, limit)
        if "loss_weights" in self.names:
            weights = self._per_token("loss_weights")
            odd, limit = ~np.isfinite(weights) | (weights < 0), "is not a weight"
            self._refuse_first("loss_weights", odd, weights, self.offsets, limit)
            bad = (weights > 0) != trained
            limit = "is over 0 where the token is not trained, or 0 where it is"
            self._refuse_first("loss_weights", bad, weights, self.offsets, limit)
        if "range_weights" in self.names:
            column = one_chunk(self.batch["range_weights"])
            is_given = column.is_valid().to_numpy(zero_copy_only=False)
            num_weights = column.value_lengths().fill_null(0).to_numpy()
            due = np.where(is_given, read_ranges(self.batch["trained_ranges"]).counts(), 0)
            self._compare("range_weights", num_weights, due, "trained ranges")
            weights = column.drop_null().flatten().to_numpy(zero_copy_only=False)
            offsets = np.concatenate([[0], np.cumsum(due)])
            bad = ~np.isfinite(weights) | (weights <= 0)
            self._refuse_first("range_weights", bad, weights, offsets, "is not a weight over 0")

    def _per_token(self, column: str) -> Values:
        """Return the values of a column that must have one value per token."""
        values, offsets = flat_list(self.batch[column])
        self._compare(column, np.diff(offsets), np.diff(self.offsets), "tokens")
        return values

    def _compare(self, column: str, found: Values, due: Values, what: str) -> None:
        """Reject the first row whose number of values differs from the number required."""
        if not np.array_equal(found, due):
            row = int(np.argmax(found != due))
            sums = "add up to" if column == "seq_lengths" else "are"
            said = f"{sums} {found[row]:,}, but it has {due[row]:,} {what}"
            self._refuse(column, row, 0, said)

    def _refuse_sequences(self, bad: Bools, limit: str) -> None:
        self._refuse_first("seq_lengths", bad, self.seq_lengths, self.seq_offsets, limit)

    def _refuse_first(
        self, column: str, bad: Bools, values: Values | None, offsets: Values, limit: str
    ) -> None:
        """Reject the first bad value, if any, naming its row and its index in the row."""
        if bad.any():
            at = int(np.argmax(bad))
            row = int(np.searchsorted(offsets, at, side="right")) - 1
            index = at - int(offsets[row])
            value = None if values is None else values[at].item()
            said = f"[{index}] {'' if values is None else f'= {values[at]} '}{limit}"
            self._refuse(column, row, index, said, value)

    def _refuse(
        self, column: str, row: int, index: int, said: str, value: object = None
    ) -> NoReturn:
        row += self.first_row
        raise ContractError(
            f"packed row {row:,}: {column}{'' if said.startswith('[') else ' '}{said}",
            row=row,
            column=column,
            index=index,
            value=value,
        )

"""Prove what a packed table promises, value by value, before anything of it is published.

Lists agree in length; ids are in the vocabulary; a label is its id or -100; seq_lengths add up to
the tokens, of which there are at most `seq_len`; positions restart at each sequence; no sequence's
first token is trained; a token has a loss weight over 0 exactly if it is trained; and every record
and every pack trains at least one token.

Cost: 2 ns a token with labels, under 1 with ranges, a few more with positions. Vectorised
over a batch; the first bad row is looked up only when there is one.
"""

from typing import Literal, NoReturn

import numpy as np
import pyarrow as pa

from packhouse.arrays import Bools
from packhouse.errors import ContractError
from packhouse.packing.layout import IGNORE_INDEX, position_ids, trained_mask
from packhouse.records.lists import flat_list, list_offsets, one_chunk, read_ranges, zero_based

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
    """Check packed rows: a table of schema `tables.PACKED` (layout `compact`) or a published one.

    Args:
        table: the rows; a published table's `position_ids` are checked where it has them.
        seq_len: pack size in tokens.
        vocab_size: ids are in [0, vocab_size).
        layout: whether the table has `labels` or `trained_ranges`.
        allow_untrained: do not ask for a trained token in every record and so in every pack. Right
            for pieces of records (strategy `concat`) and for rows whose target is their `label`.
        first_row: number of the first row in errors, for a caller who reads a file by batches.

    Raises:
        ContractError: with `row`, `column` and the first value that breaks the contract.
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
    """One batch as flat arrays: column `x` of row `i` is `x[x_offsets[i]:x_offsets[i + 1]]`."""

    def __init__(self, batch: pa.RecordBatch, first_row: int) -> None:
        self.batch = batch
        self.names = batch.schema.names
        self.first_row = first_row
        for name in self.names:
            column = one_chunk(batch[name])
            if name in ("label", "range_weights"):  # null: no class; all weights are 1
                continue
            if column.null_count:
                row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
                self._refuse(name, row, 0, "is null")
            items = column.flatten()
            if items.null_count:
                offsets = list_offsets(column)
                is_null = items.is_null().to_numpy(zero_copy_only=False)
                self._refuse_first(name, is_null, None, offsets - offsets[0], "is null")
        self.ids, self.offsets = zero_based(*flat_list(batch["input_ids"]))
        self.seq_lengths, self.seq_offsets = zero_based(*flat_list(batch["seq_lengths"]))

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
        # As unsigned, a negative id is a huge one (-1 is 4,294,967,295): one pass finds both.
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
        # Ranges (1, 3), (4, 6) of row 0 and (0, 2) of row 1: rows [0 0 1], the first ones of theirs
        # are [1 0 1], and before them ended [0 3 0].
        row = ranges.row_of_each()
        is_first = np.diff(row, prepend=-1) != 0
        is_over = ranges.ends > np.diff(self.offsets)[row]
        end_before = np.where(is_first, 0, np.concatenate([[0], ranges.ends])[:-1])
        for bad, limit in (
            (ranges.starts < end_before, "begins before the range before it ends, or below 0"),
            (ranges.starts >= ranges.ends, "begins a range without a token"),
            (is_over, "begins a range that ends behind the row's tokens"),
        ):
            self._refuse_first("trained_ranges", bad, ranges.starts, ranges.offsets, limit)
        base = self.offsets[:-1][row]
        return trained_mask(ranges.starts + base, ranges.ends + base, len(self.ids))

    def check_trained(self, trained: Bools, allow_untrained: bool) -> None:
        # Lengths [3 2 4] begin at tokens [0 3 5] of the batch, whatever packs they are in.
        starts = np.cumsum(self.seq_lengths, dtype=np.int64) - self.seq_lengths
        limit = "tokens long, has a trained first token, predicted from the record before it"
        self._refuse_sequences(trained[starts], limit)
        if not allow_untrained:  # every pack holds a record: if all records train, all packs do
            num_trained = np.add.reduceat(trained, starts, dtype=np.int64)
            self._refuse_sequences(num_trained == 0, "tokens long, has no trained token")

    def check_optional(self, trained: Bools) -> None:
        """Check `position_ids`, `loss_weights` and `range_weights` where the rows have them."""
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
        """Return the values of a column that must have one for each token."""
        values, offsets = zero_based(*flat_list(self.batch[column]))
        self._compare(column, np.diff(offsets), np.diff(self.offsets), "tokens")
        return values

    def _compare(self, column: str, found: Values, due: Values, what: str) -> None:
        """Refuse the first row that has not as many values as it has of something else."""
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
        """Refuse the first bad value, if there is any, by its row and its index in the row."""
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

"""Prove what a packed table promises, value by value, before anything of it is published.

Lists agree in length; ids are in the vocabulary; a label is its id or -100; seq_lengths add up to
the tokens, of which there are at most `seq_len`; positions restart at each sequence; no sequence's
first token is trained; a token has a loss weight over 0 exactly if it is trained; and every record
and every pack trains at least one token.

Cost: 2 ns a token with labels, under 1 with ranges, a few more with positions. Vectorised
over a batch; the first bad row is looked up only when there is one.
"""

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ContractError
from packhouse.packing.layout import IGNORE_INDEX, position_ids, trained_mask
from packhouse.packing.lists import flat_list, list_offsets, one_chunk, read_ranges, zero_based

__all__ = ["check_packed"]

Values = npt.NDArray[Any]


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
        first_row: number of the first row in errors, for who reads a file batch by batch.

    Raises:
        ContractError: with `row`, `column` and the first value that breaks the contract.
    """
    for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
        if batch.num_rows:
            _check_batch(_Rows(batch, seq_len, vocab_size, first_row), layout, allow_untrained)
        first_row += batch.num_rows


def _check_batch(rows: "_Rows", layout: str, allow_untrained: bool) -> None:
    rows.check_no_nulls()
    rows.check_lengths()
    rows.check_ids()
    is_trained = rows.trained_by_labels() if layout == "labels" else rows.trained_by_ranges()
    rows.check_first_tokens(is_trained)
    if not allow_untrained:
        rows.check_trained(is_trained)
    if "position_ids" in rows.batch.schema.names:
        rows.check_positions()
    if "loss_weights" in rows.batch.schema.names:
        rows.check_weights(is_trained)
    if "range_weights" in rows.batch.schema.names:
        rows.check_range_weights()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a flat value lies: the row it belongs to, and its number within that row."""

    row: int
    index: int


class _Rows:
    """One batch as flat arrays."""

    def __init__(
        self, batch: pa.RecordBatch, seq_len: int, vocab_size: int, first_row: int
    ) -> None:
        self.batch = batch
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.first_row = first_row
        self.ids, self.offsets = zero_based(*flat_list(batch["input_ids"]))
        self.seq_lengths, self.seq_offsets = zero_based(*flat_list(batch["seq_lengths"]))

    def check_no_nulls(self) -> None:
        for name in self.batch.schema.names:
            column = one_chunk(self.batch[name])
            if name in ("label", "range_weights"):  # null: no class; all weights are 1
                continue
            if column.null_count:
                row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
                self._refuse(name, _Place(row, 0), "is null")
            items = column.flatten()
            if items.null_count:
                at = int(np.argmax(items.is_null().to_numpy(zero_copy_only=False)))
                place = self._place(at, list_offsets(column) - list_offsets(column)[0])
                self._refuse(name, place, f"[{place.index}] is null")

    def check_lengths(self) -> None:
        num_tokens = np.diff(self.offsets)
        bad = num_tokens > self.seq_len
        if bad.any():
            row = int(np.argmax(bad))
            self._refuse(
                "input_ids",
                _Place(row, 0),
                f"has {num_tokens[row]:,} tokens, over seq_len {self.seq_len:,}",
            )
        if (num_tokens == 0).any():
            self._refuse("input_ids", _Place(int(np.argmax(num_tokens == 0)), 0), "has no token")
        self._first("seq_lengths", self.seq_lengths < 1, self.seq_lengths, self.seq_offsets, _ZERO)
        totals = np.concatenate([[0], np.cumsum(self.seq_lengths, dtype=np.int64)])
        self._same("seq_lengths", np.diff(totals[self.seq_offsets]), num_tokens, "tokens")
        names = list_offsets(one_chunk(self.batch["record_ids"]))
        self._same("record_ids", np.diff(names), np.diff(self.seq_offsets), "seq_lengths")

    def check_ids(self) -> None:
        # As unsigned, a negative id is a huge one: one pass finds both.
        if len(self.ids) and int(self.ids.view(np.uint32).max()) >= self.vocab_size:
            bad = self.ids.view(np.uint32) >= self.vocab_size
            limit = f"is outside the vocabulary of {self.vocab_size:,}"
            self._first("input_ids", bad, self.ids, self.offsets, limit)

    def trained_by_labels(self) -> npt.NDArray[np.bool_]:
        labels, offsets = zero_based(*flat_list(self.batch["labels"]))
        self._same("labels", np.diff(offsets), np.diff(self.offsets), "tokens")
        is_trained = np.asarray(labels != IGNORE_INDEX)
        bad = (labels != self.ids) & is_trained
        limit = f"is neither its token's id nor {IGNORE_INDEX}"
        self._first("labels", bad, labels, offsets, limit)
        return is_trained

    def trained_by_ranges(self) -> npt.NDArray[np.bool_]:
        ranges = read_ranges(self.batch["trained_ranges"])
        row = ranges.row_of_each()
        end_of_row = np.diff(self.offsets)[row]
        same_row = np.diff(row, prepend=-1) == 0
        after = np.where(same_row, np.concatenate([[0], ranges.ends])[:-1], 0)
        for bad, limit in (
            (ranges.starts < after, "begins before the range before it ends, or below 0"),
            (ranges.starts >= ranges.ends, "begins a range without a token"),
            (ranges.ends > end_of_row, "begins a range that ends behind the row's tokens"),
        ):
            self._first("trained_ranges", bad, ranges.starts, ranges.offsets, limit)
        base = self.offsets[:-1][row]
        return trained_mask(ranges.starts + base, ranges.ends + base, len(self.ids))

    def check_first_tokens(self, is_trained: npt.NDArray[np.bool_]) -> None:
        first = self._sequence_starts()
        limit = "tokens long, has a trained first token, predicted from the record before it"
        self._first("seq_lengths", is_trained[first], self.seq_lengths, self.seq_offsets, limit)

    def check_trained(self, is_trained: npt.NDArray[np.bool_]) -> None:
        # Every pack holds a record, so where every record trains every pack does.
        num_trained = np.add.reduceat(is_trained, self._sequence_starts(), dtype=np.int64)
        limit = "tokens long, has no trained token"
        self._first("seq_lengths", num_trained == 0, self.seq_lengths, self.seq_offsets, limit)

    def check_positions(self) -> None:
        positions, offsets = zero_based(*flat_list(self.batch["position_ids"]))
        self._same("position_ids", np.diff(offsets), np.diff(self.offsets), "tokens")
        bad = positions != position_ids(self.seq_lengths)
        limit = "does not count up from 0 at its sequence's first token"
        self._first("position_ids", bad, positions, offsets, limit)

    def check_weights(self, is_trained: npt.NDArray[np.bool_]) -> None:
        weights, offsets = zero_based(*flat_list(self.batch["loss_weights"]))
        self._same("loss_weights", np.diff(offsets), np.diff(self.offsets), "tokens")
        bad = ~np.isfinite(weights) | (weights < 0)
        self._first("loss_weights", bad, weights, offsets, "is not a weight")
        bad = (weights > 0) != is_trained
        limit = "is over 0 where the token is not trained, or 0 where it is"
        self._first("loss_weights", bad, weights, offsets, limit)

    def check_range_weights(self) -> None:
        column = one_chunk(self.batch["range_weights"])
        if column.null_count == len(column):
            return
        ranges = read_ranges(self.batch["trained_ranges"])
        given = column.is_valid().to_numpy(zero_copy_only=False)
        counts = np.where(given, ranges.counts(), 0)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        self._same(
            "range_weights",
            np.where(given, pc.fill_null(pc.list_value_length(column), 0).to_numpy(), 0),
            counts,
            "trained ranges",
        )
        weights = column.drop_null().flatten().to_numpy(zero_copy_only=False)
        bad = ~np.isfinite(weights) | (weights <= 0)
        self._first("range_weights", bad, weights, offsets, "is not a weight over 0")

    def _sequence_starts(self) -> npt.NDArray[np.int64]:
        return np.asarray(np.cumsum(self.seq_lengths, dtype=np.int64) - self.seq_lengths)

    def _same(self, column: str, got: Values, due: Values, what: str) -> None:
        bad = got != due
        if bad.any():
            row = int(np.argmax(bad))
            sums = "add up to" if column == "seq_lengths" else "are"
            self._refuse(
                column, _Place(row, 0), f"{sums} {got[row]:,}, but it has {due[row]:,} {what}"
            )

    def _first(
        self, column: str, bad: npt.NDArray[np.bool_], values: Values, offsets: Values, limit: str
    ) -> None:
        if bad.any():
            at = int(np.argmax(bad))
            place = self._place(at, offsets)
            self._refuse(column, place, f"[{place.index}] = {values[at]} {limit}", values[at])

    def _place(self, at: int, offsets: Values) -> _Place:
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        return _Place(row, at - int(offsets[row]))

    def _refuse(self, column: str, place: _Place, what: str, value: Any = None) -> NoReturn:
        row = self.first_row + place.row
        raise ContractError(
            f"packed row {row:,}: {column}{'' if what.startswith('[') else ' '}{what}",
            row=row,
            column=column,
            index=place.index,
            value=value.item() if isinstance(value, np.generic) else value,
        )


_ZERO = "is not a positive number of tokens"

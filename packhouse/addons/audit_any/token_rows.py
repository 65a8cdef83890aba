"""Rows that another tool tokenized, as flat arrays: ids, what is trained, where records begin.

A mask is whatever says so: `labels` (below 0: not trained, and wrong above -100), `loss_mask`,
`loss_weights`, `completion_mask`, `assistant_masks`; a token is trained if all that are there say
so. Without any of them every token is. Records of a row are parted by `seq_lengths`, else
`cu_seqlens`, else `position_ids` that do not rise by one, else the segment numbers of an
`attention_mask`; otherwise the row is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import SourceError
from packhouse.pack.layout import MASK_COLUMNS, published_schema, to_layout
from packhouse.system.arrays import Bools, Float64s, Int64s

Values = Float64s

_CU_SEQLENS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q")
_MASKS = (*MASK_COLUMNS, "loss_weights")
MASKS = frozenset(("labels", *_MASKS))
"""Columns that say which tokens are trained."""

_PER_TOKEN = ("labels", *_MASKS, "attention_mask", "position_ids")
_WHOLE = ("input_ids", "labels", "position_ids", "seq_lengths", *_CU_SEQLENS)
COLUMNS = ("input_ids", *_PER_TOKEN, "seq_lengths", *_CU_SEQLENS, "trained_ranges", "record_ids")
"""What is read of a row; `trained_ranges` is packhouse's own compact layout."""


@dataclass(frozen=True, slots=True)
class Padding:
    """What fills rows up to one length: pad tokens, or end tokens behind the end of an answer."""

    id: int | None
    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    """If it is the pad token, too, the last one in front is no padding."""
    unk_id: int | None = None
    """Where a tokenizer has no pad token, this one often fills rows."""

    def places(self, ids: Int64s, trained: Bools) -> Bools:
        """Return which tokens are padding: pad, end or unknown tokens at either end of a row.

        With end 2 and pad 0: [7 8 2 0 0] -> [0 0 0 1 1], and [7 8 2 2 2] -> [0 0 0 1 1]. In
        [7 8 0 0], of which the first pad alone is trained, it stands for an end: [0 0 0 1].
        """
        found = np.zeros(len(ids), np.bool_)
        first, last = ids[0], ids[-1]
        if self._fills(first):
            number = int(np.argmin(np.append(ids == first, False)))
            is_own = first == self.id or number > 1
            found[: (number - (first == self.bos_id)) * is_own] = True
        if self._fills(last) and not found[-1]:
            begin = len(ids) - int(np.argmin(np.append(ids[::-1] == last, False)))
            is_end = int(last) in self.end_ids
            is_alone = begin + 1 == len(ids)
            if is_alone and last == self.unk_id != self.id:
                return found
            is_behind_end = not self.end_ids.isdisjoint(ids[max(begin - 2, 0) : begin].tolist())
            stands_for_end = is_end or (trained[begin] and not trained[begin + 1 :].any())
            keeps = stands_for_end and (not is_behind_end or (is_end and is_alone))
            found[begin + keeps :] = True
        return found

    def _fills(self, token: np.int64) -> bool:
        return token in (self.id, self.unk_id) or int(token) in self.end_ids


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Records of many rows behind one another, without padding."""

    ids: Int64s
    trained: Bools
    starts: Int64s
    """Where each record begins, and the end of all; shape [num_records + 1]."""
    rows: Int64s
    """Row of each record."""
    row_lengths: Int64s
    """Tokens of the row of each record, without padding."""
    num_rows: int
    faults: Mapping[str, list[tuple[int, int]]]
    """Finding -> (row, token of `ids`), where a row contradicts itself; -1: the row is left out."""

    @property
    def is_last(self) -> Bools:
        """Return, for each record, if it is the last one of its row."""
        return np.append(self.rows[1:] != self.rows[:-1], True)[: len(self.rows)]

    def runs(self) -> tuple[Int64s, Int64s]:
        """Return where runs of trained tokens begin and end; none goes beyond its record.

        Trained [0 1 1 1 0 1], records at [0 3]: [1, 3), [3, 4) and [5, 6).
        """
        is_first = np.zeros(len(self.ids) + 1, np.bool_)
        is_first[self.starts] = True
        before = np.append(False, self.trained[:-1])
        after = np.append(self.trained[1:], False)
        begins = np.flatnonzero(self.trained & (~before | is_first[:-1]))
        stops = np.flatnonzero(self.trained & (~after | is_first[1:])) + 1
        return begins, stops


def read_token_rows(batch: pa.RecordBatch, first_row: int, pad: Padding) -> TokenRows:
    """Read rows with `input_ids`.

    Args:
        batch: some of `COLUMNS`; others are not looked at.
        first_row: number of the first row.
        pad: what rows may end with.

    Raises:
        SourceError: ids, labels, positions or lengths that are no whole numbers.

    Example:
        >>> rows = [{"input_ids": [7, 8, 9], "labels": [-100, 8, 9], "position_ids": [0, 1, 0]}]
        >>> read = read_token_rows(pa.RecordBatch.from_pylist(rows), 0, Padding(None))
        >>> read.trained.tolist(), read.starts.tolist(), read.rows.tolist()
        ([False, True, True], [0, 2, 3], [0, 0])
    """
    names = batch.schema.names
    if "trained_ranges" in names and "labels" not in names:
        batch = to_layout(batch, published_schema("labels"))
    columns = {name: _numbers(batch[name]) for name in COLUMNS if name in batch.schema.names}
    read = {name: column for name, column in columns.items() if column is not None}
    for name in columns:
        if name in _WHOLE or name in MASKS:
            _check_numbers(name, batch[name], read.get(name), first_row)
    found = _Found({}, [], [], [], [])
    total = 0
    for number in range(batch.num_rows):
        row = {name: values[offsets[number] : offsets[number + 1]]
               for name, (values, offsets) in read.items()}  # fmt: skip
        total += found.add(row, first_row + number, total, pad)
    return TokenRows(
        ids=np.concatenate([np.zeros(0, np.int64), *found.ids]),
        trained=np.concatenate([np.zeros(0, np.bool_), *found.trained]),
        starts=np.append(np.concatenate([np.zeros(0, np.int64), *found.starts]), total),
        rows=np.concatenate([np.zeros(0, np.int64), *(r[0] for r in found.rows)]),
        row_lengths=np.concatenate([np.zeros(0, np.int64), *(r[1] for r in found.rows)]),
        num_rows=batch.num_rows,
        faults=found.faults,
    )


def _check_numbers(
    name: str, column: pa.Array, read: tuple[Values, Int64s] | None, first_row: int
) -> None:
    """Refuse a column that would be left out, or read as other numbers than it holds."""
    if read is None and name in ("input_ids", *MASKS):
        held = str(column.type)[:80]
        hint = "; a class of the whole row goes by `label`" if name == "labels" else ""
        raise SourceError(f"column '{name}' holds {held}, not a list of numbers in each row{hint}")
    if read is None or name not in _WHOLE or column.null_count == len(column):
        return
    if pa.types.is_boolean(column.type.value_type):
        raise SourceError(f"column '{name}' holds true and false, not whole numbers")
    values, offsets = read
    broken = np.flatnonzero(np.isfinite(values) & (values % 1 != 0))
    if len(broken):
        row = first_row + int(np.searchsorted(offsets, broken[0], "right")) - 1
        value = float(values[broken[0]])
        raise SourceError(f"row {row:,}: column '{name}' holds {value}, which is no whole number")


def _numbers(column: pa.Array) -> tuple[Values, Int64s] | None:
    """Values and offsets of a list column of numbers; None where it holds no such lists."""
    if pa.types.is_null(column.type):  # nothing in any row
        column = column.cast(pa.list_(pa.null()))
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list and not pa.types.is_fixed_size_list(kind):
        return None
    value = kind.value_type
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    if not any(is_kind(value) for is_kind in kinds):
        return None
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = column.flatten()
    if pa.types.is_boolean(value) or pa.types.is_null(value):
        flat = flat.cast(pa.int8())
    values = flat.to_numpy(zero_copy_only=False).astype(np.float64)
    return values, np.append(0, np.cumsum(lengths)).astype(np.int64)


@dataclass(slots=True)
class _Found:
    faults: dict[str, list[tuple[int, int]]]
    ids: list[Int64s]
    trained: list[Bools]
    starts: list[Int64s]
    rows: list[tuple[Int64s, Int64s]]

    def fault(self, name: str, row: int, token: int) -> None:
        self.faults.setdefault(name, []).append((row, token))

    def add(self, row: Mapping[str, Values], number: int, at: int, pad: Padding) -> int:
        """Take in a row; returns its number of tokens without padding."""
        values = row["input_ids"]
        per_token = [row[name] for name in _PER_TOKEN if name in row]
        if any(len(each) not in (0, len(values)) for each in per_token):
            self.fault("uneven", number, -1)
            return 0
        is_whole = all(isfinite(each.sum()) for each in (values, *per_token))  # NaN stays NaN
        if not len(values) or not is_whole or values.min() < 0:
            self.fault("uneven" if len(values) else "empty", number, -1)
            return 0
        ids = values.astype(np.int64)
        trained = np.ones(len(ids), np.bool_)
        labels = row.get("labels", values[:0])
        if len(labels):
            trained &= labels >= 0
        for name in _MASKS:
            if len(row.get(name, ())):
                trained &= row[name] != 0
        attention = row.get("attention_mask", values[:0])
        is_masked = attention <= 0 if len(attention) else np.zeros(len(ids), np.bool_)
        is_padding = pad.places(ids, trained)
        is_token = ~(is_masked | is_padding)
        if not is_token.any():
            name = "hidden" if is_masked.all() and not is_padding.all() else "empty"
            self.fault("padding" if is_padding.all() and trained.any() else name, number, -1)
            return 0
        has_mask = any(name in row and len(row[name]) for name in MASKS)
        if not has_mask:
            self.fault("unmasked", number, at)
        if not is_token.all():
            holes = ~is_token & (ids != pad.id)
            self._left_out(
                number, at, np.flatnonzero(is_token), holes, trained & has_mask, is_masked
            )
        stated = trained | ((labels < 0) & (labels != -100)) if len(labels) else trained
        if len(labels) and (wrong := stated & is_token & (labels != ids)).any():
            self.fault("mislabeled", number, at + int(np.argmax(wrong[is_token])))
        positions = row.get("position_ids", values[:0])
        own = _Own(number, at, is_token, attention[is_token] if len(attention) else attention)
        starts = self._boundaries(own, row, positions[is_token] if len(positions) else positions)
        kept = ids[is_token]
        by_hand = not len(row.get("seq_lengths", ()))  # TRL's collator leaves first labels out
        if by_hand and len(labels) and (crossing := starts[1:][trained[is_token][starts[1:]]]).size:
            self.fault("crossing", number, at + int(crossing[0]))
        self.ids.append(kept)
        self.trained.append(trained[is_token])
        self.starts.append(starts + at)
        self.rows.append((np.full(len(starts), number), np.full(len(starts), len(kept))))
        return len(kept)

    def _left_out(
        self, number: int, at: int, places: Int64s, holes: Bools, trained: Bools, is_masked: Bools
    ) -> None:
        """Note tokens that attention does not see, and padding that is trained or in front.

        Args:
            number: of the row.
            at: where its tokens begin among those of all rows.
            places: of its tokens; all others are left out.
            holes: which tokens are left out and no pad tokens.
            trained: which tokens a mask says are trained.
            is_masked: where `attention_mask` is 0.
        """
        first, last = int(places[0]), int(places[-1])
        holes[:first] = holes[last:] = False
        if holes.any():
            self.fault("hidden", number, at + int(np.searchsorted(places, np.argmax(holes))))
        is_wrong = trained & ~holes
        is_wrong[places] = False
        is_wrong[:first] |= ~is_masked[:first]
        if is_wrong.any():
            before = int(np.searchsorted(places, np.argmax(is_wrong)))
            self.fault("padding", number, at + max(before - 1, 0))

    def _boundaries(self, own: "_Own", row: Mapping[str, Values], positions: Values) -> Int64s:
        """Where the records of a row begin; notes what contradicts itself."""
        # Records of 3 and 2 tokens, as rows say it: seq_lengths [3 2], cu_seqlens [0 3 5],
        # attention_mask [1 1 1 2 2], position_ids [0 1 2 0 1]. All give the starts [0 3].
        num_tokens = int(own.is_token.sum())
        starts = None
        if len(row.get("seq_lengths", ())):
            ends = np.cumsum(row["seq_lengths"]).astype(np.int64)
            starts = np.append(0, ends)
        for name in _CU_SEQLENS if starts is None else ():
            if len(row.get(name, ())):
                starts = row[name].astype(np.int64)
                break
        if starts is not None:
            is_whole = starts[-1] in (num_tokens, len(own.is_token))
            if not is_whole or starts[0] != 0 or (np.diff(starts) < 1).any():
                self.fault("boundaries", own.number, own.at)
                return np.zeros(1, np.int64)
            starts = starts[starts < num_tokens]
        elif len(own.attention) and own.attention.max() > 1:
            starts = np.flatnonzero(np.diff(own.attention, prepend=-1) != 0)
        if len(positions) > 1 and (positions == positions[0]).all():  # they count nothing
            self.fault("positions", own.number, own.at)
        elif len(positions):
            restarts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
            wrong = np.setxor1d(restarts, restarts if starts is None else starts)
            wrong = np.union1d(wrong, restarts[positions[restarts] != 0])
            if len(wrong):
                self.fault("positions", own.number, own.at + int(wrong[0]))
            if starts is None:
                starts = restarts
                if len(starts) > 1 and len(own.attention):  # of ones: then positions are not read
                    self.fault("joined", own.number, own.at + int(starts[1]))
        return np.zeros(1, np.int64) if starts is None else starts


@dataclass(frozen=True, slots=True)
class _Own:
    """A row of which boundaries are looked for."""

    number: int
    at: int
    is_token: Bools
    attention: Values

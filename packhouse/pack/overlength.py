"""Decide which records are packed and how many of their tokens, before packs are planned.

Works on the TOKENIZED table of one shard and reads only its small columns, at a few ns per record.
A record is dropped if it is longer than `seq_len` and the policy is to drop it, or if nothing of it
would be trained: it would waste compute and, alone in a pack, make the loss NaN. Every drop has a
reason and is counted in rows and tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from packhouse.errors import SequenceTooLongError
from packhouse.recipe import PackConfig
from packhouse.records.arrays import Bools, Bytes, Int32s, Int64s, read_ranges

# Reason codes of `Admitted.reasons` by number. `duplicate` and `near_duplicate` come from
# `packhouse.pack.dedup`, `sampled_out` from `packhouse.run.steps.pack`, and `contaminated` from
# the search for benchmarks.
# `contaminated` stays last: without benchmarks, the pack step writes only the names before it.
REASONS = (
    "kept",
    "over_seq_len",
    "first_turn_too_long",
    "nothing_trained",
    "duplicate",
    "near_duplicate",
    "sampled_out",
    "contaminated",
)
_KEPT, _OVER_SEQ_LEN, _FIRST_TURN_TOO_LONG, _NOTHING_TRAINED = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """Records of one shard, or of all, that are packed."""

    rows: Int32s | Int64s
    """Row numbers of the kept records in the shard's table, ascending."""

    lengths: Int32s
    """Number of leading tokens to pack of each kept record; shape of `rows`."""

    reasons: Bytes
    """Index into `REASONS` for every row of the shard."""

    num_tokens: Int32s
    """Full length in tokens of every row of the shard."""

    def without(self, is_out: Bools, reason: str) -> "Admitted":
        """Drop the rows in the mask `is_out` that are still kept."""
        is_out = is_out & (self.reasons == _KEPT)
        if not is_out.any():
            return self
        stays = ~is_out[self.rows]
        reasons = np.where(is_out, np.uint8(REASONS.index(reason)), self.reasons)
        return replace(self, rows=self.rows[stays], lengths=self.lengths[stays], reasons=reasons)

    def between(self, start: int, end: int) -> Int32s | Int64s:
        """Return the kept rows in [start, end)."""
        low, high = np.searchsorted(self.rows, (start, end))
        return self.rows[low:high]

    def counts(self) -> dict[str, dict[str, int]]:
        """Count rows and tokens: in, kept, truncated, and dropped by reason. `in` is the total.

        Example:
            >>> admitted = Admitted(
            ...     rows=np.array([0]), lengths=np.array([3], dtype=np.int32),
            ...     reasons=np.array([0, 1], dtype=np.uint8),
            ...     num_tokens=np.array([5, 9], dtype=np.int32))
            >>> admitted.counts()["rows"]
            {'in': 2, 'kept': 1, 'over_seq_len': 1}
            >>> admitted.counts()["tokens"]
            {'in': 14, 'kept': 3, 'truncated': 2, 'over_seq_len': 9}
        """
        rows = np.bincount(self.reasons, minlength=len(REASONS))
        tokens = np.bincount(self.reasons, self.num_tokens, minlength=len(REASONS))
        kept = int(self.lengths.sum(dtype=np.int64))
        by_rows = {"in": len(self.reasons), "kept": len(self.rows)}
        by_tokens = {"in": int(tokens.sum()), "kept": kept, "truncated": int(tokens[0]) - kept}
        for code, reason in enumerate(REASONS[1:], start=1):
            if rows[code]:
                by_rows[reason] = int(rows[code])
                by_tokens[reason] = int(tokens[code])
        return {"rows": by_rows, "tokens": by_tokens}


def join_admitted(shards: Sequence[Admitted]) -> Admitted:
    """Join the results of all shards, numbering rows across them.

    Example:
        >>> one = Admitted(np.array([1]), np.array([5]), np.array([2, 0]), np.array([9, 5]))
        >>> join_admitted([one, one]).rows.tolist()
        [1, 3]
    """
    bounds = np.cumsum([0, *(len(each.reasons) for each in shards)])
    width = np.int32 if bounds[-1] < 2**31 else np.int64
    rows = [(each.rows + first).astype(width) for each, first in zip(shards, bounds, strict=False)]
    return Admitted(
        np.concatenate([np.zeros(0, width), *rows]),
        np.concatenate([np.zeros(0, np.int32), *(each.lengths for each in shards)]),
        np.concatenate([np.zeros(0, np.uint8), *(each.reasons for each in shards)]),
        np.concatenate([np.zeros(0, np.int32), *(each.num_tokens for each in shards)]),
    )


def apply_over_length(tokenized: pa.Table, config: PackConfig) -> Admitted:
    """Apply `config.over_length` to one shard.

    - `drop`: drop records over `seq_len`.
    - `error`: raise an error for the first one.
    - `truncate_turns`: keep the tokens up to the end of the last trained range that fits. A trained
      range includes its turn's end token, so no kept answer lacks it. If not even the first range
      fits, drop the record as `first_turn_too_long`.

    Strategy `concat` cuts at pack ends, so no record is too long. Records without a trained range
    are kept if they have a `label` (for a classification head) and otherwise dropped as
    `nothing_trained`. So are records whose only trained token is the first one, because the first
    token of a sequence is never trained (it would be predicted from the previous record).

    Args:
        tokenized: a shard, schema `table_schemas.TOKENIZED`.
        config: pack settings; reads `seq_len`, `strategy` and `over_length`.

    Raises:
        SequenceTooLongError: a record is over `seq_len` and `over_length` is `error`.
    """
    # Copy, so that the mapped shard can be released.
    num_tokens = np.array(tokenized["num_tokens"].to_numpy(), np.int32)
    ranges = read_ranges(tokenized["trained_ranges"])
    row = ranges.rows
    lengths = num_tokens.copy()
    reasons = np.zeros(len(lengths), dtype=np.uint8)
    over = num_tokens > config.seq_len
    if config.strategy != "concat" and over.any():
        if config.over_length == "error":
            columns = ["record_id", "source", "row", "num_tokens"]
            (first,) = tokenized.select(columns).slice(int(np.argmax(over)), 1).to_pylist()
            raise SequenceTooLongError(
                f"record '{first['record_id']}' has {first['num_tokens']:,} tokens, more than "
                f"seq_len {config.seq_len:,} ({first['source']}, row {first['row']:,}). Set "
                "pack.over_length to 'drop', 'truncate_turns' or 'window', or raise pack.seq_len.",
                **first,
                seq_len=config.seq_len,
            )
        if config.over_length == "truncate_turns":
            # Cut after a whole turn: a cut answer has no trained end token, so the model would
            # learn not to stop. seq_len 8, trained ranges end at 5, 8 and 12 -> keep 8 tokens.
            last_end = np.zeros(len(lengths), dtype=np.int32)
            fits = ranges.ends <= config.seq_len
            np.maximum.at(last_end, row[fits], ranges.ends[fits])
            lengths[over] = last_end[over]
            reasons[over & (lengths == 0)] = _FIRST_TURN_TOO_LONG
        else:
            reasons[over] = _OVER_SEQ_LEN
    # Ranges with a trained token other than the first, within the kept tokens.
    trains = np.minimum(ranges.ends, lengths[row]) > np.maximum(ranges.starts, 1)
    has_trained = np.zeros(len(lengths), dtype=np.bool_)
    has_trained[row[trains]] = True
    has_label = tokenized["label"].is_valid().to_numpy(zero_copy_only=False)
    untrained = ~has_trained & ~(has_label & (ranges.counts == 0))
    reasons[untrained & (reasons == _KEPT)] = _NOTHING_TRAINED
    kept = np.flatnonzero(reasons == _KEPT).astype(np.int32)
    return Admitted(kept, lengths[kept], reasons, num_tokens)

"""What other pack sizes would give: packs, fill, padding, rows too long; by a run's own planner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from packhouse.errors import PackhouseError
from packhouse.pack.plan import plan_packs

_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
_MAX_RECORDS = 2**21  # 7 plans of 2 million lengths take 0.5 s


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqLenTrial:
    """What packs of one size would give."""

    seq_len: int
    num_packs: int
    num_tokens: int
    """In packs."""
    records_too_long: int
    """Longer than `seq_len`, left out here; a recipe may cut them instead."""
    tokens_too_long: int
    num_records: int
    """All of them, those too long included."""

    @property
    def num_padding(self) -> int:
        """Tokens of padding, where packs are padded to `seq_len`."""
        return self.num_packs * self.seq_len - self.num_tokens

    @property
    def fill(self) -> float:
        """Share of the packs that is tokens."""
        return self.num_tokens / max(self.num_packs * self.seq_len, 1)

    @property
    def share_kept(self) -> float:
        """Share of the records that fit."""
        return 1 - self.records_too_long / max(self.num_records, 1)


def try_seq_lens(
    splits: Sequence[Mapping[int, int]],
    seq_len: int,
    strategy: str,
    seed: int = 0,
    multiple: int = 1,
) -> list[SeqLenTrial]:
    """Plan the packs of each split again, with other sizes.

    Args:
        splits: of each split, length in tokens -> records.
        seq_len: of the version.
        strategy: as the recipe names it.
        seed: of the recipe.
        multiple: `pad_record_to_multiple_of` of the recipe.

    Returns:
        Sizes from a quarter to four times `seq_len` that are such multiples; none where the plan
        takes too long, or its plug-in is not here.

    Example:
        >>> [(a.seq_len, a.num_packs, a.records_too_long) for a in try_seq_lens([{6: 2, 2: 2}],
        ...     8, "best_fit")]
        [(2, 2, 2), (4, 1, 2), (6, 3, 0), (8, 2, 0), (12, 2, 0), (16, 1, 0), (32, 1, 0)]
    """
    if sum(sum(each.values()) for each in splits) > _MAX_RECORDS:
        return []
    sizes = sorted({max(int(seq_len * factor), 1) for factor in _FACTORS})
    sizes = [size for size in sizes if size % multiple == 0]
    try:
        return [_planned(splits, size, strategy, seed, multiple) for size in sizes]
    except PackhouseError:
        return []


def _planned(
    splits: Sequence[Mapping[int, int]], seq_len: int, strategy: str, seed: int, multiple: int
) -> SeqLenTrial:
    packs = tokens = records = long_records = long_tokens = 0
    for counts in splits:
        # {6: 2, 2: 2}: lengths [6 2], as often as [2 2].
        values, numbers = np.array(list(counts.items()), np.int64).reshape(-1, 2).T
        fits = values <= (seq_len if strategy != "concat" else values.max(initial=0))
        records += int(numbers.sum())
        long_records += int(numbers[~fits].sum())
        long_tokens += int((values * numbers)[~fits].sum())
        if fits.any():
            lengths = np.repeat(values[fits], numbers[fits])
            plan = plan_packs(lengths, seq_len, strategy, seed, multiple)
            packs, tokens = packs + plan.num_packs, tokens + plan.num_tokens
    return SeqLenTrial(
        seq_len=seq_len,
        num_packs=packs,
        num_tokens=tokens,
        records_too_long=long_records,
        tokens_too_long=long_tokens,
        num_records=records,
    )

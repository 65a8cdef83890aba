"""What a plan and its gather come to, as plain numbers for the ledger, the report and plots."""

from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np

from packhouse.pack.gather import GatherTally
from packhouse.pack.pack_plan import PackPlan
from packhouse.pack.plan import lower_bound
from packhouse.system.arrays import Int32s


@dataclass(frozen=True, kw_only=True, slots=True)
class PackStatistics:
    """Statistics of the packs of one side; `num_` fields are 0 until tokens were gathered."""

    seq_len: int
    """Pack size in tokens."""
    strategy: str
    """How the packs were planned."""
    num_sequences: int = 0
    """Sequences in packs; with `concat`, pieces."""
    num_packs: int = 0
    """Packs."""
    num_tokens: int = 0
    """Tokens in packs."""
    num_trained: int = 0
    """Tokens with a label."""
    num_first_masked: int = 0
    """Tokens that lost their label as the first of their sequence in a pack."""
    lower_bound: int
    """Packs that no plan without cuts goes below."""
    length_histogram: list[tuple[int, int]]
    """(longest length, sequences) of classes a quarter octave wide, without the empty ones."""

    @classmethod
    def of(cls, plan: PackPlan, lengths: Int32s, tally: GatherTally) -> "PackStatistics":
        """Put together what the planner and a complete gather know.

        Example:
            >>> from packhouse.pack.plan import plan_packs
            >>> lengths = np.array([5, 3, 2, 6, 4], dtype=np.int32)
            >>> tally = GatherTally(num_packs=3, num_tokens=20, num_sequences=5, num_trained=9)
            >>> statistics = PackStatistics.of(plan_packs(lengths, 8), lengths, tally)
            >>> statistics.num_padding, round(statistics.fill, 3), statistics.lower_bound
            (4, 0.833, 3)
        """
        return cls(
            seq_len=plan.seq_len,
            strategy=plan.strategy,
            num_sequences=tally.num_sequences,
            num_packs=tally.num_packs,
            num_tokens=tally.num_tokens,
            num_trained=tally.num_trained,
            num_first_masked=tally.num_first_masked,
            lower_bound=lower_bound(lengths, plan.seq_len),
            length_histogram=length_histogram(lengths),
        )

    @property
    def num_padding(self) -> int:
        """Tokens that a trainer pads to bring every pack to `seq_len`."""
        return self.num_packs * self.seq_len - self.num_tokens

    @property
    def fill(self) -> float:
        """Share of `num_packs * seq_len` that is tokens; 1.0 without packs."""
        capacity = self.num_packs * self.seq_len
        return self.num_tokens / capacity if capacity else 1.0

    def to_dict(self) -> dict[str, object]:
        """Fields and derived numbers, JSON-able."""
        return {**asdict(self), "num_padding": self.num_padding, "fill": round(self.fill, 6)}


def length_class(length: int) -> tuple[int, int]:
    """Return the least and the largest length of a length's class; a power of 2 has four classes.

    Classes end at 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..., and so at every `seq_len` that
    is a power of 2.

    Example:
        >>> length_class(6), length_class(9), length_class(10), length_class(2048)
        ((6, 6), (9, 10), (9, 10), (1793, 2048))
    """
    width = max(1, (1 << (length - 1).bit_length()) // 8)
    largest = -(-length // width) * width
    return largest - width + 1, largest


def length_histogram(lengths: Int32s) -> list[tuple[int, int]]:
    """Count sequences by length class: (largest length, sequences).

    Example:
        >>> length_histogram(np.array([5, 9, 10, 100], dtype=np.int32))
        [(5, 1), (10, 2), (112, 1)]
    """
    counts: Counter[int] = Counter()
    for length, count in zip(*np.unique(lengths, return_counts=True), strict=True):
        counts[length_class(int(length))[1]] += int(count)
    return sorted(counts.items())

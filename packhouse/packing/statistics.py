"""What a plan and its gather come to, as plain numbers for the ledger, the report and plots."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packhouse.packing.gather import GatherTally
from packhouse.packing.pack_plan import PackPlan
from packhouse.packing.plan import lower_bound

__all__ = ["PackStatistics", "length_histogram"]


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
    def of(
        cls, plan: PackPlan, lengths: npt.NDArray[np.int32], tally: GatherTally
    ) -> "PackStatistics":
        """Put together what the planner and a complete gather know.

        Example:
            >>> from packhouse.packing.plan import plan_packs
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

    def with_tally(self, tally: Mapping[str, int]) -> "PackStatistics":
        """Return what the plan knew together with what all gathers counted: the `num_` fields."""
        return PackStatistics(**{**asdict(self), **tally})

    @property
    def num_padding(self) -> int:
        """Tokens that a trainer pads to bring every pack to `seq_len`."""
        return self.num_packs * self.seq_len - self.num_tokens

    @property
    def fill(self) -> float:
        """Share of `num_packs * seq_len` that is tokens; 1.0 without packs."""
        capacity = self.num_packs * self.seq_len
        return self.num_tokens / capacity if capacity else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived numbers, JSON-able."""
        return {**asdict(self), "num_padding": self.num_padding, "fill": round(self.fill, 6)}


def length_histogram(lengths: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Count sequences by length class: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...

    Example:
        >>> length_histogram(np.array([5, 9, 10, 100], dtype=np.int32))
        [(5, 1), (10, 2), (112, 1)]
    """
    longest = int(lengths.max(initial=1))
    edges = [*range(1, 5)] + [
        2**octave * (4 + step) // 4
        for octave in range(2, longest.bit_length() + 1)
        for step in range(1, 5)
    ]
    if longest <= len(lengths):
        of_each = np.bincount(lengths)
        different = np.arange(len(of_each))
    else:  # `concat` packs books: a count for every length would take more than the lengths do
        different, of_each = np.unique(lengths, return_counts=True)
    places = np.searchsorted(edges, different)
    counts = np.bincount(places, of_each, minlength=len(edges)).astype(np.int64)
    return [(edge, int(count)) for edge, count in zip(edges, counts, strict=True) if count]

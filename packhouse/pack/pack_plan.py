"""Packs as numbers: which sequences lie in which, and in what order the packs come.

Cost of `balance_packs`: 20 ns a sequence and a sort of the packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from packhouse.pack.shuffle import permutation
from packhouse.records.lists import count_up
from packhouse.system.arrays import Int32s, Int64s

Lengths = npt.NDArray[np.integer]
IndexArray = Int32s | Int64s


@dataclass(frozen=True, slots=True, eq=False)
class PackPlan:
    """Which sequences, or pieces of them, lie in which pack.

    Pack `p` holds `order[pack_offsets[p]:pack_offsets[p + 1]]`, in that order.
    """

    order: IndexArray
    """Sequence indices, pack after pack. Each appears once; with `concat` once per piece."""

    pack_offsets: Int64s
    """Where each pack begins in `order`, shape [num_packs + 1]."""

    seq_len: int
    """Pack size in tokens."""

    num_tokens: int
    """Tokens in all packs."""

    strategy: str = field(kw_only=True)
    """The strategy that made the plan."""

    starts: IndexArray | None = None
    """`concat` only: the first token of each piece, in tokens of its sequence."""

    ends: IndexArray | None = None
    """`concat` only: the token behind the last one of each piece."""

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.pack_offsets) - 1

    @property
    def fill(self) -> float:
        """Share of `num_packs * seq_len` that is tokens; 1.0 for an empty plan."""
        capacity = self.num_packs * self.seq_len
        return self.num_tokens / capacity if capacity else 1.0


def join_plans(parts: Sequence[tuple[PackPlan, Lengths]]) -> PackPlan:
    """Lay plans one behind another, each over some of the sequences.

    Args:
        parts: each plan with the number that each of its sequences has among all; of one strategy
            and `seq_len`.

    Example:
        >>> from packhouse.pack import plan_packs
        >>> first = plan_packs(np.array([3, 5]), seq_len=8), np.array([1, 3])
        >>> second = plan_packs(np.array([4, 4]), seq_len=8), np.array([0, 2])
        >>> plan = join_plans([first, second])
        >>> plan.pack_offsets.tolist(), sorted(plan.order[:2].tolist())
        ([0, 2, 4], [1, 3])
    """
    plans = [plan for plan, _ in parts]
    before = np.cumsum([0, *(len(plan.order) for plan in plans)])
    offsets = [plan.pack_offsets[1:] + base for plan, base in zip(plans, before, strict=False)]
    starts: list[np.ndarray] = [p.starts for p in plans if p.starts is not None]
    ends: list[np.ndarray] = [p.ends for p in plans if p.ends is not None]
    return replace(
        plans[0],
        order=np.concatenate([rows[plan.order] for plan, rows in parts]),
        pack_offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        num_tokens=sum(plan.num_tokens for plan in plans),
        starts=np.concatenate(starts) if starts else None,
        ends=np.concatenate(ends) if ends else None,
    )


def pack_costs(plan: PackPlan, lengths: Lengths) -> Int64s:
    """Attention cost of each pack: the sum of the squared lengths of its sequences.

    Attention within records computes a score for each pair of tokens of a record; all else of a
    model costs the same for each token.

    Example:
        >>> plan = PackPlan(np.array([0, 1, 2]), np.array([0, 1, 3]), 8, 16, strategy="best_fit")
        >>> pack_costs(plan, np.array([8, 4, 4])).tolist()
        [64, 32]
    """
    if not plan.num_packs:
        return np.zeros(0, np.int64)
    sizes = lengths[plan.order].astype(np.int64)
    if plan.starts is not None and plan.ends is not None:
        sizes = plan.ends.astype(np.int64) - plan.starts
    sizes *= sizes
    return np.add.reduceat(sizes, plan.pack_offsets[:-1])


def balance_packs(plan: PackPlan, lengths: Lengths, balance: int, seed: int | None) -> PackPlan:
    """Put the packs in such an order that each `balance` neighbours cost about the same.

    The packs stay as they are. They are sorted by cost and cut into steps of `balance`; the seed
    shuffles the steps (None: the costliest first). What is left over, the cheapest packs, comes
    last, so that every step begins at a multiple of `balance`.

    Example:
        >>> plan = PackPlan(np.arange(5), np.arange(6), 8, 24, strategy="none")
        >>> balance_packs(plan, np.array([2, 8, 3, 7, 4]), 2, seed=None).order.tolist()
        [1, 3, 4, 2, 0]
    """
    by_cost = np.argsort(-pack_costs(plan, lengths), kind="stable")
    num_steps = plan.num_packs // balance
    whole = by_cost[: num_steps * balance].reshape(num_steps, balance)
    if seed is not None:
        whole = whole[permutation(num_steps, seed)]
    return take_packs(plan, np.concatenate([whole.ravel(), by_cost[num_steps * balance :]]))


def take_packs(plan: PackPlan, packs: Int64s) -> PackPlan:
    """Return the same packs in another order."""
    # Packs at [0 2 3 5] of `order`, taken as [2 0]: sizes [2 2], pieces [3 4 0 1].
    sizes = np.diff(plan.pack_offsets)[packs]
    pieces = np.repeat(plan.pack_offsets[packs], sizes) + count_up(sizes)
    return replace(
        plan,
        order=plan.order[pieces],
        pack_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        starts=None if plan.starts is None else plan.starts[pieces],
        ends=None if plan.ends is None else plan.ends[pieces],
    )


def step_imbalance(costs: Int64s, num_ranks: int) -> float:
    """How much longer steps take than if every rank had the mean: the sum of maxima by the means.

    Args:
        costs: of the packs in the order of training; each step takes the next `num_ranks`, and
            what is left over is not counted.
        num_ranks: ranks that wait for one another.

    Example:
        >>> step_imbalance(np.array([3, 1, 2, 2]), 2)  # (3 + 2) / (2 + 2)
        1.25
    """
    steps = costs[: len(costs) // num_ranks * num_ranks].reshape(-1, num_ranks)
    return float(steps.max(axis=1).sum() / steps.mean(axis=1).sum()) if steps.size else 1.0

"""Plan which sequences go into which pack, from their lengths alone.

| strategy | order | cost at 5 million | use it for |
|---|---|---|---|
| `best_fit` | packs shuffled | 30 ns/sequence | fine-tuning: mostly the lower bound itself |
| `first_fit` | packs shuffled | 40 ns/sequence | comparison with other tools |
| `next_fit` | sequences shuffled | 40 ns/sequence | packs that are a fair sample of the data |
| `concat` | sequences shuffled | 80 ns/sequence | continued pretraining: cuts at pack ends |
| `none` | as given | 5 ns/sequence | one sequence a row |

The seed decides, beside the order, which of the sequences of equal length goes where. Plans depend
on lengths, `seq_len`, strategy and seed only: not on the platform, numpy's release or a hash seed.
A plan holds 4 bytes a sequence (8 beyond 2**31) and 8 a pack; planning needs 12 for a moment.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from packhouse.errors import ConfigError, ContractError, PluginError, SequenceTooLongError
from packhouse.packing.histogram import (
    IntArray,
    Patterns,
    best_fit_decreasing,
    exact_completion,
    first_fit_decreasing,
)
from packhouse.packing.shuffle import keys_to_indices, permutation, shuffle_keys
from packhouse.plugins import find_plugin
from packhouse.records.lists import count_up

__all__ = [
    "STRATEGIES",
    "IndexArray",
    "PackPlan",
    "join_plans",
    "lower_bound",
    "plan_packs",
    "round_up",
]

_BLOCK_RUNS = 2**16  # in memory at a time, about

Lengths = npt.NDArray[np.integer[Any]]
_Length = TypeVar("_Length", bound=np.integer[Any])
IndexArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackPlan:
    """Which sequences, or pieces of them, lie in which pack.

    Pack `p` holds `order[pack_offsets[p]:pack_offsets[p + 1]]`, in that order.
    """

    order: IndexArray
    """Sequence indices, pack after pack. Each appears once; with `concat` once per piece."""

    pack_offsets: IntArray
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


def plan_packs(
    lengths: Lengths, seq_len: int, strategy: str = "best_fit", seed: int = 0, multiple: int = 1
) -> PackPlan:
    """Plan packs of at most `seq_len` tokens.

    Args:
        lengths: tokens per sequence, int array of shape [num_sequences], each at least 1.
        seq_len: pack size in tokens.
        strategy: one of `STRATEGIES`, or the name of a plug-in.
        seed: decides the order of packs or sequences (see the module) and the choice among equals.
        multiple: each sequence takes the room of its length rounded up to this.

    Returns:
        A plan in which every sequence (with `concat`: every token) appears exactly once.

    Raises:
        SequenceTooLongError: a sequence exceeds `seq_len`, and the strategy does not cut.
        ContractError: a sequence has no token.
        ConfigError: no such strategy, a plug-in's plan that breaks a rule, or a `seq_len` that is
            no multiple of `multiple`.

    Example:
        >>> plan = plan_packs(np.array([5, 3, 2, 6, 4, 4]), seq_len=8)
        >>> plan.num_packs, plan.fill, sorted(plan.order.tolist())
        (3, 1.0, [0, 1, 2, 3, 4, 5])
    """
    plan = _PLANNERS.get(strategy) or plugin_planner(strategy)
    lengths = np.asarray(lengths)
    assert lengths.ndim == 1, f"lengths must be one-dimensional, got shape {lengths.shape}"
    if seq_len < 1:
        raise ConfigError(f"seq_len must be positive, got {seq_len}")
    if multiple < 1 or seq_len % multiple or (multiple > 1 and strategy == "concat"):
        raise ConfigError(
            f"records cannot be padded to multiples of {multiple} in {strategy} packs of "
            f"{seq_len:,} tokens; take a seq_len that is a multiple, and no concat"
        )
    if len(lengths) and lengths.min() < 1:
        index = int(np.argmax(lengths < 1))
        raise ContractError(
            f"sequence {index} has {lengths[index]} tokens; every sequence needs at least one",
            index=index,
            num_tokens=int(lengths[index]),
        )
    if strategy != "concat" and lengths.max(initial=0) > seq_len:
        index = int(np.argmax(lengths > seq_len))
        raise SequenceTooLongError(
            f"sequence {index} has {lengths[index]:,} tokens, over seq_len {seq_len:,}. "
            "Apply an over_length policy before planning, or raise seq_len.",
            index=index,
            num_tokens=int(lengths[index]),
            seq_len=seq_len,
        )
    if multiple == 1:
        return plan(lengths, seq_len, seed)
    padded = round_up(lengths, multiple)
    num_tokens = int(lengths.sum(dtype=np.int64))
    return replace(plan(padded, seq_len, seed), num_tokens=num_tokens)


def round_up(lengths: npt.NDArray[_Length], multiple: int) -> npt.NDArray[_Length]:
    """Return lengths rounded up to a multiple.

    Example:
        >>> round_up(np.array([1, 8, 9]), 8).tolist()
        [8, 8, 16]
    """
    return lengths + -lengths % multiple


def join_plans(parts: Sequence[tuple[PackPlan, Lengths]]) -> PackPlan:
    """Lay plans one behind another, each over some of the sequences.

    Args:
        parts: each plan with the number that each of its sequences has among all; of one strategy
            and `seq_len`.

    Example:
        >>> first = plan_packs(np.array([3, 5]), seq_len=8), np.array([1, 3])
        >>> second = plan_packs(np.array([4, 4]), seq_len=8), np.array([0, 2])
        >>> plan = join_plans([first, second])
        >>> plan.pack_offsets.tolist(), sorted(plan.order[:2].tolist())
        ([0, 2, 4], [1, 3])
    """
    plans = [plan for plan, _ in parts]
    before = np.cumsum([0, *(len(plan.order) for plan in plans)])
    offsets = [plan.pack_offsets[1:] + base for plan, base in zip(plans, before, strict=False)]
    starts: list[npt.NDArray[Any]] = [p.starts for p in plans if p.starts is not None]
    ends: list[npt.NDArray[Any]] = [p.ends for p in plans if p.ends is not None]
    return replace(
        plans[0],
        order=np.concatenate([rows[plan.order] for plan, rows in parts]),
        pack_offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        num_tokens=sum(plan.num_tokens for plan in plans),
        starts=np.concatenate(starts) if starts else None,
        ends=np.concatenate(ends) if ends else None,
    )


def lower_bound(lengths: Lengths, seq_len: int) -> int:
    """Packs that no plan without cuts can go below.

    The larger of all tokens over `seq_len`, and the number of sequences over half of it (no two
    of which share a pack).

    Example:
        >>> lower_bound(np.array([5, 3, 2, 6, 4, 4]), seq_len=8)
        3
    """
    num_large = int(np.count_nonzero(lengths > seq_len // 2))
    return max(-(-int(lengths.sum(dtype=np.int64)) // seq_len), num_large)


def _best_fit(lengths: Lengths, seq_len: int, seed: int) -> PackPlan:
    counts = np.bincount(lengths)
    patterns = exact_completion(counts, seq_len)
    if patterns.total_packs > lower_bound(lengths, seq_len):
        # In doubt: of 6,000 random small instances the classical one was better on 65, the exact
        # one on 390.
        other = best_fit_decreasing(counts, seq_len)
        patterns = min(patterns, other, key=lambda each: each.total_packs)
    return _assign(lengths, patterns, seq_len, seed, "best_fit")


def _first_fit(lengths: Lengths, seq_len: int, seed: int) -> PackPlan:
    patterns = first_fit_decreasing(np.bincount(lengths), seq_len)
    return _assign(lengths, patterns, seq_len, seed, "first_fit")


def _assign(
    lengths: Lengths, patterns: Patterns, seq_len: int, seed: int, strategy: str
) -> PackPlan:
    """Give every place of every pattern a sequence of its length, and shuffle the packs.

    Lengths [5, 3, 2, 6], two patterns of a pack each: 6 + 2, and 5 + 3. By length the sequences
    are [2, 1, 0, 3], so the packs are [3, 2] and [0, 1], in an order that `seed` decides.
    """
    by_length = _permuted_by_length(lengths, seed)
    num_packs, per_pack = patterns.num_packs, patterns.per_pack
    new_place = np.empty(patterns.total_packs, dtype=np.int64)
    new_place[permutation(patterns.total_packs, seed)] = np.arange(patterns.total_packs)

    # Sequences of each pack: those of its pattern's rows added up.
    is_first = np.diff(patterns.first_pack, prepend=-1) != 0
    sizes = np.empty(patterns.total_packs, dtype=np.int64)
    if len(per_pack):
        of_pattern = np.add.reduceat(per_pack, np.flatnonzero(is_first))
        sizes[new_place] = np.repeat(of_pattern, num_packs[is_first])
    pack_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])

    # Where each row's sequences begin within its packs: [2, 1 | 3, 1] -> [0, 2 | 0, 3] ...
    before = np.cumsum(per_pack) - per_pack
    columns = before - np.maximum.accumulate(np.where(is_first, before, 0))
    # ... and among all sequences sorted by length.
    rows_by_length = np.argsort(patterns.length, kind="stable")
    taken = (num_packs * per_pack)[rows_by_length]
    starts = np.empty(len(taken), dtype=np.int64)
    starts[rows_by_length] = np.cumsum(taken) - taken

    # One run per row of the patterns and pack: `per_pack` neighbours in `by_length` go to
    # neighbouring places of `order`.
    order = np.empty(len(lengths), dtype=by_length.dtype)
    for rows in _row_blocks(num_packs):
        row = np.repeat(np.arange(rows.start, rows.stop), num_packs[rows])
        repeat = count_up(num_packs[rows])
        times = per_pack[row]
        source = starts[row] + repeat * times
        target = pack_offsets[new_place[patterns.first_pack[row] + repeat]] + columns[row]
        within = count_up(times)
        order[np.repeat(target, times) + within] = by_length[np.repeat(source, times) + within]
    num_tokens = int(lengths.sum(dtype=np.int64))
    return PackPlan(order, pack_offsets, seq_len, num_tokens, strategy=strategy)


def _row_blocks(num_packs: IntArray) -> Iterator[slice]:
    """Cut the rows of patterns so that a block stands for `_BLOCK_RUNS` packs, or is one row."""
    ends = np.cumsum(num_packs)
    first = 0
    while first < len(ends):
        done = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, done + _BLOCK_RUNS, side="right"))
        yield slice(first, max(last, first + 1))
        first = max(last, first + 1)


def _permuted_by_length(lengths: Lengths, seed: int) -> IndexArray:
    """Indices of sequences by ascending length, equal lengths in an order `seed` decides."""
    keys = lengths.astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= shuffle_keys(len(lengths), seed)
    keys.sort()
    indices = keys_to_indices(keys.astype(np.uint32), seed)
    return indices.view(np.int32) if len(indices) < 2**31 else indices.astype(np.int64)


def _compact(indices: IntArray, num: int) -> IndexArray:
    return indices.astype(np.int32) if num < 2**31 else indices


def _next_fit(lengths: Lengths, seq_len: int, seed: int) -> PackPlan:
    """Fill packs in the shuffled order, opening a new one when the next sequence does not fit."""
    order = permutation(len(lengths), seed)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    view = memoryview(ends.data)
    offsets = [0]
    filled = 0
    while offsets[-1] < len(ends):
        first = offsets[-1]
        # At most seq_len sequences fit, so the search is over seq_len places.
        last = bisect_right(view, filled + seq_len, first, min(first + seq_len, len(ends)))
        filled = view[last - 1]
        offsets.append(last)
    pack_offsets = np.array(offsets, dtype=np.int64)
    compact = _compact(order, len(lengths))
    return PackPlan(compact, pack_offsets, seq_len, filled, strategy="next_fit")


def _concat(lengths: Lengths, seq_len: int, seed: int) -> PackPlan:
    """Write the shuffled sequences behind one another and cut every `seq_len` tokens."""
    order = permutation(len(lengths), seed)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    num_tokens = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(seq_len, num_tokens, seq_len, dtype=np.int64)
    # Two ascending runs: the stable sort merges them. (np.union1d hashes: 30 times as long.)
    piece_ends = np.sort(np.concatenate([ends, cuts]), kind="stable")
    piece_ends = piece_ends[np.diff(piece_ends, prepend=0) > 0]
    piece_starts = np.concatenate([np.zeros(1, dtype=np.int64), piece_ends])[: len(piece_ends)]
    sequence = np.searchsorted(ends, piece_starts, side="right")
    before = ends[sequence] - lengths[order[sequence]]
    pack_starts = np.arange(0, num_tokens, seq_len, dtype=np.int64)
    pack_offsets = np.append(np.searchsorted(piece_starts, pack_starts), len(piece_ends))
    return PackPlan(
        _compact(order[sequence], len(lengths)),
        pack_offsets,
        seq_len,
        num_tokens,
        strategy="concat",
        starts=_compact(piece_starts - before, int(lengths.max(initial=0))),
        ends=_compact(piece_ends - before, int(lengths.max(initial=0))),
    )


def _none(lengths: Lengths, seq_len: int, seed: int) -> PackPlan:
    """One sequence a pack, in the order given; the seed decides nothing."""
    num = len(lengths)
    num_tokens = int(lengths.sum(dtype=np.int64))
    order = _compact(np.arange(num), num)
    return PackPlan(order, np.arange(num + 1), seq_len, num_tokens, strategy="none")


def plugin_planner(strategy: str) -> Callable[[Lengths, int, int], PackPlan]:
    """Return the planner of a plug-in; what it returns is checked.

    It is called with lengths, `seq_len` and seed, and returns a list of sequence indices for each
    pack.
    """
    plugin = find_plugin("packing_strategies", strategy, STRATEGIES)
    function = plugin.load()

    def plan(lengths: Lengths, seq_len: int, seed: int) -> PackPlan:
        given = lengths.copy()  # the plug-in may sort it in place
        with plugin.named_in_errors(f" on {len(lengths):,} lengths"):
            packs = [np.asarray(pack, dtype=np.int64) for pack in function(given, seq_len, seed)]
        sizes = np.array([pack.size for pack in packs], dtype=np.int64)
        order = np.concatenate([np.zeros(0, np.int64), *packs])
        outside = (order < 0) | (order >= len(lengths))
        if outside.any():
            raise PluginError(f"{plugin} packed sequence {order[outside][0]}, which is not there")
        times = np.bincount(order, minlength=len(lengths))
        if (times != 1).any():
            index = int(np.argmax(times != 1))
            raise PluginError(f"{plugin} packed sequence {index} {times[index]} times, not once")
        if not sizes.all():
            raise PluginError(f"{plugin} made pack {int(np.argmin(sizes))} of no sequence")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[order], dtype=np.int64)])
        tokens = np.diff(ends[offsets])
        if tokens.max(initial=0) > seq_len:
            index = int(np.argmax(tokens))
            raise PluginError(
                f"{plugin} put {tokens[index]:,} tokens into pack {index}, over seq_len {seq_len:,}"
            )
        compact = _compact(order, len(lengths))
        return PackPlan(compact, offsets, seq_len, int(ends[-1]), strategy=strategy)

    return plan


_PLANNERS: dict[str, Callable[[Lengths, int, int], PackPlan]] = {
    "best_fit": _best_fit,
    "first_fit": _first_fit,
    "next_fit": _next_fit,
    "concat": _concat,
    "none": _none,
}

STRATEGIES = tuple(_PLANNERS)
"""Names that `plan_packs` and `PackConfig.strategy` take."""

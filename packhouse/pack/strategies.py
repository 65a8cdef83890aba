"""Plan which sequences go into which pack, from their lengths alone.

| strategy | order | cost at 5 million | use it for |
|---|---|---|---|
| `best_fit` | packs shuffled | 30 ns/sequence | fine-tuning: usually reaches the lower bound |
| `first_fit` | packs shuffled | 40 ns/sequence | comparison with other tools |
| `first_fit_shuffle` | sequences shuffled | 3 us/sequence | packs that mix all lengths |
| `next_fit` | sequences shuffled | 40 ns/sequence | packs that are a fair sample of the data |
| `concat` | sequences shuffled | 80 ns/sequence | continued pretraining: cuts at pack ends |
| `none` | input order | 5 ns/sequence | one sequence per row |

The seed also decides which of several sequences of equal length goes where. Without a seed (None)
nothing is shuffled: sequences keep their order, and `best_fit` and `first_fit` sort packs by their
longest sequence. Plans depend only on lengths, `seq_len`, strategy and seed, not on the platform,
numpy's version or a hash seed. A plan takes 4 bytes per sequence (8 beyond 2**31) and 8 per pack;
planning briefly needs 12 bytes per sequence.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from packhouse.errors import (
    ConfigError,
    ContractError,
    PackhouseError,
    PluginError,
    SequenceTooLongError,
)
from packhouse.pack.fit_decreasing import (
    Patterns,
    best_fit_decreasing,
    exact_completion,
    first_fit_decreasing,
)
from packhouse.pack.shuffle import keys_to_indices, permutation, shuffle_keys
from packhouse.records.arrays import Int32s, Int64s, count_up
from packhouse.system.plugins import find_plugin

_BLOCK_RUNS = 2**16  # approximate runs processed at a time, to limit memory

Lengths = npt.NDArray[np.integer]
IndexArray = Int32s | Int64s
_Length = TypeVar("_Length", bound=np.integer)
# Sizes tried for "what if seq_len were ...", relative to that of the version.
_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
_MAX_RECORDS = 2**21  # 7 plans of 2 million lengths take 0.5 s


@dataclass(frozen=True, slots=True, eq=False)
class PackPlan:
    """Assignment of sequences, or pieces of them, to packs.

    Pack `p` holds `order[pack_offsets[p]:pack_offsets[p + 1]]`, in that order.
    """

    order: IndexArray
    """Sequence indices, pack after pack. Each appears once; with `concat`, once per piece."""

    pack_offsets: Int64s
    """Start of each pack in `order`, shape [num_packs + 1]."""

    seq_len: int
    """Pack size in tokens."""

    num_tokens: int
    """Tokens in all packs."""

    strategy: str = field(kw_only=True)
    """Strategy that made the plan."""

    starts: IndexArray | None = None
    """`concat` only: start of each piece, in tokens of its sequence."""

    ends: IndexArray | None = None
    """`concat` only: exclusive end of each piece, in tokens of its sequence."""

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
    lengths: Lengths,
    seq_len: int,
    strategy: str = "best_fit",
    seed: int | None = 0,
    multiple: int = 1,
    balance: int = 1,
) -> PackPlan:
    """Plan packs of at most `seq_len` tokens.

    Args:
        lengths: tokens per sequence, int array of shape [num_sequences], each at least 1.
        seq_len: pack size in tokens.
        strategy: one of `STRATEGIES`, or the name of a plug-in.
        seed: seed of the order and of the choice among equal lengths; None does not shuffle.
        multiple: reserve room for each length rounded up to this multiple.
        balance: number of packs in a training step over all ranks. Packs are ordered so that those
            of a step cost about the same (`balance_packs`); the packs themselves do not change.

    Returns:
        A plan in which every sequence (with `concat`, every token) appears exactly once.

    Raises:
        SequenceTooLongError: a sequence exceeds `seq_len`, and the strategy does not cut.
        ContractError: a sequence has no tokens.
        ConfigError: the strategy is unknown, a plug-in's plan breaks a rule, or `seq_len` is not a
            multiple of `multiple`.

    Example:
        >>> plan = plan_packs(np.array([5, 3, 2, 6, 4, 4]), seq_len=8)
        >>> plan.num_packs, plan.fill, sorted(plan.order.tolist())
        (3, 1.0, [0, 1, 2, 3, 4, 5])
    """
    plan = _PLANNERS.get(strategy) or _plugin_planner(strategy)
    lengths = np.asarray(lengths)
    assert lengths.ndim == 1, f"lengths must be one-dimensional, got shape {lengths.shape}"
    if seq_len < 1:
        raise ConfigError(f"seq_len must be positive, got {seq_len}")
    if balance < 1:
        raise ConfigError(
            f"balance is {balance}. Set it to the packs per step over all ranks, or to 1."
        )
    if multiple < 1 or seq_len % multiple or (multiple > 1 and strategy == "concat"):
        raise ConfigError(
            f"records cannot be padded to multiples of {multiple} in {strategy} packs of "
            f"{seq_len:,} tokens. Use a seq_len that is a multiple of it and a strategy other "
            "than concat."
        )
    if len(lengths) and lengths.min() < 1:
        index = int(np.argmax(lengths < 1))
        raise ContractError(
            f"sequence {index} has {lengths[index]} tokens. Every sequence needs at least one.",
            index=index,
            num_tokens=int(lengths[index]),
        )
    if strategy != "concat" and lengths.max(initial=0) > seq_len:
        index = int(np.argmax(lengths > seq_len))
        raise SequenceTooLongError(
            f"sequence {index} has {lengths[index]:,} tokens, more than seq_len {seq_len:,}. "
            "Remove it before planning (or set over_length='drop' if available), or raise seq_len.",
            index=index,
            num_tokens=int(lengths[index]),
            seq_len=seq_len,
        )
    # This costs space: Alpaca fills 93.2% of packs of 4,096 tokens with multiples of 16, and 63.3%
    # with multiples of 128.
    padded = round_up(lengths, multiple) if multiple > 1 else lengths
    packs = plan(padded, seq_len, seed)
    if multiple > 1:
        # Published packs are not padded: collators and exports add the padding that the plan left
        # room for.
        packs = replace(packs, num_tokens=int(lengths.sum(dtype=np.int64)))
    return balance_packs(packs, padded, balance, seed) if balance > 1 else packs


def round_up(lengths: npt.NDArray[_Length], multiple: int) -> npt.NDArray[_Length]:
    """Round lengths up to a multiple.

    Example:
        >>> round_up(np.array([1, 8, 9]), 8).tolist()
        [8, 8, 16]
    """
    return lengths + -lengths % multiple


def lower_bound(lengths: Lengths, seq_len: int) -> int:
    """Return the minimum number of packs for any plan that cuts no sequence.

    It is the larger of the total tokens divided by `seq_len`, and the number of sequences longer
    than half of `seq_len`, since no two of those fit into one pack.

    Example:
        >>> lower_bound(np.array([5, 3, 2, 6, 4, 4]), seq_len=8)
        3
    """
    num_large = int(np.count_nonzero(lengths > seq_len // 2))
    return max(-(-int(lengths.sum(dtype=np.int64)) // seq_len), num_large)


def _best_patterns(lengths: Lengths, seq_len: int) -> Patterns:
    counts = np.bincount(lengths)
    patterns = exact_completion(counts, seq_len)
    if patterns.total_packs > lower_bound(lengths, seq_len):
        # Neither always wins: of 6,000 random small instances, best_fit_decreasing was better on 65
        # and exact_completion on 390.
        other = best_fit_decreasing(counts, seq_len)
        patterns = min(patterns, other, key=lambda each: each.total_packs)
    return patterns


def _assign(
    lengths: Lengths, patterns: Patterns, seq_len: int, seed: int | None, strategy: str
) -> PackPlan:
    """Fill every place of every pattern with a sequence of its length, and shuffle the packs.

    Lengths [5, 3, 2, 6] and two patterns with one pack each, 6 + 2 and 5 + 3: sorted by length, the
    sequences are [2, 1, 0, 3], so the packs are [3, 2] and [0, 1], in an order set by `seed`.
    """
    by_length: IndexArray
    if seed is None:
        by_length = _compact(np.argsort(lengths, kind="stable"), len(lengths))
    else:
        # Put the length into the upper half and the shuffle key of the index into the lower one.
        # One integer sort then orders both, without a separate index array.
        keys = lengths.astype(np.uint64)
        keys <<= np.uint64(32)
        keys |= shuffle_keys(len(lengths), seed)
        keys.sort()
        indices = keys_to_indices(keys.astype(np.uint32), seed)
        by_length = indices.view(np.int32) if len(indices) < 2**31 else indices.astype(np.int64)
    num_packs, per_pack = patterns.num_packs, patterns.per_pack
    new_place = np.empty(patterns.total_packs, dtype=np.int64)
    new_place[_shuffled(patterns.total_packs, seed)] = np.arange(patterns.total_packs)

    # Number of sequences of each pack: the sum over the rows of its pattern.
    is_first = np.diff(patterns.first_pack, prepend=-1) != 0
    sizes = np.empty(patterns.total_packs, dtype=np.int64)
    if len(per_pack):
        of_pattern = np.add.reduceat(per_pack, np.flatnonzero(is_first))
        sizes[new_place] = np.repeat(of_pattern, num_packs[is_first])
    pack_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])

    # Place of each row's first sequence within its packs: [2, 1 | 3, 1] -> [0, 2 | 0, 3] ...
    before = np.cumsum(per_pack) - per_pack
    columns = before - np.maximum.accumulate(np.where(is_first, before, 0))
    # ... and among all sequences sorted by length.
    rows_by_length = np.argsort(patterns.length, kind="stable")
    taken = (num_packs * per_pack)[rows_by_length]
    starts = np.empty(len(taken), dtype=np.int64)
    starts[rows_by_length] = np.cumsum(taken) - taken

    # Copy one run per pattern row and pack: `per_pack` consecutive entries of `by_length` go to
    # consecutive places of `order`.
    order = np.empty(len(lengths), dtype=by_length.dtype)
    for rows in _row_blocks(num_packs):
        row = np.repeat(np.arange(rows.start, rows.stop), num_packs[rows])
        repeat = count_up(num_packs[rows])
        times = per_pack[row]
        source = starts[row] + repeat * times
        target = pack_offsets[new_place[patterns.first_pack[row] + repeat]] + columns[row]
        within = count_up(times)
        order[np.repeat(target, times) + within] = by_length[np.repeat(source, times) + within]
    plan = _plan_of(order, sizes, lengths, seq_len, strategy)
    if seed is not None:
        return plan
    # Sort the sequences of each pack, longest first, then packs by their first sequence.
    pack = np.repeat(np.arange(plan.num_packs), np.diff(plan.pack_offsets))
    rank = -lengths.astype(np.int64)
    order = plan.order[np.lexsort((plan.order, rank[plan.order], pack))]
    first = order[plan.pack_offsets[:-1]]
    return take_packs(replace(plan, order=order), np.lexsort((first, rank[first])))


def _shuffled(num: int, seed: int | None) -> Int64s:
    """Return indices [0, num), shuffled by `seed`; None keeps them in order."""
    return np.arange(num) if seed is None else permutation(num, seed)


def _row_blocks(num_packs: Int64s) -> Iterator[slice]:
    """Cut pattern rows into blocks of at most `_BLOCK_RUNS` packs, but at least one row.

    Rows of [40,000, 40,000, 3] packs -> rows [0, 1) and [1, 3), with 40,000 and 40,003 packs.
    """
    ends = np.cumsum(num_packs)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + _BLOCK_RUNS, side="right"))
        yield slice(first, max(last, first + 1))
        first = max(last, first + 1)


def _plan_of(
    order: IndexArray, sizes: Int64s, lengths: Lengths, seq_len: int, strategy: str
) -> PackPlan:
    """Return a plan of uncut sequences from the number of sequences in each pack."""
    num_tokens = int(lengths.sum(dtype=np.int64))
    offsets = np.append(np.int64(0), np.cumsum(sizes))
    return PackPlan(_compact(order, len(lengths)), offsets, seq_len, num_tokens, strategy=strategy)


def _compact(indices: IndexArray, num: int) -> IndexArray:
    return indices.astype(np.int32, copy=False) if num < 2**31 else indices


def _first_fit_shuffle(lengths: Lengths, seq_len: int, seed: int | None) -> PackPlan:
    """Put each sequence, in shuffled order, into the first pack that has room for it.

    `room` is a binary tree over the packs. `room[i]` is the most space left in any pack under node
    `i`; an unopened pack has `seq_len`.
    """
    num_tokens = int(lengths.sum(dtype=np.int64))
    order = _shuffled(len(lengths), seed)
    # At most one pack can be half empty (two would have been merged), which bounds the packs.
    leaves = 1 << (2 * (num_tokens // seq_len) + 2).bit_length()
    room = [seq_len] * (2 * leaves)
    packs = np.empty(len(order), dtype=np.int64)
    for index, length in enumerate(lengths[order].tolist()):
        # Four packs with [2 0 5 8] left: room is [_ 8 2 8 2 0 5 8]. A sequence of 4 tokens goes
        # from node 1 to 3 (node 2 has only 2 left), then to 6, which is pack 2.
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < length
        packs[index] = node - leaves
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    by_pack = order[np.argsort(packs, kind="stable")]
    return _plan_of(by_pack, np.bincount(packs), lengths, seq_len, "first_fit_shuffle")


def _next_fit(lengths: Lengths, seq_len: int, seed: int | None) -> PackPlan:
    """Fill packs in shuffled order, opening a new one when the next sequence does not fit."""
    order = _shuffled(len(lengths), seed)
    # Lengths [5 3 2 6] end at [5 8 10 16]; with seq_len 8, packs are cut at [0 2 4].
    ends = np.cumsum(lengths[order], dtype=np.int64)
    # On the array itself, `bisect` makes a numpy scalar at each step and takes 1.4 times as long.
    view = memoryview(ends.data)
    offsets = [0]
    filled = 0
    while offsets[-1] < len(ends):
        first = offsets[-1]
        # At most seq_len sequences fit, so search only that many.
        last = bisect_right(view, filled + seq_len, first, min(first + seq_len, len(ends)))
        filled = view[last - 1]
        offsets.append(last)
    return _plan_of(order, np.diff(offsets), lengths, seq_len, "next_fit")


def _concat(lengths: Lengths, seq_len: int, seed: int | None) -> PackPlan:
    """Concatenate the shuffled sequences and cut every `seq_len` tokens."""
    order = _shuffled(len(lengths), seed)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    num_tokens = int(ends[-1]) if len(ends) else 0
    # Lengths [5 3], seq_len 4: sequences end at [5 8], the cut is at [4], so pieces end at [4 5 8].
    # Pack offsets are [0 1 3]; in tokens of their sequence, pieces are [0 4), [4 5) and [0 3).
    cuts = np.arange(seq_len, num_tokens, seq_len, dtype=np.int64)
    # A stable sort just merges the two sorted runs; np.union1d hashes and takes 30 times as long.
    piece_ends = np.sort(np.concatenate([ends, cuts]), kind="stable")
    # A sequence that ends at a cut is there twice, and would leave a piece of 0 tokens.
    piece_ends = piece_ends[np.diff(piece_ends, prepend=0) > 0]
    piece_starts = np.concatenate([np.zeros(1, dtype=np.int64), piece_ends])[: len(piece_ends)]
    sequence = np.searchsorted(ends, piece_starts, side="right")
    before = ends[sequence] - lengths[order[sequence]]
    pack_starts = np.arange(0, num_tokens, seq_len, dtype=np.int64)
    offsets = np.append(np.searchsorted(piece_starts, pack_starts), len(piece_ends))
    longest, pieces = int(lengths.max(initial=0)), _compact(order[sequence], len(lengths))
    first, last = (_compact(each - before, longest) for each in (piece_starts, piece_ends))
    return PackPlan(
        pieces, offsets, seq_len, num_tokens, strategy="concat", starts=first, ends=last
    )


def _plugin_planner(strategy: str) -> Callable[[Lengths, int, int | None], PackPlan]:
    """Return the planner of a plug-in; its plans are checked.

    The plug-in is called with lengths, `seq_len` and seed (0 if there is none), and returns a list
    of sequence indices for each pack.
    """
    plugin = find_plugin("packing_strategies", strategy, STRATEGIES)
    function = plugin.load()

    def plan(lengths: Lengths, seq_len: int, seed: int | None) -> PackPlan:
        own = lengths.copy()  # the plug-in may sort it in place
        with plugin.named_in_errors(f" on {len(lengths):,} lengths"):
            packs = [np.asarray(pack, np.int64) for pack in function(own, seq_len, seed or 0)]
        sizes = np.array([pack.size for pack in packs], dtype=np.int64)
        order = np.concatenate([np.zeros(0, np.int64), *packs])
        outside = (order < 0) | (order >= len(lengths))
        if outside.any():
            raise PluginError(
                f"{plugin} packed sequence {order[outside][0]}, but there are only {len(lengths):,}"
            )
        times = np.bincount(order, minlength=len(lengths))
        if (times != 1).any():
            index = int(np.argmax(times != 1))
            said = f"packed sequence {index} {times[index]} times; expected once"
            raise PluginError(f"{plugin} {said}")
        if not sizes.all():
            raise PluginError(f"{plugin} returned an empty pack ({int(np.argmin(sizes))})")
        packed = _plan_of(order, sizes, lengths, seq_len, strategy)
        ends = np.append(np.int64(0), np.cumsum(lengths[order], dtype=np.int64))
        tokens = np.diff(ends[packed.pack_offsets])
        if tokens.max(initial=0) > seq_len:
            index = int(np.argmax(tokens))
            raise PluginError(
                f"{plugin} put {tokens[index]:,} tokens in pack {index}, more than seq_len "
                f"{seq_len:,}"
            )
        return packed

    return plan


_PLANNERS: dict[str, Callable[[Lengths, int, int | None], PackPlan]] = {
    "best_fit": lambda lengths, seq_len, seed: _assign(
        lengths, _best_patterns(lengths, seq_len), seq_len, seed, "best_fit"
    ),
    "first_fit": lambda lengths, seq_len, seed: _assign(
        lengths, first_fit_decreasing(np.bincount(lengths), seq_len), seq_len, seed, "first_fit"
    ),
    "first_fit_shuffle": _first_fit_shuffle,
    "next_fit": _next_fit,
    "concat": _concat,
    # One sequence per pack, in input order; there is nothing to shuffle.
    "none": lambda lengths, seq_len, seed: _plan_of(
        np.arange(len(lengths)), np.ones(len(lengths), np.int64), lengths, seq_len, "none"
    ),
}

STRATEGIES = tuple(_PLANNERS)
"""Names accepted by `plan_packs` and `PackConfig.strategy`."""


def join_plans(parts: Sequence[tuple[PackPlan, Lengths]]) -> PackPlan:
    """Concatenate plans that each cover some of the sequences.

    Args:
        parts: plans of the same strategy and `seq_len`, each with the numbers of its sequences
            among all.

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
    """Return the attention cost of each pack: the sum of the squared lengths of its sequences.

    Attention computes a score for each pair of tokens of a record; everything else in a model costs
    the same for every token.

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
    """Reorder packs so that each group of `balance` consecutive packs costs about the same.

    The packs do not change. They are sorted by cost and cut into steps of `balance`, and the seed
    shuffles the steps (None: the most expensive first). The remainder, the cheapest packs, comes
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
    """Return the plan with only these packs, in this order."""
    # Pack offsets [0 2 3 5], packs [2 0]: sizes [2 2], pieces [3 4 0 1].
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
    """Return the sum of each step's maximum cost divided by the sum of its mean cost.

    1.0 means that ranks never wait for each other.

    Args:
        costs: costs of the packs in training order; each step takes the next `num_ranks`, and the
            remainder is ignored.
        num_ranks: number of ranks.

    Example:
        >>> step_imbalance(np.array([3, 1, 2, 2]), 2)  # (3 + 2) / (2 + 2)
        1.25
    """
    steps = costs[: len(costs) // num_ranks * num_ranks].reshape(-1, num_ranks)
    return float(steps.max(axis=1).sum() / steps.mean(axis=1).sum()) if steps.size else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SeqLenTrial:
    """Result of planning packs of a given size."""

    seq_len: int
    num_packs: int
    num_tokens: int
    """Tokens in packs."""
    records_too_long: int
    """Records longer than `seq_len`, which are left out here; a recipe may cut them instead."""
    tokens_too_long: int
    num_records: int
    """All records, including those that are too long."""

    @property
    def num_padding(self) -> int:
        """Padding tokens if packs are padded to `seq_len`."""
        return self.num_packs * self.seq_len - self.num_tokens

    @property
    def fill(self) -> float:
        """Share of `num_packs * seq_len` that is tokens."""
        return self.num_tokens / max(self.num_packs * self.seq_len, 1)

    @property
    def share_kept(self) -> float:
        """Share of records that fit."""
        return 1 - self.records_too_long / max(self.num_records, 1)


def try_seq_lens(
    splits: Sequence[Mapping[int, int]],
    seq_len: int,
    strategy: str,
    seed: int = 0,
    multiple: int = 1,
) -> list[SeqLenTrial]:
    """Plan the packs of each split with several other sizes.

    Args:
        splits: length in tokens -> number of records, for each split.
        seq_len: pack size of the version.
        strategy: strategy of the recipe.
        seed: seed of the recipe.
        multiple: `pad_record_to_multiple_of` of the recipe.

    Returns:
        Results for sizes from a quarter of `seq_len` to four times it that are multiples of
        `multiple`; empty if planning takes too long or the plug-in is not installed.

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
    names = ("num_packs", "num_tokens", "num_records", "records_too_long", "tokens_too_long")
    sums = dict.fromkeys(names, 0)
    for counts in splits:
        # {6: 2, 2: 2} -> lengths [6 2], each as often as [2 2].
        values, numbers = np.array(list(counts.items()), np.int64).reshape(-1, 2).T
        fits = values <= (seq_len if strategy != "concat" else values.max(initial=0))
        sums["num_records"] += int(numbers.sum())
        sums["records_too_long"] += int(numbers[~fits].sum())
        sums["tokens_too_long"] += int((values * numbers)[~fits].sum())
        if fits.any():
            lengths = np.repeat(values[fits], numbers[fits])
            sums["num_tokens"] += int(lengths.sum())
            # Filling them as well took 0.3 s of CPU for 520,020 rows.
            if strategy == "best_fit":  # the number of packs is known before they are filled
                packs = _best_patterns(round_up(lengths, multiple), seq_len).total_packs
            else:
                packs = plan_packs(lengths, seq_len, strategy, seed, multiple).num_packs
            sums["num_packs"] += packs
    return SeqLenTrial(seq_len=seq_len, **sums)

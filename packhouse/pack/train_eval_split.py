"""Divide records into train and eval, so that adding data never moves a trained record to eval.

The side of a record is a pure function of its group key and the seed: the key's leading 64 bits are
mixed with the seed and compared with a threshold. Order, shards and other data do not matter,
records of a group are always on the same side, and appending a file changes no side.

With `eval_count`, the threshold depends on the data: groups with the lowest mixed keys go to eval
until they have that many rows, each with all its records. Appending data can only lower the
threshold, so a record may move from eval to train, but never from train to eval.

Either side may be empty; callers check for that. Cost: 50 ns per record.
"""

from functools import cached_property

import numpy as np
import pyarrow as pa

from packhouse.errors import ContractError
from packhouse.pack.shuffle import splitmix64
from packhouse.recipe import SplitConfig
from packhouse.records.arrays import Bools, Int64s, Uint64s, one_chunk
from packhouse.records.record_ids import NUM_DIGITS, Keys, is_among, key_bytes, leading_bits

VERSION = 1
"""Version of the assignment; part of the step's cache key."""


def goes_to_eval(group_keys: Keys, config: SplitConfig, is_first: Bools | None = None) -> Bools:
    """Return a mask of the records that go to eval, by the hash of their group.

    Args:
        group_keys: 20 hex digits per record, shape [num_records].
        config: split settings; reads `eval_fraction` or `eval_count`, and `seed`.
        is_first: mask of the first record of each row, which `eval_count` counts; by default each
            record is a row. Records of a row must have the same key.

    Returns:
        Mask of records, True for eval.

    Example:
        >>> keys = pa.array(["00000000000000000000", "ffffffffffffffffffff"] * 2)
        >>> goes_to_eval(keys, SplitConfig(eval_count=1)).tolist()
        [False, True, False, True]
        >>> first = np.array([True, True, True, False])  # the last two are of one row
        >>> goes_to_eval(keys[1:2].take([0, 0, 0, 0]), SplitConfig(eval_count=1), first).tolist()
        [True, True, True, True]
        >>> goes_to_eval(keys, SplitConfig(eval_fraction=0.0)).any()
        np.False_
    """
    if not len(group_keys) or (not config.eval_count and not config.eval_fraction):
        return np.zeros(len(group_keys), dtype=np.bool_)
    mixed = mixed_keys(group_keys, config.seed)
    if config.eval_count is None:
        # eval_fraction < 1, so this is below 2**64.
        return mixed < np.uint64(int(config.eval_fraction * 2**64))
    # Rows with keys [9 3 7 3], count 2: the threshold is the second lowest key, 3. Equal mixed keys
    # are one group (or two that are never divided), and go to eval together.
    of_rows = mixed if is_first is None else mixed[is_first]
    place = min(config.eval_count, len(of_rows)) - 1
    return np.asarray(mixed <= np.partition(of_rows, place)[place])


def mixed_keys(keys: Keys, seed: int) -> Uint64s:
    """Hash each key to a uniform 64-bit number that depends on the seed.

    The hash is splitmix64 of the key's leading bits, with a separate stream for each seed.
    """
    mixed = leading_bits(keys) ^ np.uint64(splitmix64(seed & (2**64 - 1)))
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


def join_groups(group_keys: Keys, pairs: Int64s, seed: int) -> pa.Array:
    """Join the groups of records that belong together, so that they are on the same side.

    Joined groups get the key with the highest mixed key among them, so they go to eval only if each
    of them would. With `eval_fraction`, a new record that joins groups may move some from eval to
    train, but never from train to eval. As a consequence, joined groups are less likely to be in
    eval.

    Args:
        group_keys: group key of every record.
        pairs: numbers of records that belong together, shape [num_pairs, 2].
        seed: seed of the split.

    Returns:
        Key of each record's joined group.

    Example:
        >>> keys = pa.array(["0" * 20, "1" * 20, "2" * 20, "0" * 20])
        >>> joined = join_groups(keys, np.array([[2, 3]]), seed=0).to_pylist()
        >>> joined[0] == joined[2] == joined[3] != joined[1]
        True
    """
    encoded = one_chunk(group_keys).dictionary_encode()
    groups = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    names = encoded.dictionary
    if not len(pairs):
        return names.take(encoded.indices)
    joined = _connected(groups[pairs], len(names))
    # Joined groups [0 0 2] with mixed keys [8 3 5]: order [1 0 2], last of each joined group [0 2].
    order = np.lexsort((mixed_keys(names, seed), joined))
    last = order[np.append(np.diff(joined[order]) != 0, True)]  # highest key of each joined group
    stands = np.empty(len(names), np.int64)
    stands[joined[last]] = last
    return names.take(pa.array(stands[joined[groups]]))


def join_equal(group_keys: Keys, record_ids: Keys, seed: int) -> pa.Array:
    """Join groups that have an equal record, so that equal records are on the same side.

    Conversations of different groups are never equal, but windows of them can be.

    Example:
        >>> keys = pa.array(["0" * 20, "1" * 20, "2" * 20])
        >>> ids = pa.array(["a" * 20, "b" * 20, "a" * 20])
        >>> joined = join_equal(keys, ids, seed=0).to_pylist()
        >>> joined[0] == joined[2], joined[1] == "1" * 20
        (True, True)
    """
    _, first, inverse = np.unique(key_bytes(record_ids), return_index=True, return_inverse=True)
    earliest = first[inverse]
    again = np.flatnonzero(earliest != np.arange(len(earliest)))
    return join_groups(group_keys, np.stack([earliest[again], again], axis=1), seed)


def _connected(edges: Int64s, num_nodes: int) -> Int64s:
    """Return the lowest node that each node is connected to.

    Four nodes with edges 0-1 and 1-2 -> 0 0 0 3.
    """
    least = np.arange(num_nodes)
    while True:
        ends = least[edges]
        lower = ends.min(axis=1)
        if (ends == lower[:, None]).all():
            return least
        # A node may have several edges: an assignment would keep the last value, not the lowest.
        np.minimum.at(least, ends.ravel(), np.repeat(lower, 2))
        # Without this, a chain of n records would take n rounds.
        while (least[least] != least).any():
            least = least[least]


class LeakCheck:
    """Finds keys that are on both sides, in chunks: first all of eval, then train.

    Memory: 18 bytes per key of the eval side, and one chunk of the train side.

    Args:
        what: name of the key in the error: `group_key` or `record_id`.

    Example:
        >>> check = LeakCheck("record_id")
        >>> check.add_eval(pa.array(["0" * 20]))
        >>> check.check_train(pa.array(["1" * 20, "0" * 20]))
        >>> check.finish()
        Traceback (most recent call last):
            ...
        packhouse.errors.ContractError: 1 train records have a record_id that is also in eval...
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._chunks = [_NO_KEYS]
        self._num_shared = 0
        self._first = b""

    def add_eval(self, keys: Keys) -> None:
        """Add keys (20 hex digits each) of the eval side."""
        # As 10 bytes each: with whole columns of strings, the step took 2.0 GB for 5.2 million
        # records, not 0.5.
        self._chunks.append(key_bytes(keys))

    @cached_property
    def _eval_keys(self) -> np.ndarray:
        return np.unique(np.concatenate(self._chunks))

    @cached_property
    def _eval_bits(self) -> Uint64s:
        leading = self._eval_keys.view(np.uint8).reshape(-1, NUM_DIGITS // 2)[:, :8]
        return np.ascontiguousarray(leading).view(">u8").reshape(-1).astype(np.uint64)

    def check_train(self, keys: Keys) -> None:
        """Check keys of the train side against those of eval."""
        likely = np.flatnonzero(is_among(leading_bits(keys), self._eval_bits))
        if not len(likely):  # bytes compare ten times slower than numbers
            return
        parsed = key_bytes(keys)[likely]
        shared = parsed[np.isin(parsed, self._eval_keys)]
        if len(shared):
            self._first = self._first or bytes(shared[0]).ljust(NUM_DIGITS // 2, b"\0")
            self._num_shared += len(shared)

    def finish(self) -> None:
        """Raise an error if a key is on both sides.

        Raises:
            ContractError: a key is on both sides; names the first one, and the number of train
                records.
        """
        if not self._num_shared:
            return
        first = self._first.hex()
        raise ContractError(
            f"{self._num_shared:,} train records have a {self.what} that is also in eval, "
            f"starting with '{first}'. Compute both splits from the same keys and seed.",
            what=self.what,
            key=first,
            num_shared=self._num_shared,
        )


_NO_KEYS = np.empty(0, dtype="S10")

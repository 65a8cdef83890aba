import gc
import itertools
import json
import time
from collections import Counter
from functools import partial

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, IterableDataset, _utils, get_worker_info

from packhouse import PackedCollator, StreamingPackedDataset, load_packed, training_receipt
from packhouse.errors import ConfigError, IntegrityError
from packhouse.load.streaming import _ENDED, _NUM_WORKERS, read_ahead
from packhouse.pack.pack_columns import published_schema
from packhouse.store import LocalFile, open_store, publish_version


@pytest.fixture(scope="module", autouse=True)
def short_waits_for_workers():
    """After other tests, a worker that shall end may not hear of it; torch kills it after 5 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
        yield


@pytest.fixture(scope="module")
def uri(make_version):
    return make_version(num_records=150, rows_per_file=7)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def packs(uri, cache):
    return [tuple(ids) for ids in load_packed(uri, cache=cache)["input_ids"]]


@pytest.fixture(scope="module")
def opened(uri, cache):
    """Open the packs, by default as the only rank."""

    def open_ranks(**settings):
        return StreamingPackedDataset(
            uri, **{"rank": 0, "world_size": 1, "cache": cache} | settings
        )

    return open_ranks


def take(dataset, num_rows=None):
    rows = []
    for row in dataset:
        if len(rows) == num_rows:
            break
        rows.append(tuple(row["input_ids"].tolist()))
        if len(rows) == num_rows:
            break
    return rows


def test_order_is_decided_by_epoch_and_seed(opened, packs):
    def order(epoch, **settings):
        dataset = opened(**settings)
        dataset.set_epoch(epoch)
        return take(dataset)

    assert order(0) == order(0)
    assert len({str(order(0)), str(order(1)), str(order(0, seed=1)), str(packs)}) == 4
    assert order(5, shuffle=False) == packs


def test_resuming_goes_on_with_the_very_next_pack(opened):
    whole = take(opened())
    first = opened(prefetch=8)
    assert take(first, 5) == whole[:5]
    second = opened()
    second.load_state_dict(first.state_dict())

    assert len(second) == len(whole) - 5
    assert take(second, 7) == whole[5:12]
    third = opened()
    third.load_state_dict(second.state_dict())
    assert take(third) == whole[12:]
    assert take(third) == whole  # the next pass is complete


def test_workers_change_neither_order_nor_content(opened):
    batch_size = 3

    def batches(workers):
        dataset = opened(rank=1, world_size=2, batch_size=batch_size)
        loader = DataLoader(dataset, batch_size, num_workers=workers, collate_fn=PackedCollator())
        return [batch["input_ids"].tolist() for batch in loader], dataset

    alone, _ = batches(0)
    together, dataset = batches(2)

    assert together == alone
    with pytest.raises(ConfigError, match=r"state_dict\(rows_seen="):
        dataset.state_dict()
    resumed = opened(rank=1, world_size=2)
    resumed.load_state_dict(dataset.state_dict(rows_seen=2 * batch_size))
    rest = [pack for batch in alone[2:] for pack in batch[0]]
    assert [token for pack in take(resumed) for token in pack] == rest


@pytest.mark.parametrize("workers", [1, 2])
def test_no_state_of_workers_whose_batches_are_unknown(opened, packs, workers):
    dataset = opened()
    batches = iter(DataLoader(dataset, 4, num_workers=workers, collate_fn=list))
    taken = [tuple(row["input_ids"].tolist()) for row in next(batches)]

    if workers == 1:
        dataset.load_state_dict(dataset.state_dict(rows_seen=4))
        assert Counter(taken + take(dataset)) == Counter(packs)
    else:  # rows 0 2 4 6, where a state would report 0 1 2 3
        with pytest.raises(ConfigError, match="2 workers take turns by batches"):
            dataset.state_dict(rows_seen=4)


def test_persistent_workers_follow_the_epoch(opened, packs):
    dataset = opened()
    loader = DataLoader(dataset, None, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        alone = opened()
        alone.set_epoch(epoch)
        rows = [tuple(row["input_ids"].tolist()) for row in loader]
        assert rows == take(alone)
        assert Counter(rows) == Counter(packs)


def test_states_and_counts_that_make_no_sense_are_refused(opened, uri, cache):
    dataset = opened()
    state = dataset.state_dict()

    with pytest.raises(ConfigError, match="the loader state has no 'dataset'"):
        dataset.load_state_dict({})
    with pytest.raises(ConfigError, match="rows_seen is -1"):
        dataset.state_dict(rows_seen=-1)
    for packs in (-1, "3"):
        with pytest.raises(ConfigError, match="negative or non-integer"):
            dataset.load_state_dict(state | {"packs": packs})
    with pytest.raises(ConfigError, match="from a DataLoader worker"):
        dataset.load_state_dict(state | {"worker_rows": 3})
    other = StreamingPackedDataset(uri, cache=cache, seed=1)
    with pytest.raises(ConfigError, match="state was saved with seed 0, but this dataset has 1"):
        other.load_state_dict(state)


@pytest.mark.parametrize("value", [None, 2**80, float("nan"), "a\x1b[2J" * 1000, {"a": 1}])
def test_states_that_somebody_rewrote_are_refused_in_a_sentence(opened, value):
    dataset = opened()
    state = dataset.state_dict()

    for name in ("dataset", "version", "seed", "epoch", "packs"):
        for use in (dataset.load_state_dict, partial(training_receipt, dataset)):
            with pytest.raises(ConfigError, match="state") as refused:
                use(state | {name: value})
            assert len(str(refused.value)) < 500
            assert "\x1b" not in str(refused.value)
    with pytest.raises(ConfigError, match="Pass the value that state_dict"):
        dataset.load_state_dict(value)
    assert dataset.state_dict() == state


def test_a_state_with_a_numpy_seed_and_epoch_is_json(uri, cache):
    dataset = StreamingPackedDataset(uri, cache=cache, seed=np.int64(3))
    dataset.set_epoch(np.int64(2))
    state = dataset.state_dict()
    assert json.loads(json.dumps(state)) == state


def test_ranks_come_from_the_environment_or_are_given_whole(uri, cache, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    dataset = StreamingPackedDataset(uri, cache=cache)
    assert (dataset.rank, dataset.world_size) == (2, 3)
    with pytest.raises(ConfigError, match="only one of rank and world_size"):
        StreamingPackedDataset(uri, cache=cache, rank=1)
    with pytest.raises(ConfigError, match="rank 3 must be at least 0 and below world_size 3"):
        StreamingPackedDataset(uri, cache=cache, rank=3, world_size=3)
    with pytest.raises(ConfigError, match="prefetch -2"):
        StreamingPackedDataset(uri, cache=cache, prefetch=-2)
    with pytest.raises(ConfigError, match="epoch is -1"):
        dataset.set_epoch(-1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match=r"RANK is 'first'. Set it to an integer"):
        StreamingPackedDataset(uri, cache=cache)


def test_the_prefetching_thread_ends_with_its_iterator_and_passes_errors_on(uri, cache):
    import threading

    rows = iter(StreamingPackedDataset(uri, cache=cache, prefetch=2))
    next(rows)
    assert any("packhouse-prefetch" in thread.name for thread in threading.enumerate())
    rows.close()
    assert not any("packhouse-prefetch" in thread.name for thread in threading.enumerate())

    broken = StreamingPackedDataset(uri, cache=cache, prefetch=2)
    broken._entries = [entry for entry in broken._entries if entry.rows < 0]
    with pytest.raises(IndexError):
        take(broken)


@pytest.mark.parametrize("publish", [{"file_format": "arrow"}, {"file_format": "jsonl"}])
def test_other_formats_stream_too(make_version, cache, publish):
    uri = make_version(rows_per_file=7, **publish)
    packs = [tuple(ids) for ids in load_packed(uri, cache=cache)["input_ids"]]

    assert Counter(take(StreamingPackedDataset(uri, cache=cache))) == Counter(packs)


@given(
    runs=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=4),
    lanes=st.integers(1, 9),
)
@settings(max_examples=12, deadline=None)
def test_every_pack_is_seen_once_an_epoch_whatever_the_stops_and_world_sizes(
    opened, packs, runs, lanes
):
    epoch, seen, state = 0, [], None
    for world_size, steps in [*runs, (2, len(packs))]:
        ranks = [
            opened(rank=r, world_size=world_size, lanes=lanes, prefetch=0)
            for r in range(world_size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
            assert rank.epoch == epoch
        rows = [iter(rank) for rank in ranks]
        for _ in range(steps):  # ranks run in step, as in training
            taken = [next(each, None) for each in rows]
            seen += [tuple(row["input_ids"].tolist()) for row in taken if row is not None]
            if taken[0] is None:
                assert Counter(seen) == Counter(packs)
                assert ranks[0].state_dict()["packs"] == len(packs)
                epoch, seen = epoch + 1, []
                for rank in ranks:
                    rank.set_epoch(epoch)
                rows = [iter(rank) for rank in ranks]
        state = ranks[0].state_dict()


def test_the_state_of_a_finished_pass_leaves_nothing_of_its_epoch(opened, packs):
    done = opened()
    assert len(take(done)) == len(packs) == len(done)
    resumed = opened()
    resumed.load_state_dict(done.state_dict())

    assert len(resumed) == 0
    assert take(resumed) == []
    assert len(take(resumed)) == len(packs)  # the next pass is complete
    resumed.load_state_dict(done.state_dict())
    resumed.set_epoch(1)
    assert len(take(resumed)) == len(packs)


def test_a_second_pass_with_workers_after_a_resume_is_a_whole_one(opened, packs):
    first = opened()
    took = take(first, 6)
    resumed = opened(batch_size=1)
    resumed.load_state_dict(first.state_dict())
    loader = DataLoader(resumed, None, num_workers=2, persistent_workers=True)

    def rows():
        return [tuple(row["input_ids"].tolist()) for row in loader]

    assert Counter(took + rows()) == Counter(packs)
    left = len(packs) - 6
    assert resumed.state_dict(rows_seen=left)["packs"] == len(packs)
    assert Counter(rows()) == Counter(packs)
    assert resumed.state_dict(rows_seen=4)["packs"] == 4
    assert len(resumed) == len(packs)


def test_dropping_the_uneven_end_never_drops_everything(opened, uri, cache, packs):
    world_size = len(packs) + 1
    with pytest.raises(ConfigError, match=f"drops all {len(packs)} packs"):
        StreamingPackedDataset(uri, rank=0, world_size=world_size, cache=cache, drop_uneven=True)
    ranks = [opened(rank=r, world_size=world_size) for r in range(world_size)]
    assert [len(take(rank)) for rank in ranks] == [1] * len(packs) + [0]


@pytest.fixture
def republish(uri, cache, tmp_path):
    """Write the packs again, with the given files and row groups."""
    table = load_packed(uri, cache=cache).data.table
    schema = published_schema(position_ids=True)
    table = pa.Table.from_batches(
        [b for b in table.select(schema.names).cast(schema).to_batches() if b.num_rows]
    )

    def publish(cuts, row_group_size, told=None):
        files = []
        for number, (low, high) in enumerate(itertools.pairwise(cuts)):
            path = tmp_path / f"{number}.parquet"
            rows = table.slice(low, high - low)
            pq.write_table(rows, path, row_group_size=row_group_size)
            tokens = sum(map(len, rows["input_ids"].to_pylist()))
            num_rows = rows.num_rows if told is None else told
            files.append(LocalFile(path, "train", num_rows, tokens))
        store = str(tmp_path / "store")
        publish_version(open_store(store), "again", "ab12", files, {"content_id": "c"}, "latest")
        return f"{store}/again"

    return publish


def test_empty_files_and_packs_before_and_after_them_are_read(republish, packs, tmp_path):
    again = republish([0, 0, 5, 5, 5, len(packs), len(packs)], row_group_size=3)

    assert [tuple(ids) for ids in load_packed(again, cache=tmp_path)["input_ids"]] == packs
    for lanes in (1, 8, 500):
        dataset = StreamingPackedDataset(again, rank=0, world_size=1, cache=tmp_path, lanes=lanes)
        assert Counter(take(dataset)) == Counter(packs)


def test_files_that_hold_other_rows_than_counted_are_refused(republish, packs, tmp_path):
    again = republish([0, len(packs)], row_group_size=3, told=len(packs) + 2)

    with pytest.raises(IntegrityError, match=f"has {len(packs)} rows, but the manifest says"):
        take(StreamingPackedDataset(again, cache=tmp_path))


def test_open_files_and_decoded_rows_stay_bounded(republish, packs, tmp_path):
    again = republish(list(range(0, len(packs) + 1)), row_group_size=1)
    # Without a reading thread, nothing is fetched or opened while files are counted.
    dataset = StreamingPackedDataset(again, cache=tmp_path, lanes=3, prefetch=0)
    most_files = 0
    for _ in dataset:
        files = [file.path for file in psutil.Process().open_files()]
        most_files = max(most_files, sum(file.startswith(str(tmp_path)) for file in files))
    assert 0 < most_files <= 3  # one per lane

    def peak(uri, lanes):
        gc.collect()
        start, most = pa.total_allocated_bytes(), 0
        for _ in StreamingPackedDataset(uri, cache=tmp_path, lanes=lanes, prefetch=0):
            most = max(most, pa.total_allocated_bytes() - start)
        return most

    assert peak(again, 3) < peak(again, 30) / 4


def test_the_reader_is_never_further_ahead_than_asked():
    pulled, depth = 0, 2

    def rows():
        nonlocal pulled
        for number in range(200):
            pulled += 1
            yield number

    furthest = 0
    for taken, _ in enumerate(read_ahead(rows(), depth), start=1):
        while taken % 20 == 1 and pulled == taken:
            time.sleep(0.001)  # until the reader's thread is ahead
        furthest = max(furthest, pulled - taken)
    assert pulled == 200
    assert 0 < furthest <= depth


class _InWorkers(IterableDataset):
    """Imitate torchdata's StatefulDataLoader: each worker loads its part and returns a state."""

    def __init__(self, data, states):
        self.data, self.states = data, states

    def __iter__(self):
        number = get_worker_info().id
        if number in self.states:
            self.data.load_state_dict(self.states[number])
        for row in self.data:
            yield number, tuple(row["input_ids"].tolist()), self.data.state_dict()


def test_workers_that_keep_their_own_states_go_on_where_they_stood(opened, packs):
    def rows(states):
        data = opened(batch_size=3)
        return iter(DataLoader(_InWorkers(data, states), None, num_workers=2))

    taken = list(itertools.islice(rows({}), 7))
    states = {number: state for number, _, state in taken}
    rest = list(rows(states))

    assert {state["worker_rows"] for state in states.values()} == {3, 4}
    assert Counter(tuple(ids) for _, ids, _ in taken + rest) == Counter(packs)


# States that once lost packs or read them twice.


def test_packs_that_were_left_out_are_not_in_the_receipt(opened):
    ranks = [opened(rank=r, world_size=4, drop_uneven=True) for r in range(4)]
    num_packs = ranks[0].num_rows
    assert num_packs % 4
    taken = sum(len(list(rank)) for rank in ranks)

    assert taken == num_packs - num_packs % 4
    for rank in ranks:
        receipt = training_receipt(rank, rank.state_dict())
        assert receipt["packs"] == taken
    resumed = opened()  # another number of ranks has room for them
    resumed.load_state_dict(ranks[0].state_dict())
    assert len(list(resumed)) == num_packs % 4


def test_a_worker_s_own_rows_are_refused_where_others_would_be_its_own(opened):
    states = iter(DataLoader(_InWorkers(opened(batch_size=1), {}), None, num_workers=2))
    state = [next(states) for _ in range(6)][-1][2]
    assert state["worker_rows"] == 3

    for other in ({"world_size": 2}, {"batch_size": 3}, {"num_workers": 1}):
        settings = {"world_size": 1, "batch_size": 1, "num_workers": 2} | other
        workers = settings.pop("num_workers")
        rows = _InWorkers(opened(**settings), dict.fromkeys((0, 1), state))
        with pytest.raises(ConfigError, match=f"a worker was saved with {next(iter(other))}"):
            next(iter(DataLoader(rows, None, num_workers=workers)))
    with pytest.raises(ConfigError, match="from a DataLoader worker"):
        training_receipt(opened(), state)  # it would report 0 packs


def test_a_look_at_the_last_batches_after_a_resume_takes_nothing(opened):
    data = opened(batch_size=1)
    data.load_state_dict(data.state_dict() | {"packs": data.num_rows - 3})
    loader = DataLoader(data, None, num_workers=2)
    assert sum(1 for _ in loader) == 3  # read ahead by a worker, although only one batch was taken
    data.set_epoch(0)

    assert len(data) == 3
    assert sum(1 for _ in loader) == 3
    data.set_epoch(1)
    assert sum(1 for _ in loader) == data.num_rows


def test_a_pass_that_was_left_does_not_end_the_next_one(opened):
    data = opened()
    data.load_state_dict(data.state_dict() | {"packs": data.num_rows - 4})
    data._shared[_ENDED] = 1  # worker 0 of 2 had ended when the pass was interrupted
    data._shared[_NUM_WORKERS] = 2
    rows = iter(data)
    next(rows)

    assert data.state_dict()["packs"] == data.num_rows - 3
    assert len(data) == 4


def test_a_dataset_made_before_torch_distributed_is_refused(opened, tmp_path, monkeypatch):
    """Every rank would be rank 0 of 1 and read every pack."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    data = opened(rank=None, world_size=None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    with pytest.raises(
        ConfigError, match="rank 1 of 2, but the dataset was created for rank 0 of 1"
    ):
        next(iter(data))
    assert next(iter(opened(rank=None, world_size=None)))
    assert next(iter(opened()))  # set manually, as accelerate needs it

"""`StreamingPackedDataset` states that once lost packs or read them twice."""

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from packhouse import StreamingPackedDataset, training_receipt
from packhouse.errors import ConfigError
from packhouse.load.streaming import _ENDED, _NUM_WORKERS


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def opened(make_version, cache):
    """Open the packs of one version, by default as the only rank."""
    uri = make_version(num_records=150)

    def open_ranks(**settings):
        given = {"rank": 0, "world_size": 1, "batch_size": 1, "cache": cache} | settings
        return StreamingPackedDataset(uri, **given)

    return open_ranks


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


class _InWorkers(IterableDataset):
    """Each worker returns its own state, as in torchdata's StatefulDataLoader."""

    def __init__(self, data, state=None):
        self.data, self.state = data, state

    def __iter__(self):
        if self.state is not None:
            self.data.load_state_dict(self.state)
        for _ in self.data:
            yield get_worker_info().id, self.data.state_dict()


@pytest.mark.parametrize(
    "other", [{"world_size": 2}, {"batch_size": 3}, {"num_workers": 1}], ids=lambda o: next(iter(o))
)
def test_a_worker_s_own_rows_are_refused_where_others_would_be_its_own(opened, other):
    settings = {"world_size": 1, "batch_size": 1, "num_workers": 2} | other
    states = iter(DataLoader(_InWorkers(opened()), None, num_workers=2))
    state = [next(states) for _ in range(6)][-1][1]
    assert state["worker_rows"] == 3

    data = opened(world_size=settings["world_size"], batch_size=settings["batch_size"])
    loader = DataLoader(_InWorkers(data, state), None, num_workers=settings["num_workers"])
    with pytest.raises(ConfigError, match=f"a worker was saved with {next(iter(other))}"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="from a DataLoader worker"):
        training_receipt(opened(), state)  # it would report 0 packs


def test_a_look_at_the_last_batches_after_a_resume_takes_nothing(opened):
    data = opened()
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

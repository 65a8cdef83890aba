"""Ranks over gloo: `check_ranks`, Trainer and DDP."""

import json
import multiprocessing
import os
from collections import Counter
from multiprocessing.connection import wait

import pytest

from packhouse import load_packed
from tests.forked import forks_of
from tests.loaders import rank_job, trainer_job
from tests.store.ceph import free_port


def start_rank(environment, job, *arguments):
    os.environ.update(environment)
    # A DataLoader's workers are forks of their rank, as in training, and end with it.
    multiprocessing.set_start_method("fork", force=True)
    job(*arguments)


def run_ranks(world_size, job, *arguments):
    """Run a job on ranks as torchrun does; return their exit codes. A rank that fails ends all."""
    # Importing torch and transformers takes each rank 4 s.
    processes = forks_of(__name__, "transformers.trainer", "datasets")
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world_size):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(processes.Process(target=start_rank, args=(environment, job, *arguments)))
        ranks[-1].start()
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in wait(running):
            running.pop(sentinel).join()
        if any(rank.exitcode for rank in ranks):
            for rank in running.values():
                rank.kill()
    return [rank.exitcode for rank in ranks]


def test_a_record_of_any_rank_moves_no_logit_of_another(tmp_path):
    assert run_ranks(4, rank_job.main, tmp_path) == [0] * 4

    first, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4))
    assert all(other == first for other in others)
    assert {name: is_safe for name, (_, is_safe, _) in first.items()} == {
        "plain": False,
        "enabled": True,
        "apart": True,
        "together": False,
        "zeros": False,
        "another pair's": False,
    }
    assert first["enabled"][2] == 0.0
    assert first["plain"][2] > 1.0
    assert "INCONCLUSIVE, no token affects" in first["zeros"][0]
    assert "10 records on 4 ranks" in first["enabled"][0]
    assert "6 records on 4 ranks" in first["apart"][0]


def test_two_ranks_take_each_pack_once_and_have_the_gradients_of_one_process(
    make_version, tmp_path
):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    uri = make_version(num_records=40)
    packs = [tuple(ids) for ids in load_packed(uri, cache=tmp_path / "cache")["input_ids"]]
    assert run_ranks(2, trainer_job.main, tmp_path, uri) == [0] * 2

    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    seen = Counter(tuple(pack) for each in told for pack in each["seen"])
    assert seen.total() == len(packs) // 2 * 2
    assert seen <= Counter(packs)
    for each in told:
        assert each["gradient"] > 0.01
        assert each["difference"] < 1e-5

"""Ranks over gloo: `check_ranks`, Trainer, DDP, and kill -9 in the middle of epochs."""

import json
import multiprocessing
import os
import signal
from collections import Counter
from hashlib import sha256
from multiprocessing.connection import wait

import pytest

from packhouse import StreamingPackedDataset, consumed_records, load_packed
from tests.forked import forks_of
from tests.loaders import rank_job, trainer_job, training_job
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


RUNS = [  # ranks, workers of each, the step at which one is killed
    (2, 2, 5),
    (3, 0, 14),
    (1, 3, -1),
]


def test_every_pack_is_taken_once_an_epoch_and_receipts_say_so(make_version, tmp_path):
    uri = make_version(num_records=150, rows_per_file=11)
    packs = load_packed(uri, cache=tmp_path / "cache")
    names = {tuple(row["input_ids"]): row["record_ids"] for row in packs}
    assert len(names) == len(packs) > 30
    taken = {0: [], 1: []}  # epoch -> packs of steps before the last checkpoint
    before = 0
    for number, (world_size, num_workers, killed_at) in enumerate(RUNS):
        codes = run_ranks(world_size, training_job.main, tmp_path, uri, num_workers, killed_at)
        is_last = number == len(RUNS) - 1
        assert codes == [0] if is_last else codes[-1] == -signal.SIGKILL

        last = max(tmp_path.glob("checkpoint-*"))
        receipt = json.loads((last / "packhouse-receipt.json").read_text())
        assert is_last or receipt["step"] == killed_at // 3 * 3
        logs = list(tmp_path.glob(f"run-{before:04}-{world_size}-*.jsonl"))
        assert len(logs) == world_size
        for log in logs:
            for line in map(json.loads, log.read_text().splitlines()):
                if is_last or line["step"] <= receipt["step"]:
                    taken[line["epoch"]] += map(tuple, line["packs"])
        before = receipt["step"]
        if is_last:
            break
        data = StreamingPackedDataset(uri, seed=7, rank=0, world_size=1, cache=tmp_path / "cache")
        in_receipt = list(consumed_records(data, receipt["state"]))
        own = taken[receipt["state"]["epoch"]]
        assert receipt["packs"] == len(own)
        assert Counter(in_receipt) == Counter(name for pack in own for name in names[pack])
        digest = sha256("".join(f"{name}\n" for name in in_receipt).encode()).hexdigest()
        assert receipt["records_sha256"] == digest

    assert Counter(taken[0]) == Counter(taken[1]) == Counter(names.keys())

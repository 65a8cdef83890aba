"""Kill ranks of torchrun (kill -9) in the middle of epochs, and resume with other ranks."""

import json
import os
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path

from packhouse import StreamingPackedDataset, consumed_records, load_packed

ROOT = Path(__file__).parents[2]

RUNS = [  # ranks, workers of each, the step at which one is killed
    (2, 2, 5),
    (4, 1, 8),
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
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        job = [f"--nproc-per-node={world_size}", "-m", "tests.loaders.training_job"]
        done = subprocess.run(
            [*torchrun, *job, str(tmp_path), uri, str(num_workers), str(killed_at)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        is_last = number == len(RUNS) - 1
        assert (done.returncode == 0) == is_last, done.stderr
        assert ("SIGKILL" in done.stderr) != is_last

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

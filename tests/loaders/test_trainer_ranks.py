"""Two ranks of torchrun: Trainer over a stream, and a custom loop under DDP."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from packhouse import load_packed

ROOT = Path(__file__).parents[2]


def test_two_ranks_take_each_pack_once_and_have_the_gradients_of_one_process(
    make_version, tmp_path
):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    uri = make_version(num_records=40)
    packs = [tuple(ids) for ids in load_packed(uri, cache=tmp_path / "cache")["input_ids"]]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", "-m", "tests.loaders.trainer_job", str(tmp_path), uri],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    seen = Counter(tuple(pack) for each in told for pack in each["seen"])
    assert seen.total() == len(packs) // 2 * 2
    assert seen <= Counter(packs)
    for each in told:
        assert each["gradient"] > 0.01
        assert each["difference"] < 1e-5

"""`check_ranks` in processes of torchrun over gloo, data-parallel and context-parallel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("world_size", "num_records"), [(2, 5), (4, 10)])
def test_a_record_of_any_rank_moves_no_logit_of_another(tmp_path, world_size, num_records):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = [f"--nproc-per-node={world_size}", "-m", "tests.loaders.rank_job", str(tmp_path)]
    done = subprocess.run(
        [*torchrun, *job],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    first, *others = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)
    )
    assert all(other == first for other in others)
    assert {name: is_safe for name, (_, is_safe, _) in first.items()} == {
        "plain": False,
        "enabled": True,
        "apart": True,
        "together": False,
        "zeros": False,
        "another pair's": world_size == 2,  # there is no other pair
    }
    assert first["enabled"][2] == 0.0
    assert first["plain"][2] > 1.0
    assert "INCONCLUSIVE, no token affects" in first["zeros"][0]
    assert f"{num_records} records on {world_size} ranks" in first["enabled"][0]
    assert f"{3 * world_size // 2} records on {world_size} ranks" in first["apart"][0]

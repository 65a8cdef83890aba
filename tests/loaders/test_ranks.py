"""`check_ranks` on two processes over gloo, data-parallel and context-parallel."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_record_of_any_rank_moves_no_logit_of_another(tmp_path):
    command = [sys.executable, "-m", "tests.loaders.rank_job"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, problem = rank.communicate(timeout=110)
        assert rank.returncode == 0, problem

    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert {name: is_safe for name, (_, is_safe, _) in first.items()} == {
        "plain": False,
        "enabled": True,
        "apart": True,
        "together": False,
    }
    assert first["enabled"][2] == 0.0
    assert first["plain"][2] > 1.0
    assert "5 records on 2 ranks" in first["enabled"][0]
    assert "3 records on 2 ranks" in first["apart"][0]

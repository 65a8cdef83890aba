"""Check that the benchmark runs, not what it measures."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_small_run_prints_a_row_for_packhouse_and_for_plain_python():
    only = ["--only", "packhouse", "plain_python"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.peers", "--small", *only],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]

    assert [row[0].strip() for row in rows[2:]] == ["packhouse", "plain_python"]
    packs = [int(row[5]) for row in rows[2:]]
    assert 0 < packs[0] <= packs[1]

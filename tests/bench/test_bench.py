"""The benchmark works; what it measures is no test."""

import subprocess
import sys
from pathlib import Path

from bench.measuring import Sample
from bench.reporting import peers_table

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


def test_ratios_say_how_many_times_ours_it_takes():
    facts = {"packs": 1, "tokens": 10, "bytes": 20}
    ours = Sample(wall_s=1, cpu_s=2, import_s=1, peak_mb=100, facts=facts)
    theirs = Sample(wall_s=9, cpu_s=8, import_s=2, peak_mb=50, facts=facts)

    row = peers_table({"packhouse": [ours], "peer": [theirs]}, "packhouse")[1]

    assert row[-4:] == ["2.00", "4.0", "6.0", "0.50"]

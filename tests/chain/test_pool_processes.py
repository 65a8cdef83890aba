"""Processes of `packhouse prepare --workers N` end with the run that started them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from packhouse.run import step
from packhouse.run.steps import validate
from packhouse.cli import main
validate.MAX_SHARD_BYTES, step._LEAST_BYTES = 1500, 0  # many small jobs, each handed out
main()
"""


@pytest.mark.timeout(600)
def test_processes_of_a_killed_run_end_with_it(tmp_path):
    recipe = ROOT / "deployments" / "demo" / "recipe.yaml"
    run = psutil.Popen(
        [
            *(sys.executable, "-c", RUN, "prepare", str(recipe), "--workers", "2"),
            *("--cache", str(tmp_path / "cache"), "--set", f"publish.store={tmp_path / 'store'}"),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pool = []
    try:
        while len(pool) < 2:
            assert run.poll() is None, "it ended before it had two processes"
            pool = [p for p in run.children() if "spawn_main" in " ".join(p.cmdline())]
            time.sleep(0.05)  # between two checks
        pool = run.children(recursive=True)  # and their workers
        run.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(pool, timeout=100)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        for process in (run, *pool):
            if process.is_running():
                process.kill()
        run.wait()

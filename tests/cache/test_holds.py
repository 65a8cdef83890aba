"""Steps that runs hold: no removal takes them, whatever the grace, and whoever was killed."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from packhouse.cache import list_steps, remove_steps
from packhouse.cache_holds import UNFINISHED_DAYS, held_keys, hold_steps
from packhouse.cli import cli
from packhouse.step_store import StepStore
from tests.cache.conftest import steps_in
from tests.chain.conftest import House

GC_LOOP = """
import sys
from pathlib import Path
from packhouse.cache import list_steps, remove_steps
while not Path(sys.argv[1], "stop").exists():
    cache = Path(sys.argv[1], "cache")
    freed = remove_steps(cache, [each for each in list_steps(cache) if not each.is_held])
    if freed:
        Path(sys.argv[1], "freed").touch()
"""


def gc(house, *options):
    arguments = ["cache", "gc", "--cache", str(house.cache), "--grace-hours", "0", "--json"]
    done = CliRunner().invoke(cli, [*arguments, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_run_dies_while_another_process_removes_all_that_it_may(house, start):
    """Five runs side by side, and one process that removes whatever no run holds."""
    for number in range(5):
        text = (house.root / "recipe.yaml").read_text().replace("sums", f"sums-{number}")
        text = text.replace("seq_len: 256", f"seq_len: {128 + 64 * (number % 3)}")
        (house.root / f"{number}.yaml").write_text(text)
    house.prepare()  # steps that no run holds, which the runs want too
    remover = subprocess.Popen([sys.executable, "-c", GC_LOOP, str(house.root)])
    try:
        runs = [start(f"{number}.yaml") for number in range(5)]
        errors = [run.communicate()[1].decode() for run in runs]
    finally:
        (house.root / "stop").touch()
        assert remover.wait(120) == 0
    assert [(run.returncode, error) for run, error in zip(runs, errors, strict=True)] == [
        (0, "")
    ] * 5
    assert (house.root / "freed").exists()
    assert not held_keys(house.cache)

    gc(house, "--max-gb", "0", "--delete")
    assert steps_in(house.cache) == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_killed_run_did_stays_a_week_and_its_next_try_goes_on_there(house, start):
    killed = start(kill=("files", "1", "before"))
    killed.wait()
    assert killed.returncode == -9
    done = steps_in(house.cache)
    assert {"validate", "format", "tokenize", "pack", "gather"} <= {step for step, _ in done}

    assert gc(house, "--delete", "--max-gb", "0")["freed"] == 0
    assert steps_in(house.cache) == done

    assert start().wait() == 0
    assert done <= steps_in(house.cache)  # found: each step has one receipt, made once
    assert not held_keys(house.cache)  # the try that was killed is forgotten
    assert not list((house.cache / "running").glob("*.keys"))
    assert gc(house)["steps"] == []  # all of them are of the last run


def test_a_run_that_failed_over_a_week_ago_holds_nothing(tmp_path):
    StepStore(tmp_path / "steps").run("s", "k", lambda folder: {})
    with pytest.raises(ZeroDivisionError), hold_steps(tmp_path, "v" * 16, ["k"]):
        raise ZeroDivisionError
    assert remove_steps(tmp_path, list_steps(tmp_path)) == 0
    (file,) = (tmp_path / "running").glob("*.keys")
    age(file)
    assert remove_steps(tmp_path, list_steps(tmp_path)) > 0
    assert not file.exists()


def test_a_run_that_goes_on_for_longer_than_a_week_still_holds_its_steps(tmp_path):
    StepStore(tmp_path / "steps").run("s", "k", lambda folder: {})
    with hold_steps(tmp_path, "v" * 16, ["k"]) as hold:
        hold(["later"])
        (file,) = (tmp_path / "running").glob("*.keys")
        age(file)
        assert held_keys(tmp_path) == {"k", "later"}
        assert time.time() - file.stat().st_mtime < 3600  # its week begins when it ends
        assert remove_steps(tmp_path, list_steps(tmp_path)) == 0
    assert remove_steps(tmp_path, list_steps(tmp_path)) > 0


def age(file):
    then = time.time() - UNFINISHED_DAYS * 86400 - 60
    os.utime(file, (then, then))


def test_a_file_system_without_locks_takes_runs_and_removes_nothing(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    without = SimpleNamespace(flock=refuse, LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB)
    monkeypatch.setattr("packhouse.cache_holds.fcntl", without)
    house = House(tmp_path)
    house.write_rows(range(30))
    assert house.prepare().created
    before = steps_in(house.cache)
    assert gc(house, "--max-gb", "0", "--delete")["freed"] == 0
    assert steps_in(house.cache) == before


def test_a_hold_is_never_seen_unlocked(tmp_path, monkeypatch):
    """Another try of the version that succeeds at that moment would forget it."""
    lock, seen = fcntl.flock, []

    def look(file, how):
        seen.append(list(tmp_path.glob("running/*.keys")))
        lock(file, how)

    monkeypatch.setattr("packhouse.cache_holds.fcntl.flock", look)
    with hold_steps(tmp_path, "v" * 16, ["a"]):
        assert held_keys(tmp_path) == {"a"}
    assert seen[0] == []

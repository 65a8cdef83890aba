"""Steps that runs hold are never deleted, whatever the grace period and whoever was killed."""

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from packhouse.addons.cache import UNFINISHED_DAYS, held_keys, list_steps, remove_steps
from packhouse.cli import cli
from packhouse.errors import AuditError
from packhouse.run.step_cache import StepStore, pin_steps
from tests.cache.conftest import steps_in

GC_LOOP = """
import sys, time
from pathlib import Path
from packhouse.addons.cache import list_steps, remove_steps
while not Path(sys.argv[1], "stop").exists():
    cache = Path(sys.argv[1], "cache")
    freed = remove_steps(cache, [each for each in list_steps(cache) if not each.is_held])
    if freed:
        Path(sys.argv[1], "freed").touch()
    time.sleep(0.02)  # without a pause, this loop takes a core from the runs that it disturbs
"""


def gc(project, *options):
    arguments = ["cache", "gc", "--cache", str(project.cache), "--grace-hours", "0", "--json"]
    done = CliRunner().invoke(cli, [*arguments, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_run_dies_while_another_process_removes_all_that_it_may(project, start):
    """Two parallel runs, and one process that deletes everything that no run holds."""
    for number in range(2):
        text = (project.root / "recipe.yaml").read_text().replace("sums", f"sums-{number}")
        text = text.replace("seq_len: 256", f"seq_len: {128 + 64 * (number % 3)}")
        (project.root / f"{number}.yaml").write_text(text)
    project.prepare()  # steps that no run holds, which the runs also need
    remover = subprocess.Popen([sys.executable, "-c", GC_LOOP, str(project.root)])
    try:
        runs = [start(f"{number}.yaml") for number in range(2)]
        ends = [run.wait() for run in runs]
    finally:
        (project.root / "stop").touch()
        assert remover.wait(120) == 0
    assert ends == [(0, "")] * 2
    assert (project.root / "freed").exists()
    assert not held_keys(project.cache)

    gc(project, "--max-gb", "0", "--delete")
    assert steps_in(project.cache) == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_of_a_killed_run_stay_a_week_and_its_retry_reuses_them(project, start):
    assert start(kill=("files", 1, "before")).wait()[0] == -9
    done = steps_in(project.cache)
    assert {"validate", "format", "tokenize", "pack", "split"} <= {step for step, _ in done}

    assert gc(project, "--delete", "--max-gb", "0")["freed"] == 0
    assert steps_in(project.cache) == done

    assert start().wait() == (0, "")
    assert done <= steps_in(project.cache)  # found: each step has one receipt, written once
    assert not held_keys(project.cache)  # the killed attempt is forgotten
    assert not list((project.cache / "running").glob("*.keys"))
    assert gc(project)["steps"] == []  # all of them belong to the last run


def test_gc_reports_what_a_refused_run_holds_and_frees_it_if_asked(project):
    project.prepare()
    used = steps_in(project.cache)
    project.rows.write_text(project.rows.read_text() * 2)
    with pytest.raises(AuditError):
        project.prepare("audit.max_duplicates=0")
    refused = steps_in(project.cache) - used
    (file,) = (project.cache / "running").glob("*.keys")
    until = datetime.fromtimestamp(file.stat().st_mtime + 7 * 86400, UTC)

    shown = gc(project, "--max-gb", "0")
    assert {(step["step"], step["key"]) for step in shown["steps"]} == used - held_by(file, used)
    held = shown["unfinished"]
    assert (held["runs"], held["until"]) == (1, until.isoformat(sep=" ", timespec="minutes"))
    assert held["bytes"] == sum(
        each.num_bytes for each in list_steps(project.cache) if (each.step, each.key) in refused
    )
    text = CliRunner().invoke(cli, ["cache", "gc", "--cache", str(project.cache)]).output
    assert f"{held['bytes']:,} bytes in {len(refused)} jobs: kept until " in text
    assert "so that 1 unfinished run can continue" in text
    assert f"until {held['until']} at most" in text

    arguments = ["cache", "gc", "--cache", str(project.cache), "--unfinished", "--json"]
    freed = json.loads(CliRunner().invoke(cli, [*arguments, "--delete"]).output)
    assert freed["freed"] == held["bytes"]  # just created, but the grace period does not keep them
    assert steps_in(project.cache) == used
    assert not list((project.cache / "running").glob("*.keys"))
    assert gc(project)["unfinished"] == {"runs": 0, "bytes": 0, "until": None}


def held_by(file, steps):
    keys = file.read_text().split()
    return {(step, key) for step, key in steps if key in keys}


def test_unfinished_keeps_the_steps_of_a_running_run(tmp_path):
    steps = StepStore(tmp_path / "steps")
    for key in ("both", "ended"):
        steps.run("s", key, lambda folder: {})
    with pytest.raises(ZeroDivisionError), pin_steps(tmp_path, "a" * 16, ["both", "ended"]):
        raise ZeroDivisionError
    with pin_steps(tmp_path, "b" * 16, ["both"]):
        command = ["cache", "gc", "--cache", str(tmp_path), "--unfinished", "--delete", "--json"]
        done = json.loads(CliRunner().invoke(cli, command).output)
        assert [step["key"] for step in done["steps"]] == ["ended"]
        assert done["unfinished"]["bytes"] == done["freed"] > 0
        assert steps_in(tmp_path) == {("s", "both")}
        assert held_keys(tmp_path) == {"both"}


def test_a_run_that_failed_over_a_week_ago_holds_nothing(tmp_path):
    StepStore(tmp_path / "steps").run("s", "k", lambda folder: {})
    with pytest.raises(ZeroDivisionError), pin_steps(tmp_path, "v" * 16, ["k"]):
        raise ZeroDivisionError
    assert remove_steps(tmp_path, list_steps(tmp_path)) == 0
    (file,) = (tmp_path / "running").glob("*.keys")
    age(file)
    assert remove_steps(tmp_path, list_steps(tmp_path)) > 0
    assert not file.exists()


def test_a_run_that_goes_on_for_longer_than_a_week_still_holds_its_steps(tmp_path):
    StepStore(tmp_path / "steps").run("s", "k", lambda folder: {})
    with pin_steps(tmp_path, "v" * 16, ["k"]) as hold:
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

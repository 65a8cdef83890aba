import json
import os
import time

import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from tests.chain.conftest import Project


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    project.write_rows(range(60))
    return project


@pytest.fixture
def call(project):
    def call(*arguments):
        done = CliRunner().invoke(cli, ["cache", *arguments, "--cache", str(project.cache)])
        assert done.exit_code == 0, done.output
        return done.output

    return call


def age(project, hours):
    then = time.time() - hours * 3600
    for file in (*project.cache.rglob("receipt.json"), *(project.cache / "runs").iterdir()):
        os.utime(file, (then, then))


def test_ls_counts_the_steps_of_the_last_runs(project, call):
    project.prepare()
    project.prepare("pack.seq_len=128")
    steps = json.loads(call("ls", "--json"))["steps"]
    assert (steps["tokenize"]["jobs"], steps["tokenize"]["used"]) == (1, 1)
    assert (steps["pack"]["jobs"], steps["pack"]["used"]) == (2, 1)
    assert steps["pack"]["bytes"] > steps["pack"]["used_bytes"] > 0
    assert "jobs" in call("ls")


def test_gc_is_a_dry_run_first_and_deletes_only_unused_steps(project, call):
    project.prepare()
    last = project.prepare("pack.seq_len=128")
    age(project, 2)
    shown = json.loads(call("gc", "--json"))
    assert shown["dry_run"]
    assert {step["step"] for step in shown["steps"]} == {
        *("pack", "split", "audit", "files", "publish")
    }
    assert json.loads(call("gc", "--json"))["bytes"] == shown["bytes"]

    assert json.loads(call("gc", "--json", "--delete"))["freed"] == shown["bytes"]

    again = project.prepare("pack.seq_len=128")
    assert all(receipt.cached for receipt in again.receipts)
    assert again.version == last.version
    assert not project.prepare().created  # computed again, with the same result


def test_gc_keeps_steps_used_within_the_grace(project, call):
    project.prepare()
    project.prepare("pack.seq_len=128")
    assert json.loads(call("gc", "--json"))["steps"] == []
    age(project, 2)
    project.prepare()  # finds everything; now the other seq_len is unused
    in_use = {step["key"] for step in json.loads(call("gc", "--max-gb", "0", "--json"))["steps"]}
    assert in_use
    assert all(receipt.key not in in_use for receipt in project.prepare().receipts)


def test_gc_to_a_size_takes_steps_in_use_last(project, call):
    project.prepare()
    project.prepare("pack.seq_len=128")
    age(project, 2)
    steps = json.loads(call("ls", "--json"))["steps"].values()
    used = sum(step["used_bytes"] for step in steps)
    limit = str((used + 1) / 1e9)
    assert json.loads(call("gc", "--max-gb", limit, "--delete", "--json"))["freed"] > 0
    assert all(receipt.cached for receipt in project.prepare("pack.seq_len=128").receipts)
    age(project, 2)
    call("gc", "--max-gb", "0", "--delete")
    assert not list((project.cache / "steps").glob("*/*/receipt.json"))
    assert not project.prepare("pack.seq_len=128").created


@pytest.mark.parametrize("option", ["--max-gb", "--grace-hours"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_gc_takes_no_number_that_is_none(option, value, project):
    done = CliRunner().invoke(cli, ["cache", "gc", option, value, "--cache", str(project.cache)])
    assert done.exit_code == 2
    assert "must be numbers, not nan or inf" in done.output

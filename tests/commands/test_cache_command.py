import json
import os
import time

import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from tests.chain.conftest import House


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    house.write_rows(range(60))
    return house


@pytest.fixture
def call(house):
    def call(*arguments):
        done = CliRunner().invoke(cli, ["cache", *arguments, "--cache", str(house.cache)])
        assert done.exit_code == 0, done.output
        return done.output

    return call


def age(house, hours):
    then = time.time() - hours * 3600
    for file in (*house.cache.rglob("receipt.json"), *(house.cache / "runs").iterdir()):
        os.utime(file, (then, then))


def test_ls_counts_what_the_last_runs_used(house, call):
    house.prepare()
    house.prepare("pack.seq_len=128")
    steps = json.loads(call("ls", "--json"))["steps"]
    assert (steps["tokenize"]["jobs"], steps["tokenize"]["used"]) == (1, 1)
    assert (steps["pack"]["jobs"], steps["pack"]["used"]) == (2, 1)
    assert steps["pack"]["bytes"] > steps["pack"]["used_bytes"] > 0
    assert "jobs" in call("ls")


def test_gc_shows_first_and_removes_only_what_no_last_run_used(house, call):
    house.prepare()
    last = house.prepare("pack.seq_len=128")
    age(house, 2)
    shown = json.loads(call("gc", "--json"))
    assert shown["dry_run"]
    assert {step["step"] for step in shown["steps"]} == {
        *("pack", "gather", "split", "audit", "files", "publish")
    }
    assert json.loads(call("gc", "--json"))["bytes"] == shown["bytes"]

    assert json.loads(call("gc", "--json", "--delete"))["freed"] == shown["bytes"]

    again = house.prepare("pack.seq_len=128")
    assert all(receipt.cached for receipt in again.receipts)
    assert again.version == last.version
    assert not house.prepare().created  # done again, and the same


def test_gc_leaves_what_a_run_made_or_found_within_the_grace(house, call):
    house.prepare()
    house.prepare("pack.seq_len=128")
    assert json.loads(call("gc", "--json"))["steps"] == []
    age(house, 2)
    house.prepare()  # finds all, and the other seq_len is the one out of use now
    in_use = {step["key"] for step in json.loads(call("gc", "--max-gb", "0", "--json"))["steps"]}
    assert in_use
    assert all(receipt.key not in in_use for receipt in house.prepare().receipts)


def test_gc_to_a_size_takes_steps_in_use_last(house, call):
    house.prepare()
    house.prepare("pack.seq_len=128")
    age(house, 2)
    steps = json.loads(call("ls", "--json"))["steps"].values()
    used = sum(step["used_bytes"] for step in steps)
    limit = str((used + 1) / 1e9)
    assert json.loads(call("gc", "--max-gb", limit, "--delete", "--json"))["freed"] > 0
    assert all(receipt.cached for receipt in house.prepare("pack.seq_len=128").receipts)
    age(house, 2)
    call("gc", "--max-gb", "0", "--delete")
    assert not list((house.cache / "steps").glob("*/*/receipt.json"))
    assert not house.prepare("pack.seq_len=128").created

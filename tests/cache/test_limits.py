"""What runs keep the cache to by themselves: data that is gone, age, size."""

import json
import os
import time

import pytest
from click.testing import CliRunner

from packhouse.cache import keep_limits, list_steps
from packhouse.cache_holds import hold_steps
from packhouse.cli import cli
from packhouse.errors import ConfigError, DiskError
from packhouse.refresh import planned_version
from tests.cache.conftest import steps_in


def size(house):
    return sum(each.num_bytes for each in list_steps(house.cache))


def age(house, days):
    then = time.time() - days * 86400
    for file in (*house.cache.rglob("receipt.json"), *(house.cache / "runs").iterdir()):
        os.utime(file, (then, then))


def test_ten_runs_of_a_growing_file_leave_what_the_last_one_used(house):
    for number in range(10):
        house.write_rows(range(60 + number))
        last = house.prepare("dedup.exact=drop")
    left = steps_in(house.cache)
    assert {(r.step, r.key) for r in last.receipts} == {s for s in left if s[0] != "fingerprints"}
    assert len(left) == len(last.receipts) + 1
    assert all(each.is_used for each in list_steps(house.cache))
    assert all(receipt.cached for receipt in house.prepare("dedup.exact=drop").receipts)


def test_unchanged_shards_keep_their_steps_and_changed_ones_lose_the_former(house, monkeypatch):
    monkeypatch.setattr("packhouse.jobs.SHARD_BYTES", 1500)
    house.write_rows(range(60))
    house.prepare()
    house.write_rows(range(61))
    second = house.prepare()
    tokenized = [receipt for receipt in second.receipts if receipt.step == "tokenize"]
    assert sum(not receipt.cached for receipt in tokenized) == 1
    assert len(tokenized) == len([s for s in steps_in(house.cache) if s[0] == "tokenize"]) > 2


def test_steps_of_other_settings_stay_for_someone_may_go_back(house):
    first = house.prepare()
    house.prepare("pack.seq_len=128", "format.template=completion")
    again = house.prepare()
    assert all(receipt.cached for receipt in again.receipts)
    assert again.version == first.version


def test_steps_that_no_run_used_for_long_go_at_the_next_run(house, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_DAYS", "3.5")
    other = house.prepare("pack.seq_len=128")
    age(house, 4)
    last = house.prepare()
    kept = {(receipt.step, receipt.key) for receipt in last.receipts}
    assert steps_in(house.cache) == kept
    assert not kept >= {(receipt.step, receipt.key) for receipt in other.receipts}


def test_looking_whether_anything_changed_keeps_the_steps_of_the_last_run_young(house):
    house.prepare("pack.seq_len=128")
    last = house.prepare()
    age(house, 31)
    planned_version(house.recipe(), house.cache)
    keep_limits(house.cache)
    assert {(receipt.step, receipt.key) for receipt in last.receipts} == steps_in(house.cache)


def test_a_size_is_kept_with_the_longest_unused_steps_first(house, monkeypatch):
    house.prepare("pack.seq_len=128")
    age(house, 1)
    house.prepare()
    used = sum(each.num_bytes for each in list_steps(house.cache) if each.is_used)
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_GB", f"{used / 1e9:.9f}")
    assert all(receipt.cached for receipt in house.prepare().receipts)
    assert size(house) <= used
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_GB", "0")
    assert not house.prepare().created
    assert size(house) == 0


def test_no_limit_takes_what_another_run_holds(house, monkeypatch):
    keys = [receipt.key for receipt in house.prepare().receipts]
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_GB", "0")
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_DAYS", "0")
    with hold_steps(house.cache, "a" * 16, keys):
        house.write_rows(range(70))
        house.prepare()
        assert {key for _, key in steps_in(house.cache)} == set(keys)
    house.prepare()
    assert size(house) == 0


def test_a_disk_that_fails_after_publication_fails_no_run(house, monkeypatch, caplog):
    def refuse(cache, chosen):
        if (house.root / "store").exists():
            raise DiskError("cannot write to the cache")
        return 0

    monkeypatch.setattr("packhouse.cache.remove_steps", refuse)
    assert house.prepare().created
    assert "was not brought within its limits: cannot write to the cache" in caplog.text


@pytest.mark.parametrize("name", ["PACKHOUSE_CACHE_MAX_GB", "PACKHOUSE_CACHE_MAX_DAYS"])
def test_a_limit_that_is_no_number_is_refused_before_any_work(name, house, monkeypatch):
    monkeypatch.setenv(name, "lots")
    with pytest.raises(ConfigError, match=f"{name} is 'lots'; it must be a number from 0 on"):
        house.prepare()
    assert not (house.cache / "steps").exists()


def test_a_plan_and_the_doctor_say_what_a_run_will_take_and_what_is_free(house, caplog):
    recipe = str(house.root / "recipe.yaml")
    at = ["--cache", str(house.cache)]

    def call(*arguments):
        done = CliRunner().invoke(cli, [*arguments, *at])
        assert done.exit_code == 0, done.output
        return done.output

    planned = json.loads(call("plan", recipe, "--json"))["cache"]
    assert planned["needed_bytes"] > house.rows.stat().st_size
    assert planned["num_bytes"] == 0
    assert planned["free_bytes"] > 0
    with caplog.at_level("INFO", "packhouse.cache"):
        house.prepare()
    assert "this run adds about" in caplog.text  # Prefect's log of a deployment's run has it, too
    planned = json.loads(call("plan", recipe, "--json"))["cache"]
    assert (planned["needed_bytes"], planned["num_bytes"]) == (0, size(house))
    assert "cache:  this run adds about 0.0 MB" in call("plan", recipe)
    checks = {line["name"]: line for line in json.loads(call("doctor", "cache", recipe, "--json"))}
    assert {line["status"] for line in checks.values()} == {"pass"}
    assert "limit" in checks["room"]["detail"]
    assert "adds about 0.0 MB" in checks["run"]["detail"]

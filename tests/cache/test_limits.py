"""Limits on the cache that runs enforce themselves: deleted data, age and size."""

import json
import os
import time

import pytest
from click.testing import CliRunner

from packhouse.addons.cache import list_steps
from packhouse.cli import cli
from packhouse.errors import ConfigError
from packhouse.run.step_cache import pin_steps
from tests.cache.conftest import steps_in


def size(project):
    return sum(each.num_bytes for each in list_steps(project.cache))


def age(project, days):
    then = time.time() - days * 86400
    for file in (*project.cache.rglob("receipt.json"), *(project.cache / "runs").iterdir()):
        os.utime(file, (then, then))


def test_runs_of_a_growing_file_keep_the_steps_of_the_last_one(project):
    for number in range(4):
        project.write_rows(range(60 + number))
        last = project.prepare("dedup.exact=drop")
    left = steps_in(project.cache)
    assert {(r.step, r.key) for r in last.receipts} == {s for s in left if s[0] != "fingerprints"}
    assert len(left) == len(last.receipts) + 1
    assert all(each.is_used for each in list_steps(project.cache))
    assert all(receipt.cached for receipt in project.prepare("dedup.exact=drop").receipts)


def test_unchanged_shards_keep_their_steps_and_changed_ones_lose_the_former(project, monkeypatch):
    monkeypatch.setattr("packhouse.run.steps.validate.MAX_SHARD_BYTES", 1500)
    project.write_rows(range(60))
    project.prepare()
    project.write_rows(range(61))
    second = project.prepare()
    tokenized = [receipt for receipt in second.receipts if receipt.step == "tokenize"]
    assert sum(not receipt.cached for receipt in tokenized) == 1
    assert len(tokenized) == len([s for s in steps_in(project.cache) if s[0] == "tokenize"]) > 2


def test_steps_of_other_settings_stay_for_someone_may_go_back(project):
    first = project.prepare()
    project.prepare("pack.seq_len=128", "format.template=completion")
    again = project.prepare()
    assert all(receipt.cached for receipt in again.receipts)
    assert again.version == first.version


def test_steps_that_no_run_used_for_long_go_at_the_next_run(project, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_DAYS", "3.5")
    other = project.prepare("pack.seq_len=128")
    age(project, 4)
    last = project.prepare()
    kept = {(receipt.step, receipt.key) for receipt in last.receipts}
    assert steps_in(project.cache) == kept
    assert not kept >= {(receipt.step, receipt.key) for receipt in other.receipts}


def test_a_size_is_kept_with_the_longest_unused_steps_first(project, monkeypatch):
    project.prepare("pack.seq_len=128")
    age(project, 1)
    project.prepare()
    used = sum(each.num_bytes for each in list_steps(project.cache) if each.is_used)
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_GB", f"{used / 1e9:.9f}")
    assert all(receipt.cached for receipt in project.prepare().receipts)
    assert size(project) <= used
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_GB", "0")
    assert not project.prepare().created
    assert size(project) == 0


def test_no_limit_deletes_what_another_run_holds(project, monkeypatch):
    keys = [receipt.key for receipt in project.prepare().receipts]
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_GB", "0")
    monkeypatch.setenv("PACKHOUSE_CACHE_MAX_DAYS", "0")
    with pin_steps(project.cache, "a" * 16, keys):
        project.write_rows(range(70))
        project.prepare()
        assert {key for _, key in steps_in(project.cache)} == set(keys)
    project.prepare()
    assert size(project) == 0


@pytest.mark.parametrize("name", ["PACKHOUSE_CACHE_MAX_GB", "PACKHOUSE_CACHE_MAX_DAYS"])
def test_a_limit_that_is_no_number_is_refused_before_any_work(name, project, monkeypatch):
    monkeypatch.setenv(name, "lots")
    with pytest.raises(ConfigError, match=f"{name} is 'lots'. Set it to a number"):
        project.prepare()
    assert not (project.cache / "steps").exists()


def test_a_plan_and_the_doctor_show_needed_and_free_space(project, caplog):
    recipe = str(project.root / "recipe.yaml")
    at = ["--cache", str(project.cache)]

    def call(*arguments):
        done = CliRunner().invoke(cli, [*arguments, *at])
        assert done.exit_code == 0, done.output
        return done.output

    planned = json.loads(call("plan", recipe, "--json"))["cache"]
    assert planned["needed_bytes"] > project.rows.stat().st_size
    assert planned["num_bytes"] == 0
    assert planned["free_bytes"] > 0
    with caplog.at_level("INFO", "packhouse.run.step_cache"):
        project.prepare()
    assert "this run adds about" in caplog.text  # Prefect's log of a deployment's run has it too
    planned = json.loads(call("plan", recipe, "--json"))["cache"]
    assert (planned["needed_bytes"], planned["num_bytes"]) == (0, size(project))
    assert "cache: this run adds about 0.0 MB" in call("plan", recipe)
    checks = {line["name"]: line for line in json.loads(call("doctor", "cache", recipe, "--json"))}
    assert {line["status"] for line in checks.values()} == {"pass"}
    assert "allowed" in checks["space"]["detail"]
    assert "adds about 0.0 MB" in checks["run"]["detail"]

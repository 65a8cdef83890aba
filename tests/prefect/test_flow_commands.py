"""The flows' command lines: what they print, and the exit codes that scripts go by."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows.command import backfill, refresh
from flows.store_command import COMMANDS

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    shutil.copytree(DEMO, folder / "demo")
    return folder


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, place):
    """The commands give the root logger a file; take it away again."""
    monkeypatch.setenv("PACKHOUSE_CACHE", str(place / "cache"))
    before = list(logging.getLogger().handlers)
    yield
    for handler in set(logging.getLogger().handlers) - set(before):
        logging.getLogger().removeHandler(handler)
        handler.close()


def run(command, *arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def recipe(place, *options):
    return [place / "demo" / "recipe.yaml", "--set", f"publish.store={place / 'store'}", *options]


def test_refresh_promote_verify_rollback_and_gc_as_a_shell_would(place):
    dataset = place / "store" / "demo"
    first = run(refresh, *recipe(place))
    assert first.exit_code == 0, first.output
    assert "demo: 'latest' moved from nothing to " in first.output
    again = run(refresh, *recipe(place, "--json"))
    assert json.loads(again.stdout)["outcome"] == "unchanged"

    (place / "demo" / "chats.jsonl").write_text(
        "".join((DEMO / "chats.jsonl").read_text().splitlines(keepends=True)[:60])
    )
    waiting = run(refresh, *recipe(place, "--approval", "--json"))
    assert json.loads(waiting.stdout)["outcome"] == "waiting"
    moved = run(COMMANDS["promote"], dataset)
    assert moved.exit_code == 0, moved.output
    assert f"-> {json.loads(waiting.stdout)['version']}" in moved.output

    assert "1 version intact" in run(COMMANDS["verify"], dataset).output
    back = run(COMMANDS["rollback"], dataset, "--json")
    assert json.loads(back.stdout)["result"]["seq"] == 3
    assert "0 bytes of garbage" in run(COMMANDS["gc"], dataset).output


def test_a_ref_held_back_by_drift_has_a_code_of_its_own(place):
    run(refresh, *recipe(place, "--set", "dataset=drift"))
    (place / "demo" / "chats.jsonl").write_text(
        "".join((DEMO / "chats.jsonl").read_text().splitlines(keepends=True)[:20])
    )
    limits = ["--set", "dataset=drift", "--set", "publish.max_source_drift=0.01"]
    assert run(refresh, *recipe(place, *limits)).exit_code == 7


@pytest.mark.parametrize(
    ("name", "arguments", "code", "says"),
    [
        ("verify", ["{}/none/demo"], 5, "no dataset"),
        ("promote", ["{}/store/nothing"], 5, "has no dataset 'nothing'"),
        ("rollback", ["{}/store/nothing"], 5, "has no ref 'latest'"),
        ("gc", ["x"], 0, "0 bytes of garbage"),
        ("verify", ["s3://a"], 2, "names no dataset"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_code(name, arguments, code, says, place, monkeypatch):
    monkeypatch.chdir(place)
    done = run(COMMANDS[name], *(argument.format(place) for argument in arguments))
    assert done.exit_code == code, done.output
    assert says in done.output
    assert "Traceback" not in done.output


def test_refresh_and_backfill_take_an_engine(place, monkeypatch):
    monkeypatch.delenv("PACKHOUSE_WORKERS", raising=False)
    options = ["--set", "dataset=engines", "--runner", "processes", "--workers", "2"]
    done = run(refresh, *recipe(place, *options))
    assert done.exit_code == 0, done.output
    assert os.environ.pop("PACKHOUSE_WORKERS") == "2"
    options = ["--runner", "threads", "--runner-address", "tcp://x:1"]
    for command in (refresh, backfill):
        done = run(command, *recipe(place, "--set", "dataset=none", *options))
        assert "has no address" in done.output
        assert done.exit_code != 0
    os.environ.pop("PACKHOUSE_RUNNER_ADDRESS")


def test_a_backfill_exits_with_4_if_a_recipe_failed(place):
    bad = place / "demo" / "bad.yaml"
    text = (place / "demo" / "recipe.yaml").read_text().replace("dataset: demo", "dataset: bad")
    bad.write_text(text.replace("max_quarantined: 0.05", "max_quarantined: 0"))
    done = run(backfill, bad, *recipe(place))
    assert done.exit_code == 4, done.output
    assert "1 of 2 recipes failed: bad" in done.output
    assert "demo: " in done.output

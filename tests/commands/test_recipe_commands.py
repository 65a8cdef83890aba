import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.run.steps import STEPS

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "recipe.yaml"


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Call a command with an empty cache."""
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "cache"))
    return invoke


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    recipe = load_recipe(DEMO, (f"publish.store={folder / 'store'}",))
    runner = LocalRunner(recipe=recipe, workspace=Workspace(cache=folder / "cache"))
    return prepare(recipe, runner, folder / "cache")


@pytest.fixture
def call_afterwards(prepared, monkeypatch):
    """Call a command with the cache of a finished run."""
    monkeypatch.setenv("PACKHOUSE_CACHE", str(Path(prepared.store).parent / "cache"))
    return invoke


def whys(output: str) -> dict[str, list[str]]:
    return {job["step"]: job["why"] for job in json.loads(output)["jobs"] if not job["cached"]}


def test_explain_before_the_first_run(call):
    output = call("explain", str(DEMO), "--json")
    assert list(whys(output)) == [step.name for step in STEPS]
    assert whys(output)["pack"] == ["never run"]
    assert whys(output)["files"] == ["the number of jobs is not known until pack is done"]


def test_explain_names_the_component_that_changed(call_afterwards):
    call = call_afterwards
    assert whys(call("explain", str(DEMO), "--json")) == {}
    output = call("explain", str(DEMO), "--json", "--set", "pack.seq_len=128")
    assert whys(output) == {
        "pack": ["pack.seq_len: 512 -> 128"],
        "split": ["an earlier step changed"],
        "audit": ["an earlier step changed"],
        "files": ["the number of jobs is not known until pack is done"],
        "publish": ["an earlier step changed"],
    }


def test_explain_shows_every_job_of_a_run(call_afterwards, prepared):
    shown = {
        job["key"] for job in json.loads(call_afterwards("explain", str(DEMO), "--json"))["jobs"]
    }
    assert shown == {receipt.key for receipt in prepared.receipts}
    assert len(shown) == 20


def test_explain_notices_a_file_that_is_gone(call, prepared, tmp_path):
    shutil.copytree(Path(prepared.store).parent / "cache", tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "steps" / "pack").rglob("train-offsets.arrow")
    file.unlink()
    output = call("explain", str(DEMO), "--json")
    assert whys(output) == {"pack": ["its files are missing or changed"]}
    assert "pack  runs" in call("explain", str(DEMO))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("pack.over_length=window", "pack.seq_len=128"),
        ("pack.strategy=concat",),
        ("format.turns=alone",),
    ],
)
def test_plan_estimates_before_any_work_and_counts_after_it(call, tmp_path, options):
    setting = [part for option in options for part in ("--set", option)]
    before = json.loads(call("plan", str(DEMO), "--json", *setting))
    assert not before["is_exact"]
    assert before["steps"]["tokenize"] == {"cached": 0, "jobs": 2}

    recipe = load_recipe(DEMO, (f"publish.store={tmp_path / 'store'}", *options))
    runner = LocalRunner(recipe=recipe, workspace=Workspace(cache=tmp_path / "cache"))
    done = prepare(recipe, runner, tmp_path / "cache")
    after = json.loads(call("plan", str(DEMO), "--json", *setting))

    (line,) = (line for line in done.ledger if line.step == "pack")
    assert after["is_exact"]
    assert after["version_id"] == before["version_id"] == done.version.split(".")[0]
    assert (after["records"], after["tokens"]) == (line.rows_out, line.tokens_out)
    assert options or (line.rows_out, line.tokens_out) == (294, 29_487)
    assert before["records"] == pytest.approx(line.rows_out, rel=0.05)
    assert before["rows"] == pytest.approx(after["rows"], rel=0.05)
    is_split = any(
        option in ("format.turns=alone", "pack.over_length=window") for option in options
    )
    assert (after["rows"] < after["records"]) == is_split
    assert before["tokens"] == pytest.approx(line.tokens_out, rel=0.05)
    packs = sum(side.num_packs for side in done.published.statistics.values())
    assert after["packs"] == pytest.approx(packs, abs=1, rel=0.05)
    printed = call("plan", str(DEMO), *setting)
    rows = f"{after['rows']:,} rows"
    if after["rows"] != after["records"]:
        rows += f" ({line.rows_out:,} records)"
    assert f"{rows}, {line.tokens_out:,} tokens" in printed
    num_over = sum(line.dropped.values())
    assert ("more tokens than pack.seq_len" in printed) == bool(num_over)


def test_plan_shows_that_a_run_would_fail(call):
    printed = call("plan", str(DEMO), "--set", "pack.over_length=error")
    assert "would fail: 1 record has more tokens than pack.seq_len 512, but" in printed
    limit = ("--set", "validate.max_quarantined=0.01")
    refused = json.loads(call("plan", str(DEMO), *limit, "--json"))["refusals"]
    assert refused[0].startswith("9 of 304 rows (2.96%) are bad; validate.max_quarantined")
    assert json.loads(call("plan", str(DEMO), "--json"))["refusals"] == []


def test_plan_shows_the_results_of_other_pack_sizes(call):
    found = json.loads(call("plan", str(DEMO), "--json"))["seq_lens"]
    by_size = {line["seq_len"]: line for line in found}
    assert by_size[512]["records_too_long"] == 1
    assert by_size[2048]["records_too_long"] == 0
    assert by_size[128]["records_too_long"] > 1
    for size, line in by_size.items():
        assert line["num_tokens"] + line["num_padding"] == size * line["num_packs"]
        assert 0 < line["fill"] <= 1
    assert "pack.seq_len  packs" in call("plan", str(DEMO))
    window = ("--set", "pack.over_length=window")  # other sizes give other windows
    assert json.loads(call("plan", str(DEMO), *window, "--json"))["seq_lens"] == []
    multiple = ("--set", "pack.pad_record_to_multiple_of=128")
    padded = json.loads(call("plan", str(DEMO), *multiple, "--json"))
    (own,) = (line for line in padded["seq_lens"] if line["seq_len"] == 512)
    assert own["num_packs"] == padded["packs"] > by_size[512]["num_packs"]


def test_plan_notes_that_contaminated_rows_are_not_subtracted(call):
    benchmarks = f"audit.benchmarks=[{{path: {DEMO.parent / 'chats.jsonl'}}}]"
    settings = ("--set", benchmarks, "--set", "audit.on_match=drop")
    said = "contaminated rows are still counted here, but audit.on_match will drop them"
    assert said in json.loads(call("plan", str(DEMO), *settings, "--json"))["notes"]


def test_a_recipe_that_is_a_folder_is_refused(tmp_path):
    done = CliRunner().invoke(cli, ["explain", str(tmp_path)])
    assert done.exit_code == 2
    assert "is a folder" in done.output


def test_a_report_leaves_out_the_split_that_is_empty(prepared, capsys):
    from packhouse.cli.result_summary import print_report

    statistics = prepared.published.statistics
    assert statistics["eval"].num_packs > 0
    empty = replace(statistics["eval"], num_packs=0, num_sequences=0, num_tokens=0)
    published = replace(prepared.published, statistics={**statistics, "eval": empty})
    print_report(replace(prepared, published=published))
    printed = capsys.readouterr().out
    assert re.search(r"^train ", printed, flags=re.M)
    assert not re.search(r"^eval ", printed, flags=re.M)

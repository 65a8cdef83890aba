"""`packhouse.prepare` and `packhouse prepare`: from rows to a version in one call."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner

import packhouse
from packhouse.cli import cli
from packhouse.errors import ConfigError, SourceError, TokenizerError
from packhouse.recipe.sections import FormatConfig
from packhouse.run.prepare_arguments import recipe_for

TOKENIZER = str(Path(__file__).parents[2] / "deployments" / "demo" / "tokenizer")
ROWS = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(60)]
ALPACA = {"template": "alpaca"}


@pytest.fixture
def prepare(tmp_path):
    def call(data, **options):
        places = {"store": tmp_path / "store", "cache": tmp_path / "cache", "progress": False}
        return packhouse.prepare(
            data, **({"tokenizer": TOKENIZER, "format": ALPACA} | places | options)
        )

    return call


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "My Numbers.v2.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def ids(version):
    return [row["input_ids"] for row in version.train]


def test_rows_in_any_form_give_the_same_packs_as_next_to_other_sources(prepare, file):
    version = prepare(file)
    assert version.dataset == "my-numbers"
    assert sum(len(row["seq_lengths"]) for row in version.train) == len(ROWS)
    frame = pd.DataFrame(ROWS)
    for data in (tuple(ROWS), datasets.Dataset.from_list(ROWS), frame, pa.Table.from_pandas(frame)):
        assert ids(prepare(data)) == ids(version)
    asked = [{"question": f"What is {n}?", "answer": f"{n}"} for n in range(40)]
    rows, name = datasets.Dataset.from_list(asked), "question_answer"
    both = prepare([file, {"path": rows, "name": "asked", "format": name}], dataset="mixed")
    assert {source["file"].split("/")[0]: source["rows"] for source in both.sources} == {
        "my-numbers.v2": 60,
        "asked": 40,
    }


def test_rows_in_the_cache_that_were_altered_are_written_again(prepare, tmp_path):
    first = prepare(ROWS)
    (kept,) = (tmp_path / "cache" / "given").glob("*/rows.jsonl")
    kept.write_text(json.dumps({"instruction": "altered", "output": "altered"}) + "\n")
    assert prepare(ROWS, store=tmp_path / "other").id == first.id


def test_a_recipe_its_file_and_its_arguments_are_the_same_version(
    prepare, file, tmp_path, monkeypatch
):
    by_hand = prepare(file, seq_len=256, split={"eval_fraction": 0.2})
    recipe = {
        "dataset": "my-numbers",
        "sources": [{"path": str(file)}],
        "tokenizer": TOKENIZER,
        "format": ALPACA,
        "pack": {"seq_len": 512, "seed": 0},
        "split": {"eval_fraction": 0.2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    own = {"tokenizer": None, "format": {}, "seq_len": 256}

    assert by_hand.is_new
    for data in (path, packhouse.load_recipe(path)):
        found = prepare(data, **own)
        assert (found.id, found.is_new) == (by_hand.id, False)
    assert prepare(path, **own | {"seq_len": None}).id != by_hand.id  # the recipe's own 512
    del recipe["tokenizer"]
    path.write_text(yaml.safe_dump(recipe))
    with pytest.raises(ConfigError, match="tokenizer"):
        prepare(path, **own)
    monkeypatch.chdir(Path(TOKENIZER).parent)  # the caller sets the folder, not the recipe
    assert prepare(path, **own | {"tokenizer": "tokenizer"}).id == by_hand.id


def test_a_version_gives_an_account_of_every_row(prepare):
    bad = [
        {"instruction": "no answer", "output": ""},
        {"instruction": "long", "output": "x " * 500},
    ]
    version = prepare([*ROWS, *bad], seq_len=128, validate={"max_quarantined": 0.5})

    assert version.eval is None
    steps = [line["step"] for line in version.ledger]
    assert steps == ["validate", "format", "tokenize", "pack", "split"]
    assert version.ledger[0]["rows_in"] == 62
    assert version.quarantined["row"].to_pylist() == [60]
    assert version.dropped == {"over_seq_len": 1}
    assert version.audit["dataset"]["rows"] == 61
    ledger, audit = version.ledger.to_pandas(), version.audit.to_pandas()
    assert ledger.loc["validate", ["rows_in", "quarantined", "rows_out"]].tolist() == [62, 1, 61]
    assert audit.loc["rows", "dataset"] == 61
    lines = repr(version.ledger).splitlines()
    assert [line.split()[0] for line in lines[1:]] == steps
    assert repr(version.audit).splitlines()[0].split() == ["count", *audit.columns]
    shown = repr(version)
    for part in (version.uri, "quarantined: 1 row ", "dropped: 1 row (over_seq_len 1)"):
        assert part in shown
    again = packhouse.open_version(version.uri)
    assert (again.id, again.is_new, ids(again)) == (version.id, None, ids(version))


def test_odd_data_is_refused_with_a_suggestion(prepare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data, said in (
        ([], "data is an empty list"),
        ("", "data is an empty path"),
        (ROWS[0], "type dict does not hold rows"),
        ((row for row in ROWS), "type generator does not hold rows"),
        (pd.DataFrame, "type type does not hold rows"),
        (
            datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
            r"pass one split: data\['train'\]",
        ),
        ([*ROWS, {"output": b"x"}], "row 60 of the list cannot be written as JSON"),
        ([{1: "x"}], "Dict key must be str"),
        ([*ROWS, None], "item 60 of the list has type NoneType, but others are rows"),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare(data)
    with pytest.raises(SourceError, match=r"'data/absent.jsonl' does not exist"):
        prepare("data/absent.jsonl")  # not a Hub dataset
    (tmp_path / "data").mkdir()
    with pytest.raises(SourceError, match=r"'data/absent' does not exist"):
        prepare("data/absent")


def test_settings_that_collide_are_refused(prepare, file, tmp_path, monkeypatch):
    for options, said in (
        ({"seq_len": 64, "pack": {"seq_len": 128}}, "seq_len is set twice"),
        ({"publish": {"store": "other"}}, "store is set twice"),
        ({"sources": [{"path": str(file)}]}, "data and sources= both specify rows"),
        ({"workers": 0}, "workers must be"),
        ({"workers": None}, "workers must be"),
        ({"tokenizer": ""}, "no tokenizer"),
        ({"store": Path("s3://bucket/store")}, "lacks the '//' of an address"),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare(file, **options)
    monkeypatch.chdir(tmp_path)
    assert prepare(file, store="gs").uri.startswith(f"{tmp_path}/gs/")  # a folder with that name


def test_a_section_may_be_a_model_and_goes_over_that_of_a_recipe(file):
    recipe = packhouse.Recipe(
        dataset="own",
        sources=[{"path": str(file)}],
        tokenizer=TOKENIZER,
        format={"template": "alpaca", "system": "Be brief."},
    )
    merged = recipe_for(
        recipe, cache=Path("unused"), settings={"format": FormatConfig(train_on="all")}
    )
    assert (merged.format.template, merged.format.train_on) == ("alpaca", "all")


def test_an_invalid_tokenizer_is_refused(prepare):
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json")
    for tokenizer, said in (
        (backend, r"PreTrainedTokenizerFast\(tokenizer_object"),
        (5, "type int is not a tokenizer"),
        ("a" * 5000, "no tokenizer folder at 'a"),
    ):
        with pytest.raises(TokenizerError, match=said):
            prepare(ROWS, tokenizer=tokenizer)
    with pytest.raises(TokenizerError, match="cannot be a URI") as refused:
        prepare(ROWS, tokenizer="https://user:hunter2@host/tokenizer")
    assert "hunter2" not in str(refused.value)


def test_the_printed_load_command_loads_the_new_version(file, tmp_path):
    """A changed recipe does not move `latest`, and a version may have an empty train split."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"dataset: rows\ntokenizer: {TOKENIZER}\nformat: {{template: alpaca}}\n"
        f"publish: {{store: {tmp_path / 'store'}}}\n"
        f"sources:\n- path: {file}\n  eval_only: true\n"
    )
    call = ["prepare", str(recipe), "--cache", str(tmp_path / "cache")]
    packs = []
    for options in ([], ["--set", "pack.seq_len=512"]):
        shown = CliRunner().invoke(cli, [*call, *options])
        assert shown.exit_code == 0, shown.output
        *_, imported, said = shown.stdout.rstrip().splitlines()
        found = {}
        exec(f"{imported.strip()}\n{said.strip()}", found)
        packs.append(len(found["eval"]))
    assert packs[0] < packs[1]


def test_a_recipe_cannot_be_combined_with_files(file):
    done = CliRunner().invoke(cli, ["prepare", "recipe.yaml", str(file), "--tokenizer", TOKENIZER])
    assert done.exit_code == 2
    assert "is a recipe and cannot be combined" in done.stderr


def test_importing_packhouse_imports_nothing_heavy():
    code = (
        "import sys, packhouse; assert packhouse.__version__;"
        "heavy = {'pyarrow', 'transformers', 'datasets', 'pydantic', 'torch', 'duckdb'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "from packhouse.registry import PUBLIC;"
        "modules = PUBLIC;"
        "addons = ('torch', 'dart_math', 'packs_in_memory');"
        "torch = ('packhouse.load.', *(f'packhouse.addons.{name}' for name in addons));"
        "names = [n for n in modules if not modules[n].startswith(torch)];"
        "assert len(names) > 8;"
        "[getattr(packhouse, name) for name in [*names, 'load_packed', 'pack_dataset']];"
        "assert not {'torch', 'prefect', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_mistake_in_a_recipe_names_its_line_unless_it_is_in_an_argument(prepare, file, tmp_path):
    recipe = tmp_path / "numbers.yaml"
    recipe.write_text(f"dataset: numbers\nsources:\n- path: {file}\npack:\n  seed: no\n")
    with pytest.raises(ConfigError, match="line 5"):
        prepare(recipe)
    with pytest.raises(ConfigError) as caught:
        prepare(recipe, pack={"seed": "none"})
    assert "line 5" not in str(caught.value)

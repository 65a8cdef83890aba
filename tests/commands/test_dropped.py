"""`packhouse dropped` lists the rows that were left out."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from packhouse.api import prepare
from packhouse.cli import cli
from tests.prepared import TOKENIZER, prepare_in


@pytest.fixture
def version(tmp_path):
    rows = [{"instruction": f"Say {n}.", "output": f"It is {n}!"} for n in range(20)]
    rows += [rows[3], {"instruction": "Count.", "output": "\x1b[2J" + "one two " * 200}]
    return prepare_in(
        tmp_path,
        rows,
        dataset="numbers",
        format={"template": "alpaca"},
        pack={"seq_len": 128, "over_length": "drop"},
        dedup={"exact": "drop"},
    )


def call(version, cache: Path, *options: str):
    return CliRunner().invoke(cli, ["dropped", version.uri, "--cache", str(cache), *options])


def test_rows_say_why_and_how_long_they_are(version, tmp_path):
    done = call(version, tmp_path / "cache")
    repeat = "rows/rows.jsonl row 20, 71 tokens: repeats rows/rows.jsonl row 3"
    assert f"duplicate: 1 record\n  {repeat}\n" in done.stdout
    assert "tokens: longer than seq_len (128 tokens)" in done.stdout
    assert "Say 3." in done.stdout
    assert "\x1b[2J" not in done.stdout
    (row,) = map(json.loads, call(version, tmp_path / "cache", "--json", "--reason",
                                  "over_seq_len").stdout.splitlines())  # fmt: skip
    assert row["row"] == 21
    assert row["num_tokens"] > 128
    assert row["text"].endswith("one two <|im_end|>")


def test_each_window_of_a_row_has_its_own_text(tmp_path):
    turns = [(f"Say {n}.", f"It is {n}!") for n in range(24)]
    talk = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 2)
    (tmp_path / "recipe.yaml").write_text(
        f"dataset: talks\nsources: [{{path: talks.jsonl}}]\ntokenizer: {TOKENIZER}\n"
        "dedup: {exact: drop}\npack: {seq_len: 256, over_length: window}\n"
    )
    made = prepare(
        tmp_path / "recipe.yaml", store=tmp_path / "store", cache=tmp_path / "cache", progress=False
    )
    windows = list(map(json.loads, call(made, tmp_path / "cache", "--json").stdout.splitlines()))
    assert len(windows) > 1
    assert {each["row"] for each in windows} == {1}
    said = [[n for n in range(24) if f"It is {n}!" in each["text"]] for each in windows]
    assert sorted(n for numbers in said for n in numbers) == list(range(24))
    elsewhere = call(made, tmp_path / "c", "--json", "--recipe", str(tmp_path / "recipe.yaml"))
    raw = [json.loads(line)["raw"] for line in elsewhere.stdout.splitlines()]
    assert raw == [json.dumps({"messages": talk})] * len(windows)


@pytest.mark.usefixtures("own_tokenizers")  # the other cache fetches it from the store
def test_another_machine_reports_that_it_has_no_texts(version, tmp_path):
    done = call(version, tmp_path / "elsewhere")
    assert "rows/rows.jsonl row 20: repeats rows/rows.jsonl row 3" in done.stdout
    assert "the text of 2 rows of rows/rows.jsonl: its path on this machine" in done.stdout
    assert call(version, tmp_path / "cache", "--reason", "json").exit_code == 2


@pytest.fixture
def filtered(request, tmp_path):
    """A version of a file with three of its rows left out by `where`; its path and its recipe."""
    path = tmp_path / f"talk.{request.param}"
    table = pa.table(
        {
            "instruction": [f"Say {n}." for n in range(20)],
            "output": [f"It is {n}! \u202e" for n in range(20)],
        }
    )
    write_rows(path, table)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "dataset": "talk",
                "sources": [
                    {"path": path.name, "name": "talk", "where": "output not like '% 1_!%'"}
                ],
                "tokenizer": str(TOKENIZER),
                "format": {"template": "alpaca"},
                "pack": {"seq_len": 128},
                "publish": {"store": str(tmp_path / "store")},
            }
        )
    )
    version = prepare(recipe, cache=tmp_path / "cache", progress=False)
    return version, path, recipe


def write_rows(path: Path, table: pa.Table) -> None:
    rows = table.to_pylist()
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))


def raw_of(version, *options: str) -> tuple[list[dict], str]:
    done = CliRunner().invoke(cli, ["dropped", version.uri, "--json", *options])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("filtered", ["csv", "parquet"], indirect=True)
def test_filtered_rows_are_shown_as_they_stand_in_their_file(filtered, tmp_path):
    version, _, _ = filtered
    cache, elsewhere = ["--cache", str(tmp_path / "cache")], ["--cache", str(tmp_path / "other")]
    rows, said = raw_of(version, *cache)
    assert {row["row"] for row in rows} == set(range(10, 20))
    assert all(f"Say {row['row']}." in row["raw"] for row in rows)
    assert said == ""
    assert "\u202e" not in call(version, tmp_path / "cache").stdout
    assert "raw" not in raw_of(version, *elsewhere)[0][0]


@pytest.mark.parametrize("filtered", ["jsonl"], indirect=True)
def test_a_file_that_changed_gives_no_text(filtered, tmp_path):
    version, path, recipe = filtered
    cache = ["--cache", str(tmp_path / "cache")]
    other = ["--cache", str(tmp_path / "other"), "--recipe", str(recipe)]
    assert all("raw" in row for row in raw_of(version, *other)[0])
    table = pa.table({"instruction": ["Forged."] * 20, "output": ["Forged."] * 20})
    write_rows(path, table)
    rows, said = raw_of(version, *cache)
    assert not any("raw" in row for row in rows)
    assert said.count("\n") == 1
    assert "the text of 10 rows of talk/talk." in said
    assert "changed since it was scanned" in said
    rows, said = raw_of(version, *other)
    assert not any("raw" in row for row in rows)
    assert "changed since the version was made (its sha256 differs)" in said
    path.unlink()
    for options in (cache, other):
        rows, said = raw_of(version, *options)
        assert not any("raw" in row for row in rows)
        assert said.count("\n") == 1
        assert "does not exist" in said

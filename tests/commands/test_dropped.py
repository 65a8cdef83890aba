"""What `packhouse dropped` says of rows that were left out."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from packhouse.api import prepare
from packhouse.cli import cli

TOKENIZER = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "tokenizer"


@pytest.fixture
def version(tmp_path):
    rows = [{"instruction": f"Say {n}.", "output": f"It is {n}!"} for n in range(20)]
    rows += [rows[3], {"instruction": "Count.", "output": "\x1b[2J" + "one two " * 200}]
    return prepare(
        rows,
        tokenizer=TOKENIZER,
        dataset="numbers",
        store=tmp_path / "store",
        cache=tmp_path / "cache",
        progress=False,
        format={"template": "alpaca"},
        pack={"seq_len": 128, "over_length": "drop"},
        dedup={"exact": "drop"},
    )


def call(version, cache: Path, *options: str):
    return CliRunner().invoke(cli, ["dropped", version.uri, "--cache", str(cache), *options])


def test_rows_say_why_and_how_long_they_are(version, tmp_path):
    done = call(version, tmp_path / "cache")
    assert "duplicate: 1 row\n  rows/rows.jsonl row 20, 71 tokens: repeats rows/rows.jsonl row 3\n"\
        in done.stdout  # fmt: skip
    assert "tokens: more than seq_len 128 tokens" in done.stdout
    assert "Say 3." in done.stdout
    assert "\x1b[2J" not in done.stdout
    (row,) = map(json.loads, call(version, tmp_path / "cache", "--json", "--reason",
                                  "over_seq_len").stdout.splitlines())  # fmt: skip
    assert row["row"] == 21
    assert row["num_tokens"] > 128
    assert row["text"].endswith("one two <|im_end|>")


def test_another_machine_says_that_it_has_no_texts(version, tmp_path):
    done = call(version, tmp_path / "elsewhere")
    assert "rows/rows.jsonl row 20: repeats rows/rows.jsonl row 3" in done.stdout
    assert "no texts, no token counts" in done.stdout
    assert call(version, tmp_path / "cache", "--reason", "json").exit_code == 2

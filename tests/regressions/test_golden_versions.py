"""Committed versions of every layout, which later releases must open and verify.

`python -m tests.regressions.test_golden_versions` publishes missing versions, together with the
rows that they contain. A release that changes the published bytes adds versions and keeps the old
ones.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import packhouse
from packhouse.cli import cli

FOLDER = Path(__file__).parents[1] / "golden" / "versions"
TOKENIZER = "deployments/demo/tokenizer"
LAYOUTS = {
    "labels-parquet": {"layout": "labels"},
    "compact-parquet": {"layout": "compact"},
    "labels-arrow": {"file_format": "arrow"},
    "compact-jsonl": {"layout": "compact", "file_format": "jsonl"},
}
SMALL = {"report": False, "keep_tokenizer": False}
ROWS = [{"instruction": f"Add {n} and 1.", "output": str(n + 1)} for n in range(12)]
PAIRS = [{"prompt": f"{n} + 1?", "chosen": f" {n + 1}", "rejected": " 0"} for n in range(1, 9)]
NAMES = [*LAYOUTS, "pairs"]


def loaded(name: str, split: str, cache: Path) -> list[dict]:
    load = packhouse.load_preferences if name == "pairs" else packhouse.load_packed
    return load(FOLDER / name, split=split, cache=cache).with_format(None).to_list()


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


def test_rows_are_those_of_the_day_of_publication(name, tmp_path):
    expected = json.loads((FOLDER / f"{name}.json").read_text())
    assert {side: loaded(name, side, tmp_path) for side in ("train", "eval")} == expected


def test_it_verifies_and_answers_questions(name):
    verified = CliRunner().invoke(cli, ["verify", str(FOLDER / name)])
    assert verified.exit_code == 0, verified.output
    version = packhouse.open_version(FOLDER / name)
    query = (
        "select outcome, count(*) n, sum(num_trained) > 0 t, count(pack) p from records group by 1"
    )
    (kept,) = version.sql(query).to_pylist()
    num_records = len(PAIRS if name == "pairs" else ROWS)
    assert kept == {"outcome": "kept", "n": num_records, "t": True, "p": num_records}
    assert version.quarantined.num_rows == 1


def publish(name: str, cache: Path) -> None:
    rows = PAIRS if name == "pairs" else ROWS
    source = cache / f"{name}.jsonl"
    cache.mkdir(parents=True, exist_ok=True)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{}\n")
    kind = "pairs" if name == "pairs" else "alpaca"
    recipe = packhouse.Recipe.model_validate(
        {
            "dataset": name,
            "sources": [{"path": str(source), "format": kind, "name": "golden"}],
            "tokenizer": TOKENIZER,
            "validate": {"max_quarantined": 0.5},
            "format": {"template": "completion" if name == "pairs" else "alpaca"},
            "pack": {"seq_len": 256},
            "split": {"eval_count": 2},
            "publish": {**SMALL, **LAYOUTS.get(name, {})},
        }
    )
    packhouse.prepare(recipe, store=FOLDER, cache=cache, progress=False)
    sides = {side: loaded(name, side, cache) for side in ("train", "eval")}
    (FOLDER / f"{name}.json").write_text(json.dumps(sides) + "\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        for each in NAMES:
            if not (FOLDER / each).exists():
                publish(each, Path(place))

"""Shards that only moved within their file: their steps are copied with new row numbers."""

import json
import random

import pytest

from packhouse.run import step
from packhouse.run.step_cache import StepStore
from tests.chain.conftest import Project, question

WORDS = "red green blue one two three four fire water earth wind stone".split()


def alpaca_rows(number):
    """Rows of which some are bad, left out, repeated, nearly equal, or hold HTML."""
    chance = random.Random(number)
    rows = []
    for index in range(number):
        row = question(index) | {"note": "a text that no setting reads" * (index % 4 == 0)}
        row["remark"] = "another text, but of few rows" * (index % 40 == 39)
        row["instruction"] += " " + " ".join(chance.choices(WORDS, k=chance.randrange(30)))
        row["output"] += " <b>bold</b>" * (index % 13 == 0)
        if index % 11 == 5:
            row["output"] = ""
        if index % 19 == 7:
            row = rows[index // 2]
        rows.append(row)
    return rows


def chat(row):
    turns = ("user", row["instruction"]), ("assistant", row["output"])
    return {
        "remark": row["remark"],
        "messages": [{"role": role, "content": text} for role, text in turns],
    }


RECIPES = {
    "alpaca": {
        "sources": [{"format": "alpaca", "where": "instruction NOT LIKE '%fire fire%'"}],
        "audit": {
            "quality": {},
            "benchmarks": [{"path": "benchmark.jsonl", "format": "text"}],
            "benchmark_ngram": 5,
            "on_match": "drop",
        },
    },
    "chat": {"sources": [{"format": "chat"}], "format": {"template": "chat"}},
}


def write(project, name, rows):
    if name.endswith(".json"):
        (project.root / name).write_text(json.dumps(rows, indent=1))
    else:
        project.write(rows, name)


def steps_of(project, prepared):
    """Digests of the files, and facts, of every step of a run."""
    store, found = StepStore(project.cache / "steps"), {}
    for receipt in prepared.receipts:
        kept = store.find(*receipt.ref)
        assert kept is not None
        found[kept.ref] = {name: file.sha256 for name, file in kept.files.items()}, kept.facts
    return found


@pytest.fixture
def copied(monkeypatch):
    """Names of the steps that are copied."""
    names, copy = [], step.copy_moved

    def noted(old, *arguments):
        names.append(old.step)
        copy(old, *arguments)

    monkeypatch.setattr(step, "copy_moved", noted)
    return names


@pytest.mark.parametrize(
    ("name", "kind", "place"), [("rows.jsonl", "alpaca", 1), ("rows.json", "chat", 100)]
)
def test_an_inserted_row_leaves_what_a_cold_run_leaves(
    name, kind, place, tmp_path, monkeypatch, copied
):
    monkeypatch.setattr("packhouse.run.steps.validate.MAX_SHARD_BYTES", 4000)
    warm, cold = Project(tmp_path / "warm"), Project(tmp_path / "cold")
    rows = alpaca_rows(200)
    benchmark = [{"text": rows[150]["instruction"]}]
    rows = list(map(chat, rows)) if kind == "chat" else rows
    settings = {"path": name, "ignored_fields": ["note"]}
    for project in (warm, cold):
        project.root.mkdir()
        project.write(benchmark, "benchmark.jsonl")
        project.write_recipe(
            **{
                "split": {"eval_fraction": 0.2},
                "dedup": {"exact": "drop", "near": "keep"},
                "validate": {"max_quarantined": 0.5},
                **RECIPES[kind],
                "sources": [{**RECIPES[kind]["sources"][0], **settings}],
            }
        )
    write(warm, name, rows)
    warm.prepare()
    rows[place:place] = [rows[17], {"broken": 1}, rows[18]]
    for project in (warm, cold):
        write(project, name, rows)
    assert not copied
    second = warm.prepare()
    steps = set(copied)
    copied.clear()
    first = cold.prepare()

    assert not copied
    assert steps >= {"validate", "format", "tokenize", "audit"}
    assert ("benchmarks" in steps) == (kind == "alpaca")
    cached = [each.cached for each in second.receipts if each.step == "validate"]
    assert cached.count(True) >= (place > 1)
    assert steps_of(warm, second) == steps_of(cold, first)
    assert second.version == first.version

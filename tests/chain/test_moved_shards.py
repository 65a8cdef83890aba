"""Shards that only moved within their file: their steps are copied with new row numbers."""

import json
import random
import shutil

import pytest

from packhouse.addons.plan import explain_plan
from packhouse.run import step
from packhouse.run.chain import plan_jobs
from packhouse.run.step_cache import StepStore, Workspace
from packhouse.system.plugins import PluginFunction
from tests.chain.conftest import Project, question
from tests.prepared import prepare_in

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


SIDE_STEPS = {"fingerprints", "benchmarks"}  # `explain` lists no side jobs


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


def insert(place):
    def edit(rows):
        return [*rows[:place], rows[17], {"broken": 1}, rows[18], *rows[place:]]

    return edit


def test_row_numbers_in_the_words_of_a_plug_in_are_those_of_a_cold_run(tmp_path, monkeypatch):
    monkeypatch.setattr("packhouse.run.steps.validate.MAX_SHARD_BYTES", 4000)

    def odd(table):
        return {n: f"row {row}" for n, row in enumerate(table["row"].to_pylist()) if row % 9 == 3}

    audit = {"checks": [PluginFunction(odd, version="1")], "max_failed_checks": 1.0}
    rows = list(map(question, range(100)))
    found = []
    for edits in ([rows, [question(200), *rows]], [[question(200), *rows]]):
        folder = tmp_path / str(len(edits))
        folder.mkdir()
        for each in edits:
            (folder / "rows.json").write_text(json.dumps(each))
            data = {"path": folder / "rows.json", "format": "alpaca"}
            version = prepare_in(folder, data, audit=audit)
        found.append(version.audit["checks"])
    assert found[0] == found[1]


def test_rows_appended_to_a_broken_array_leave_what_a_cold_run_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr("packhouse.run.steps.validate.MAX_SHARD_BYTES", 2000)
    long = [json.dumps(question(n) | {"output": "long " * n}) for n in (170, 240)]
    # One element by its brackets, three by its lines. Only the last shard of a file, whose
    # elements are not counted, is split by lines.
    broken = f'{{"instruction": "a", "output": [1}},\n{long[0]},\n{{"output": "b"}}}}'
    first = [broken, json.dumps(question(0))]
    second = [*first, long[1], *(json.dumps(question(n)) for n in range(30))]
    warm, cold = Project(tmp_path / "warm"), Project(tmp_path / "cold")
    runs = []
    for project, edits in ((warm, [first, second]), (cold, [second])):
        project.root.mkdir()
        source = {"path": "rows.json", "format": "alpaca"}
        project.write_recipe(sources=[source], validate={"max_quarantined": 1.0})
        for elements in edits:
            (project.root / "rows.json").write_text(",\n".join(elements).join("[]"))
            runs.append(project.prepare())

    read = [run.receipts[0].facts for run in runs]
    assert [facts.rows_in for facts in read] == [4, 2, 2]
    assert len({facts.origin.sha256 for facts in read}) == 1
    assert steps_of(warm, runs[1]) == steps_of(cold, runs[2])


def test_explain_copies_nothing_from_files_that_are_gone(project, monkeypatch):
    monkeypatch.setattr("packhouse.run.steps.validate.MAX_SHARD_BYTES", 4000)
    project.write_rows(range(1, 100))
    project.prepare()
    project.write_rows(range(100))
    said = []
    for _ in range(2):
        recipe = project.recipe()
        rows = explain_plan(plan_jobs(recipe), Workspace(cache=project.cache), recipe)
        said.append([row.step for row in rows if "moved" in " ".join(row.why)])
        shutil.rmtree(project.cache / "steps", ignore_errors=True)
    assert "tokenize" in said[0]
    assert said[1] == []


# Text before the first row moves bytes, but no row.
@pytest.mark.parametrize(
    ("name", "kind", "edit"),
    [
        ("rows.jsonl", "alpaca", insert(1)),
        ("rows.json", "chat", insert(100)),
        ("rows.json", "alpaca", "\n\n"),
    ],
    ids=["start", "middle", "text-before"],
)
def test_an_edited_file_leaves_what_a_cold_run_leaves(
    name, kind, edit, tmp_path, monkeypatch, copied
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
    for project in (warm, cold):
        if callable(edit):
            write(project, name, edit(rows))
        else:
            write(project, name, rows)
            path = project.root / name
            path.write_text(edit + path.read_text())
    assert not copied
    explained = explain_plan(plan_jobs(warm.recipe()), Workspace(cache=warm.cache), warm.recipe())
    second = warm.prepare()
    steps = set(copied)
    copied.clear()
    first = cold.prepare()

    assert not copied
    assert steps >= {"validate", "format", "tokenize", "audit"}
    assert {job.step for job in explained if "moved" in " ".join(job.why)} == steps - SIDE_STEPS
    assert ("benchmarks" in steps) == (kind == "alpaca")
    assert steps_of(warm, second) == steps_of(cold, first)
    assert second.version == first.version

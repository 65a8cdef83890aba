"""Rows that match a benchmark are dropped, or moved to the same split as the benchmark."""

import json

import pytest
import yaml

from packhouse.addons.ask.query import read
from packhouse.errors import AuditError, ConfigError
from packhouse.store import open_version
from tests.audit.test_audit_gate import Project

QUESTION = "A farmer has 17 sheep and all but nine die. How many are left?"
OTHER = "Which river begins in Bohemia, flows through Dresden and ends in the North Sea?"


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    rows = [{"instruction": f"Add 1 to {n}.", "output": f"{n + 1}."} for n in range(40)]
    rows[5] = {"instruction": QUESTION, "output": "Nine."}
    rows[9] = {"instruction": QUESTION, "output": "There are nine of them."}
    rows[30] = {"instruction": f"Riddle: {QUESTION}", "output": "9."}
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    exam(tmp_path, QUESTION)
    recipe = yaml.safe_load(project.path.read_text())
    recipe["audit"] = {
        "benchmarks": [{"path": "exam.jsonl", "format": "question_answer"}],
        "benchmark_ngram": 10,
        "on_match": "drop",
    }
    project.path.write_text(yaml.safe_dump(recipe))
    return project


def exam(folder, *questions):
    rows = [{"question": question, "answer": "9"} for question in questions]
    (folder / "exam.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def matched(project, published, outcome="contaminated"):
    return [r for r in project.records(published) if r["outcome"] == outcome]


def test_matching_rows_are_left_out_counted_and_listed(project):
    published = project.prepare()
    (packed,) = [line for line in published.ledger if line.step == "pack"]
    assert packed.dropped == {"contaminated": 3}
    rows = matched(project, published)
    assert [row["row"] for row in rows] == [5, 9, 30]
    assert {row["repeats"] for row in rows} == {"exam/exam.jsonl row 0"}
    assert all(row["times"] == 0 < row["num_tokens"] for row in rows)
    opened = open_version(published.store, "sums")
    dropped = read(opened, "SELECT detail FROM dropped").to_pylist()
    assert dropped == [{"detail": "shares words with exam/exam.jsonl row 0"}] * 3
    manifest = opened.manifest
    found = manifest.audit["contamination"]
    assert (found["contaminated"], found["on_match"]) == (3, "drop")
    assert found["by_benchmark"] == {"exam/exam.jsonl": 3}
    with pytest.raises(AuditError, match=r"change audit.max_contaminated, audit.on_match"):
        project.prepare("audit.on_match=stop")


def test_the_benchmark_decides_pack_and_no_step_before(project):
    published = project.prepare()
    again = project.prepare()
    assert (again.version, again.created) == (published.version, False)
    exam(project.folder, OTHER)
    other = project.prepare()
    assert other.version != published.version
    assert matched(project, other) == []
    done = project.cached_steps(other)
    assert "tokenize" in done
    assert "pack" not in done
    # A setting that only stops the run is part of the version but not of any pack.
    exam(project.folder, QUESTION)
    stopped = project.prepare("audit.on_match=stop", "audit.max_contaminated=1")
    exam(project.folder, OTHER)
    assert "pack" in project.cached_steps(
        project.prepare("audit.on_match=stop", "audit.max_contaminated=1")
    )
    assert len(matched(project, stopped)) == 0


def test_matching_rows_go_to_eval_with_all_of_their_prompt(project):
    """Rows 5 and 9 ask the same; 30 asks it in other words. Copies of a row stay with it."""
    lines = (project.folder / "sums.jsonl").read_text().splitlines()
    lines.append(json.dumps({"instruction": "Add 1 to 3.", "output": f"{QUESTION} Four!"}))
    (project.folder / "sums.jsonl").write_text("\n".join(lines))
    settings = ["audit.on_match=same_side", "split.eval_fraction=0.01"]
    published = project.prepare(*settings, "sources.0.weight=3")
    in_eval = [row for row in project.records(published) if row["split"] == "eval"]
    assert [row["row"] for row in in_eval] == [3, 5, 9, 30, 40]  # 3 has the same prompt as 40
    assert {row["times"] for row in in_eval} == {3}
    assert published.published.statistics["eval"].num_sequences == 15
    assert published.published.audit["contamination"]["on_match"] == "same_side"


def test_a_side_must_be_there(project):
    with pytest.raises(ConfigError, match="has no eval split"):
        project.prepare("audit.on_match=same_side")


def test_windows_of_a_matching_row_all_go(project):
    lines = (project.folder / "sums.jsonl").read_text().splitlines()
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": f"{QUESTION if n == 8 else 'Go on.'} {n}"}
        for n in range(40)
    ]
    (project.folder / "sums.jsonl").write_text("\n".join(lines[:3]))
    (project.folder / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    published = project.prepare(
        'sources=[{"path": "sums.jsonl", "format": "alpaca"}, {"path": "chat.jsonl"}]',
        "pack.over_length=window",
        "pack.seq_len=64",
    )
    rows = [row for row in project.records(published) if row["source"] == "chat/chat.jsonl"]
    assert len(rows) > 2
    assert {row["outcome"] for row in rows} == {"contaminated"}

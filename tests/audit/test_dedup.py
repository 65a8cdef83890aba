"""Exact duplicates are dropped by policy and counted in the ledger, however data is sharded."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from packhouse.pack.dedup import first_of_each
from tests.audit.test_audit_gate import Project


@pytest.fixture
def project(tmp_path):
    """Ten rows, and a second file with the same ten and one more."""
    project = Project(tmp_path)
    rows = [{"instruction": f"Add 1 to {n}.", "output": f"{n + 1}."} for n in range(10)]
    again = [*rows, {"instruction": "Add 1 to 7.", "output": "That is 8."}]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, again)) + "\n")
    recipe = yaml.safe_load(project.path.read_text())
    recipe["format"]["template"] = "sound.jinja"
    recipe["sources"].append({"path": "more.jsonl", "format": "alpaca"})
    recipe["split"] = {"eval_fraction": 0.3}
    recipe["audit"] = {"max_duplicates": 1}
    project.path.write_text(yaml.safe_dump(recipe))
    return project


def pack_line(prepared):
    return next(line for line in prepared.ledger if line.step == "pack")


def test_dropped_duplicates_are_in_the_ledger_in_rows_and_tokens(project):
    kept = project.prepare()
    dropped = project.prepare("dedup.exact=drop")

    assert (pack_line(kept).rows_out, pack_line(kept).dropped) == (21, {})
    line = pack_line(dropped)
    assert (line.rows_out, dict(line.dropped)) == (11, {"duplicate": 10})
    assert line.tokens_in - line.tokens_out == line.tokens_dropped["duplicate"] > 0
    assert project.cached_steps(dropped) == ["validate", "format", "tokenize"]
    assert kept.published.audit["dataset"]["duplicates"] == 10
    assert dropped.published.audit["dataset"]["duplicates"] == 0


def test_the_first_by_file_and_row_stays_and_another_answer_is_no_duplicate(project):
    prepared = project.prepare("dedup.exact=drop")
    (path,) = (project.folder / "store").rglob("records/*.parquet")
    records = pq.read_table(path).to_pylist()
    assert len(records) == 21
    assert prepared.version
    lost = [(r["source"], r["outcome"]) for r in records if r["times"] == 0]
    assert lost == [("sums/sums.jsonl", "duplicate")] * 10  # `more` comes before `sums`
    assert len({r["record_id"] for r in records if r["times"]}) == 11


def test_shards_change_nothing(project, monkeypatch):
    whole = project.prepare("dedup.exact=drop")
    monkeypatch.setattr("packhouse.run.steps.validate.MAX_SHARD_BYTES", 200)
    project.cache = project.folder / "other"
    parts = project.prepare("dedup.exact=drop", f"publish.store={project.folder / 'other-store'}")
    assert len([r for r in parts.receipts if r.step == "tokenize"]) > 4
    assert parts.published.content_id == whole.published.content_id


@given(st.lists(st.integers(0, 5)))
def test_a_repeat_is_of_the_first_that_it_equals(numbers):
    due = [numbers.index(number) for number in numbers]
    assert first_of_each(np.array(numbers, np.int64)).tolist() == due

"""Weighted sources: taken by hash of the record, repeated, counted, never on both sides."""

import json

import numpy as np
import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.loaders import load_packed
from packhouse.recipe import SourceConfig
from packhouse.steps.mixing import times_of
from tests.audit.test_audit_gate import Project


def ids(num_records):
    return pa.array([f"{n * 0x9E3779B97F4A7C15 % 2**64:016x}0000" for n in range(num_records)])


@given(st.floats(0, 5), st.integers(0, 3))
@settings(deadline=None)
def test_every_record_is_taken_floor_or_ceiling_of_weight_times(weight, seed):
    times = times_of(ids(500), SourceConfig(path="", weight=weight, mix_seed=seed))
    assert set(times.tolist()) <= {int(weight), int(weight) + 1}
    assert abs(times.mean() - weight) < 0.15


def test_more_weight_only_adds_and_appended_rows_change_nothing():
    few, more = (times_of(ids(1000), SourceConfig(path="", weight=w)) for w in (0.3, 0.7))
    assert (few <= more).all()
    grown = times_of(ids(1500), SourceConfig(path="", weight=0.3))
    assert np.array_equal(grown[:1000], few)
    before = times_of(ids(1000), SourceConfig(path="", max_records=100)) > 0
    after = times_of(ids(1500), SourceConfig(path="", max_records=100)) > 0
    assert not (after[:1000] & ~before).any()  # some give way, none comes in that was out
    assert 50 < (before & after[:1000]).sum() < 100


def test_seeds_choose_otherwise_and_the_two_choices_are_independent():
    one, other = (
        times_of(ids(1000), SourceConfig(path="", weight=0.5, mix_seed=s)) for s in (0, 1)
    )
    assert 400 < (one != other).sum() < 600
    both = times_of(ids(1000), SourceConfig(path="", weight=0.5, max_records=400))
    assert 160 < both.sum() < 240


@pytest.fixture
def project(tmp_path):
    """Two sources of 60 rows; `b` holds ten rows of `a`."""
    project = Project(tmp_path)
    rows = [{"instruction": f"Add 1 to {n}.", "output": f"{n + 1}."} for n in range(110)]
    for name, part in (("a", rows[:60]), ("b", rows[50:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)) + "\n")
    recipe = yaml.safe_load(project.path.read_text())
    recipe["format"]["template"] = "sound.jinja"
    recipe["sources"] = [{"path": f"{n}.jsonl", "format": "alpaca"} for n in "ab"]
    recipe["split"] = {"eval_fraction": 0.3}
    recipe["audit"] = {"max_duplicates": 1}
    project.path.write_text(yaml.safe_dump(recipe))
    return project


def test_sources_are_mixed_and_every_row_is_accounted_for(project):
    whole = project.prepare()
    mixed = project.prepare("sources.0.weight=2.5", "sources.1.weight=0.25")
    assert project.cached_steps(mixed) == ["validate", "format", "tokenize"]
    records = project.records(mixed)
    times = {s: [r["times"] for r in records if r["source"].startswith(s)] for s in "ab"}
    assert set(times["a"]) == {2, 3}
    assert set(times["b"]) == {0, 1}
    line = next(line for line in mixed.ledger if line.step == "pack")
    assert line.rows_in == 120
    assert dict(line.dropped) == {"sampled_out": times["b"].count(0)}
    assert dict(line.added) == {"repeated": sum(times["a"]) - 60}
    assert line.rows_out == sum(times["a"]) + sum(times["b"])
    assert sum(line.tokens_added.values()) > 0
    facts = mixed.published.mixed
    assert facts["a"]["repeated"] == sum(times["a"]) - 60
    assert facts["b"]["sampled_out"] == times["b"].count(0)
    assert mixed.published.audit["dataset"]["duplicates"] <= 10  # repeats on purpose are none
    assert mixed.version != whole.version


def test_repeats_are_sequences_of_their_own_on_one_side(project):
    mixed = project.prepare("sources.0.weight=3")
    sides = {}
    for side in ("train", "eval"):
        packs = load_packed(f"{project.folder}/store/{mixed.dataset}", split=side)
        found = [name for row in packs["record_ids"] for name in row]
        sides[side] = {name: found.count(name) for name in found}
    assert not sides["train"].keys() & sides["eval"].keys()
    by_id = {}
    for record in project.records(mixed):
        by_id[record["record_id"]] = by_id.get(record["record_id"], 0) + record["times"]
    assert sides["train"] | sides["eval"] == by_id


def test_a_row_that_is_not_taken_displaces_no_equal_one(project):
    mixed = project.prepare("sources.0.weight=0", "dedup.exact=drop")
    line = next(line for line in mixed.ledger if line.step == "pack")
    assert dict(line.dropped) == {"sampled_out": 60}
    assert line.rows_out == 60


def test_max_records_is_kept_to_the_record(project):
    mixed = project.prepare("sources.0.max_records=7", "sources.0.weight=2")
    assert sum(r["times"] for r in project.records(mixed) if r["source"].startswith("a")) == 14

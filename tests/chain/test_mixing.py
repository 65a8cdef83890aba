"""Weighted sources: rows are chosen by hash, repeated, counted, and never in both splits."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from packhouse import load_packed
from packhouse.pack.overlength import Admitted, join_admitted
from packhouse.recipe import Recipe, SourceConfig
from packhouse.records.table_schemas import TOKENIZED
from packhouse.run.steps.pack import mix, row_keys, times_of
from tests.audit.conftest import Sums


def ids(num_records):
    return pa.array([f"{n * 0x9E3779B97F4A7C15 % 2**64:016x}0000" for n in range(num_records)])


@given(st.floats(0, 5), st.integers(0, 3))
@settings(deadline=None)
def test_every_row_is_taken_floor_or_ceiling_of_weight_times(weight, seed):
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
    assert not (after[:1000] & ~before).any()  # some leave, but none that was out comes in
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
    """Two sources of 60 rows; `b` contains ten rows of `a`."""
    project = Sums(
        tmp_path,
        sources=[{"path": f"{name}.jsonl", "format": "alpaca"} for name in "ab"],
        split={"eval_fraction": 0.3},
        audit={"max_duplicates": 1},
    )
    rows = [{"instruction": f"Add 1 to {n}.", "output": f"{n + 1}."} for n in range(110)]
    project.write(rows[:60], "a.jsonl")
    project.write(rows[50:], "b.jsonl")
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
    assert mixed.published.audit["dataset"]["duplicates"] <= 10  # not the repeats
    assert mixed.version != whole.version


def test_repeats_are_sequences_of_their_own_on_one_side(project):
    mixed = project.prepare("sources.0.weight=3")
    sides = {}
    for side in ("train", "eval"):
        packs = load_packed(f"{project.root}/store/{mixed.dataset}", split=side)
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


ROWS = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=30
)  # the records of each row: True for those that can be packed


def split_rows(rows, numbers):
    """Shards of the records of these rows, and their conversations."""
    names = {number: ids(2000)[number].as_py() for number in numbers}
    records = [
        {
            "record_id": names[number] if len(rows[number]) == 1 else f"{place}{names[number][1:]}",
            "row": number,
            "group_key": names[number],
        }
        for number in numbers
        for place in range(len(rows[number]))
    ]
    validated = [{"record_id": names[number], "row": number} for number in numbers]
    kept = np.array([is_kept for number in numbers for is_kept in rows[number]], np.bool_)
    lengths = np.full(len(kept), 5, np.int32)
    at = np.flatnonzero(kept).astype(np.int32)
    own = [TOKENIZED.field(name) for name in ("record_id", "row", "group_key")]
    return (
        pa.Table.from_pylist(records, pa.schema(own)),
        pa.Table.from_pylist(validated, pa.schema(own[:2])),
        Admitted(at, lengths[at], (~kept).astype(np.uint8), lengths),
    )


def mixed_rows(rows, parts, **settings):
    """Return how often each row is used; all its packable records must agree."""
    recipe = Recipe.model_validate(
        {"dataset": "d", "tokenizer": "t", "sources": [{"path": "s.jsonl", **settings}]}
    )
    shards, validated, admitted = zip(*(split_rows(rows, part) for part in parts), strict=True)
    before = join_admitted(admitted)
    bounds = np.cumsum([0, *(shard.num_rows for shard in shards)])
    after, times = mix(before, bounds, shards, validated, ["s"] * len(shards), recipe)
    found = {}
    numbers = [number for shard in shards for number in shard["row"].to_pylist()]
    for place, number in enumerate(numbers):
        if place in before.rows:
            found.setdefault(number, set()).add(int(times[place]))
            assert (place in after.rows) == (times[place] > 0)
        else:
            assert times[place] == 0
    assert all(len(each) == 1 for each in found.values())
    return {number: each.pop() for number, each in found.items()}


@given(ROWS, st.data())
@settings(deadline=None, max_examples=25)
def test_a_row_is_taken_with_all_its_records_and_as_if_it_had_one(rows, data):
    chosen = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "weight": st.sampled_from([0.3, 1.5, 2.0]),
                "max_records": st.integers(0, 12),
                "mix_seed": st.integers(0, 3),
            },
        )
    )
    numbers = list(range(len(rows)))
    cut = data.draw(st.integers(0, len(rows)))
    found = mixed_rows(rows, [numbers], **chosen)
    assert mixed_rows(rows, [numbers[:cut], numbers[cut:]], **chosen) == found
    packed = [number for number in numbers if any(rows[number])]
    as_one = [[True] if any(row) else [False] for row in rows]
    assert mixed_rows(as_one, [numbers], **chosen) == found
    assert sorted(found) == packed
    if "max_records" in chosen and chosen.get("weight", 1.0) >= 1:
        assert sum(times > 0 for times in found.values()) == min(chosen["max_records"], len(packed))


def test_questions_of_one_article_are_rows_of_their_own():
    of_article, of_turns = ["0", "1"], ["2", "3"]
    shard = pa.table(
        {
            "record_id": of_article + of_turns,
            "row": [4, 4, 7, 7],
            "group_key": ["a", "b", "c", "c"],
        }
    )
    validated = pa.table({"record_id": [*of_article, "4"], "row": [4, 4, 7]})
    for is_stripped in (False, True):
        keys = row_keys(shard, validated, is_stripped=is_stripped)
        assert keys.to_pylist() == [*of_article, "4", "4"]

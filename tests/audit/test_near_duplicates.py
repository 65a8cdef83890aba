"""Near duplicates are found exactly where planted, and dropped or kept in one split by policy."""

import json
import random
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from packhouse.addons.near_dedup import find_near
from packhouse.errors import ConfigError
from packhouse.pack.dedup import (
    FINGERPRINTS,
    drop_in_order,
    fingerprint_table,
    first_of_each,
    near_libraries,
)
from packhouse.read import read_shard, scan_source
from packhouse.recipe import DedupConfig, SourceConfig, ValidateConfig
from tests.audit.conftest import SUMS, Sums

WORDS = [f"w{n}" for n in range(3000)]


def text(rng, num_words):
    return " ".join(rng.choices(WORDS, k=num_words))


def planted(num_rows, seed=0):
    """Rows, each followed later by a copy with one of its 60 words replaced."""
    rng = random.Random(seed)
    rows = [{"instruction": text(rng, 20), "output": text(rng, 40)} for _ in range(num_rows)]
    copies = []
    for row in rows:
        words = row["output"].split()
        words[rng.randrange(40)] = "another"
        copies.append({**row, "output": " ".join(words)})
    return rows + copies


def conversations(tmp_path, rows, **config):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    source = SourceConfig(path=str(path), **config)
    parts = [read_shard(s, source, ValidateConfig(), "prompt") for s in scan_source(source)]
    return pa.concat_tables([part.validated for part in parts]).combine_chunks()


def near_of(table, config, num_parts=1):
    cuts = np.linspace(0, table.num_rows, num_parts + 1).astype(int)
    parts = [table.slice(a, b - a) for a, b in pairwise(cuts)]
    prints = [fingerprint_table(part, config) for part in parts]
    rows = [np.arange(part.num_rows) for part in parts]
    return find_near(prints, rows, config.near_threshold)


def test_the_shards_change_nothing(tmp_path):
    table = conversations(tmp_path, planted(30))
    whole, parts = (near_of(table, DedupConfig(near="drop"), n) for n in (1, 7))
    assert all(map(np.array_equal, whole, parts))


@given(st.lists(st.lists(st.integers(0, 12), max_size=12), min_size=2, max_size=12))
@settings(max_examples=30, deadline=None)
def test_similarity_is_that_of_sets(sets):
    """With enough permutations, every similar pair is a candidate, so the pairs are exact."""
    sets = [sorted({2 * n for n in each}) for each in sets]
    hashes = np.zeros((len(sets), 32), np.uint32)
    columns = {
        "normal_id": [f"{n:020x}" for n in range(len(sets))],
        "shingles": sets,
        "minhash": hashes.tolist(),  # one band for all, so every pair is a candidate
    }
    near, similarity, _ = find_near([pa.table(columns, FINGERPRINTS)], [np.arange(len(sets))], 0.5)
    due = {
        (i, j): len(set(sets[i]) & set(sets[j])) / len(set(sets[i]) | set(sets[j]))
        for j in range(len(sets))
        for i in range(j)
        if sets[i] and sets[j]
    }
    due = {pair: share for pair, share in due.items() if share >= 0.5}
    found = zip(map(tuple, near.tolist()), similarity.tolist(), strict=True)
    assert dict(found) == due


def test_a_row_falls_only_for_one_that_stays():
    chain = np.array([[0, 1], [1, 2], [2, 3], [0, 3]])
    assert drop_in_order(chain).tolist() == [[0, 1], [2, 3]]


def test_other_answers_to_a_long_text_are_no_duplicates_but_share_a_side(tmp_path):
    long = text(random.Random(1), 200)
    rows = [
        {"instruction": f"{long} {n}", "output": o} for n, o in enumerate(["Yes it is.", "Never."])
    ]
    _, similarity, answers = near_of(conversations(tmp_path, rows), DedupConfig(near="drop"))
    assert similarity[0] > 0.9
    assert answers.tolist() == [0.0]


def test_ideographs_are_words(tmp_path):
    asked, said = "请告诉我北京今天的天气怎么样", "北京今天晴朗气温二十度适合出门散步"
    rows = [{"instruction": f"{asked}{end}谢谢", "output": said} for end in "呢啊"]
    rows.append({"instruction": "写一首关于春天的诗", "output": "春眠不觉晓处处闻啼鸟"})
    near, _, _ = near_of(conversations(tmp_path, rows), DedupConfig(near="drop"))
    assert near.tolist() == [[0, 1]]


def test_without_the_add_on_a_run_fails_before_any_work(monkeypatch):
    monkeypatch.setattr("packhouse.registry.is_there", lambda module: "near" not in module)

    with pytest.raises(ConfigError, match=r"needs packhouse\.addons\.near_dedup"):
        near_libraries(DedupConfig(near="drop"))


def test_without_datasketch_the_remedy_is_named(tmp_path, monkeypatch):
    table = conversations(tmp_path, planted(2))
    monkeypatch.setitem(sys.modules, "datasketch", None)
    assert fingerprint_table(table, DedupConfig(exact="drop")).num_rows == 4
    with pytest.raises(ConfigError, match=r"pip install .*\[dedup\]"):
        fingerprint_table(table, DedupConfig(near="drop"))
    with pytest.raises(ConfigError, match="needs datasketch"):
        near_libraries(DedupConfig(near="same_side"))  # checked before any work


@pytest.fixture
def project(tmp_path):
    """40 rows, their near copies, and one row that differs from the first only in whitespace."""
    rows = planted(40)
    rows.append({**rows[0], "output": rows[0]["output"].replace(" ", "\n ")})
    return Sums(
        tmp_path,
        rows,
        pack={"seq_len": 2048},
        split={"eval_fraction": 0.4, "group_by": "record"},
        audit={"max_duplicates": 1},
    )


def pack_line(prepared):
    return next(line for line in prepared.ledger if line.step == "pack")


def test_dropped_near_rows_are_counted_and_say_what_they_repeat(project):
    prepared = project.prepare("dedup.near=drop")
    line = pack_line(prepared)
    assert dict(line.dropped) == {"duplicate": 1, "near_duplicate": 40}
    assert line.rows_out == 40
    records = project.records(prepared)
    ids = [record["record_id"] for record in records]
    assert [r["repeats"] for r in records[40:]] == [*ids[:40], ids[0]]
    assert [r["times"] for r in records] == [1] * 40 + [0] * 41
    found = prepared.published.dedup
    assert (found.equal.rows, found.near.rows) == (1, 40)
    assert found.near.samples[0]["repeats"]["row"] == 0
    assert prepared.published.audit["dataset"]["near_duplicates"] == 0


def test_same_side_keeps_all_and_parts_none(project):
    split = project.prepare()
    sides = [record["split"] for record in project.records(split)]
    assert sum(a != b for a, b in zip(sides[:40], sides[40:80], strict=True)) > 5
    together = project.prepare("dedup.near=same_side")
    records = project.records(together)
    sides = [record["split"] for record in records]
    assert sides[:40] == sides[40:80]
    assert sides[80] == sides[0]
    assert {"train", "eval"} == set(sides)
    assert pack_line(together).dropped == {}
    audit = together.published.audit["dataset"]
    assert (audit["near_duplicates"], audit["both_sides"]) == (40, 0)


def exchanges(seed, num_turns=3):
    rng = random.Random(seed)
    return [
        {"role": role, "content": text(rng, words)}
        for _ in range(num_turns)
        for role, words in (("user", 10), ("assistant", 60))
    ]


def with_a_word_changed(messages):
    """Rows that are similar turn by turn: each text ends in a different word."""
    changed = [m["content"].rsplit(" ", 1)[0] + " changed" for m in messages]
    return [{**m, "content": c} for m, c in zip(messages, changed, strict=True)]


def test_examples_of_one_conversation_are_no_duplicates_of_each_other(project):
    talks = [exchanges(seed) for seed in range(20)]
    talks += [with_a_word_changed(talk) for talk in talks[:15]]
    rows = [{"messages": talk} for talk in talks]
    project.write(rows, "sums.jsonl")
    base = ["sources.0.format=chat", "format.template=chat", "split.group_by=record"]
    base += ["format.turns=alone", "pack.over_length=window", "pack.seq_len=400"]

    kept = project.prepare(*base, "dedup.near=keep")
    assert pack_line(kept).dropped == {}
    rows = [record["row"] for record in project.records(kept)]
    again = sum(row >= 20 for row in rows)
    assert again >= 30
    near = kept.published.dedup.near
    assert (near.rows, near.dropped) == (15, 0)  # conversations, not examples
    assert near.on_both_sides > 0

    line = pack_line(project.prepare(*base, "dedup.near=drop"))
    assert dict(line.dropped) == {"near_duplicate": again}
    assert line.rows_out == len(rows) - again

    together = project.prepare(*base, "dedup.near=same_side")
    sides = {}
    for record in project.records(together):
        sides.setdefault(record["row"], set()).add(record["split"])
    assert all(len(found) == 1 for found in sides.values())
    assert [sides[row] for row in range(15)] == [sides[row + 20] for row in range(15)]


def test_exact_same_side_joins_rows_that_differ_in_white_space(project):
    prepared = project.prepare("dedup.exact=same_side")
    sides = [record["split"] for record in project.records(prepared)]
    assert sides[80] == sides[0]
    assert pack_line(prepared).rows_out == 81


def test_appended_rows_take_nothing_from_train_to_eval(project):
    before = project.records(project.prepare("dedup.near=same_side"))
    more = planted(80, seed=0)[80:] + planted(30, seed=9)
    with (project.root / "sums.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in more)
    after = project.records(project.prepare("dedup.near=same_side"))
    moved = [(a["split"], b["split"]) for a, b in zip(before, after, strict=False)]
    assert ("train", "eval") not in moved


@pytest.fixture
def repeated(tmp_path):
    """Ten rows, and a second file with the same ten and one more."""
    project = Sums(
        tmp_path,
        SUMS[:10],
        sources=[{"path": f"{name}.jsonl", "format": "alpaca"} for name in ("sums", "more")],
        split={"eval_fraction": 0.3},
        audit={"max_duplicates": 1},
    )
    project.write(
        [*SUMS[:10], {"instruction": "Add 1 to 7.", "output": "That is 8."}], "more.jsonl"
    )
    return project


def test_the_first_by_file_and_row_stays_and_another_answer_is_no_duplicate(repeated):
    prepared = repeated.prepare("dedup.exact=drop")
    records = repeated.records(prepared)
    assert len(records) == 21
    lost = [(r["source"], r["outcome"]) for r in records if r["times"] == 0]
    assert lost == [("sums/sums.jsonl", "duplicate")] * 10  # `more` comes before `sums`
    assert len({r["record_id"] for r in records if r["times"]}) == 11


@given(st.lists(st.integers(0, 5)))
def test_a_repeat_is_of_the_first_that_it_equals(numbers):
    due = [numbers.index(number) for number in numbers]
    assert first_of_each(np.array(numbers, np.int64)).tolist() == due

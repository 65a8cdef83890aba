"""Evaluation by source: files of each source, and sources used only for evaluation."""

from typing import Any

import pyarrow.parquet as pq
import pytest

from packhouse import StreamingPackedDataset, load_packed
from packhouse.addons.exports import export_version
from packhouse.errors import ConfigError
from packhouse.store import OpenVersion, open_version
from tests.chain.conftest import Project


@pytest.fixture
def project(tmp_path):
    """Sources `a` (50 questions), `b` (50 others) and `test` (20, of which 10 are in `a`)."""
    project = Project(tmp_path)
    parts = {"a": range(50), "b": range(50, 100), "test": [*range(10), *range(200, 210)]}
    for name, numbers in parts.items():
        rows = [{"instruction": f"Add 1 to {n}.", "output": f"{n + 1}, {name}."} for n in numbers]
        project.write(rows, f"{name}.jsonl")
    return project


def publish(project: Project, *, only: bool = False, **sections: Any) -> tuple[str, Any]:
    sources = [{"path": f"{name}.jsonl", "format": "alpaca"} for name in ("a", "b", "test")]
    if only:
        sources[2]["eval_only"] = True  # type: ignore[assignment]
    project.write_recipe(sources=sources, **sections)
    prepared = project.prepare()
    return project.uri(prepared), prepared


def records(rows: Any) -> set[str]:
    return {name for row in rows for name in row["record_ids"]}


def opened_at(uri: str) -> OpenVersion:
    address, _, version = uri.partition("@")
    return open_version(*address.rsplit("/", 1), version)


def lineage(uri: str) -> list[dict[str, Any]]:
    opened = opened_at(uri)
    files = [opened.store.path(opened.key(e)) for e in opened.files("records")]
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("strategy", ["best_fit", "concat"])
def test_each_source_has_eval_files_of_its_own(project, tmp_path, strategy):
    split = {"eval_fraction": 0.3, "eval_by_source": True}
    pack = {"seq_len": 256, "strategy": strategy}
    uri, _ = publish(project, split=split, pack=pack, publish={"file_format": "arrow"})

    by_source = load_packed(uri, split="eval", by_source=True, cache=tmp_path)
    whole = load_packed(uri, split="eval", cache=tmp_path)

    assert list(by_source) == ["a", "b", "test"]
    assert [row for rows in by_source.values() for row in rows] == list(whole)
    named = [entry.key.rpartition("-of-")[0] for entry in opened_at(uri).files(split="eval")]
    assert named == ["data/eval-a-00000", "data/eval-b-00001", "data/eval-test-00002"]
    of_record = {row["record_id"]: row for row in lineage(uri)}
    for name, rows in by_source.items():
        assert {of_record[r]["source"].partition("/")[0] for r in records(rows)} == {name}
    asked = {r["record_id"] for r in of_record.values() if r["split"] == "eval" and r["times"]}
    assert records(whole) == asked
    streamed = StreamingPackedDataset(uri, split="eval", rank=0, world_size=1, cache=tmp_path)
    assert len(list(streamed)) == len(whole)


def test_exports_hold_a_set_for_each_source(project, tmp_path):
    formats = ["trl", "axolotl", "megatron", "mds", "jsonl", "arrow"]
    split = {"eval_fraction": 0.3, "eval_by_source": True}
    uri, _ = publish(project, split=split, publish={"exports": formats})
    made = {
        name: export_version(opened_at(uri), name, tmp_path / name, cache=tmp_path / "copies").files
        for name in formats
    }

    whole = load_packed(uri, split="eval", by_source=True, cache=tmp_path)
    for source, rows in whole.items():
        found = pq.read_table(tmp_path / "trl" / f"eval-{source}.parquet")
        assert found["input_ids"].to_pylist() == rows["input_ids"]
        records = pq.read_table(tmp_path / "axolotl" / f"eval-{source}.parquet")
        assert records.num_rows == sum(map(len, rows["seq_lengths"]))
    names = ["eval-a", "eval-b", "eval-test", "train"]
    assert list(made["jsonl"]) == [f"{name}.jsonl" for name in names]
    assert [name for name in made["megatron"] if name.endswith(".parquet")] == [
        f"{name}.idx.parquet" for name in names
    ]
    assert [name for name in made["mds"] if name.endswith(".json")] == [
        f"{name}/index.json" for name in names
    ]


def test_a_source_for_evaluation_only_takes_its_prompts_along(project, tmp_path):
    uri, prepared = publish(project, only=True)

    rows = {row["record_id"]: row for row in lineage(uri)}
    of_eval = {(row["source"].partition("/")[0], row["row"]) for row in rows.values()
               if row["split"] == "eval"}  # fmt: skip
    assert {row for name, row in of_eval if name == "test"} == set(range(20))
    assert {row for name, row in of_eval if name == "a"} == set(range(10))  # the same prompts
    assert not [name for name, _ in of_eval if name == "b"]
    [facts] = [r.facts for r in prepared.receipts if r.step == "pack"]
    assert (facts.split.asked, facts.split.eval, facts.split.rows) == (20, 30, 120)


def test_a_row_that_stays_for_one_for_evaluation_only_is_not_trained(project):
    rows = [{"instruction": f"Add  1 to {n}.", "output": f"{n + 1}, a."} for n in range(5)]
    project.write(rows, "test.jsonl")
    uri, _ = publish(project, only=True, dedup={"exact": "drop"}, split={"group_by": "record"})

    rows = {(row["source"].partition("/")[0], row["row"]): row for row in lineage(uri)}
    assert {rows["test", n]["outcome"] for n in range(5)} == {"duplicate"}
    assert {rows["test", n]["repeats"] for n in range(5)} == {
        row["record_id"] for row in rows.values() if row["split"] == "eval" and row["times"]
    }
    assert {key for key, row in rows.items() if row["split"] == "eval" and row["times"]} == {
        ("a", n) for n in range(5)
    }


def test_a_count_is_of_the_other_sources(project):
    uri, prepared = publish(project, only=True, split={"eval_count": 12})

    own = [r for r in lineage(uri) if r["split"] == "eval" and not r["source"].startswith("test")]
    assert 10 + 12 <= len(own) <= 10 + 13  # ten share a prompt with `test`
    [facts] = [r.facts for r in prepared.receipts if r.step == "pack"]
    assert facts.split.asked == 20 + 12


def test_a_version_without_files_by_source_names_the_setting(project, tmp_path):
    uri, _ = publish(project, split={"eval_fraction": 0.3})

    with pytest.raises(ConfigError, match=r"split\.eval_by_source: true"):
        load_packed(uri, split="eval", by_source=True, cache=tmp_path)

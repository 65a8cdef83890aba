"""Every rule for the contents of a published file, violated once."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhouse.store import LocalFile, open_store, open_version, publish_version, verify_version
from tests.store.versions import FACTS, INT32S, pack_table, write_file

GOOD = {
    "input_ids": [[7, 8, 9], [5, 6]],
    "labels": [[-100, -100, 9], [-100, 6]],
    "seq_lengths": [[1, 2], [2]],
    "record_ids": [["a", "b"], ["c"]],
    "position_ids": [[0, 0, 1], [0, 1]],
}
CONCAT = FACTS | {"configuration": {"pack": {"seq_len": 8, "strategy": "concat"}}}


def problems_of(folder, changes, facts=CONCAT):
    """Return the result of `verify` for a version whose only file contains these columns."""
    columns = {k: v for k, v in (GOOD | changes).items() if v is not None}
    numbers = ("input_ids", "labels", "seq_lengths", "position_ids")
    table = pa.table({k: pa.array(v, INT32S if k in numbers else None) for k, v in columns.items()})
    pq.write_table(table, folder / "train.parquet")
    store = open_store(str(folder / "store"))
    file = LocalFile(folder / "train.parquet", "train", rows=2, tokens=5)
    publish_version(store, "tiny", "aaaa", [file], facts)
    return verify_version(open_version(store, "tiny", "aaaa")).problems


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [[7, 8, 9], [5, -6]]}, "packed row 1: input_ids[1] = -6 is outside"),
        ({"labels": [[-100, -100, 9], [-100, 5]]}, "packed row 1: labels[1] = 5"),
        ({"labels": [[-100, 8, 9], [-100, 6]]}, "packed row 0: seq_lengths[1]"),
        ({"seq_lengths": [[1, 2], [3]]}, "packed row 1: seq_lengths add up to 3"),
        ({"position_ids": [[0, 1, 2], [0, 1]]}, "packed row 0: position_ids[1] = 1"),
        ({"record_ids": [["a", "b"], ["c", "d"]]}, "packed row 1: record_ids"),
        ({"labels": None}, "lack the columns trained_ranges"),
        ({"seq_lengths": None}, "lack the columns seq_lengths"),
    ],
)
def test_a_broken_rule_is_found_from_the_store_alone(tmp_path, changes, message):
    (problem,) = problems_of(tmp_path, changes)
    assert message in problem


def test_limits_come_from_the_manifest(tmp_path):
    limits = {
        "a": {"configuration": {"pack": {"seq_len": 2, "strategy": "concat"}}},
        "b": {"lineage": {"tokenizer": {"vocab_size": 9}}, "configuration": {}},
        "c": {"configuration": {"pack": {"seq_len": 8, "strategy": "best_fit"}}},
    }
    messages = {
        "a": "has 3 tokens, more than seq_len 2",
        "b": "vocabulary of 9",
        "c": "no trained token",
    }
    for name, facts in limits.items():
        (tmp_path / name).mkdir()
        (problem,) = problems_of(tmp_path / name, {}, FACTS | facts)
        assert messages[name] in problem


def test_verify_finds_wrong_values_in_a_manifest(store, tmp_path):
    good = write_file(tmp_path, pack_table(), "a")
    wrong = {
        "aaaa": (
            LocalFile(good.path, "train", rows=3, tokens=7),
            "has 2 rows, but the manifest says 3",
        ),
        "bbbb": (
            LocalFile(good.path, "train", rows=2, tokens=8),
            "has 7 tokens, but the manifest says 8",
        ),
    }
    for vid, (file, message) in wrong.items():
        publish_version(store, "tiny", vid, [file], FACTS)
        (problem,) = verify_version(open_version(store, "tiny", vid)).problems
        assert message in problem
    facts = FACTS | {"schema": pa.schema([pa.field("input_ids", pa.list_(pa.int64()))])}
    publish_version(store, "tiny", "cccc", [good], facts)
    (problem,) = verify_version(open_version(store, "tiny", "cccc")).problems
    assert "schema differs" in problem


@pytest.mark.parametrize("ending", [".arrow", ".jsonl"])
def test_other_formats_are_verified_too(store, tmp_path, ending):
    path = tmp_path / f"train{ending}"
    for vid, table, problems in [("aaaa", pack_table(), 0), ("bbbb", pack_table(-1), 1)]:
        if ending == ".arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        publish_version(store, "tiny", vid, [LocalFile(path, "train", rows=2, tokens=7)], FACTS)
        assert len(verify_version(open_version(store, "tiny", vid)).problems) == problems


def test_a_row_of_json_may_be_longer_than_a_block_of_the_reader(store, tmp_path):
    path = tmp_path / "train.jsonl"
    size = 300_000
    row = {"input_ids": list(range(size)), "labels": [-100, *range(1, size)]}
    row |= {"seq_lengths": [size], "record_ids": ["a"]}
    wrong = row | {"labels": [-100] * (size - 1) + [7]}
    path.write_text("".join(json.dumps(each) + "\n" for each in (row, row, wrong)))
    facts = FACTS | {"configuration": {"pack": {"seq_len": size}}}
    file = LocalFile(path, "train", rows=3, tokens=3 * size)
    publish_version(store, "tiny", "aaaa", [file], facts)
    (problem,) = verify_version(open_version(store, "tiny", "aaaa")).problems
    assert "packed row 2: labels[299999] = 7" in problem  # counted through all batches

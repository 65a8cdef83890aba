import pyarrow as pa
import pytest

from packhouse.addons.ask.diff import diff_versions
from packhouse.addons.ask.duckdb_queries import read
from packhouse.store import open_store, open_version, publish_version
from tests.store.versions import FACTS, INT32S, pack_file, pack_table, write_file


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


def test_records_are_compared_by_id_wherever_packing_put_them(store, tmp_path):
    # a: another mask; b: another token; c: removed; d: new
    other = pa.table(
        {
            "input_ids": pa.array([[4, 9, 1, 2, 3], [8]], INT32S),
            "labels": pa.array([[4, 9, -100, 2, 3], [8]], INT32S),
            "seq_lengths": pa.array([[2, 3], [1]], INT32S),
            "record_ids": [["b", "a"], ["d"]],
        }
    )
    publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "prod")
    facts = FACTS | {"configuration": {"pack": {"seq_len": 16}}}
    publish_version(store, "tiny", "bbbb", [write_file(tmp_path, other, "o")], facts, "latest")

    found = diff_versions(open_version(store, "tiny", "prod"), open_version(store, "tiny"))

    assert found.configuration == {"pack.seq_len": [8, 16]}
    assert found.totals == {"train.packs": [2, 2], "train.tokens": [7, 6]}
    assert found.schema == {}
    examples = {k: [c.record_id for c in v] for k, v in found.records.examples.items()}
    assert examples == {
        "added": ["d"],
        "removed": ["c"],
        "changed_tokens": ["b"],
        "changed_masks": ["a"],
    }
    assert (found.records.num_same, found.records.num_moved) == (0, 0)


def test_a_record_that_changes_sides_is_told(store, tmp_path):
    publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "prod")
    files = [
        write_file(tmp_path, pack_table().slice(0, 1), "t"),
        write_file(tmp_path, pack_table().slice(1, 1), "e", split="eval"),
    ]
    publish_version(store, "tiny", "bbbb", files, FACTS, "latest")

    found = diff_versions(open_version(store, "tiny", "prod"), open_version(store, "tiny"))

    (moved,) = found.records.examples["moved"]
    assert (moved.record_id, moved.detail) == ("c", "train -> eval")
    assert (found.records.num_moved, found.records.num_same) == (1, 2)


def test_both_layouts_give_the_same_traces(store, tmp_path):
    spans = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32())]))
    ranges = [[(1, 2), (4, 5)], [(1, 2)]]
    ranges = [[{"start": s, "end": e} for s, e in row] for row in ranges]
    compact = pack_table().drop(["labels"])
    compact = compact.append_column("trained_ranges", pa.array(ranges, spans))
    publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "prod")
    publish_version(store, "tiny", "bbbb", [write_file(tmp_path, compact, "c")], FACTS, "latest")

    names = "record_id, num_tokens, num_trained, ids_digest, mask_digest"
    labels, spans = (
        read(open_version(store, "tiny", n), f"SELECT {names} FROM contents")
        for n in ("prod", "latest")
    )
    assert labels == spans
    assert labels.to_pylist()[0] | {"ids_digest": "", "mask_digest": ""} == {
        "record_id": "a",
        "num_tokens": 3,
        "num_trained": 1,
        "ids_digest": "",
        "mask_digest": "",
    }

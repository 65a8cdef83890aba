import pyarrow as pa
import pytest

from packhouse.addons.ask.diff import diff_versions
from packhouse.addons.ask.duckdb_queries import read
from packhouse.store import open_store, open_version, publish_version
from tests.store.versions import FACTS, pack_file, pack_table, write_file


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


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

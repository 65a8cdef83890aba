"""Each rule on what a published file may hold, broken once."""

import json

import pyarrow as pa
import pytest

from packhouse.errors import ContractError
from packhouse.store import LocalFile, open_store, open_version, publish_version, verify_version
from packhouse.store.contracts import check_packs
from tests.store.versions import FACTS, pack_table, write_file

GOOD = {
    "input_ids": [[7, 8, 9], [5, 6]],
    "labels": [[-100, 8, 9], [-100, 6]],
    "seq_lengths": [[1, 2], [2]],
    "position_ids": [[0, 0, 1], [0, 1]],
}


def check(changes, **limits):
    columns = {k: v for k, v in (GOOD | changes).items() if v is not None}
    return check_packs(pa.RecordBatch.from_pydict(columns), first_row=100, **limits)


def test_good_packs_pass_and_are_counted():
    assert check({}, seq_len=3, vocab_size=10) == 5
    assert check({"labels": None, "position_ids": None}) == 5
    assert check_packs(pa.RecordBatch.from_pydict({"text": ["a"]})) == 0


@pytest.mark.parametrize(
    ("changes", "limits", "message"),
    [
        ({}, {"seq_len": 2}, "row 100: 3 tokens, over 2"),
        ({}, {"vocab_size": 9}, r"row 100: token id 9 is not in \[0, 9\)"),
        ({"input_ids": [[7, 8, 9], [5, -1]]}, {}, "row 101: token id -1"),
        ({"labels": [[-100, 8, 9], [-100]]}, {}, "row 101: 1 labels, 2 tokens"),
        ({"labels": [[-100, 8, 9], [-100, 5]]}, {}, "row 101: label 5 at token 6"),
        ({"labels": [[-100, 8, 9], [-100, -100]]}, {}, "row 101: no trained token"),
        ({"seq_lengths": [[1, 2], [3]]}, {}, "row 101: seq_lengths add up to 3"),
        ({"seq_lengths": [[1, 2, 0], [2]]}, {}, "row 100: a record of 0 tokens"),
        ({"position_ids": [[0, 1, 2], [0, 1]]}, {}, "row 100: position 1 does not restart"),
        ({"position_ids": [[0, 0, 1], [0]]}, {}, "row 101: 1 positions, 2 tokens"),
        ({"input_ids": [[7, 8, 9], None]}, {}, "'input_ids' has nulls"),
        ({"labels": [[-100, 8, None], [-100, 6]]}, {}, "'labels' has nulls inside"),
    ],
)
def test_a_broken_rule_names_its_row(changes, limits, message):
    with pytest.raises(ContractError, match=message):
        check(changes, **limits)


def test_a_class_label_needs_no_trained_token():
    labels = [[-100, -100, -100], [-100, -100]]
    assert check({"labels": labels, "label": [0, 1]}) == 5


def test_verify_finds_what_a_manifest_says_wrongly(tmp_path):
    store = open_store(str(tmp_path / "store"))
    good = write_file(tmp_path, pack_table(), "a")
    wrong = {
        "aaaa": (
            LocalFile(good.path, "train", rows=3, tokens=7),
            "2 rows, and the manifest says 3",
        ),
        "bbbb": (
            LocalFile(good.path, "train", rows=2, tokens=8),
            "7 tokens, and the manifest says 8",
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
def test_other_formats_are_verified_too(tmp_path, ending):
    store = open_store(str(tmp_path / "store"))
    path = tmp_path / f"train{ending}"
    for vid, table, problems in [("aaaa", pack_table(), 0), ("bbbb", pack_table(-1), 1)]:
        if ending == ".arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        publish_version(store, "tiny", vid, [LocalFile(path, "train", rows=2, tokens=7)], FACTS)
        assert len(verify_version(open_version(store, "tiny", vid)).problems) == problems

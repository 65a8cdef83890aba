"""The views in parts, and their columns for weights and labels."""

import json

import pyarrow as pa
import pytest

import packhouse
from packhouse.addons.ask.diff import diff_versions
from packhouse.recipe import Recipe
from packhouse.store import open_store, open_version, publish_version
from tests.prepared import TOKENIZER
from tests.store.versions import FACTS, pack_file, pack_table, write_file


def prepared(folder, rows, row_format="auto", **settings):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "dataset": "rows",
        "sources": [{"path": str(folder / "rows.jsonl"), "format": row_format}],
        "tokenizer": str(TOKENIZER),
        "publish": {"store": str(folder / "store")},
        "pack": {"seq_len": 128},
    }
    recipe = Recipe.model_validate(recipe | settings)
    return packhouse.prepare(recipe, cache=folder / "cache", progress=False)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "pack": {"seq_len": 64, "strategy": "concat"},
            "split": {"eval_fraction": 0.4},
            "publish": {"layout": "compact"},
        },
        {"pack": {"seq_len": 96, "over_length": "window"}, "dedup": {"exact": "drop"}},
    ],
    ids=["concat, eval, compact", "windows"],
)
def test_places_of_records_are_those_of_the_packs(tmp_path, settings):
    """Each record twice, some with equal content: the columns match the contents of the packs."""
    turns = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "a b c"}]
    many = [turns[0], {**turns[1], "weight": 0.5}, turns[0], {**turns[1], "content": "d " * 50}]
    rows = [{"messages": messages} for messages in (turns, many, turns, [*many, *turns], many[:2])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"path": str(tmp_path / "rows.jsonl"), "weight": 2}]
    store = {"store": str(tmp_path / "store"), **settings.pop("publish", {})}
    limits = (
        "untrained_packs",
        "untrained_rows",
        "unterminated_turns",
        "duplicates",
        "cut_sequences",
    )
    audit = {f"max_{name}": 1 for name in limits} | {"min_answer_coverage": 0}
    version = prepared(tmp_path, rows, sources=sources, publish=store, audit=audit, **settings)
    found = version.sql("select *, input_ids from records where outcome = 'kept'").to_pylist()
    names = "split, pack, record_ids, seq_lengths, input_ids, trained, loss_weights"
    query = f"select {names} from packs"
    packs = {(row["split"], row["pack"]): row for row in version.sql(query).to_pylist()}
    places = set()
    for row in found:
        pack, at, left = row["pack"], row["position"], row["num_tokens"]
        places.add((row["split"], pack, at))
        trained, weight, ids = 0, 0, []
        while left:
            held = packs[row["split"], pack]
            starts = [sum(held["seq_lengths"][:n]) for n in range(len(held["seq_lengths"]))]
            number = starts.index(at)
            assert held["record_ids"][number] == row["record_id"]
            size = held["seq_lengths"][number]
            trained += sum(held["trained"][at : at + size])
            weight += sum(held["loss_weights"][at : at + size])
            ids += held["input_ids"][at : at + size]
            pack, at, left = pack + 1, 0, left - size
        assert (row["num_trained"], row["total_weight"]) == (trained, weight)
        assert row["input_ids"] == ids
    assert len(places) == len(found) > 0
    gone = version.sql("select pack, num_trained from records where times = 0").to_pylist()
    assert all(row == {"pack": None, "num_trained": None} for row in gone)


def test_verdicts_of_records_are_those_of_their_rows(tmp_path):
    verdicts = [{"prompt": f"Say {n}", "completion": f"{n}", "label": n != 1} for n in range(3)]
    pack = {"seq_len": 128, "strategy": "none"}
    version = prepared(tmp_path, verdicts, "kto", pack=pack)
    found = version.sql("select label, num_trained, total_weight from records order by row")
    assert found["label"].to_pylist() == [1, 0, 1]
    assert found["total_weight"].to_pylist() == found["num_trained"].to_pylist()


def test_records_of_other_weights_alone_are_told(tmp_path):
    """a: weights 1, then 0.5; b and c: all 1, given in one version and omitted in the other."""
    store = open_store(str(tmp_path / "store"))
    weights = [[0, 0.5, 0, 0, 1], [0, 1]]
    weighted = pack_table().append_column("loss_weights", pa.array(weights, pa.list_(pa.float32())))
    publish_version(store, "tiny", "aaaa", [write_file(tmp_path, pack_table(), "a")], FACTS, "prod")
    publish_version(store, "tiny", "bbbb", [write_file(tmp_path, weighted, "b")], FACTS, "latest")
    found = diff_versions(open_version(store, "tiny", "prod"), open_version(store, "tiny")).records

    assert (found.num_changed_weights, found.num_changed_masks, found.num_same) == (1, 0, 2)
    (change,) = found.examples["changed_weights"]
    assert (change.record_id, change.detail) == ("a", "loss weight 1 -> 0.5")


def test_a_record_that_changes_sides_is_told(tmp_path):
    store = open_store(str(tmp_path / "store"))
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

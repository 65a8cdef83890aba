import pyarrow as pa
import pytest

from packhouse.errors import ContractError
from packhouse.recipe import PublishConfig
from packhouse.store import commit as publication, load_ref, open_version, publish_version
from packhouse.store.schema_drift import measure_drift
from tests.store.versions import FACTS, pack_table, write_file


def publish(store, tmp_path, vid, table, *, facts=None, **options):
    file = write_file(tmp_path, table, vid)
    return publish_version(store, "tiny", vid, [file], facts or FACTS, "latest", **options)


def test_a_schema_that_breaks_readers_of_the_ref_is_refused_before_anything_is_written(
    store, tmp_path
):
    first = pack_table().replace_schema_metadata({"packhouse.labels": "unshifted"})
    publish(store, tmp_path, "aaaa", first)
    before = [info.key for info in store.list("")]

    wide = first.drop(["labels"])
    wide = wide.set_column(0, "input_ids", wide["input_ids"].cast(pa.list_(pa.int64())))
    with pytest.raises(
        ContractError, match=r"'input_ids' changed from .*int32.* to .*int64"
    ) as raised:
        publish(store, tmp_path, "bbbb", wide)
    assert "column 'labels' was removed" in raised.value.changes
    assert [info.key for info in store.list("")] == before

    shifted = first.replace_schema_metadata({"packhouse.labels": "shifted"})
    with pytest.raises(ContractError, match=r"packhouse\.labels changed from 'unshifted' to 'shif"):
        publish(store, tmp_path, "bbbb", shifted)
    more = first.append_column("label", pa.array([1, 2]))  # breaks nobody
    assert publish(store, tmp_path, "cccc", more).ref.version == "cccc.g0"

    done = publish(store, tmp_path, "bbbb", wide, limits=PublishConfig(allow_breaking_schema=True))
    assert done.ref.version == "bbbb.g0"


def between_look_and_move(monkeypatch, do):
    """Let another publisher act after the gate has passed and before anything is committed."""
    commit = publication._commit_steps

    def late(ours):
        monkeypatch.setattr(publication, "_commit_steps", commit)
        do()
        return commit(ours)

    monkeypatch.setattr(publication, "_commit_steps", late)


@pytest.mark.parametrize("first", [None, "aaaa"])
def test_a_ref_moved_by_another_publisher_passes_the_gate_again(
    store, tmp_path, monkeypatch, first
):
    narrow = pack_table().drop(["labels"])
    if first:  # bbbb adds labels: the first check finds nothing that would break
        publish(store, tmp_path, first, narrow)
    between_look_and_move(monkeypatch, lambda: publish(store, tmp_path, "bbbb", pack_table()))
    done = publish(store, tmp_path, "cccc", narrow)

    assert done.created
    assert done.ref is None
    assert done.held_back == ("readers of bbbb.g0 would break: column 'labels' was removed",)
    assert load_ref(store, "tiny", "latest").version == "bbbb.g0"

    between_look_and_move(monkeypatch, lambda: publish(store, tmp_path, "dddd", pack_table(9)))
    assert publish(store, tmp_path, "eeee", pack_table(8)).ref.version == "eeee.g0"


def test_publishing_again_what_the_ref_once_held_is_no_break(store, tmp_path):
    narrow = pack_table().drop(["labels"])
    publish(store, tmp_path, "aaaa", narrow)
    publish(store, tmp_path, "bbbb", pack_table())
    again = publish(store, tmp_path, "aaaa", narrow)
    assert (again.created, again.held_back, again.ref.version) == (False, (), "bbbb.g0")


def facts_of(rows, lengths, trained, bad):
    return {
        "lineage": {"sources": [{"file": f, "rows": n} for f, n in rows.items()]},
        "counts": {
            "ledger": [
                {"step": "validate", "rows_in": 100, "rows_out": 90, "quarantined": {"json": bad}}
            ],
            "statistics": {
                "train": {
                    "seq_len": 64,
                    "strategy": "best_fit",
                    "lower_bound": 1,
                    "length_histogram": lengths,
                    "num_tokens": 200,
                    "num_trained": trained,
                }
            },
        },
    }


def test_drift_is_measured_from_manifests_and_can_hold_the_ref_back(store, tmp_path):
    old = facts_of({"a": 50, "b": 50}, [[16, 60], [32, 40]], trained=100, bad=1)
    new = facts_of({"a": 80, "b": 20}, [[16, 60], [64, 40]], trained=120, bad=5)
    publish(store, tmp_path, "aaaa", pack_table(), facts=old)
    limits = PublishConfig(max_length_drift=0.3)
    done = publish(store, tmp_path, "bbbb", pack_table(9), facts=new, limits=limits)

    assert done.change.drift.lengths == pytest.approx(0.4)
    assert done.change.drift.sources == pytest.approx(0.3)
    assert done.change.drift.trained == pytest.approx(0.1)
    assert done.change.drift.quarantined == pytest.approx(0.04)
    assert done.held_back == ("length drift is 0.4000; the limit is 0.3000",)
    assert done.ref is None
    assert load_ref(store, "tiny", "latest").version == "aaaa.g0"
    assert open_version(store, "tiny", "bbbb").version == "bbbb.g0"  # published nevertheless

    again = publish(store, tmp_path, "bbbb", pack_table(9), facts=new)
    assert (again.created, again.ref.version) == (False, "bbbb.g0")
    assert measure_drift(done.manifest, done.manifest).lengths == 0

import os
import time

import pytest

from packhouse.addons import gc
from packhouse.addons.gc import collect_garbage
from packhouse.store import open_store, open_version, publish_version, verify_version
from packhouse.store.commit import draft_manifest, name_files
from packhouse.store.conditional_writes import require_guarded
from packhouse.store.local_folder import LocalStore
from packhouse.store.object_keys import file_key
from packhouse.store.store_requests import put_data, run
from tests.store.versions import FACTS, pack_file


def upload_only(store, folder, vid="aaaa"):
    """Leave the files of a publisher that was killed before its commit."""
    uploads = name_files([pack_file(folder)])
    draft = draft_manifest("tiny", vid, uploads, FACTS)
    for entry, body in uploads:
        run(store, put_data(file_key("tiny", draft.version, entry.key), body))
    return uploads


def age(store, seconds):
    old = time.time() - seconds
    for path in store.root.rglob("*"):
        os.utime(path, (old, old))


def test_an_abandoned_attempt_is_fenced_and_deleted_and_a_late_publisher_moves_on(store, tmp_path):
    upload_only(store, tmp_path)
    assert not collect_garbage(store, "tiny").garbage
    age(store, 2 * gc.DEFAULT_GRACE_S)

    (garbage,) = collect_garbage(store, "tiny").garbage
    assert (garbage.version, garbage.reason, len(garbage.objects)) == ("aaaa.g0", "abandoned", 1)
    assert collect_garbage(store, "tiny").num_deleted == 0  # dry run
    assert collect_garbage(store, "tiny", dry_run=False).num_deleted == 1
    assert not collect_garbage(store, "tiny").garbage

    late = publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    assert (late.version, late.created) == ("aaaa.g1", True)
    assert verify_version(open_version(store, "tiny")).is_intact


def test_probes_of_a_killed_store_check_are_deleted_once_old(store, tmp_path):
    publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    left = "_doctor-0123456789ab/create"
    store.put_create(left, b"first")
    assert collect_garbage(store, "tiny", dry_run=False).num_probes == 0  # it may be running
    age(store, 2 * gc.DEFAULT_GRACE_S)

    assert collect_garbage(store, "tiny").num_probes == 1
    assert left in [info.key for info in store.list("")]
    assert collect_garbage(store, "tiny", dry_run=False).num_probes == 1
    assert left not in [info.key for info in store.list("")]
    assert verify_version(open_version(store, "tiny")).is_intact


class CollectedUnderWay(LocalStore):
    """A store in which a collection without grace runs before each write."""

    num_visits = 0

    def _visit(self):
        self.num_visits += 1
        collect_garbage(open_store(str(self.root)), "tiny", grace_s=-1, dry_run=False)

    def put_create(self, key, body):
        self._visit()
        return super().put_create(key, body)

    def put_if_match(self, key, body, etag):
        self._visit()
        return super().put_if_match(key, body, etag)


def test_a_collection_without_grace_leaves_the_check_of_a_store_alone(tmp_path):
    """Otherwise the object is gone that must refuse a second writer, or that a swap must find."""
    store = CollectedUnderWay(tmp_path / "store")
    require_guarded(store)
    assert store.num_visits >= 7
    assert list(store.list("")) == []


def test_committed_versions_are_never_garbage_and_strays_are(store, tmp_path):
    publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    stray = "tiny/v/aaaa.g0/data/train-00000-of-00001-000000000000.parquet"
    store.put_create(stray, b"other bytes")
    (store.root / ".packhouse" / "tmp" / "left").write_bytes(b"half")  # by a killed writer
    assert not collect_garbage(store, "tiny").garbage  # they are young
    age(store, 2 * gc.DEFAULT_GRACE_S)

    (garbage,) = collect_garbage(store, "tiny").garbage
    assert (garbage.reason, [info.key for info in garbage.objects]) == ("stray", [stray])
    assert collect_garbage(store, "tiny", dry_run=False).num_unfinished_uploads == 1
    assert list((store.root / ".packhouse" / "tmp").iterdir()) == []
    assert verify_version(open_version(store, "tiny")).is_intact


@pytest.mark.parametrize("ahead_s", [-3 * gc.DEFAULT_GRACE_S, 3 * gc.DEFAULT_GRACE_S])
def test_age_is_measured_by_the_clock_of_the_store(store, tmp_path, monkeypatch, ahead_s):
    upload_only(store, tmp_path)
    left = store.root / ".packhouse" / "tmp" / "left"
    left.write_bytes(b"half")
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + ahead_s)
    report = collect_garbage(store, "tiny")
    assert (report.garbage, report.num_unfinished_uploads) == ((), 0)

    for path in store.root.rglob("*"):
        os.utime(path, (now - 2 * gc.DEFAULT_GRACE_S,) * 2)
    report = collect_garbage(store, "tiny", dry_run=False)
    assert (report.num_deleted, report.num_unfinished_uploads) == (1, 1)

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhouse.errors import ConfigError, ConflictError, IntegrityError, VersionNotFoundError
from packhouse.store import (
    LocalFile,
    open_version,
    publish_version,
    pull_version,
    set_ref,
    verify_version,
)
from packhouse.store.object_store import file_body
from tests.store.versions import FACTS, list_versions, pack_file, pack_table


def test_files_removed_from_a_version_are_restored(store, tmp_path):
    files = [pack_file(tmp_path), pack_file(tmp_path, 9)]
    first = publish_version(store, "tiny", "aaaa", files, FACTS, "latest")
    entries = [entry for entry in first.manifest.files if entry.kind == "data"]
    store.delete(f"tiny/v/{first.version}/{entries[1].key}")
    opened = open_version(store, "tiny", "aaaa")
    assert not verify_version(opened).is_intact

    again = publish_version(store, "tiny", "aaaa", files, FACTS, "latest")

    assert (again.created, again.ref) == (False, first.ref)
    assert verify_version(opened).is_intact


def test_other_bytes_at_the_same_version_id_are_an_alarm(store, tmp_path):
    publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")

    with pytest.raises(ConflictError, match=r"not deterministic.*Differences: files"):
        publish_version(store, "tiny", "aaaa", [pack_file(tmp_path, 9)], FACTS | {"content_id": ""})
    with pytest.raises(ConflictError, match="packs are equal"):
        publish_version(store, "tiny", "aaaa", [pack_file(tmp_path, 9)], FACTS)


def test_a_ref_points_only_to_committed_versions_and_expected_guards_it(store, tmp_path):
    publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")

    publish_version(store, "tiny", "dddd", [pack_file(tmp_path, 9)], FACTS)
    with pytest.raises(VersionNotFoundError, match=r"version 'cccc\.g0' of 'tiny' does not exist"):
        set_ref(store, "tiny", "prod", "cccc.g0")
    assert set_ref(store, "tiny", "prod", "aaaa.g0").seq == 1
    assert set_ref(store, "tiny", "prod", "aaaa.g0").seq == 1  # already there
    with pytest.raises(ConflictError, match=r"points to aaaa\.g0, not to bbbb\.g0"):
        set_ref(store, "tiny", "prod", "dddd.g0", expected="bbbb.g0")


@pytest.mark.parametrize("dataset", ["", "Tiny", "../x", "a/b", "-a", "a" * 65])
def test_dataset_names_are_checked(store, tmp_path, dataset):
    with pytest.raises(ConfigError, match="use at most 64 characters from a-z, 0-9"):
        publish_version(store, dataset, "aaaa", [pack_file(tmp_path)], FACTS)


def test_credentials_do_not_get_into_a_manifest(store, tmp_path):
    facts = FACTS | {"lineage": {"sources": [{"uri": "s3://key:secret@bucket/x"}]}}
    with pytest.raises(ConfigError, match="key 'sources', key 'uri' contains a credential"):
        publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], facts)


@pytest.mark.parametrize(
    ("left", "change"),
    [("nothing", "no Parquet"), ("files", "one bit"), ("version", "one bit"), ("version", "rows")],
)
def test_a_changed_file_is_found_whether_or_not_the_store_has_it(store, tmp_path, left, change):
    file = pack_file(tmp_path)
    stated = [LocalFile(file.path, "train", 2, 7, sha256=file_body(file.path).sha256)]
    if left != "nothing":
        publish_version(store, "tiny", "aaaa", stated, FACTS)
    if left == "files":  # from a publication that was killed before its commit
        (key,) = (info.key for info in store.list("tiny/") if info.key.endswith("manifest.json"))
        store.delete(key)
    data = bytearray(Path(file.path).read_bytes())
    data[20] ^= 1
    if change == "rows":
        pq.write_table(pa.concat_tables([pack_table()] * 2), file.path)
    else:
        Path(file.path).write_bytes(data if change == "one bit" else data[:-5])

    if left == "version" and change == "one bit":  # whose bytes are there and correct
        assert not publish_version(store, "tiny", "aaaa", stated, FACTS).created
        return
    with pytest.raises(IntegrityError, match="was changed after it was written"):
        publish_version(store, "tiny", "aaaa", stated, FACTS)
    assert len(list_versions(store, "tiny")) == (left == "version")


def test_pull_is_verified_resumed_and_whole_only_with_its_manifest(store, tmp_path):
    publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    opened = open_version(store, "tiny")
    dest = pull_version(opened, tmp_path / "pulled")

    (entry,) = opened.files()
    assert pq.read_table(dest / entry.path).equals(pack_table())
    assert (dest / "manifest.json").read_bytes() == opened.manifest.to_bytes()

    whole = (dest / entry.path).read_bytes()
    (dest / entry.path).unlink()
    (dest / "manifest.json").unlink()
    partial = (dest / entry.path).with_name(
        f".{entry.path.split('/')[1]}.{entry.sha256[:12]}.partial"
    )
    partial.write_bytes(whole[:100])
    pull_version(opened, dest)
    assert (dest / entry.path).read_bytes() == whole
    assert not partial.exists()

    publish_version(store, "tiny", "bbbb", [pack_file(tmp_path, 9)], FACTS, "latest")
    with pytest.raises(ConfigError, match="already has another version"):
        pull_version(open_version(store, "tiny"), dest)


@pytest.mark.parametrize("write", ["create", "swap"])
def test_a_folder_syncs_a_file_before_its_name_shows_and_the_name_before_it_returns(
    store, monkeypatch, write
):
    """After a power cut, there is no name without bytes and no answer without a name."""
    key, done = "tiny/refs/latest.json", []
    tag = store.put_create(key, b"first") if write == "swap" else ""

    def noting(name, real, inode_of):
        def do(*arguments):
            done.append((name, inode_of(arguments[0])))
            return real(*arguments)

        monkeypatch.setattr(f"os.{name}", do)

    noting("fsync", os.fsync, lambda handle: os.fstat(handle).st_ino)
    noting("link", os.link, lambda path: Path(path).stat().st_ino)
    noting("replace", os.replace, lambda path: Path(path).stat().st_ino)
    if write == "swap":
        store.put_if_match(key, b"second", tag)
    else:
        store.put_create(key, b"first")

    path = store.root / key
    named = ("replace" if write == "swap" else "link", path.stat().st_ino)
    folders = [path.parent] if write == "swap" else [*path.parents[:3]]
    assert done == [
        ("fsync", path.stat().st_ino),
        named,
        *(("fsync", folder.stat().st_ino) for folder in folders),
    ]

"""A store's contents are read as if an attacker wrote them: manifests, refs, links, sizes.

The attacker can write any object and knows every digest, so forged manifests have correct ones.
"""

import json
import os
import shutil

import pytest
from click.testing import CliRunner

from packhouse.addons.gc import collect_garbage
from packhouse.cli import cli
from packhouse.errors import (
    ConfigError,
    IntegrityError,
    StoreError,
    VersionNotFoundError,
)
from packhouse.load.mapped_rows import load_packed
from packhouse.run.step_cache import StepStore, parse_receipt
from packhouse.store import (
    LocalFile,
    load_ref,
    open_store,
    open_version,
    publish_version,
    pull_version,
    rollback_ref,
    set_ref,
    verify_version,
)
from packhouse.store.object_store import MAX_GET_BYTES
from packhouse.store.refs import scan_refs
from packhouse.store.version_reader import scan_versions
from tests.store.versions import FACTS, canonical, forged, pack_file, sha256


@pytest.fixture
def store(store, tmp_path):
    for vid, first in (("aaaa", 1), ("bbbb", 9)):
        facts = FACTS | {"content_id": vid}
        files = [pack_file(tmp_path, first), pack_file(tmp_path, first + 100)]
        publish_version(store, "tiny", vid, files, facts, "latest")
    return store


def slot(store, version="bbbb.g0"):
    return store.root / "tiny" / "v" / version / "manifest.json"


def forge(store, change, version="bbbb.g0"):
    path = slot(store, version)
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(forged(document))


def cli_call(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args])


BAD_KEYS = [
    "../../victim",
    "data/{sha}/../../../../victim",
    "/VICTIM",
    "data\\..\\..\\victim",
    "data/a\0b{sha}",
    "data/a\x1b[2Jb{sha}",
    "data/\u202etxt{sha}.x",
    "d\u0430ta/train-00000-of-00002-{sha}.parquet",  # a Cyrillic a
    "data/train-00000-of-00002-{sha}.parquet\n",
    "data/" + "a" * 300,
    "records/train-00000-of-00002-{sha}.parquet",  # of kind data
    "manifest.json",
    "exports/../../../victim",
    "exports/a\x1b[2Jb",
    "",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_no_key_of_a_manifest_reaches_a_file_outside(store, tmp_path, key, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "a"))
    (tmp_path / "a").mkdir()

    def change(document):
        entry = document["files"][0]
        if key.startswith("exports/"):  # names of these files contain no number and no digest
            entry = {**entry, "kind": "exports"}
            document["files"].append(entry)
        entry["key"] = key.replace("/VICTIM", str(victim)).replace("{sha}", entry["sha256"][:12])

    forge(store, change)
    before = sorted(tmp_path.rglob("*"))

    uri = f"{store.uri}/tiny"
    for args in (("verify", uri), ("pull", uri, tmp_path / "copy")):
        done = cli_call(*args)
        assert done.exit_code == IntegrityError.exit_code, done.output
        assert "manifest.json is damaged" in done.output
        assert "\x1b" not in done.output
    with pytest.raises(IntegrityError, match="is damaged: file"):
        load_packed(uri, cache=tmp_path / "cache")
    (item,) = collect_garbage(store, "tiny", grace_s=0, dry_run=False).garbage
    assert item.reason == "damaged"

    assert victim.read_text() == "mine"
    ours = {tmp_path / "cache"}  # created for the cache; `pull` created nothing
    assert set(tmp_path.rglob("*")) - set(before) <= ours
    assert set(before) <= set(tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["size", "rows", "tokens"])
def test_no_number_of_a_file_is_strange(store, name):
    whole = slot(store).read_bytes()
    for value in (-1, True, 1.0, 2**40, 2**70, "5", None, [], {"a": 1}):
        slot(store).write_bytes(whole)
        forge(store, lambda document, value=value: document["files"][1].update({name: value}))
        with pytest.raises(IntegrityError, match=f"{name} is not an integer"):
            open_version(store, "tiny", "bbbb.g0")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset", "../x"),
        ("dataset", "t\u0456ny"),
        ("dataset", None),
        ("vid", "../../aaaa"),
        ("vid", 7),
        ("generation", -1),
        ("generation", True),
        ("generation", 10**9),
        ("files", {}),
        ("files", ["x"]),
        ("content_id", 5),
        ("schema", {"fields": [{"name": "x"}]}),
        ("schema", []),
        ("counts", {"ledger": {"step": "x"}}),
        ("counts", {"ledger": [{"step": "x", "rows_in": 1}]}),
        ("counts", {"dedup": None}),
        ("configuration", {"pack": {"pad_record_to_multiple_of": 0}}),
        ("audit", {"dataset": {}, "sources": {}, "quality": {"dataset": {"rows": 1}}}),
        ("counts", {"statistics": {"train": {"length_histogram": [[1]]}}}),
        ("lineage", {"tokenizer": {"fingerprint": "../../secret"}}),
        ("audit", {"dataset": {"rows": None}, "sources": {}}),
        ("configuration", {"pack": []}),
        ("engines", []),
        ("provenance", None),
        ("unknown", 1),
    ],
)
def test_no_name_or_fact_is_strange(store, name, value):
    forge(store, lambda document: document.update({name: value}))
    with pytest.raises(IntegrityError, match=r"manifest.json is damaged"):
        open_version(store, "tiny", "bbbb.g0")


def nested(depth):
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    "bytes_of",
    [
        lambda data: data.replace(b'"vid":', b'"vid":"aaaa","vid":'),  # the last one counts
        lambda data: data + b" ",
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.decode().encode("utf-16"),
        lambda data: data.replace(b'"generation":0', b'"generation":0.0'),
        lambda data: data.replace(b'"generation":0', b'"generation":false'),
        lambda data: data.replace(b'"rows_in":3', b'"rows_in":1e999'),
        lambda data: data.replace(b'"rows_in":3', b'"rows_in":NaN'),
        lambda data: data.replace(b'"rows_in":3', b'"rows_in":' + b"9" * 5000),
        lambda data: data.replace(b'"rows_in":3', b'"rows_in":' + nested(100_000)),
        lambda data: data.replace(b'"rows_in":3', b'"rows_in":"\\ud800"'),
        lambda data: data.replace(b'"format":1', b'"format":true'),
        lambda data: data.replace(b'"format":1', b'"format":2'),
        lambda data: b"[" + data + b"]",
        lambda data: b"null",
        lambda data: b"",
        lambda data: b'{"tombstone":true,"format":1,"dataset":"tiny","version":"../x"}',
        lambda data: b'{"dataset":"tiny","format":1,"tombstone":true,"version":"bbbb.g0","x":1}',
    ],
)
def test_no_form_of_json_is_taken_for_another(store, bytes_of):
    path = slot(store)
    changed = bytes_of(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    with pytest.raises(IntegrityError, match=r"manifest.json (is damaged|has format)"):
        open_version(store, "tiny", "bbbb.g0")


def test_two_files_never_share_a_place(store):
    def twice(document):
        document["files"].append(document["files"][0])

    def two_cards(document):
        card = next(e for e in document["files"] if e["kind"] == "card")
        document["files"].append(card | {"key": f"card/READ2-{card['sha256'][:12]}.md"})

    def by_case(document):
        export = document["files"][0] | {"kind": "exports"}
        document["files"] += [export | {"key": "exports/a"}, export | {"key": "exports/A"}]

    def below_a_file(document):
        export = document["files"][0] | {"kind": "exports"}
        document["files"] += [export | {"key": "exports/a"}, export | {"key": "exports/a/b"}]

    whole = slot(store).read_bytes()
    for change in (twice, two_cards, by_case, below_a_file):
        slot(store).write_bytes(whole)
        forge(store, change)
        with pytest.raises(IntegrityError, match="two files have the same path"):
            open_version(store, "tiny", "bbbb.g0")


def test_a_manifest_at_another_place_is_refused(store, tmp_path):
    slot(store, "aaaa.g0").write_bytes(slot(store, "bbbb.g0").read_bytes())
    for read in (
        lambda: open_version(store, "tiny", "aaaa.g0"),
        lambda: open_version(store, "tiny", "aaaa"),
        lambda: load_packed(f"{store.uri}/tiny", "aaaa.g0", cache=tmp_path / "cache"),
        lambda: set_ref(store, "tiny", "prod", "aaaa.g0"),
    ):
        with pytest.raises(IntegrityError, match="it is the manifest of 'tiny' bbbb"):
            read()
    assert cli_call("verify", f"{store.uri}/tiny@aaaa.g0").exit_code == 5

    shutil.copytree(store.root / "tiny", store.root / "other")
    with pytest.raises(IntegrityError, match="it is the manifest of 'tiny' bbbb"):
        open_version(store, "other", "bbbb.g0")


def test_a_tombstone_of_another_version_frees_nothing_for_collection(store):
    data = b'{"dataset":"tiny","format":1,"tombstone":true,"version":"aaaa.g0"}'
    slot(store, "bbbb.g0").write_bytes(data)
    report = collect_garbage(store, "tiny", grace_s=0, dry_run=False)
    assert [g.reason for g in report.garbage] == ["damaged"]
    assert len(list((store.root / "tiny/v/bbbb.g0/data").iterdir())) == 2


def erase_counts(document):
    document["counts"] = {}


def drop_all_data_of_the_split(document):
    document["files"] = [e for e in document["files"] if e["kind"] != "data"]


def change_the_card(document):
    document["files"] = [e for e in document["files"] if e["kind"] != "card"]


@pytest.mark.parametrize("change", [erase_counts, drop_all_data_of_the_split, change_the_card])
def test_a_manifest_that_changed_after_its_ref_moved_is_refused(store, tmp_path, change):
    uri = f"{store.uri}/tiny"
    forge(store, change)
    problem = "was changed: its ID is .* but a ref recorded"
    with pytest.raises(IntegrityError, match=problem):
        load_packed(uri, cache=tmp_path / "cache")
    assert cli_call("verify", uri).exit_code == 5
    by_name = cli_call("verify", f"{uri}@bbbb.g0")  # verify checks the refs itself
    assert by_name.exit_code == 5
    assert "a ref recorded" in by_name.output.replace("\n", " ")

    forge(store, change, "aaaa.g0")
    with pytest.raises(IntegrityError, match=problem):
        rollback_ref(store, "tiny", "latest")
    assert load_ref(store, "tiny", "latest").version == "bbbb.g0"
    with pytest.raises(IntegrityError, match=problem):  # drift would be measured from it
        publish_version(store, "tiny", "cccc", [pack_file(tmp_path, 50)], FACTS, "latest")


def test_an_address_with_a_digest_refuses_a_rewritten_manifest(store, tmp_path, caplog):
    opened = open_version(store, "tiny", "bbbb.g0")
    copy = pull_version(opened, tmp_path / "copy")
    assert opened.address == f"{store.uri}/tiny@bbbb.g0#{opened.manifest.manifest_id[:32]}"

    def load(name):
        return load_packed(f"{store.uri}/tiny@{name}", cache=tmp_path / "cache").num_rows

    digest = opened.manifest.manifest_id
    for name in ("latest", opened.pinned, f"bbbb.g0#{digest}", f"bbbb#{digest}"):
        assert load(name) == 4
    assert not caplog.records
    for name in ("bbbb.g0", "bbbb"):
        assert load(name) == 4
        assert f"Use {opened.address}" in caplog.messages.pop()
    with pytest.raises(ConfigError, match="digest of 32 to 64 digits"):
        load(f"bbbb.g0#{digest[:31]}")
    with pytest.raises(VersionNotFoundError, match="no version 'latest'"):
        load(f"latest#{digest}")

    forge(store, erase_counts)
    problem = "was changed: its ID is .* but the address recorded"
    for name in (opened.pinned, f"bbbb.g0#{digest}", f"bbbb#{digest}"):
        with pytest.raises(IntegrityError, match=problem):
            load(name)
    done = cli_call("ref", "set", f"{store.uri}/tiny", "prod", opened.pinned)
    assert done.exit_code == 5
    assert load_packed(copy, opened.pinned, cache=tmp_path / "cache").num_rows == 4
    with pytest.raises(IntegrityError, match=problem):
        load_packed(copy, f"bbbb.g0#{'0' * 64}", cache=tmp_path / "cache")


def test_a_version_that_was_removed_and_published_again_is_recorded_again(store, tmp_path):
    """Another release of packhouse writes another card, so the manifest has another ID."""
    path = slot(store)
    path.unlink()
    (tmp_path / "card.md").write_text("another card")
    facts = FACTS | {"content_id": "bbbb"}
    files = [pack_file(tmp_path, 9), pack_file(tmp_path, 109)]
    files.append(LocalFile(tmp_path / "card.md", "all", kind="card"))
    done = publish_version(store, "tiny", "bbbb", files, facts, "latest")
    assert done.ref.manifest_id == done.manifest.manifest_id
    assert open_version(store, "tiny").manifest == done.manifest
    assert publish_version(store, "tiny", "bbbb", files, facts, "latest").ref.seq == done.ref.seq


# Refs.


@pytest.mark.parametrize(
    "change",
    [
        {"version": "../../x"},
        {"version": "aaaa.g0\n"},
        {"version": 5},
        {"seq": 0},
        {"seq": True},
        {"seq": 2**63},
        {"write_id": "../x"},
        {"parent": "../x"},
        {"past": [["aaaa.g0", 1, "w", "x"]]},
        {"past": [["aaaa.g0", 1, "w"]]},
        {"past": [["aaaa.g0", 1, "w", "0" * 64]] * 501},
        {"past": "aaaa"},
        {"manifest_id": "x"},
        {"unknown": 1},
        {"name": "prod"},
    ],
)
def test_no_field_of_a_ref_is_strange(store, change):
    path = store.root / "tiny/refs/latest.json"
    document = json.loads(path.read_bytes()) | change
    del document["sha256"]
    path.write_bytes(canonical(document | {"sha256": sha256(document)}))
    with pytest.raises(IntegrityError, match=r"ref 'tiny/refs/latest\.json' is damaged"):
        open_version(store, "tiny")
    assert len(scan_refs(store, "tiny")[1]) == 1


# Links, pipes and sizes in a folder that others can write to.


def test_a_link_out_of_a_store_is_neither_read_nor_written_nor_collected(store, tmp_path):
    outside = tmp_path / "outside"
    (outside / "abcd.g0").mkdir(parents=True)
    (outside / "abcd.g0" / "mine.txt").write_text("mine")
    os.utime(outside / "abcd.g0" / "mine.txt", (0, 0))
    (store.root / "evil").mkdir()
    (store.root / "evil" / "v").symlink_to(outside)

    problem = "a symbolic link at .* leads outside the store"
    with pytest.raises(StoreError, match=problem):
        collect_garbage(store, "evil", grace_s=0, dry_run=False)
    with pytest.raises(StoreError, match=problem):
        publish_version(store, "evil", "aaaa", [pack_file(tmp_path)], FACTS)
    with pytest.raises(StoreError, match=problem):
        store.delete("evil/v/abcd.g0/mine.txt")
    with pytest.raises(StoreError, match=problem):
        scan_versions(store, "evil")
    assert [path.name for path in outside.rglob("*")] == ["abcd.g0", "mine.txt"]

    entry = open_version(store, "tiny").files()[0]
    data = store.root / "tiny/v/bbbb.g0" / entry.key
    (tmp_path / "same").write_bytes(data.read_bytes())
    data.unlink()
    data.symlink_to(tmp_path / "same")
    with pytest.raises(StoreError, match=problem):
        load_packed(f"{store.uri}/tiny", cache=tmp_path / "cache")


def test_a_link_inside_a_store_and_a_linked_root_work(store, tmp_path):
    (tmp_path / "link").symlink_to(store.root)
    linked = open_store(str(tmp_path / "link"))
    assert verify_version(open_version(linked, "tiny")).is_intact
    (store.root / "disk2").mkdir()
    (store.root / "tiny").rename(store.root / "disk2" / "tiny")
    (store.root / "tiny").symlink_to(store.root / "disk2" / "tiny")
    assert verify_version(open_version(store, "tiny")).is_intact


def test_an_object_that_grew_fills_neither_memory_nor_disk(store, tmp_path):
    opened = open_version(store, "tiny")
    entry = opened.files()[0]
    data = store.root / "tiny/v/bbbb.g0" / entry.key
    os.truncate(data, 2**40)
    with pytest.raises(IntegrityError, match="reads differs from the published"):
        pull_version(opened, tmp_path / "copy")
    assert not (tmp_path / "copy" / entry.key).exists()

    os.truncate(slot(store), 2**40)
    assert len(store.get("tiny/v/bbbb.g0/manifest.json").data) == MAX_GET_BYTES + 1
    with pytest.raises(IntegrityError, match="is damaged"):
        open_version(store, "tiny", "bbbb.g0")


def test_publishers_write_no_manifest_that_readers_refuse(store, tmp_path):
    for facts in (
        {"lineage": {"tokenizer": {"fingerprint": "../x"}}},
        {"counts": {"ledger": [{"rows_in": None}]}},
    ):
        with pytest.raises(ConfigError):
            publish_version(store, "tiny", "cccc", [pack_file(tmp_path)], FACTS | facts)
    assert not (store.root / "tiny/v/cccc.g0").exists()


# Receipts of steps, from a mirror or a shared cache.


@pytest.mark.parametrize(
    "files",
    [
        {"../../x.arrow": {"size": 1, "sha256": "0"}},
        {"a\0.arrow": {"size": 1, "sha256": "0"}},
        {"a\\b.arrow": {"size": 1, "sha256": "0"}},
        {"receipt.json": {"size": 1, "sha256": "0"}},
        {"a.arrow": {"size": -1, "sha256": "0"}},
        {"a.arrow": {"size": True, "sha256": "0"}},
        {"a.arrow": {"size": 1, "sha256": None}},
        {"a.arrow": {"size": 1, "sha256": "0", "more": 1}},
        ["a.arrow"],
        None,
    ],
)
def test_a_receipt_names_only_files_that_a_step_writes(tmp_path, files):
    receipt = {"step": "s", "key": "k", "files": files, "facts": {}, "seconds": 0.1}
    data = canonical(receipt | {"digest": sha256(receipt)})
    with pytest.raises(IntegrityError, match="is invalid"):
        parse_receipt(data, "s", "k", tmp_path)
    folder = tmp_path / "s" / "k"
    folder.mkdir(parents=True)
    (folder / "receipt.json").write_bytes(data)
    assert StepStore(tmp_path).find("s", "k") is None

import getpass
import json
import os
import socket
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.store import open_store, open_version, publish_version
from tests.store.versions import FACTS, pack_file

LEDGER = [
    {"step": "validate", "rows_in": 5, "rows_out": 4, "quarantined": {"json": 1}},
    {"step": "pack", "rows_in": 4, "rows_out": 3, "dropped": {"over_seq_len": 1}},
]


@pytest.fixture
def dataset(tmp_path):
    root = str(tmp_path / "store")
    store = open_store(root)
    for vid, first in (("aaaa", 1), ("bbbb", 9)):
        facts = FACTS | {"content_id": vid, "counts": {"ledger": LEDGER}}
        publish_version(store, "tiny", vid, [pack_file(tmp_path, first)], facts, "latest")
    return f"{root}/tiny"


def call(*args, code=0):
    done = CliRunner().invoke(cli, [str(arg) for arg in args])
    assert done.exit_code == code, done.output
    return done.output


def test_ls_lists_datasets_and_versions(dataset):
    root = dataset.rpartition("/")[0]
    (row,) = json.loads(call("ls", root, "--json"))
    moved = row.pop("moved")["latest"]
    assert row == {"dataset": "tiny", "refs": {"latest": "bbbb.g0"}}
    assert f"latest -> bbbb.g0 {moved[:10]}" in call("ls", root)
    rows = json.loads(call("ls", dataset, "--json"))
    assert [r["published"][:10] for r in rows] == [moved[:10], moved[:10]]
    assert [(r["version"], r["refs"], r["records"], r["tokens"]) for r in rows] == [
        ("aaaa.g0", [], 3, 7),  # records that were published, not rows that were read
        ("bbbb.g0", ["latest"], 3, 7),
    ]
    assert "bbbb.g0" in call("ls", dataset)


def test_refs_are_set_listed_and_rolled_back(dataset):
    assert json.loads(call("ref", "set", dataset, "prod", "latest", "--json"))["seq"] == 1
    call("ref", "rollback", dataset, "latest")
    refs = json.loads(call("ref", "ls", dataset, "--json"))
    assert {r["name"]: r["version"] for r in refs} == {"latest": "aaaa.g0", "prod": "bbbb.g0"}
    call("ref", "set", dataset, "latest", "prod", "--reason", "checked by hand\udcff")
    log = json.loads(call("ref", "log", dataset, "latest", "--json"))
    moves = [log, *log["past"]]
    assert [(move["version"], move["reason"]) for move in moves] == [
        ("bbbb.g0", "checked by hand?"),
        ("aaaa.g0", "rolled back 1 move"),
        ("bbbb.g0", "published"),
        ("aaaa.g0", "published"),
    ]
    assert {move["by"] for move in moves} == {f"{getpass.getuser()}@{socket.gethostname()}"}
    times = [datetime.fromisoformat(move["time"]) for move in moves]
    assert datetime.now(UTC) >= times[0] >= times[-1] > datetime.now(UTC) - timedelta(minutes=10)
    call("ref", "rollback", dataset, "prod", code=5)


def test_gc_shows_first(dataset, tmp_path):
    store = open_store(str(tmp_path / "store"))
    store.put_create("tiny/v/cccc.g0/data/train-0.parquet", b"left")
    os.utime(store.root / "tiny/v/cccc.g0/data/train-0.parquet", (0, 0))
    shown = json.loads(call("gc", dataset, "--grace-hours", "0", "--json"))
    assert (shown["dry_run"], shown["bytes"], shown["deleted"]) == (True, 4, 0)
    assert "1 object deleted" in call("gc", dataset, "--grace-hours", "0", "--delete")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://key:secret@bucket/tiny", "must not contain credentials"),
        ("ftp://host/tiny", "unknown store"),
        ("hdfs://host/tiny", "unknown store"),
        (
            "abfs://container@account.dfs.core.windows.net/tiny",
            "must not contain credentials, an account",
        ),
    ],
)
def test_places_that_are_refused(place, message):
    done = CliRunner().invoke(cli, ["ls", place])
    assert done.exit_code in (2, 5)
    assert message in done.output
    assert "secret" not in done.output


def test_pull_to_a_place_that_is_no_folder(dataset):
    message = call("pull", dataset, "/dev/null/x", code=2)
    assert "cannot create folder '/dev/null/x': Not a directory" in message


@pytest.fixture
def damaged_ref(dataset, tmp_path):
    path = tmp_path / "store" / "tiny" / "refs" / "latest.json"
    path.write_bytes(path.read_bytes()[:40])
    return path


def test_a_damaged_ref_is_named_with_its_remedy_and_the_rest_is_listed(dataset, damaged_ref):
    remedy = "packhouse ref set STORE/tiny latest VERSION --force"
    call("ref", "set", dataset, "prod", "aaaa.g0")
    listed = call("ls", dataset.rpartition("/")[0], code=5)
    assert "prod -> aaaa.g0" in listed
    for output in (listed, call("ls", dataset, code=5), call("ref", "ls", dataset, code=5)):
        assert "warning: ref 'tiny/refs/latest.json' is damaged" in output
        assert remedy in output
    for command in (["show", dataset], ["ref", "set", dataset, "latest", "aaaa.g0"]):
        assert remedy in call(*command, code=5)
    assert remedy in call("ref", "rollback", dataset, "latest", code=5)


def test_a_damaged_manifest_is_named_and_the_other_versions_are_listed(dataset, tmp_path):
    path = tmp_path / "store" / "tiny" / "v" / "aaaa.g0" / "manifest.json"
    whole = path.read_bytes()
    for damaged in (whole[:100], b"", whole.replace(b'"generation":0', b'"generation":1')):
        path.write_bytes(damaged)
        output = call("ls", dataset, code=5)
        assert "warning: tiny/v/aaaa.g0/manifest.json is damaged" in output
        assert "bbbb.g0" in output
        assert "Restore it from a copy made with `packhouse pull`" in output
        call("verify", f"{dataset}@aaaa.g0", code=5)
        call("show", dataset)


def test_gc_leaves_a_version_with_a_damaged_manifest_alone(dataset, tmp_path):
    folder = tmp_path / "store" / "tiny" / "v" / "aaaa.g0"
    (folder / "manifest.json").write_bytes(b"{")
    stray = tmp_path / "store" / "tiny" / "v" / "cccc.g0" / "data" / "train-0.parquet"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"left")
    before = sorted(folder.rglob("*"))
    for path in (stray, *(p for p in before if p.is_file())):
        os.utime(path, (0, 0))
    output = call("gc", dataset, "--grace-hours", "1", "--delete", code=5)
    assert "damaged" in output
    assert "1 object deleted" in output
    assert sorted(folder.rglob("*")) == before


def test_a_damaged_ref_is_replaced_by_force_only(dataset, damaged_ref):
    moved = json.loads(call("ref", "set", dataset, "latest", "bbbb.g0", "--force", "--json"))
    assert (moved["version"], moved["seq"], moved["past"]) == ("bbbb.g0", 1, [])
    assert "bbbb.g0" in call("show", dataset)
    call("ref", "set", dataset, "latest", "aaaa.g0", "--force")
    call("ref", "rollback", dataset, "latest")


def test_anything_not_found_is_reported_with_a_working_command(dataset, tmp_path):
    root = dataset.rpartition("/")[0]
    for place, problem, remedy in (
        (f"{dataset}@prod", "'tiny' has no ref or version 'prod'", f"packhouse ls {dataset}"),
        (f"{dataset}@cccc.g0", "version 'cccc.g0' of 'tiny' does not exist", dataset),
        (f"{root}/other", f"store '{root}' has no dataset 'other'", f"packhouse ls {root}`"),
        (f"{tmp_path}/none/tiny", f"store '{tmp_path}/none' has no datasets", "publish.store"),
    ):
        message = call("show", place, code=5)
        assert problem in message
        assert remedy in message
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    assert f"is a file, not a version. Run `packhouse init {rows}" in call("inspect", rows, code=2)
    assert f"packhouse ref ls {dataset}`" in call("ref", "log", dataset, "prod", code=5)
    assert f"packhouse ls {dataset}`" in call("ref", "rollback", dataset, "prod", code=5)


def test_ls_of_a_store_that_is_not_there_fails_and_of_an_empty_one_does_not(tmp_path):
    assert f"no store or dataset at '{tmp_path}/nope'" in call("ls", tmp_path / "nope", code=5)
    assert json.loads(call("ls", tmp_path, "--json")) == []


def test_a_full_disk_under_a_pull_is_named_and_not_the_store(dataset, tmp_path):
    opened = open_version(str(tmp_path / "store"), "tiny")
    (entry,) = opened.files()
    path = tmp_path / "copy" / entry.path
    path.parent.mkdir(parents=True)
    partial = path.with_name(f".{path.name}.{entry.sha256[:12]}.partial")
    partial.symlink_to("/dev/full")
    message = call("pull", dataset, tmp_path / "copy", code=5)
    assert f"cannot write '{partial}': No space left on device" in message
    partial.unlink(missing_ok=True)
    call("pull", dataset, tmp_path / "copy")


def test_a_file_that_was_removed_by_hand_is_named_with_a_remedy(dataset, tmp_path):
    (path,) = (tmp_path / "store" / "tiny" / "v" / "bbbb.g0" / "data").iterdir()
    path.unlink()
    for command in (["verify", dataset], ["pull", dataset, tmp_path / "copy"]):
        assert "is missing: it was deleted outside packhouse" in call(*command, code=5)
    assert not (tmp_path / "copy" / "manifest.json").exists()

"""The real huggingface_hub client on a server that enforces its commit conditions."""

import json

import pytest
from pydantic import ValidationError

from packhouse.addons.mirrors import mirror_to_hub
from packhouse.errors import StoreError, TransientError
from packhouse.recipe import PublishConfig
from packhouse.store import LocalFile, open_version, publish_version
from tests.store.hub_server import HubServer
from tests.store.versions import FACTS, pack_file

URI = "hf://datasets/acme/tiny"
# huggingface_hub passes files to its HTTP client as that wants them no more.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        yield server


@pytest.fixture
def store(store, tmp_path):
    (tmp_path / "bad.jsonl").write_text("raw row\n")
    quarantine = LocalFile(tmp_path / "bad.jsonl", "all", rows=1, kind="quarantine")
    for vid, first in (("aaaa", 1), ("bbbb", 9)):
        files = [pack_file(tmp_path, first), quarantine]
        publish_version(store, "tiny", vid, files, FACTS, "latest")
    return store


def mirror(store, names):
    return [mirror_to_hub(open_version(store, "tiny", name), URI) for name in names.split()]


def test_a_mirror_is_one_commit_that_replaces_the_data_of_the_version_before(hub, store):
    first, second, *_ = mirror(store, "aaaa aaaa bbbb aaaa bbbb")
    assert first == second  # nothing to do

    commits = hub.repos["acme/tiny"]
    assert len(commits) == 5  # the empty one, and aaaa and bbbb twice
    assert hub.num_lfs_puts == 2  # bytes that the Hub has are not sent again
    opened = open_version(store, "tiny", "bbbb")
    (entry,) = opened.files()
    assert sorted(commits[-1]) == ["README.md", entry.path, "manifest.json"]
    assert commits[-1][entry.path] == store.get(opened.key(entry)).data
    assert json.loads(commits[-1]["manifest.json"])["vid"] == "bbbb"
    assert b"raw row" not in b"".join(commits[-1].values())


def test_data_files_go_the_lfs_route_in_parts(hub, store):
    hub.part_bytes = 1000
    mirror(store, "aaaa")

    opened = open_version(store, "tiny", "aaaa")
    (entry,) = opened.files()
    assert list(hub.lfs) == [entry.sha256]
    assert hub.num_lfs_puts == -(-entry.size // 1000)
    assert hub.repos["acme/tiny"][-1][entry.path] == store.get(opened.key(entry)).data


def test_a_refused_large_file_names_the_token_and_commits_nothing(hub, store):
    hub.refuse_lfs_with = 403
    with pytest.raises(StoreError, match=r"acme/tiny: the Hub denied access \(403\)"):
        mirror(store, "aaaa")
    assert len(hub.repos["acme/tiny"]) == 1
    hub.refuse_with = 401
    with pytest.raises(StoreError, match="Check HF_TOKEN"):
        mirror(store, "aaaa")


def test_a_hub_that_does_not_answer_is_a_passing_failure(hub, store, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(TransientError, match="hf://datasets/acme/tiny: "):
        mirror(store, "aaaa")


def test_a_hub_without_xet_is_reported(hub, store, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    with pytest.raises(TransientError, match="HF_HUB_DISABLE_XET=1"):
        mirror(store, "aaaa")
    assert len(hub.repos["acme/tiny"]) == 1


def test_another_commit_in_between_is_seen_and_kept(hub, store):
    mirror(store, "aaaa")
    paths = ("NOTES.md", "data/another-mirror.parquet")
    lines = [{"key": "file", "value": {"path": path, "content": "aGk="}} for path in paths]
    hub.race = lambda: hub.commit("acme/tiny", lines, None)
    mirror(store, "bbbb")

    last = hub.repos["acme/tiny"][-1]
    assert last["NOTES.md"] == b"hi"
    assert "data/another-mirror.parquet" not in last  # mirrors do not mix
    assert json.loads(last["manifest.json"])["vid"] == "bbbb"


@pytest.mark.parametrize("uri", ["hf://datasets/name", "hf://models/a/b", "s3://a/b", "hf://a/b/c"])
def test_an_invalid_dataset_repository(uri):
    with pytest.raises(ValidationError):
        PublishConfig(also=[uri])

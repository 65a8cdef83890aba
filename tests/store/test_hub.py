"""The real huggingface_hub client on a server that enforces its commit conditions."""

import json
import os

import pytest
from pydantic import ValidationError

from packhouse.addons.mirrors import mirror_to_hub
from packhouse.errors import PackhouseError
from packhouse.recipe import PublishConfig
from packhouse.store import LocalFile, open_store, open_version, publish_version
from tests.forked import forks_of
from tests.store.hub_server import HubServer
from tests.store.versions import FACTS, pack_file

URI = "hf://datasets/acme/tiny"


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def store(tmp_path):
    store = open_store(str(tmp_path / "store"))
    (tmp_path / "bad.jsonl").write_text("raw row\n")
    quarantine = LocalFile(tmp_path / "bad.jsonl", "all", rows=1, kind="quarantine")
    for vid, first in (("aaaa", 1), ("bbbb", 9)):
        files = [pack_file(tmp_path, first), quarantine]
        publish_version(store, "tiny", vid, files, FACTS, "latest")
    return store


def mirror(hub, store, names, fails=False, **settings):
    """Run in a separate process, because huggingface_hub reads its endpoint at import.

    Return the results, or the error.
    """
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_test", "PATH": "/usr/bin:/bin"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HOME": "/nonexistent", "HF_HOME": "/nonexistent"}
    context = forks_of(__name__)
    results = context.SimpleQueue()
    arguments = environment | settings, store.uri, names.split(), results
    process = context.Process(target=_mirror, args=arguments)
    process.start()
    done, error = results.get()
    process.join()
    assert bool(error) is fails, error
    return error or done


def _mirror(environment, uri, names, results):
    os.environ.clear()
    os.environ.update(environment)
    done = []
    try:
        for name in names:
            done.append(mirror_to_hub(open_version(uri, "tiny", name), URI))
    except PackhouseError as error:
        results.put((done, f"{type(error).__name__}: {error}"))
    else:
        results.put((done, ""))


def test_a_mirror_is_one_commit_that_replaces_the_data_of_the_version_before(hub, store):
    first, second, *_ = mirror(hub, store, "aaaa aaaa bbbb aaaa bbbb")
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
    mirror(hub, store, "aaaa")

    opened = open_version(store, "tiny", "aaaa")
    (entry,) = opened.files()
    assert list(hub.lfs) == [entry.sha256]
    assert hub.num_lfs_puts == -(-entry.size // 1000)
    assert hub.repos["acme/tiny"][-1][entry.path] == store.get(opened.key(entry)).data


def test_a_refused_large_file_names_the_token_and_commits_nothing(hub, store):
    hub.refuse_lfs_with = 403
    message = mirror(hub, store, "aaaa", fails=True)
    assert "StoreError: hf://datasets/acme/tiny: the Hub denied access (403)" in message
    assert len(hub.repos["acme/tiny"]) == 1
    hub.refuse_with = 401
    assert "Check HF_TOKEN" in mirror(hub, store, "aaaa", fails=True)


def test_a_hub_that_does_not_answer_is_a_passing_failure(hub, store):
    message = mirror(hub, store, "aaaa", fails=True, HF_ENDPOINT="http://127.0.0.1:1")
    assert "TransientError: hf://datasets/acme/tiny: " in message


def test_a_hub_without_xet_is_reported(hub, store):
    message = mirror(hub, store, "aaaa", fails=True, HF_HUB_DISABLE_XET="0")
    assert "HF_HUB_DISABLE_XET=1" in message
    assert len(hub.repos["acme/tiny"]) == 1


def test_another_commit_in_between_is_seen_and_kept(hub, store):
    mirror(hub, store, "aaaa")
    paths = ("NOTES.md", "data/another-mirror.parquet")
    lines = [{"key": "file", "value": {"path": path, "content": "aGk="}} for path in paths]
    hub.race = lambda: hub.commit("acme/tiny", lines, None)
    mirror(hub, store, "bbbb")

    last = hub.repos["acme/tiny"][-1]
    assert last["NOTES.md"] == b"hi"
    assert "data/another-mirror.parquet" not in last  # mirrors do not mix
    assert json.loads(last["manifest.json"])["vid"] == "bbbb"


@pytest.mark.parametrize("uri", ["hf://datasets/name", "hf://models/a/b", "s3://a/b", "hf://a/b/c"])
def test_an_invalid_dataset_repository(uri):
    with pytest.raises(ValidationError):
        PublishConfig(also=[uri])

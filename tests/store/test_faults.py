"""Production code on an S3 server behind a proxy that loses and damages requests."""

import pytest

from packhouse.errors import IntegrityError
from packhouse.store import (
    load_ref,
    open_store,
    open_version,
    publish_version,
    pull_version,
    verify_version,
)
from packhouse.store.store_requests import RetryPolicy
from tests.store.conftest import checks_digests
from tests.store.proxy import GET_FAULTS, FaultyProxy, in_turn
from tests.store.versions import FACTS, list_versions, pack_file


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(RetryPolicy, "delay_s", lambda *_: 0.01)


@pytest.mark.parametrize("last", ["drop_after", "busy_after"])  # it is executed: no more tries
def test_faults_on_every_put_neither_fail_nor_commit_twice(
    s3_server, use, monkeypatch, tmp_path, last
):
    faults = ("drop_before", "busy_before", "conflict", "flip_request", last)
    if not checks_digests(s3_server):  # moto checks no hash of a body
        faults = ("drop_before", "busy_before", "conflict", last)
    root = use(s3_server)
    with FaultyProxy(s3_server["AWS_ENDPOINT_URL"], in_turn(faults, ("PUT",))) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        done = publish_version(
            open_store(root), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest"
        )
        # Three for the check of the store; data, card, manifest, ref.
        assert proxy.counts == dict.fromkeys(faults, 7)
    assert (done.version, done.ref.seq) == ("aaaa.g0", 1)
    assert_one_intact_version(root, s3_server, monkeypatch)


def test_a_read_is_repeated_after_any_fault(s3_server, use, monkeypatch, tmp_path):
    root = use(s3_server)
    publish_version(open_store(root), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    with FaultyProxy(s3_server["AWS_ENDPOINT_URL"], in_turn(GET_FAULTS, ("GET",))) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        dest = pull_version(open_version(root, "tiny"), tmp_path / "copy")
        # Of ref, manifest, data and card.
        assert proxy.counts == dict.fromkeys(GET_FAULTS, 4)
    (file,) = (dest / "data").iterdir()
    assert file.read_bytes() == (tmp_path / "train-1.parquet").read_bytes()


def test_a_file_that_is_damaged_each_time_is_reported(s3_server, use, monkeypatch, tmp_path):
    root = use(s3_server)
    publish_version(open_store(root), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")

    def rule(method, path):
        return "flip_answer" if method == "GET" and "/data/" in path else None

    with FaultyProxy(s3_server["AWS_ENDPOINT_URL"], rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        with pytest.raises(IntegrityError, match="is damaged"):
            pull_version(open_version(root, "tiny"), tmp_path / "copy")
    assert not (tmp_path / "copy" / "manifest.json").exists()


def assert_one_intact_version(root, s3_server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server["AWS_ENDPOINT_URL"])
    store = open_store(root)
    (manifest,) = list_versions(store, "tiny")
    assert manifest.version == "aaaa.g0"
    assert load_ref(store, "tiny", "latest").version == "aaaa.g0"
    assert verify_version(open_version(store, "tiny")).problems == ()

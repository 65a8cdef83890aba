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
from tests.store.proxy import GET_FAULTS, PUT_FAULTS, FaultyProxy, first_time
from tests.store.versions import FACTS, list_versions, pack_file


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(RetryPolicy, "delay_s", lambda *_: 0.01)


@pytest.mark.parametrize("fault", PUT_FAULTS)
def test_a_fault_on_every_put_neither_fails_nor_commits_twice(
    s3_server, use, monkeypatch, tmp_path, fault
):
    if fault == "flip_request" and not checks_digests(s3_server):
        pytest.skip("moto checks neither Content-MD5 nor the signed hash of the body")
    root = use(s3_server)
    with FaultyProxy(s3_server["AWS_ENDPOINT_URL"], first_time(fault, ("PUT",))) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        done = publish_version(
            open_store(root), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest"
        )
        # Three for the check of the store; data, card, manifest, ref.
        assert proxy.counts[fault] == 7
    assert (done.version, done.ref.seq) == ("aaaa.g0", 1)
    assert_one_intact_version(root, s3_server, monkeypatch)


@pytest.mark.parametrize("fault", GET_FAULTS)
def test_a_fault_on_every_read_gives_right_bytes_or_is_repeated(
    s3_server, use, monkeypatch, tmp_path, fault
):
    root = use(s3_server)
    publish_version(open_store(root), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    with FaultyProxy(s3_server["AWS_ENDPOINT_URL"], first_time(fault, ("GET", "HEAD"))) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        dest = pull_version(open_version(root, "tiny"), tmp_path / "copy")
        assert proxy.counts[fault] == 4  # ref, manifest, data, card
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

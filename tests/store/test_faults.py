"""Production code on an S3 server behind a proxy that loses and damages requests."""

from types import SimpleNamespace

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
from tests.store.proxy import GET_FAULTS, PUT_FAULTS, FaultyProxy, at_random, first_time
from tests.store.versions import FACTS, list_versions, pack_file


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.e2e)])
def server(request):
    return request.getfixturevalue(f"{request.param}_environment")


@pytest.mark.parametrize("fault", PUT_FAULTS)
def test_a_fault_on_every_put_neither_fails_nor_commits_twice(
    server, use, monkeypatch, tmp_path, fault
):
    if fault == "flip_request" and not is_ceph(server):
        pytest.skip("moto checks neither Content-MD5 nor the signed hash of the body")
    root = use(server)
    with FaultyProxy(server["AWS_ENDPOINT_URL"], first_time(fault, ("PUT",))) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        done = publish_version(
            open_store(root), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest"
        )
        # Three for the check of the store; data, card, manifest, ref.
        assert proxy.counts[fault] == 7
    assert (done.version, done.ref.seq) == ("aaaa.g0", 1)
    assert_one_intact_version(root, server, monkeypatch)


@pytest.mark.parametrize("fault", GET_FAULTS)
def test_a_fault_on_every_read_gives_right_bytes_or_is_repeated(
    server, use, monkeypatch, tmp_path, fault
):
    root = use(server)
    publish_version(open_store(root), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    with FaultyProxy(server["AWS_ENDPOINT_URL"], first_time(fault, ("GET", "HEAD"))) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        dest = pull_version(open_version(root, "tiny"), tmp_path / "copy")
        assert proxy.counts[fault] == 4  # ref, manifest, data, card
    (file,) = (dest / "data").iterdir()
    assert file.read_bytes() == (tmp_path / "train-1.parquet").read_bytes()


def test_a_file_that_is_damaged_each_time_is_reported(server, use, monkeypatch, tmp_path):
    root = use(server)
    publish_version(open_store(root), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")

    def rule(method, path):
        return "flip_answer" if method == "GET" and "/data/" in path else None

    with FaultyProxy(server["AWS_ENDPOINT_URL"], rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        with pytest.raises(IntegrityError, match="is damaged"):
            pull_version(open_version(root, "tiny"), tmp_path / "copy")
    assert not (tmp_path / "copy" / "manifest.json").exists()


def test_publishing_and_reading_under_random_faults(server, use, monkeypatch, tmp_path):
    root = use(server)
    with FaultyProxy(server["AWS_ENDPOINT_URL"], at_random(0.25, seed=1)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(root)
        if not is_ceph(server):  # see above
            proxy.rule = without_flips(proxy.rule)
        for number in range(8):
            file = pack_file(tmp_path, number + 1)
            done = publish_version(store, "tiny", f"aaa{number}", [file], FACTS, "latest")
            assert verify_version(open_version(store, "tiny", done.version)).is_intact
        assert sum(proxy.counts.values()) > 10
    monkeypatch.setenv("AWS_ENDPOINT_URL", server["AWS_ENDPOINT_URL"])
    assert len(list_versions(open_store(root), "tiny")) == 8
    assert load_ref(open_store(root), "tiny", "latest").seq == 8


def test_a_deadline_ends_the_tries(server, use, monkeypatch):
    """Time passes only in the waits between attempts, however long a request takes here."""
    from packhouse.errors import TransientError
    from packhouse.store import store_requests

    root, slept = use(server), []
    monkeypatch.setattr(
        store_requests, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    )
    with FaultyProxy(server["AWS_ENDPOINT_URL"], lambda *_: "busy_before") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        policy = store_requests.RetryPolicy(deadline_s=10)
        with pytest.raises(TransientError, match="503 SlowDown"):
            store_requests.run(
                open_store(root),
                store_requests.ask(store_requests.ObjectStore.get, "d/x"),
                retry=policy,
            )
        assert proxy.requests == len(slept) + 1 > 5
    assert sum(slept) <= 10


def is_ceph(server):
    return server["AWS_ACCESS_KEY_ID"].startswith("PACKHOUSE")


def without_flips(rule):
    def other(method, path):
        fault = rule(method, path)
        return None if fault == "flip_request" else fault

    return other


def assert_one_intact_version(root, server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server["AWS_ENDPOINT_URL"])
    store = open_store(root)
    (manifest,) = list_versions(store, "tiny")
    assert manifest.version == "aaaa.g0"
    assert load_ref(store, "tiny", "latest").version == "aaaa.g0"
    assert verify_version(open_version(store, "tiny")).problems == ()

"""Behaviour specific to Google's and Azure's stores. Everything else is in test_stores."""

import multiprocessing
import os
import sys
import traceback
from dataclasses import replace

import pytest

from packhouse.addons.doctor import examine
from packhouse.errors import (
    ConfigError,
    PackhouseError,
    StoreError,
    StoreRefusedError,
    TransientError,
)
from packhouse.store import load_ref, open_store, open_version, publish_version, verify_version
from packhouse.store.conditional_writes import require_guarded
from packhouse.store.object_store import ObjectNotFoundError, PreconditionFailedError, file_body
from tests.store import azurite
from tests.store.gcs_server import BUCKET
from tests.store.proxy import FaultyProxy, in_turn
from tests.store.versions import FACTS, list_versions, pack_file

GS = f"gs://{BUCKET}"


def assert_one_version(root):
    store = open_store(root)
    (manifest,) = list_versions(store, "tiny")
    assert manifest.version == "aaaa.g0"
    assert load_ref(store, "tiny", "latest").seq == 1
    assert verify_version(open_version(store, "tiny")).problems == ()


@pytest.mark.parametrize(("when", "status"), [("before", 429), ("after", 503)])
def test_a_lost_answer_of_every_upload_neither_fails_nor_doubles(gcs, tmp_path, when, status):
    store = open_store(GS)
    publish_version(store, "other", "aaaa", [pack_file(tmp_path)], FACTS)  # the store is probed
    gcs.faults = [(when, status), ("", 0)] * 4

    done = publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")

    assert (done.version, done.ref.seq) == ("aaaa.g0", 1)
    assert_one_version(GS)


@pytest.mark.parametrize("uri", [GS, f"{GS}/a b/\u00fc=?#&"])
def test_odd_prefixes_and_none(gcs, tmp_path, uri):
    publish_version(open_store(uri), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    assert_one_version(uri)
    assert list(open_store(uri).list_folders("")) == ["tiny"]


def test_google_that_ignores_conditions_is_refused(gcs, tmp_path):
    gcs.honours_conditions = False
    with pytest.raises(StoreRefusedError, match="second create-only write"):
        publish_version(open_store(f"{GS}/x"), "tiny", "aaaa", [pack_file(tmp_path)], FACTS)
    failed = {
        c.name for c in examine(open_store(GS), num_races=2, num_racers=4) if c.status != "pass"
    }
    # Racing swaps may be executed one after another, and then nothing is wrong with them.
    assert {"create-only", "compare-and-swap", "create races"} <= failed


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (403, StoreError, "credentials"),
        (400, StoreError, "400 Refused"),
        (408, TransientError, "408"),
        (409, TransientError, "409"),
        (500, TransientError, "500"),
        (501, StoreRefusedError, "501"),
    ],
)
def test_answers_of_google_are_told_apart(gcs, status, error, message):
    gcs.refuse_with = status
    for ask in (lambda s: s.get("d/x"), lambda s: s.put_create("d/x", b"1"), lambda s: s.clock()):
        with pytest.raises(error, match=message) as raised:
            ask(open_store(GS))
        assert type(raised.value) is error


def test_no_bucket_is_told_from_no_object(gcs):
    with pytest.raises(ObjectNotFoundError):
        open_store(GS).get("d/x")
    for ask in (lambda s: s.get("d/x"), lambda s: s.put_create("d/x", b"1"), lambda s: s.clock()):
        with pytest.raises(StoreError, match="no bucket 'other'"):
            ask(open_store("gs://other"))


@pytest.mark.parametrize(
    "fault", ["drop_before", "drop_after", "busy_before", "busy_after", "conflict"]
)
@pytest.mark.e2e
def test_a_fault_on_every_put_to_azure_neither_fails_nor_doubles(
    azure, azure_environment, monkeypatch, tmp_path, fault
):
    settings = azure_environment["AZURE_STORAGE_CONNECTION_STRING"]
    server = settings.partition("BlobEndpoint=")[2].partition(f"/{azurite.ACCOUNT}")[0]
    require_guarded(open_store(azure))
    with FaultyProxy(server, in_turn((fault,), ("PUT",))) as proxy:
        faulty = settings.replace(server, proxy.endpoint)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", faulty)
        publish_version(open_store(azure), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
        assert proxy.counts[fault] == 4  # data, card, manifest, ref
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", settings)
    assert_one_version(azure)


@pytest.mark.e2e
def test_no_container_and_a_wrong_key(azure, monkeypatch):
    with pytest.raises(StoreError, match="no container 'other'"):
        open_store("az://other").put_create("d/x", b"1")
    settings = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", settings.replace(azurite.KEY, "YQ=="))
    with pytest.raises(StoreError, match="Check the credentials"):
        open_store(azure).put_create("d/x", b"1")


@pytest.mark.e2e
def test_a_large_file_is_create_only_too(azure, tmp_path):
    """obstore sends a file above 5 MiB in parts, unless the write has a condition."""
    path = tmp_path / "big"
    path.write_bytes(bytes(66 * 2**20))
    store = open_store(azure)
    store.put_create("d/big", file_body(path))
    path.write_bytes(b"\1" * 66 * 2**20)
    with pytest.raises(PreconditionFailedError):
        store.put_create("d/big", file_body(path))
    chunks = list(store.chunks("d/big", 2**20 + 1))
    assert [len(chunk) for chunk in chunks] == [8 * 2**20] * 8 + [2**20 - 1]
    assert set(b"".join(chunks)) == {0}
    assert list(store.chunks("d/big", 66 * 2**20 + 1)) == []


def test_a_file_over_the_limit_of_one_upload_is_refused_before_it_is_read(gcs, tmp_path):
    body = replace(file_body(pack_file(tmp_path).path), size=2**30 + 1)
    with pytest.raises(StoreError, match=r"1,073,741,825 bytes, .* Lower publish.max_file_mb"):
        open_store(GS).put_create("d/x", body)


def test_google_without_credentials_names_the_variable(gcs, monkeypatch):
    """The fake server also plays the machine's token server, which does not know this token."""
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, gcs.endpoint.removeprefix("http://"))
    with pytest.raises(ConfigError, match="Set GOOGLE_APPLICATION_CREDENTIALS"):
        open_store(GS).get("d/x")


@pytest.mark.parametrize(("uri", "extra"), [("gs://b/x", "gcs"), ("az://c/x", "azure")])
def test_a_client_that_is_not_installed_is_named(uri, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "packhouse.addons.gcs_azure", raising=False)
    with pytest.raises(ConfigError, match=rf"pip install .*\[.*{extra}"):
        open_store(uri)


AZURE = "AccountName=a;AccountKey=a2V5"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (AZURE, {"account_name": "a", "account_key": "a2V5"}),
        (
            f"DefaultEndpointsProtocol=https;{AZURE}==;EndpointSuffix=core.chinacloudapi.cn;",
            {
                "account_name": "a",
                "account_key": "a2V5==",
                "endpoint": "https://a.blob.core.chinacloudapi.cn",
            },
        ),
        (
            "BlobEndpoint=https://x.test/a;SharedAccessSignature=sv=1&sig=b%3D;AccountName=a",
            {"endpoint": "https://x.test/a", "sas_key": "sv=1&sig=b%3D", "account_name": "a"},
        ),
        ("", {}),
    ],
)
def test_a_connection_string_is_read(settings, expected, monkeypatch):
    cloud = pytest.importorskip("packhouse.addons.gcs_azure")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", settings)
    assert cloud._azure_config() == expected


def read_object():
    return open_store(GS).get("d/x").data


def test_a_fork_is_refused_where_it_would_wait_for_ever(gcs):
    open_store(GS).put_create("d/x", b"1")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        answer = pool.apply_async(read_object)
        with pytest.raises(ConfigError, match="multiprocessing_context='forkserver'"):
            answer.get(timeout=60)


def test_each_request_is_one_attempt(gcs):
    """A retry inside the client would report a lost success as a key that exists."""
    store, gcs.refuse_with = open_store(GS), 503
    for ask in (lambda: store.put_create("d/x", b"1"), lambda: store.get("d/x")):
        gcs.num_requests = 0
        with pytest.raises(TransientError):
            ask()
        assert gcs.num_requests == 1


def test_azure_without_an_account_names_the_variables(monkeypatch):
    pytest.importorskip("obstore", reason="no obstore: pip install 'packhouse[azure]'")
    for name in ("CONNECTION_STRING", "ACCOUNT_NAME", "ACCOUNT_KEY"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    with pytest.raises(ConfigError, match="AZURE_STORAGE_CONNECTION_STRING"):
        open_store("az://container/x")


@pytest.mark.e2e
def test_no_secret_of_azure_is_in_an_error(azure, monkeypatch):
    settings = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    endpoint = settings.partition("BlobEndpoint=")[2]
    signed = "SharedAccessSignature=sv=2021-12-02&sig=c2VjcmV0"
    for place in (endpoint, "http://127.0.0.1:1/a"):
        value = f"AccountName={azurite.ACCOUNT};{signed};BlobEndpoint={place}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", value)
        with pytest.raises(PackhouseError) as raised:
            open_store(azure).get("d/x")
        assert "c2VjcmV0" not in "".join(traceback.format_exception(raised.value))

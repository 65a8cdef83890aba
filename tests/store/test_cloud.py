"""Google's and Azure's stores: what only they can get wrong. The rest is in test_stores."""

import sys

import pytest

from packhouse.errors import ConfigError, StoreError, StoreRefusedError, TransientError
from packhouse.store import load_ref, open_store, open_version, publish_version, verify_version
from packhouse.store.doctor import examine
from packhouse.store.objects import ObjectNotFoundError
from packhouse.store.read import list_versions
from tests.store import azurite
from tests.store.gcs_server import BUCKET
from tests.store.proxy import FaultyProxy, first_time
from tests.store.versions import FACTS, pack_file

GS = f"gs://{BUCKET}"


@pytest.fixture
def impatient(monkeypatch):
    """gcsfs waits 1, 2, 4, ... s before its own tries."""
    import gcsfs.retry

    async def at_once(_):
        return None

    monkeypatch.setattr(gcsfs.retry.asyncio, "sleep", at_once)


def assert_one_version(root):
    store = open_store(root)
    (manifest,) = list_versions(store, "tiny")
    assert manifest.version == "aaaa.g0"
    assert load_ref(store, "tiny", "latest").seq == 1
    assert verify_version(open_version(store, "tiny")).problems == ()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("status", [503, 429])
def test_a_lost_answer_of_every_upload_neither_fails_nor_doubles(
    gcs, impatient, tmp_path, when, status
):
    store = open_store(GS)
    publish_version(store, "other", "aaaa", [pack_file(tmp_path)], FACTS)  # the store is probed
    gcs.faults = [(when, status), ("", 0)] * 4 if when == "before" else [(when, status)] * 8

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
    assert {"create-only", "compare-and-swap", "create races", "swap races"} <= failed


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (401, StoreError, "credentials"),
        (403, StoreError, "credentials"),
        (501, StoreRefusedError, "501"),
    ],
)
def test_answers_of_google_are_told_apart(gcs, impatient, status, error, message):
    gcs.refuse_with = status
    with pytest.raises(error, match=message):
        open_store(GS).put_create("d/x", b"1")


def test_a_busy_google_is_transient(gcs, impatient):
    gcs.refuse_with = 503
    with pytest.raises(TransientError, match="503"):
        open_store(GS).put_create("d/x", b"1")


def test_no_bucket_is_told_from_no_object(gcs):
    with pytest.raises(ObjectNotFoundError):
        open_store(GS).get("d/x")
    for ask in (lambda s: s.get("d/x"), lambda s: s.put_create("d/x", b"1"), lambda s: s.clock()):
        with pytest.raises(StoreError, match="no bucket 'other'"):
            ask(open_store("gs://other"))


@pytest.mark.parametrize("fault", ["drop_before", "drop_after", "busy_before", "busy_after"])
@pytest.mark.e2e
def test_a_fault_on_every_put_to_azure_neither_fails_nor_doubles(
    azure, azure_environment, monkeypatch, tmp_path, fault
):
    settings = azure_environment["AZURE_STORAGE_CONNECTION_STRING"]
    server = settings.partition("BlobEndpoint=")[2].partition(f"/{azurite.ACCOUNT}")[0]
    with FaultyProxy(server, first_time(fault, ("PUT",))) as proxy:
        faulty = settings.replace(server, proxy.endpoint)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", faulty)
        publish_version(open_store(azure), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
        assert proxy.counts[fault] == 4  # data, card, manifest, ref
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", settings)
    assert_one_version(azure)


@pytest.mark.e2e
def test_azure_root_of_a_container_and_odd_prefixes(azure, tmp_path):
    for uri in (f"az://{azurite.CONTAINER}", f"{azure}/a b/\u00fc=&"):
        publish_version(open_store(uri), "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
        assert_one_version(uri)


@pytest.mark.e2e
def test_no_container_and_a_wrong_key(azure, monkeypatch):
    with pytest.raises(StoreError, match="no container 'other'"):
        open_store("az://other").put_create("d/x", b"1")
    import os

    settings = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", settings.replace(azurite.KEY, "YQ=="))
    with pytest.raises(StoreError, match="check the credentials"):
        open_store(azure).put_create("d/x", b"1")


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_file_of_many_blocks_is_create_only_too(azure, tmp_path):
    """Above 64 MiB the client sends blocks, and the condition stands on the list that ends them."""
    from packhouse.store.objects import PreconditionFailedError, file_body

    path = tmp_path / "big"
    path.write_bytes(bytes(1024) * 66 * 1024)
    store = open_store(azure)
    store.put_create("d/big", file_body(path))
    path.write_bytes(b"\1" * 1024 * 66 * 1024)
    with pytest.raises(PreconditionFailedError):
        store.put_create("d/big", file_body(path))
    assert store.get_range("d/big", 0, 2) == b"\0\0"


@pytest.mark.parametrize(
    ("uri", "client", "extra"), [("gs://b/x", "gcsfs", "gcs"), ("az://c/x", "adlfs", "azure")]
)
def test_a_client_that_is_not_installed_is_named(uri, client, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, client, None)
    with pytest.raises(ConfigError, match=rf"pip install 'packhouse\[{extra}\]'"):
        open_store(uri)


def test_azure_without_an_account_names_the_variables(monkeypatch):
    pytest.importorskip("adlfs", reason="no adlfs: pip install 'packhouse[azure]'")
    for name in ("CONNECTION_STRING", "ACCOUNT_NAME", "ACCOUNT_KEY"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    with pytest.raises(ConfigError, match="AZURE_STORAGE_CONNECTION_STRING"):
        open_store("az://container/x")

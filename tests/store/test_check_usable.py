"""A store that cannot be published to is noticed before any work, at the cost of one request."""

import pytest

from packhouse.errors import StoreError, StoreRefusedError, TransientError
from packhouse.store import open_store
from packhouse.store.conditional_writes import check_usable
from packhouse.store.local_folder import LocalStore
from packhouse.store.s3 import S3Store
from tests.store import ceph
from tests.store.proxy import FaultyProxy


def test_a_good_store_passes_and_shows_no_dataset(root):
    check_usable(root)
    check_usable(root)
    store = open_store(root)
    assert [i.key for i in store.list("") if not i.key.startswith(".packhouse/")] == []


def test_a_folder_is_not_made(tmp_path):
    check_usable(str(tmp_path / "not" / "yet"))
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_costs_one_request_and_its_absence_is_named(use, s3_server, monkeypatch):
    root = use(s3_server)
    check_usable(root)
    with pytest.raises(StoreError, match="no bucket 'not-there'"):
        check_usable("s3://not-there/store")
    with FaultyProxy(s3_server["AWS_ENDPOINT_URL"], lambda *_: None) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        check_usable(root)
        assert proxy.requests == 1


def test_a_server_that_does_not_answer_ends_the_wait(use, s3_server, monkeypatch):
    from packhouse.addons import doctor
    from packhouse.store import conditional_writes
    from packhouse.store.store_requests import RetryPolicy

    root = use(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ceph.free_port()}")
    monkeypatch.setattr(conditional_writes, "PROBE_RETRY", RetryPolicy(deadline_s=0.3))
    with pytest.raises(TransientError):
        check_usable(root)
    with pytest.raises(TransientError):  # `doctor storage` waits no longer
        doctor.examine(open_store(root))


def test_conditions_that_are_ignored_are_noticed(use, s3_server, monkeypatch):
    root = use(s3_server)

    def unconditional(self, key, body, **_):
        return put(self, key, body)

    put = S3Store._put
    monkeypatch.setattr(S3Store, "_put", unconditional)
    with pytest.raises(StoreRefusedError, match="second create-only write"):
        check_usable(root)


def test_a_folder_that_is_a_file_or_cannot_be_linked_in(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"is a file\. Move the file"):
        check_usable(str(tmp_path / "file" / "store"))
    with pytest.raises(StoreError, match="store /proc/x"):
        check_usable("/proc/x")

    def no_links(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("packhouse.store.local_folder.os.link", no_links)
    with pytest.raises(StoreRefusedError, match="no hard links"):
        LocalStore(tmp_path).check_usable()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

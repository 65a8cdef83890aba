"""Guarantees of every kind of store; each test runs on a folder, S3 and Google's store."""

import hashlib
import io
import time
from types import SimpleNamespace

import pytest

from packhouse.addons.doctor import examine
from packhouse.errors import (
    ConfigError,
    IntegrityError,
    StoreError,
    StoreRefusedError,
    TransientError,
)
from packhouse.store import (
    open_store,
    open_version,
    publish_version,
    pull_version,
    verify_version,
)
from packhouse.store.conditional_writes import require_guarded
from packhouse.store.object_store import (
    ObjectNotFoundError,
    PreconditionFailedError,
    check_key,
    file_body,
)
from packhouse.store.s3 import S3Store, make_client
from tests.store.proxy import FaultyProxy
from tests.store.versions import FACTS, pack_file


def test_create_only_and_compare_and_swap(any_store):
    first = any_store.put_create("d/refs/a.json", b"1")
    with pytest.raises(PreconditionFailedError):
        any_store.put_create("d/refs/a.json", b"2")
    second = any_store.put_if_match("d/refs/a.json", b"2", first)
    with pytest.raises(PreconditionFailedError):
        any_store.put_if_match("d/refs/a.json", b"3", first)

    blob = any_store.get("d/refs/a.json")
    assert (blob.data, blob.etag) == (b"2", second)
    if not any_store.uri.startswith(("gs://", "az://")):  # their tags identify a write
        assert second in (hashlib.md5(b"2").hexdigest(), hashlib.sha256(b"2").hexdigest())


def test_absent_objects(any_store, tmp_path):
    tag = any_store.put_create("d/x", b"1")
    for ask in (any_store.get, any_store.head, lambda key: list(any_store.chunks(key))):
        with pytest.raises(ObjectNotFoundError):
            ask("d/y")
    with pytest.raises(ObjectNotFoundError):
        any_store.download("d/y", tmp_path / "y")
    with pytest.raises(PreconditionFailedError):
        any_store.put_if_match("d/y", b"1", tag)
    any_store.delete("d/y")


def test_files_are_put_whole_and_read_in_parts(any_store, tmp_path):
    path = tmp_path / "big"
    path.write_bytes(bytes(range(256)) * 12_000)
    body = file_body(path)
    before = time.time()
    tag = any_store.put_create("d/big", body)
    assert tag in (body.md5, body.sha256) or any_store.uri.startswith(("gs://", "az://"))
    assert (any_store.head("d/big").size, any_store.head("d/big").etag) == (3_072_000, tag)
    assert before - 60 < any_store.head("d/big").last_modified < time.time() + 60
    assert b"".join(any_store.chunks("d/big", 3_071_996)) == bytes([252, 253, 254, 255])
    assert any_store.sha256("d/big") == body.sha256
    part = tmp_path / "part"
    part.write_bytes(path.read_bytes()[:1_000_001])
    any_store.download("d/big", part, offset=1_000_001)
    assert part.read_bytes() == path.read_bytes()


def test_a_file_that_changes_under_the_upload_is_not_published(any_store, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    body = file_body(path)
    path.write_bytes(b"after!")
    try:
        tag = any_store.put_create("d/file", body)
    except (IntegrityError, TransientError):
        with pytest.raises(ObjectNotFoundError):
            any_store.head("d/file")
    else:  # a server that does not check Content-MD5: the tag shows the damage
        assert tag not in (body.md5, body.sha256)


def test_listing(any_store):
    for key in ("d/v/b.g0/x", "d/v/a.g0/x", "d/v/a.g0/y", "d/refs/latest.json", "e/refs/z.json"):
        any_store.put_create(key, b"1")
    assert [i.key for i in any_store.list("d/v/")] == ["d/v/a.g0/x", "d/v/a.g0/y", "d/v/b.g0/x"]
    assert {i.size for i in any_store.list("d/v/")} == {1}
    assert list(any_store.list_folders("d/v/")) == ["a.g0", "b.g0"]
    assert list(any_store.list_folders("")) == ["d", "e"]
    any_store.delete("e/refs/z.json")
    assert list(any_store.list_folders("")) == ["d"]
    assert list(any_store.list("nothing/")) == []


def test_examination_passes_stores_with_conditional_writes(any_store):
    checks = examine(any_store, num_races=2, num_racers=3)
    assert [c for c in checks if c.status == "fail"] == []
    assert list(any_store.list("")) == []


def test_publish_open_verify_pull(any_store, root, tmp_path):
    done = publish_version(any_store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    before = list(any_store.list(""))
    again = publish_version(any_store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    assert (done.created, again.created, again.ref) == (True, False, done.ref)
    assert list(any_store.list("")) == before

    opened = open_version(root, "tiny")
    assert verify_version(opened).problems == ()
    (entry,) = opened.files()
    dest = pull_version(opened, tmp_path / "copy")
    assert (dest / entry.path).read_bytes() == (tmp_path / "train-1.parquet").read_bytes()


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a\\b", "a\0b"])
def test_keys_stay_under_the_root(key):
    with pytest.raises(ConfigError, match="not a key"):
        check_key(key)


class FakeClient:
    """A server that gives every PUT the same answer."""

    class meta:
        endpoint_url = "http://fake"

    def __init__(self, status, code):
        self.status, self.code, self.objects = status, code, {}

    def get_paginator(self, _):
        return SimpleNamespace(paginate=lambda **_: [])

    def get_object(self, Key, **_):
        return {"ETag": '"0"', "Body": io.BytesIO(self.objects[Key])}

    def put_object(self, Key, Body, **_):
        if self.status == 200:
            self.objects[Key] = Body.read()
            return {"ETag": '"0"'}
        from botocore.exceptions import ClientError

        answer = {
            "Error": {"Code": self.code},
            "ResponseMetadata": {"HTTPStatusCode": self.status},
        }
        raise ClientError(answer, "PutObject")


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (412, "PreconditionFailed", PreconditionFailedError),
        (409, "ConditionalRequestConflict", TransientError),
        (429, "TooManyRequests", TransientError),
        (503, "SlowDown", TransientError),
        (500, "InternalError", TransientError),
        (400, "RequestTimeout", TransientError),
        (400, "BadDigest", TransientError),
        (501, "NotImplemented", StoreRefusedError),
        (403, "AccessDenied", StoreError),
        (404, "NoSuchBucket", StoreError),
        (400, "EntityTooLarge", StoreError),
    ],
)
def test_answers_of_s3_are_told_apart(status, code, error):
    store = S3Store("bucket", client=FakeClient(status, code))
    with pytest.raises(error) as raised:
        store.put_create("d/x", b"1")
    assert type(raised.value) is error


def test_a_store_that_ignores_conditions_or_cannot_is_refused(tmp_path):
    for client in (FakeClient(200, ""), FakeClient(501, "NotImplemented")):
        store = S3Store(f"bucket{client.status}", client=client)
        with pytest.raises(StoreRefusedError, match=r"safe publishing|safe concurrent publishing"):
            publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS)


def test_a_good_store_is_probed_once(tmp_path):
    store = open_store(str(tmp_path / "store"))
    require_guarded(store)
    before = store.put_create
    store.put_create = None
    require_guarded(store)
    store.put_create = before


class OneQuoting:
    """A server that understands one style of If-Match; it wraps a real client."""

    def __init__(self, client, quoted):
        self.client, self.quoted, self.asked = client, quoted, []

    def __getattr__(self, name):
        return getattr(self.client, name)

    def put_object(self, **request):
        tag = request.get("IfMatch")
        if tag is not None:
            self.asked.append(tag[0] == '"')
            request["IfMatch"] = tag if self.asked[-1] == self.quoted else '"other"'
        return self.client.put_object(**request)


@pytest.mark.parametrize("quoted", [True, False])
def test_both_quotings_of_if_match_are_tried_and_the_right_one_is_kept(
    use, moto_environment, quoted
):
    """On moto, which takes both; Ceph takes one."""
    bucket = use(moto_environment).split("/")[2]
    client = OneQuoting(make_client(), quoted)
    store = S3Store(bucket, client=client)
    tag = store.put_create("d/x", b"0")
    for number in range(1, 4):
        tag = store.put_if_match("d/x", str(number).encode(), tag)

    assert client.asked == ([True] * 3 if quoted else [True, False, False, False])


def test_wrong_credentials_are_a_mistake_and_not_retried(use, s3_server, monkeypatch):
    root = use(s3_server)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with FaultyProxy(s3_server["AWS_ENDPOINT_URL"], lambda *_: None) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        with pytest.raises(StoreError, match="Check the credentials"):
            open_version(root, "tiny")
        assert proxy.requests == 1
        with pytest.raises(StoreError, match=f"{root}/tiny/: access denied"):
            list(open_store(root).list("tiny/"))
        assert proxy.requests == 2


def test_no_credentials_names_the_variables(use, s3_server, monkeypatch):
    root = use(s3_server)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
        open_version(root, "tiny")

"""Stores of every kind: a folder, an S3 server (Ceph's gateway, else moto), gs and az."""

import functools
import os
import subprocess
import sys
import uuid

import pytest
from botocore import loaders

from packhouse.store import open_store
from tests.e2e.services import wait_until
from tests.store import azurite, ceph, gcs_server

SETTINGS = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_CA_BUNDLE",
    "AWS_ENDPOINT_URL_S3",
)


def s3_environment(endpoint: str, access_key: str, secret_key: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@pytest.fixture(scope="session", autouse=True)
def models_of_botocore_are_read_once():
    """Each new client reads them again, which takes 0.4 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "create_loader", functools.lru_cache(loaders.create_loader))
        yield


@pytest.fixture(scope="session")
def moto_environment():
    """moto allows a few calls without authentication: enough to create a user with a key."""
    port = ceph.free_port()
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.moto_s3", str(port)],
        env=os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": "3"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: ceph._accepts(port), "moto", server)
        yield _moto_user(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(10)


def _moto_user(endpoint: str) -> dict[str, str]:
    import boto3

    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    iam = boto3.client("iam", endpoint_url=endpoint, region_name="us-east-1", **keys)
    iam.create_user(UserName="tests")
    policy = (
        '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
    )
    iam.put_user_policy(UserName="tests", PolicyName="s3", PolicyDocument=policy)
    key = iam.create_access_key(UserName="tests")["AccessKey"]
    return s3_environment(endpoint, key["AccessKeyId"], key["SecretAccessKey"])


@pytest.fixture(scope="session")
def ceph_environment(ceph_endpoint):
    return s3_environment(ceph_endpoint, ceph.ACCESS_KEY, ceph.SECRET_KEY)


@pytest.fixture(scope="session")
def s3_server(request):
    """Environment of a real S3 server: Ceph if it is installed, else moto."""
    kind = "ceph" if ceph.is_installed() else "moto"
    return request.getfixturevalue(f"{kind}_environment")


def checks_digests(environment: dict[str, str]) -> bool:
    """Return whether the server compares bodies with Content-MD5, which moto does not."""
    return environment["AWS_ACCESS_KEY_ID"] == ceph.ACCESS_KEY


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path):
    """Environment and root of an empty store, for other processes."""
    if request.param == "folder":
        return {}, str(tmp_path / "store")
    environment = request.getfixturevalue("s3_server")
    return environment, request.getfixturevalue("use")(environment)


@pytest.fixture
def use(monkeypatch):
    """Set a server's AWS environment, create a bucket, and return the root of a store in it."""

    def set_environment(environment: dict[str, str]) -> str:
        for name in SETTINGS:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        from packhouse.store.s3 import make_client

        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        make_client().create_bucket(Bucket=bucket)
        return f"s3://{bucket}/some/prefix"

    return set_environment


@pytest.fixture
def gcs(monkeypatch):
    """A fake of Google's XML API, and an environment in which obstore uses it."""
    pytest.importorskip("obstore", reason="no obstore: pip install 'packhouse[gcs]'")
    with gcs_server.GcsServer() as server:
        monkeypatch.setenv("GOOGLE_BASE_URL", server.endpoint)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "of-the-tests")
        yield server


@pytest.fixture(scope="session")
def azure_environment(tmp_path_factory):
    pytest.importorskip("obstore", reason="no obstore: pip install 'packhouse[azure]'")
    if azurite.find() is None:
        pytest.skip("no Azurite on PATH: npm install azurite")
    with azurite.running(tmp_path_factory.mktemp("azurite")) as environment:
        yield environment


@pytest.fixture
def azure(azure_environment, monkeypatch):
    """Root of an empty store in Azurite."""
    for name, value in azure_environment.items():
        monkeypatch.setenv(name, value)
    return f"az://{azurite.CONTAINER}/{uuid.uuid4().hex[:12]}/prefix"


@pytest.fixture(params=["folder", "s3", "gcs", pytest.param("azure", marks=pytest.mark.e2e)])
def root(request, tmp_path):
    """Root of an empty store of each kind."""
    if request.param == "folder":
        return str(tmp_path / "store")
    if request.param == "gcs":
        request.getfixturevalue("gcs")
        return f"gs://{gcs_server.BUCKET}/some/prefix"
    if request.param == "azure":
        return request.getfixturevalue("azure")
    return request.getfixturevalue("use")(request.getfixturevalue("s3_server"))


@pytest.fixture
def store(tmp_path):
    """An empty store in a folder."""
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def any_store(root):
    return open_store(root)

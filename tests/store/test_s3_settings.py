"""Endpoint, region, addressing, CA bundle and profile come from the usual AWS environment."""

import io
import os
import shutil
import ssl
import subprocess

import pytest
from botocore.response import StreamingBody
from botocore.stub import Stubber

from packhouse.errors import ConfigError, StoreError
from packhouse.store import open_store
from packhouse.store.s3 import S3Store, filesystem_options, make_client
from tests.store.conftest import SETTINGS
from tests.store.proxy import FaultyProxy


@pytest.fixture
def bare(monkeypatch):
    """Remove all AWS settings."""
    names = [name for name in os.environ if name.startswith("AWS_")]
    for name in [*names, *SETTINGS]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    return monkeypatch


def test_a_custom_endpoint_is_addressed_by_path(bare):
    bare.setenv("AWS_ENDPOINT_URL_S3", "http://s3.example:9000")
    bare.setenv("AWS_REGION", "eu-west-1")
    client = make_client()
    assert client.meta.region_name == "eu-west-1"
    assert client.meta.endpoint_url == "http://s3.example:9000"
    assert client.meta.config.s3["addressing_style"] == "path"
    assert client.meta.config.retries["total_max_attempts"] == 1
    assert client.meta.config.request_checksum_calculation == "when_required"


def test_a_profile_names_endpoint_region_keys_and_style(bare, tmp_path):
    config = tmp_path / "config"
    config.write_text(
        "[profile lab]\nregion = lab-1\nendpoint_url = https://s3.lab.example\n"
        "aws_access_key_id = A\naws_secret_access_key = B\ns3 =\n    addressing_style = virtual\n"
    )
    bare.setenv("AWS_CONFIG_FILE", str(config))
    bare.setenv("AWS_PROFILE", "lab")
    client = make_client()
    assert (client.meta.region_name, client.meta.endpoint_url) == (
        "lab-1",
        "https://s3.lab.example",
    )
    assert client.meta.config.s3["addressing_style"] == "virtual"
    assert filesystem_options()["config_kwargs"]["s3"] == {"addressing_style": "virtual"}


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")
def test_a_private_certificate_needs_its_ca_bundle(use, s3_server, monkeypatch, tmp_path):
    root = use(s3_server)
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*command, *subject, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with FaultyProxy(s3_server["AWS_ENDPOINT_URL"], lambda *_: None) as proxy:
        proxy.socket = context.wrap_socket(proxy.socket, server_side=True)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint.replace("http:", "https:"))
        with pytest.raises(StoreError, match="AWS_CA_BUNDLE"):
            open_store(root).put_create("d/x", b"1")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        store = open_store(root)
        store.put_create("d/x", b"1")
        assert store.get("d/x").data == b"1"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_with_a_password_is_refused_and_not_repeated(monkeypatch, name):
    """Libraries repeat an address that they cannot reach, so it would end up in logs."""
    monkeypatch.setenv(name, "http://u:canary@127.0.0.1:9/?key=canary")
    for use in (make_client, filesystem_options):
        with pytest.raises(ConfigError, match=f"{name} contains a user name") as caught:
            use()
        assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "answer", "call"),
    [
        ("head_object", {"ContentLength": 1, "ETag": "x"}, lambda store: store.head("k")),
        ("get_object", {"ContentLength": 4}, lambda store: store.get("k")),
        ("get_object", {"ContentLength": 4}, lambda store: store.get_range("k", 0, 4)),
        ("put_object", {}, lambda store: store.put_create("k", b"PAR1")),
    ],
)
def test_an_answer_without_required_headers_is_refused(bare, operation, answer, call):
    bare.setenv("AWS_ACCESS_KEY_ID", "a")
    bare.setenv("AWS_SECRET_ACCESS_KEY", "b")
    client = make_client()
    if operation == "get_object":
        answer |= {"Body": StreamingBody(io.BytesIO(b"PAR1"), 4)}
    stubber = Stubber(client)
    stubber.add_response(operation, answer)
    with stubber, pytest.raises(StoreError, match="the response lacks '"):
        call(S3Store("bucket", client=client))

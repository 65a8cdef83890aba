"""Azurite, Microsoft's own emulator of Azure Blob Storage, if it is installed.

npm install azurite            # MIT; needs node
PATH=$PATH:$PWD/node_modules/.bin pytest tests/store -k azure
"""

import base64
import hmac
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from urllib.request import Request, urlopen

from tests.e2e.services import wait_until
from tests.store import ceph

ACCOUNT = "packhouse"
KEY = base64.b64encode(b"a key of the tests, of no use elsewhere").decode()
CONTAINER = "versions"


def find() -> str | None:
    return shutil.which("azurite-blob")


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Start Azurite with a container in it; return the environment that points to it."""
    program = find()
    assert program is not None
    port = ceph.free_port()
    options = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    place = ["--location", str(folder), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    server = subprocess.Popen(
        [program, *options, *place],
        env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: ceph._accepts(port), "Azurite", server)
        url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        _make_container(url)
        settings = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url};"
        yield {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{settings}"}
    finally:
        server.terminate()
        server.wait(10)


def _make_container(url: str) -> None:
    """Send a request signed with the account's key, because obstore cannot create containers."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    place = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    text = f"PUT{chr(10) * 12}{signed}{place}"
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = Request(f"{url}/{CONTAINER}?restype=container", headers=headers, method="PUT")
    with urlopen(request, timeout=30) as answer:
        assert answer.status == 201

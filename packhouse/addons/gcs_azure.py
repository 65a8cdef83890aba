"""Google Cloud Storage and Azure Blob Storage as object stores, using obstore.

    gs://bucket/prefix      the tag is the object's generation; a create requires generation 0
    az://container/prefix   the tag is the ETag; a create sends `If-None-Match: *`

Every object is uploaded in one request, so it is visible completely or not at all. A tag identifies
a write, not its bytes, so each uploaded file is read back once.

Credentials come from the usual environment: GOOGLE_APPLICATION_CREDENTIALS or the login of the
machine; AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with
AZURE_STORAGE_ACCOUNT_KEY, a SAS token, or a login.
"""

import os
import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from packhouse.errors import ConfigError
from packhouse.store.object_keys import PROBES
from packhouse.store.object_store import (
    MAX_GET_BYTES,
    Blob,
    FileBody,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    Part,
    PreconditionFailedError,
    check_key,
    error_of_answer,
)
from packhouse.system.plugins import pip_install
from packhouse.system.wording import first_line

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.fsspec import FsspecStore
    from obstore.store import AzureStore, GCSStore
except ImportError:
    raise ConfigError(f"gs:// and az:// stores need obstore: {pip_install('gcs,azure')}") from None

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import AzureConfig, ClientConfig, RetryConfig

Scheme = Literal["gs", "az"]

_CHUNK_BYTES = 8 * 2**20
_UPLOAD_TIMEOUT_S = 3600  # 1 GiB at 300 kB/s
# After a lost response, obstore's retries would report our own success as "already exists".
_ONCE: "RetryConfig" = {"max_retries": 0}
# `... - Server returned non-2xx status code: 503 Service Unavailable: <Error><Code>ServerBusy</...`
# A test against a server notices if obstore words its messages differently.
_STATUS = re.compile(r"(?:status |\()code: ([1-5][0-9][0-9])\b")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")


class CloudStore(ObjectStore):
    """Objects under `gs://bucket/prefix` or `az://container/prefix`. Thread-safe."""

    # A conditional write keeps its file in memory: at most 1 GiB each, two at a time.
    max_put_bytes = 2**30

    def __init__(
        self, scheme: Scheme, bucket: str, prefix: str = "", *, timeout_s: float = 60
    ) -> None:
        if not bucket:
            raise ConfigError(f"the {scheme}:// store has no bucket. Use {scheme}://bucket/prefix")
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        self._scheme = scheme
        # The timeout covers a whole request with its body. Reads ask for 8 MiB at most, so 60 s
        # are enough; an upload of 1 GiB needs its own client.
        self._client = _make_client(scheme, bucket, timeout_s)
        self._uploads = _make_client(scheme, bucket, _UPLOAD_TIMEOUT_S)
        self._large = threading.BoundedSemaphore(2)

    @override
    def get(self, key: str) -> Blob:
        with self._request(key):
            found = obstore.get(self._client, self._at(key))
            tag = self._tag(found.meta)
            if found.meta["size"] <= MAX_GET_BYTES:
                return Blob(bytes(found.bytes()), tag)
            return Blob(self._range(key, 0, MAX_GET_BYTES + 1), tag)

    @override
    def chunks(self, key: str, start: int = 0) -> Iterator[bytes]:
        """Read ranges of 8 MiB; a plain read would hold the whole object in memory."""
        size = self.head(key).size
        while start < size:
            with self._request(key):
                chunk = self._range(key, start, _CHUNK_BYTES)
            if not chunk:
                return
            yield chunk
            start += len(chunk)

    @override
    def get_range(self, key: str, start: int, length: int) -> Part:
        with self._request(key):
            wanted = (start, start + length)
            found = obstore.get(self._client, self._at(key), options={"range": wanted})
            return Part(bytes(found.bytes()), found.meta["size"], self._tag(found.meta))

    def _range(self, key: str, start: int, length: int) -> bytes:
        return bytes(obstore.get_range(self._client, self._at(key), start=start, length=length))

    @override
    def head(self, key: str) -> ObjectInfo:
        with self._request(key):
            return self._info(obstore.head(self._client, self._at(key)))

    @override
    def put_create(self, key: str, body: bytes | FileBody) -> str:
        if isinstance(body, bytes):
            with self._request(key):
                return self._tag(obstore.put(self._client, self._at(key), body, mode="create"))
        self._check_size(body)
        with self._large:
            # obstore streams an upload only if it has no condition.
            data = bytearray()
            for chunk in body.chunks():
                data += chunk
            with self._request(key):
                return self._tag(obstore.put(self._uploads, self._at(key), data, mode="create"))

    @override
    def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        condition: UpdateVersion = {"version": etag} if self._scheme == "gs" else {"e_tag": etag}
        try:
            with self._request(key):
                return self._tag(obstore.put(self._client, self._at(key), body, mode=condition))
        except ObjectNotFoundError as error:
            raise PreconditionFailedError(str(error), key=key) from None

    @override
    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        folder, _, rest = (self.prefix + prefix).rpartition("/")  # obstore lists whole folders
        start = f"{folder}/{rest}" if folder else rest
        with self._request(prefix):
            found = [meta for page in obstore.list(self._client, folder) for meta in page]
        wanted = [self._info(meta) for meta in found if meta["path"].startswith(start)]
        return sorted(wanted, key=lambda info: info.key)

    @override
    def list_folders(self, prefix: str) -> Sequence[str]:
        with self._request(prefix):
            found = obstore.list_with_delimiter(self._client, self.prefix + prefix)
        base = self.prefix + prefix
        return sorted(folder.removeprefix(base) for folder in found["common_prefixes"])

    @override
    def delete(self, key: str) -> None:
        with suppress(ObjectNotFoundError), self._request(key):
            obstore.delete(self._client, self._at(key))

    @override
    def clock(self) -> float:
        """Return the write time of a temporary object; `gc` removes those of killed processes."""
        key = f"{PROBES}clock-{uuid.uuid4().hex[:12]}/now"
        with self._request(key):
            obstore.put(self._client, self._at(key), b"", mode="create")
            now = self._info(obstore.head(self._client, self._at(key))).last_modified
            obstore.delete(self._client, self._at(key))
        return now

    def _at(self, key: str) -> str:
        return self.prefix + check_key(key)

    def _tag(self, found: "ObjectMeta | PutResult") -> str:
        return str(found["version"] if self._scheme == "gs" else found["e_tag"])

    def _info(self, found: "ObjectMeta") -> ObjectInfo:
        key = found["path"].removeprefix(self.prefix)
        return ObjectInfo(key, found["size"], found["last_modified"].timestamp(), self._tag(found))

    @contextmanager
    def _request(self, key: str) -> Iterator[None]:
        """Translate errors of the client.

        Status and code are parsed from the message, because obstore's exception classes do not
        distinguish 503 from 400.
        """
        _check_process()
        try:
            yield
        except ValueError as error:
            raise ConfigError(f"{self.uri}/{key}: {error}") from None
        except (BaseError, FileNotFoundError) as error:
            message, code = str(error).partition("\n")[0], _CODE.search(str(error))
            number = status_of(error)
            if "token request" in message and number < 429:
                needed = _VARIABLES[self._scheme]
                raise ConfigError(f"{self.uri}: no credentials. Set {needed}") from error
            kind = "bucket" if self._scheme == "gs" else "container"
            raise error_of_answer(
                f"{self.uri}/{key}",
                key,
                number,
                code[1] if code else "",
                detail=message,
                no_bucket=f"no {kind} '{self.bucket}'. Create it, or correct publish.store",
            ) from error


def status_of(error: BaseException) -> int:
    """Return the HTTP status from an obstore error; 0 if there was no response.

    Example:
        >>> status_of(BaseError("Server returned non-2xx status code: 503 Service Unavailable"))
        503
    """
    status = _STATUS.search(str(error).partition("\n")[0])
    return int(status[1]) if status else 404 * isinstance(error, FileNotFoundError)


_process = 0  # the process in which obstore started its threads; 0 before that


def _check_process() -> None:
    """Refuse to work in a forked process, where obstore's threads are missing and requests hang."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise ConfigError(
            "this process was forked after its parent used a gs:// or az:// store, which then "
            "hangs. Start it with spawn or forkserver, for example, "
            "DataLoader(..., multiprocessing_context='forkserver')"
        )


def make_filesystem(scheme: Scheme) -> Any:
    """Create an fsspec filesystem with the same settings, for reading; never cached."""
    _check_process()
    options = _client_options(60)
    config = {"config": _azure_config()} if scheme == "az" else {}
    return FsspecStore(scheme, **config, client_options=options, skip_instance_cache=True)


def _make_client(scheme: Scheme, bucket: str, timeout_s: float) -> GCSStore | AzureStore:
    options = _client_options(timeout_s)
    try:
        if scheme == "gs":
            return GCSStore(bucket, client_options=options, retry_config=_ONCE)
        config = _azure_config()
        return AzureStore(bucket, config=config, client_options=options, retry_config=_ONCE)
    except BaseError as error:
        raise ConfigError(f"{scheme}://: {first_line(error)}. Set {_VARIABLES[scheme]}") from None


def _client_options(timeout_s: float) -> "ClientConfig":
    return {
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=timeout_s),
        "allow_http": True,  # used only if the endpoint is http://, as for an emulator
    }


def _azure_config() -> "AzureConfig":
    """Parse AZURE_STORAGE_CONNECTION_STRING; obstore reads only the other variables.

    `AccountName=a;AccountKey=k;EndpointSuffix=core.windows.net` -> account_name, account_key,
    and the endpoint https://a.blob.core.windows.net.
    """
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.strip().partition("=")[::2] for part in text.split(";"))
    if "EndpointSuffix" in parts:
        endpoint = f"https://{parts.get('AccountName', '')}.blob.{parts['EndpointSuffix']}"
        parts.setdefault("BlobEndpoint", endpoint)
    config: AzureConfig = {}
    for name, setting in _AZURE_SETTINGS.items():
        if name in parts:
            config[setting] = parts[name]
    return config


_AZURE_SETTINGS: dict[str, Literal["account_name", "account_key", "sas_key", "endpoint"]] = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}
_VARIABLES = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": (
        "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and "
        "AZURE_STORAGE_ACCOUNT_KEY"
    ),
}

"""A Google Cloud Storage bucket as an object store, through gcsfs's own requests.

gcsfs's file interface has create-only writes and no compare-and-swap, so its `call` is used, which
signs and sends one request of the JSON API: `ifGenerationMatch=0` is create-only and
`ifGenerationMatch=<generation>` a compare-and-swap. An object's tag is its generation, which is
never given twice. Each upload is one request that names its MD5, which the server checks.

gcsfs tries each request six times by itself; a lost success then reads as "exists", which is why a
refused write is always read back (`packhouse.store.steps`). Credentials come from the usual Google
environment. Costs: an uploaded file is held in memory, two at a time, and is read back once, for a
generation says nothing of the bytes.
"""

import base64
import email.utils
import hashlib
import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from typing_extensions import override

from packhouse.errors import (
    ConfigError,
    IntegrityError,
    PackhouseError,
    StoreError,
    StoreRefusedError,
    TransientError,
)
from packhouse.store.objects import (
    Blob,
    FileBody,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    check_key,
)

__all__ = ["GcsStore", "make_filesystem"]

_OBJECT = "b/{}/o/{}"
_BOUNDARY = "packhouse-7d3f1c0a9b5e4286"
_AGAIN = {408, 409, 429}


class GcsStore(ObjectStore):
    """Objects in `gs://bucket/prefix`; safe to share between threads."""

    max_put_bytes = 2**30

    def __init__(self, bucket: str, prefix: str = "", *, filesystem: Any = None) -> None:
        if not bucket:
            raise ConfigError("a Google store needs a bucket: gs://bucket/prefix")
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"gs://{bucket}/{prefix}".rstrip("/")
        self._fs = filesystem or make_filesystem()
        self._large = threading.BoundedSemaphore(2)

    @override
    def get(self, key: str) -> Blob:
        with self._request(key):
            headers, data = self._fs.call("GET", _OBJECT, *self._at(key), alt="media")
        return Blob(data, headers["x-goog-generation"])

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        wanted = {"Range": f"bytes={start}-{start + length - 1}"}
        with self._request(key):
            headers, data = self._fs.call(
                "GET", _OBJECT, *self._at(key), alt="media", headers=wanted
            )
        part: bytes = data if "Content-Range" in headers else data[start : start + length]
        return part

    @override
    def head(self, key: str) -> ObjectInfo:
        with self._request(key):
            found = self._fs.call("GET", _OBJECT, *self._at(key), json_out=True)
        return self._info(found)

    @override
    def put_create(self, key: str, body: bytes | FileBody) -> str:
        if isinstance(body, bytes):
            return self._put(key, body, hashlib.md5(body, usedforsecurity=False).digest(), "0")
        if body.size > self.max_put_bytes:
            raise StoreError(
                f"'{body.path}' has {body.size:,} bytes, over {self.max_put_bytes:,} of one "
                "guarded upload; lower publish.max_file_mb"
            )
        with self._large:
            try:
                data = body.path.read_bytes()
            except FileNotFoundError:
                problem = f"'{body.path}' vanished while it was being published"
                raise IntegrityError(problem) from None
            return self._put(key, data, bytes.fromhex(body.md5), "0")

    @override
    def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        md5 = hashlib.md5(body, usedforsecurity=False).digest()
        try:
            return self._put(key, body, md5, etag)
        except ObjectNotFoundError as error:
            raise PreconditionFailedError(str(error), key=key) from None

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages(prefix):
            yield from map(self._info, page.get("items", ()))

    @override
    def list_folders(self, prefix: str) -> Iterator[str]:
        for page in self._pages(prefix, delimiter="/"):
            for folder in page.get("prefixes", ()):
                yield folder.removeprefix(self.prefix + prefix).rstrip("/")

    @override
    def delete(self, key: str) -> None:
        try:
            with self._request(key):
                self._fs.call("DELETE", _OBJECT, *self._at(key))
        except ObjectNotFoundError:
            return

    @override
    def clock(self) -> float:
        """The `Date` header of an answer: one second coarse."""
        with self._request(""):
            headers, _ = self._fs.call("GET", "b/{}/o", self.bucket, maxResults=1)
        return email.utils.parsedate_to_datetime(headers["Date"]).timestamp()

    def _at(self, key: str) -> tuple[str, str]:
        return self.bucket, self.prefix + check_key(key)

    def _info(self, found: dict[str, Any]) -> ObjectInfo:
        key = found["name"].removeprefix(self.prefix)
        modified = datetime.fromisoformat(found["updated"]).timestamp()
        return ObjectInfo(key, int(found["size"]), modified, found["generation"])

    def _pages(self, prefix: str, **query: str) -> Iterator[dict[str, Any]]:
        query |= {"prefix": self.prefix + prefix}
        while True:
            with self._request(prefix):
                page = self._fs.call("GET", "b/{}/o", self.bucket, json_out=True, **query)
            yield page
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def _put(self, key: str, body: bytes, md5: bytes, generation: str) -> str:
        bucket, name = self._at(key)
        described = {"name": name, "md5Hash": base64.b64encode(md5).decode()}
        place = self._fs.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"
        with self._request(key):
            answer = self._fs.call(
                "POST",
                place,
                bucket,
                uploadType="multipart",
                ifGenerationMatch=generation,
                headers={"Content-Type": f"multipart/related; boundary={_BOUNDARY}"},
                data=_related(described, body),
                json_out=True,
            )
        return str(answer["generation"])

    @contextmanager
    def _request(self, key: str) -> Iterator[None]:
        import aiohttp
        import google.auth.exceptions
        import requests
        from gcsfs.retry import HttpError

        place = f"{self.uri}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            raise self._absent(key) from error
        except FileExistsError as error:
            raise PreconditionFailedError(f"{place} exists or has changed", key=key) from error
        except HttpError as error:
            raise _explained(place, key, error) from error
        except google.auth.exceptions.GoogleAuthError as error:
            raise ConfigError(
                f"{self.uri}: no credentials; set GOOGLE_APPLICATION_CREDENTIALS: {error}"
            ) from error
        except ValueError as error:  # gcsfs's name for an answer of 400 that says "invalid"
            raise TransientError(f"{place}: {error}", key=key) from error
        except (aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
            raise TransientError(f"{place}: {error or type(error).__name__}", key=key) from error
        except OSError as error:
            if "Forbidden" in str(error):
                raise StoreError(
                    f"{place}: refused (403); check the credentials and their rights"
                ) from error
            raise TransientError(f"{place}: {error}", key=key) from error

    def _absent(self, key: str) -> StoreError:
        """Tell a bucket that is not there from an object; costs a request, once all is lost."""
        try:
            self._fs.call("GET", "b/{}/o", self.bucket, maxResults=1)
        except FileNotFoundError:
            return StoreError(f"no bucket '{self.bucket}' at {self._fs.base}")
        except Exception:
            pass
        return ObjectNotFoundError(f"no object {self.uri}/{key}", key=key)


class _Body(io.BytesIO):
    """Bytes that aiohttp cannot close after a failed try: gcsfs sends them again."""

    @override
    def close(self) -> None:
        return


def _related(described: dict[str, str], body: bytes) -> io.BytesIO:
    """Metadata and bytes as one `multipart/related` body."""
    head = (
        f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
        f"{json.dumps(described)}\r\n"
        f"--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    return _Body(b"".join((head.encode(), body, f"\r\n--{_BOUNDARY}--".encode())))


def _explained(place: str, key: str, error: Any) -> PackhouseError:
    code = int(error.code or 0)
    if code == 501:
        return StoreRefusedError(f"{place}: the store answers 501 to a conditional write")
    if code in _AGAIN or code >= 500:
        return TransientError(f"{place}: {code}", key=key, status=code)
    if code == 416:
        return IntegrityError(f"{place} is shorter than it was published", key=key)
    if code in (401, 403):
        return StoreError(f"{place}: refused ({code}); check the credentials and their rights")
    if code == 400 and "md5" in str(error.message).lower():
        return TransientError(f"{place}: damaged on its way: {error.message}", key=key)
    return StoreError(f"{place}: {code}: {error.message}")


def make_filesystem() -> Any:
    """A gcsfs filesystem from the usual Google environment, without caches.

    Raises:
        ConfigError: gcsfs is not installed, or there are no credentials.
    """
    try:
        import gcsfs
    except ImportError:
        raise ConfigError("gs:// stores need gcsfs: pip install 'packhouse[gcs]'") from None
    # It logs a traceback of every failed try; what fails for good is raised, and said once.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    # An emulator takes no credentials; without this, gcsfs looks for Google's machines first.
    token = "anon" if os.environ.get("STORAGE_EMULATOR_HOST") else None
    try:
        return gcsfs.GCSFileSystem(token=token, skip_instance_cache=True, use_listings_cache=False)
    except Exception as error:
        raise ConfigError(
            f"gs://: no credentials; set GOOGLE_APPLICATION_CREDENTIALS: {error}"
        ) from error

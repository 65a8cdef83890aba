"""The interface of object stores, and `open_store`, which opens any kind of store.

Each method makes **one attempt** and distinguishes the outcomes that a publisher must distinguish:
success, a lost race (`PreconditionFailedError`), a missing object (`ObjectNotFoundError`), busy or
unknown (`TransientError`: retry, then read back), and no conditional writes (`StoreRefusedError`).
Retries and reading back are in `packhouse.store.store_requests`, once for all stores; tests
simulate them there.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import urlsplit

from packhouse.errors import (
    ConfigError,
    IntegrityError,
    PackhouseError,
    StoreError,
    StoreRefusedError,
    TransientError,
)
from packhouse.registry import function_of_addon
from packhouse.system.plugins import import_extra

# Codes that mean "send it again", although some come with status 400: data was lost in transit.
_AGAIN = {"RequestTimeout", "BadDigest", "IncompleteBody", "SlowDown", "XAmzContentSHA256Mismatch"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}


def error_of_answer(
    place: str, key: str, status: int, code: str, *, detail: str, no_bucket: str
) -> PackhouseError:
    """Return the exception for an error response: lost race, missing, busy, unable or a mistake.

    Args:
        place: Address of the object, for the message.
        key: Key of the object.
        status: HTTP status; 0 if there was no response.
        code: Error code of the store, such as `SlowDown`; may be empty.
        detail: Message of the client.
        no_bucket: Message if the bucket does not exist.
    """
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return StoreError(no_bucket)
    if status == 404 or code in ("NoSuchKey", "NoSuchUpload"):
        return ObjectNotFoundError(f"no object {place}", key=key)
    if status == 412 or code == "BlobAlreadyExists":  # Azure's comes with a 409
        return PreconditionFailedError(f"{place} already exists or has changed", key=key)
    if status == 416:
        return IntegrityError(f"{place} is shorter than when it was published", key=key)
    if status == 501 or code == "NotImplemented":
        return StoreRefusedError(
            f"{place}: the store returned status 501 for a conditional write, which safe "
            "publishing needs. Use another store, and check it with `packhouse doctor storage`"
        )
    if not status:  # no response, so the write may or may not have happened
        return TransientError(f"{place}: {detail}", key=key)
    # 409: another write of the same key is in progress. boto3, s3fs and obstore do not retry it.
    if status in (408, 409, 429) or status >= 500 or code in _AGAIN:
        return TransientError(f"{place}: {status} {code}", key=key, status=status, code=code)
    if status in (401, 403) or code in _DENIED:
        return StoreError(
            f"{place}: access denied ({code or status}). Check the credentials and permissions"
        )
    return StoreError(f"{place}: {status} {code}: {detail}")


MAX_GET_BYTES = 2**26
"""Maximum size that `ObjectStore.get` reads; manifests, refs and receipts are smaller."""

_CHUNK_BYTES = 2**20


class ObjectNotFoundError(StoreError):
    """No object has this key."""


class PreconditionFailedError(StoreError):
    """A conditional write was refused: the key exists, or its ETag differs."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes of an object, and its tag for a compare-and-swap."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of an object, with a tag to detect that the object changed between reads."""

    data: bytes
    size: int
    """Bytes of the whole object; -1 if the store did not tell."""
    tag: str
    """Equal for all parts of an object; changes with each write."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Metadata of an object."""

    key: str
    size: int
    """Bytes."""
    last_modified: float
    """Seconds since the epoch, by the store's clock."""
    etag: str = ""
    """MD5 of the bytes on S3, sha256 in folders, an ID of the write on gs and az; may be empty in
    listings."""


@dataclass(frozen=True)
class FileBody:
    """A local file to upload, and the sha256 that it had when it was hashed."""

    path: Path
    size: int
    sha256: str

    def open(self) -> BinaryIO:
        """Open the file.

        Raises:
            IntegrityError: The file was removed.
        """
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            raise IntegrityError(
                f"'{self.path}' was removed while it was being published. Run its step again"
            ) from None

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, 1 MiB at a time.

        Raises:
            IntegrityError: The file was removed; or, after the last byte, its sha256 differs.
        """
        digest = hashlib.sha256()
        with self.open() as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
        if digest.hexdigest() != self.sha256:
            raise IntegrityError(
                f"'{self.path}' was changed after it was written (sha256 {digest.hexdigest()}, "
                f"expected {self.sha256}). Remove it and run its step again",
                path=self.path,
            )

    def check(self) -> None:
        """Read the file and compare its sha256.

        Raises:
            IntegrityError: The file was removed, or its sha256 differs.
        """
        for _ in self.chunks():
            pass

    @cached_property
    def md5(self) -> str:
        """MD5 of the bytes, for S3's Content-MD5. Computed once; also checks the sha256."""
        digest = hashlib.md5(usedforsecurity=False)
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()

    def has_tag(self, etag: str) -> bool:
        """Return True if a store's tag proves that it has these bytes; if False, read them back.

        In folders, the tag is the sha256 of the bytes. On S3, it is their MD5, unless the server
        encrypts. On gs and az, it identifies only the write.
        """
        return etag == self.sha256 or (len(etag) == 32 and etag == self.md5)


def file_body(path: str | Path, sha256: str | None = None) -> FileBody:
    """Return a local file to upload; it is hashed unless its sha256 is given.

    Raises:
        ConfigError: The file does not exist.
    """
    path = Path(path)
    try:
        # Size and digest of one open file: another one may take its name meanwhile.
        with path.open("rb") as file:
            sha256 = sha256 or hashlib.file_digest(file, "sha256").hexdigest()
            return FileBody(path, os.fstat(file.fileno()).st_size, sha256)
    except FileNotFoundError:
        raise ConfigError(f"file '{path}' to publish does not exist") from None


class ObjectStore(ABC):
    """Objects under a root, with keys such as `alpaca/refs/latest.json`.

    All methods may raise `TransientError` (busy, or the outcome is unknown) and `StoreError` (a
    retry does not help: wrong credentials, no such bucket). Methods that read an object raise
    `ObjectNotFoundError` if it does not exist.
    """

    uri: str
    """Root, without credentials."""

    max_put_bytes: int = 5 * 2**30
    """Maximum size of a conditional PUT (S3: 5 GiB)."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle only the address: clients have open connections, and each process needs its own.
        return open_store, (self.uri,)

    @abstractmethod
    def get(self, key: str) -> Blob:
        """Return bytes and tag of an object of at most `MAX_GET_BYTES`.

        For a larger object, returns the first `MAX_GET_BYTES` + 1 bytes, which no parser accepts.
        """

    @abstractmethod
    def chunks(self, key: str, start: int = 0) -> Iterator[bytes]:
        """Yield the object's bytes from `start` on, a few MiB at a time."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> Part:
        """Return up to `length` bytes from `start` on; fewer at the end of the object.

        Raises:
            IntegrityError: The object ends before `start`.
        """

    def download(self, key: str, path: Path, offset: int = 0, end: int | None = None) -> None:
        """Append the object's bytes from `offset` on to a local file.

        Stops at `end`, so that an object that grew does not fill the disk.
        """
        with path.open("ab") as out:
            for chunk in self.chunks(key, offset):
                out.write(chunk if end is None else chunk[: max(0, end - out.tell())])
                if end is not None and out.tell() >= end:
                    return

    def sha256(self, key: str) -> str:
        """Read the whole object and return the sha256 of its bytes."""
        digest = hashlib.sha256()
        for chunk in self.chunks(key):
            digest.update(chunk)
        return digest.hexdigest()

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size, tag and age of an object."""

    @abstractmethod
    def put_create(self, key: str, body: bytes | FileBody) -> str:
        """Write an object that must not exist yet; it becomes visible completely or not at all.

        Returns:
            The new tag.

        Raises:
            PreconditionFailedError: The key exists.
            IntegrityError: The sha256 of the file differs from the recorded one.
            StoreRefusedError: The store has no create-only writes.
        """

    @abstractmethod
    def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        """Replace an object if its tag is still `etag`.

        Returns:
            The new tag.

        Raises:
            PreconditionFailedError: The tag differs, or the object was deleted.
            StoreRefusedError: The store has no compare-and-swap.
        """

    @abstractmethod
    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return all objects whose keys start with `prefix`, sorted by key."""

    @abstractmethod
    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return the names of folders directly under `prefix` (which ends in `/` or is empty)."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object; do nothing if it does not exist."""

    @abstractmethod
    def clock(self) -> float:
        """Return seconds since the epoch by the store's own clock, as used for `last_modified`."""

    def delete_unfinished_uploads(self, older_than_s: float, *, dry_run: bool) -> int:
        """Delete unfinished uploads, which listings do not show; return their number."""
        return 0

    def _check_size(self, body: FileBody) -> None:
        if body.size > self.max_put_bytes:
            raise StoreError(
                f"'{body.path}' has {body.size:,} bytes, over the limit of {self.max_put_bytes:,} "
                "for one conditional upload. Lower publish.max_file_mb"
            )


def check_key(key: str) -> str:
    """Return `key` if it cannot leave its root on any kind of store.

    Example:
        >>> check_key("alpaca/refs/latest.json")
        'alpaca/refs/latest.json'
        >>> check_key("../etc/passwd")
        Traceback (most recent call last):
        ...
        packhouse.errors.ConfigError: '../etc/passwd' is not a key of an object store
    """
    parts = key.split("/")
    if not key or "\\" in key or "\0" in key or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(f"'{key}' is not a key of an object store")
    return key


# `gcs` is fsspec's name, `abfs` and `abfss` are Hadoop's.
_CLOUD: dict[str, Literal["gs", "az"]] = dict(gs="gs", gcs="gs", az="az", abfs="az", abfss="az")


def open_store(uri: str, *, read_timeout_s: float = 60) -> ObjectStore:
    """Open the store at a folder, `s3://bucket/prefix`, `gs://...` or `az://...`.

    Makes no request, so a wrong bucket is only noticed at the first one. Credentials, region,
    endpoint, profile and CA bundle come from the usual AWS environment and files; see
    `packhouse.addons.gcs_azure` for those of Google and Azure.

    Args:
        uri: The root.
        read_timeout_s: Seconds without a response after which a small request is retried.

    Raises:
        ConfigError: The scheme is unknown, the URI has no bucket or contains credentials, or the
            client is not installed.
    """
    scheme, colon, rest = uri.partition(":")
    if "://" not in uri and colon and scheme in ("s3", "file", *_CLOUD):
        raise ConfigError(
            f"store '{uri}' lacks the '//' of an address, perhaps because of a Path. Pass the "
            f"string '{scheme}://{rest.lstrip('/')}'"
        )
    parts = urlsplit(uri if "://" in uri else "file://")
    # A slash in a password ends the host before the `@`, so look for the colon too; ARNs have some.
    has_password = ":" in parts.netloc and not parts.netloc.startswith("arn:")
    if "@" in parts.netloc or has_password or parts.query:
        raise ConfigError(
            f"a {parts.scheme}:// store URI must not contain credentials, an account or options. "
            "Use the environment variables or the profile of its client"
        )
    prefix = parts.path.strip("/")
    if parts.scheme == "file":
        from packhouse.store.local_folder import LocalStore

        return LocalStore(Path(parts.path if "://" in uri else uri).expanduser())
    if parts.scheme == "s3":
        from packhouse.store.s3 import S3Store, make_client

        return S3Store(parts.netloc, prefix, client=make_client(read_timeout_s))
    if parts.scheme in _CLOUD:
        kind, open_cloud = _CLOUD[parts.scheme], function_of_addon("CloudStore")
        store: ObjectStore = open_cloud(kind, parts.netloc, prefix, timeout_s=read_timeout_s)
        return store
    raise ConfigError(
        f"unknown store '{uri}'. Use a folder, s3://bucket/prefix, gs://bucket/prefix or "
        "az://container/prefix"
    )


def open_filesystem(uri: str) -> tuple[Any, str]:
    """Return an fsspec filesystem (s3fs, obstore) and the path in it, for pyarrow and datasets.

    Only for reading: these clients retry and map errors in ways that hide if a write succeeded.
    """
    import fsspec

    if uri.startswith("s3://"):
        from packhouse.store.s3 import filesystem_options

        # fsspec caches instances, even if the environment has changed since.
        options = filesystem_options() | {"skip_instance_cache": True}
        import_extra("s3fs", "s3", "s3://")
        return fsspec.filesystem("s3", **options), uri.removeprefix("s3://")
    scheme, _, path = uri.partition("://")
    if scheme in _CLOUD:
        return function_of_addon("make_filesystem")(_CLOUD[scheme]), path
    if path and scheme != "file":
        raise ConfigError(f"unknown store '{uri}'. Use a folder or s3://bucket/prefix")
    folder = Path(uri.removeprefix("file://")).expanduser().resolve()
    return fsspec.filesystem("file"), str(folder)

"""What publication needs of an object store, and `open_store`, which opens every kind of one.

Each method is **one attempt** and tells apart what a publisher must tell apart: done, lost a race
(`PreconditionFailedError`), absent (`ObjectNotFoundError`), unknown or busy (`TransientError`:
try again, then read back), and cannot guard a publication at all (`StoreRefusedError`). Retrying
and reading back live in `packhouse.store.protocol`, once for all stores, where they are simulated.
"""

import hashlib
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
from packhouse.system.plugins import import_extra

# Codes that mean "send it again", though some come with a 400: bytes or time were lost on the way.
_AGAIN = {"RequestTimeout", "BadDigest", "IncompleteBody", "SlowDown", "XAmzContentSHA256Mismatch"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}


def error_of_answer(
    place: str, key: str, status: int, code: str, *, detail: str, no_bucket: str
) -> PackhouseError:
    """Tell apart lost race, absence, busy store, unable store and mistake.

    Args:
        place: address of the object, for people.
        key: its key.
        status: of HTTP; 0 if no answer came.
        code: the store's own word, such as `SlowDown`; empty if it gave none.
        detail: what the client says of it.
        no_bucket: what to say if there is no such bucket.
    """
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return StoreError(no_bucket)
    if status == 404 or code in ("NoSuchKey", "NoSuchUpload"):
        return ObjectNotFoundError(f"no object {place}", key=key)
    if status == 412 or code == "BlobAlreadyExists":  # Azure's comes with a 409
        return PreconditionFailedError(f"{place} exists or has changed", key=key)
    if status == 416:
        return IntegrityError(f"{place} is shorter than it was published", key=key)
    if status == 501 or code == "NotImplemented":
        return StoreRefusedError(
            f"{place}: the store answers 501 to a conditional write, so a publication there "
            "could be torn or doubled; see `packhouse doctor storage`"
        )
    if not status:
        return TransientError(f"{place}: {detail}", key=key)
    if status in (408, 409, 429) or status >= 500 or code in _AGAIN:
        return TransientError(f"{place}: {status} {code}", key=key, status=status, code=code)
    if status in (401, 403) or code in _DENIED:
        return StoreError(
            f"{place}: refused ({code or status}); check the credentials and their rights"
        )
    return StoreError(f"{place}: {status} {code}: {detail}")


MAX_GET_BYTES = 2**26
"""Most that `ObjectStore.get` holds in memory: manifests, refs and receipts are smaller."""

_CHUNK_BYTES = 2**20


class ObjectNotFoundError(StoreError):
    """No object has this key."""


class PreconditionFailedError(StoreError):
    """A conditional write did not happen: the key exists, or its ETag is another."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes of an object and the tag that a compare-and-swap names them by."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of an object, and what shows that two parts are of one object."""

    data: bytes
    size: int
    """Bytes of the whole object; -1 where the store did not say it."""
    tag: str
    """Equal for all parts of one object, and another after each write."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows about an object, without its bytes."""

    key: str
    size: int
    """Bytes."""
    last_modified: float
    """Seconds since the epoch, by the clock of the store and not of this machine."""
    etag: str = ""
    """MD5 of the bytes on S3, sha256 in folders, a name of the write on gs and az; may be empty in
    listings."""


@dataclass(frozen=True)
class FileBody:
    """A local file to be uploaded whole, and the sha256 that it had when it was hashed."""

    path: Path
    size: int
    sha256: str

    def open(self) -> BinaryIO:
        """Open the file.

        Raises:
            IntegrityError: it is gone.
        """
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            raise IntegrityError(f"'{self.path}' vanished while it was being published") from None

    def chunks(self) -> Iterator[bytes]:
        """The bytes, 1 MiB at a time.

        Raises:
            IntegrityError: the file is gone; or, at the end, the bytes had another sha256.
        """
        digest = hashlib.sha256()
        with self.open() as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
        if digest.hexdigest() != self.sha256:
            raise IntegrityError(
                f"'{self.path}' has sha256 {digest.hexdigest()}, not {self.sha256}: it changed "
                "since it was written; remove it and run its step again",
                path=self.path,
            )

    def check(self) -> None:
        """Read the file and compare its sha256.

        Raises:
            IntegrityError: it is gone, or has another one.
        """
        for _ in self.chunks():
            pass

    @cached_property
    def md5(self) -> str:
        """MD5 of the bytes, which S3 compares with what arrives; read and checked for it, once."""
        digest = hashlib.md5(usedforsecurity=False)
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()

    def has_tag(self, etag: str) -> bool:
        """Return True if a store's tag shows that it holds these bytes; False: read them back.

        The tag of one PUT is the bytes' sha256 in folders, and their MD5 on S3 unless the server
        encrypts; on gs and az it names the write alone.
        """
        return etag == self.sha256 or (len(etag) == 32 and etag == self.md5)


def file_body(path: str | Path) -> FileBody:
    """Hash a local file.

    Raises:
        ConfigError: no such file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileBody(path, file.tell(), digest)
    except FileNotFoundError:
        raise ConfigError(f"no file '{path}' to publish") from None


class ObjectStore(ABC):
    """Objects under one root, named by keys such as `alpaca/refs/latest.json`.

    All methods may raise `TransientError` (busy, or the outcome is unknown) and `StoreError` (a
    mistake that no retry repairs: wrong credentials, no such bucket). Those that read an object
    raise `ObjectNotFoundError` if none has the key.
    """

    uri: str
    """Root, without credentials."""

    max_put_bytes: int = 5 * 2**30
    """Largest object of one conditional PUT (S3: 5 GiB)."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As its address: clients hold connections, and each process opens its own.
        return open_store, (self.uri,)

    @abstractmethod
    def get(self, key: str) -> Blob:
        """Bytes and tag of an object of at most `MAX_GET_BYTES`.

        Of a larger object, its first `MAX_GET_BYTES` + 1 bytes, which no parser accepts.
        """

    @abstractmethod
    def chunks(self, key: str, start: int = 0) -> Iterator[bytes]:
        """The object's bytes from `start` on, a few MiB at a time."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> Part:
        """Up to `length` bytes from `start` on, held in memory; fewer where the object ends.

        Raises:
            IntegrityError: the object ends before `start`.
        """

    def download(self, key: str, path: Path, offset: int = 0, end: int | None = None) -> None:
        """Append the object's bytes from `offset` on to a local file, as they come.

        Bytes from `end` on are left out, so that an object that grew does not fill the disk.
        """
        with path.open("ab") as out:
            for chunk in self.chunks(key, offset):
                out.write(chunk if end is None else chunk[: max(0, end - out.tell())])
                if end is not None and out.tell() >= end:
                    return

    def sha256(self, key: str) -> str:
        """Digest of the object's bytes, which are all read for it."""
        digest = hashlib.sha256()
        for chunk in self.chunks(key):
            digest.update(chunk)
        return digest.hexdigest()

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Size, tag and age of an object."""

    @abstractmethod
    def put_create(self, key: str, body: bytes | FileBody) -> str:
        """Write an object that does not exist yet; visible whole or not at all.

        Returns:
            The new tag.

        Raises:
            PreconditionFailedError: the key exists.
            IntegrityError: the file has another sha256 than is stated.
            StoreRefusedError: the store has no create-only write.
        """

    @abstractmethod
    def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        """Replace an object if its tag still is `etag`.

        Returns:
            The new tag.

        Raises:
            PreconditionFailedError: the tag is another, or the key is gone.
            StoreRefusedError: the store has no compare-and-swap.
        """

    @abstractmethod
    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Every object whose key starts with `prefix`, in the order of keys."""

    @abstractmethod
    def list_folders(self, prefix: str) -> Sequence[str]:
        """Names directly under `prefix` (which ends in `/` or is empty) that hold objects."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; an absent one is removed already."""

    @abstractmethod
    def clock(self) -> float:
        """Seconds since the epoch by the store's own clock, the one behind `last_modified`."""

    def abort_uploads(self, older_than_s: float, *, dry_run: bool) -> int:
        """Drop unfinished uploads that no listing shows; returns how many there were."""
        return 0

    def _check_size(self, body: FileBody) -> None:
        if body.size > self.max_put_bytes:
            raise StoreError(
                f"'{body.path}' has {body.size:,} bytes, over {self.max_put_bytes:,} of one "
                "guarded upload; lower publish.max_file_mb"
            )


def check_key(key: str) -> str:
    """Return `key` if it stays under its root on every kind of store.

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


_CLOUD: dict[str, Literal["gs", "az"]] = dict(gs="gs", gcs="gs", az="az", abfs="az", abfss="az")


def open_store(uri: str, *, read_timeout_s: float = 60) -> ObjectStore:
    """Open a root: a local folder, `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/...`.

    Nothing is read yet, so that a wrong bucket shows at the first request. Credentials, region,
    endpoint, profile and CA bundle come from the usual AWS environment and files; see
    `packhouse.store.cloud` for those of Google and Azure.

    Args:
        uri: the root.
        read_timeout_s: seconds after which a small request without an answer is tried again.

    Raises:
        ConfigError: an unknown scheme, no bucket, or credentials inside the URI; a client that is
            not installed.
    """
    scheme, colon, rest = uri.partition(":")
    if "://" not in uri and colon and scheme in ("s3", "file", *_CLOUD):
        raise ConfigError(
            f"store '{uri}' is an address without its '//', as a Path makes them; give "
            f"'{scheme}://{rest.lstrip('/')}' as text"
        )
    parts = urlsplit(uri if "://" in uri else "file://")
    # A password with a slash in it ends the host before the `@`; only an ARN has colons by right.
    has_password = ":" in parts.netloc and not parts.netloc.startswith("arn:")
    if "@" in parts.netloc or has_password or parts.query:
        raise ConfigError(
            f"a {parts.scheme}:// store URI must hold no credentials, account or options: use the "
            "environment variables or profile of its own client"
        )
    prefix = parts.path.strip("/")
    if parts.scheme == "file":
        from packhouse.store.local import LocalStore

        return LocalStore(Path(parts.path if "://" in uri else uri).expanduser())
    if parts.scheme == "s3":
        from packhouse.store.s3 import S3Store, make_client

        return S3Store(parts.netloc, prefix, client=make_client(read_timeout_s))
    if parts.scheme in _CLOUD:
        from packhouse.store.cloud import CloudStore

        return CloudStore(_CLOUD[parts.scheme], parts.netloc, prefix, timeout_s=read_timeout_s)
    raise ConfigError(
        f"unknown store '{uri}': give a folder, s3://bucket/prefix, gs://bucket/prefix or "
        "az://container/prefix; others are refused, for no create-only write of theirs is proven"
    )


def open_filesystem(uri: str) -> tuple[Any, str]:
    """An fsspec filesystem (s3fs, obstore) and the path in it, for pyarrow and datasets.

    Reads only: these retry and map errors in ways that hide whether a write happened.
    """
    import fsspec

    if uri.startswith("s3://"):
        from packhouse.store.s3 import filesystem_options

        # No instance of before: fsspec's cache does not look at the environment.
        options = filesystem_options() | {"skip_instance_cache": True}
        import_extra("s3fs", "s3", "s3://")
        return fsspec.filesystem("s3", **options), uri.removeprefix("s3://")
    scheme, _, path = uri.partition("://")
    if scheme in _CLOUD:
        from packhouse.store.cloud import make_filesystem

        return make_filesystem(_CLOUD[scheme]), path
    if path and scheme != "file":
        raise ConfigError(f"unknown store '{uri}': give a folder or s3://bucket/prefix")
    folder = Path(uri.removeprefix("file://")).expanduser().resolve()
    return fsspec.filesystem("file"), str(folder)

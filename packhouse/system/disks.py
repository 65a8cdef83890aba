"""Atomic writes, disk errors with a fix, and the location of the cache.

`find_cache` is the one rule for the location of finished steps, for all commands, flows and
loaders.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from platformdirs import user_cache_path

from packhouse.errors import ConfigError, DiskError


def write_checked(file: Path, content: dict[str, Any]) -> None:
    """Write digest and content to a temporary file, then rename it."""
    body = orjson.dumps(content)
    write_whole(file, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def read_checked(file: Path) -> dict[str, Any] | None:
    """Read a file of `write_checked`; None if it is missing or damaged."""
    try:
        digest, _, body = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    return dict(orjson.loads(body))


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Error numbers of full or read-only disks.
OF_DISKS = (*_FULL, errno.EROFS)
_OTHER_CACHE = "use another folder with `cache`, --cache or PACKHOUSE_CACHE"
_OTHER_TMP = "set TMPDIR to another folder"
# Seconds after which an unlocked temporary folder counts as abandoned. A new one is not locked yet
# for a moment.
_LOCKED_BY_S = 60


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Space that the user can still write on a file system."""

    bytes: int
    inodes: int | None
    """Number of files that can still be created; None if the file system has no limit."""


def free_space(place: Path) -> FreeSpace:
    """Return the free space of the file system of `place`, which may not exist yet."""
    facts = os.statvfs(next(p for p in (place, *place.absolute().parents) if p.exists()))
    return FreeSpace(facts.f_bavail * facts.f_frsize, facts.f_favail if facts.f_files else None)


@contextmanager
def disk_errors(place: Path, what: str = "the cache", remedy: str = _OTHER_CACHE) -> Iterator[None]:
    """Turn errors of writing to `place` into a `DiskError`.

    Errors about missing files, or about files outside `place`, are not changed.

    Raises:
        DiskError: The disk is full, out of inodes or read-only, or the user may not write there.
    """
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(os.fsdecode(error.filename)).absolute()
        is_elsewhere = named is not None and not named.is_relative_to(place.absolute())
        is_of_disks = error.errno in OF_DISKS  # Arrow's errors have no file name
        if is_elsewhere or error.errno == errno.ENOENT or (named is None and not is_of_disks):
            raise
        raise disk_error(error, place, what, remedy) from error


def disk_error(error: OSError, place: Path, what: str, remedy: str) -> DiskError:
    """Return the error for the disk of `place`, which is used for `what`, with a fix."""
    free = free_space(place)
    if error.errno in _FULL:
        reason = f"{os.strerror(error.errno)} ({free.bytes:,} bytes free)"
        if free.inodes == 0:
            reason = "its disk has no free inodes for more files"
        cure = f"Free some space there or {remedy}, then run again"
    else:
        is_read_only = error.errno == errno.EROFS
        reason = "its file system is read-only" if is_read_only else str(error.strerror)
        cure = f"Make it writable, or {remedy}"
    return DiskError(
        f"cannot write to {what} '{place}': {reason}. {cure}", place=str(place), errno=error.errno
    )


def write_whole(path: Path, body: bytes) -> None:
    """Write a file of the cache atomically.

    Raises:
        DiskError: The disk is full or cannot be written to.
    """
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with disk_errors(path.parent):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(body)
            staged.replace(path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Create a temporary folder `packhouse-<purpose>-<random>` and delete it after the block.

    It is locked. The next call with the same purpose deletes unlocked folders of killed processes.

    Raises:
        DiskError: The folder cannot be created, or its disk is full.
    """
    try:
        root = Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # Python tried /tmp and others; none is writable
        raise DiskError(
            f"no folder for temporary files: {error.strerror}. Set TMPDIR to another folder"
        ) from error
    what = "the folder of temporary files"
    with disk_errors(root, what, _OTHER_TMP):
        for left in root.glob(f"packhouse-{purpose}-*"):
            with suppress(FileNotFoundError), _locked(left) as is_nobodys:
                if is_nobodys and time.time() - left.stat().st_mtime > _LOCKED_BY_S:
                    shutil.rmtree(left, ignore_errors=True)
        made = tempfile.TemporaryDirectory(prefix=f"packhouse-{purpose}-", dir=root)
    with made as name, _locked(Path(name)), disk_errors(root, what, _OTHER_TMP):
        # `disk_errors` reports free space, so it must end before the folder is deleted.
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder until the block or the process ends; yield False if it cannot be locked."""
    is_locked = False
    with ExitStack() as stack:
        # It may be locked by another process, deleted, a link, or on a disk without locks.
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        yield is_locked


# A URI whose slashes are missing or were lost in a Path; `a:b/c` and `x/b:c` are folders.
_URI = re.compile(r"(?:^|/)(?:[a-z][a-z0-9+.-]+(?=:/)|s3|gs|gcs|az|abfss?|file):", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlace:
    """Location of finished steps."""

    folder: Path
    """Folder on this machine."""
    mirror: str | None = None
    """URI of an object store that shares steps between machines."""


def find_cache(setting: str | None = None) -> CachePlace:
    """Return the location of finished steps, for all commands, flows and loaders.

    A setting is a folder or the URI of a mirror. The first folder and the first mirror are used
    among `setting` (from `--cache`), PACKHOUSE_CACHE and PACKHOUSE_CACHE_MIRROR. By default there
    is no mirror, and the folder is `.packhouse` if the working directory has finished steps there,
    otherwise the user's cache for all projects (`~/.cache/packhouse` on Linux).

    Raises:
        ConfigError: PACKHOUSE_CACHE_MIRROR is not a URI.

    Example:
        >>> find_cache("s3://bucket/steps").mirror, find_cache("/data/cache").folder
        ('s3://bucket/steps', PosixPath('/data/cache'))
    """
    shared = os.environ.get("PACKHOUSE_CACHE_MIRROR") or None
    if shared is not None and "://" not in shared:
        raise ConfigError(
            f"PACKHOUSE_CACHE_MIRROR is '{shared}', not a URI. Set it to s3://bucket/prefix"
        )
    named = [name for name in (setting, os.environ.get("PACKHOUSE_CACHE"), shared) if name]
    folders = [name for name in named if "://" not in name]
    mirrors = [name for name in named if "://" in name]
    folder = Path(".packhouse")
    if folders:  # Path.expanduser raises at `~x`, which may be a folder's name
        folder = Path(os.path.expanduser(folders[0]))  # noqa: PTH111 - for that reason
    elif not (folder / "steps").is_dir():
        folder = user_cache_path("packhouse", appauthor=False)
    return CachePlace(folder=folder, mirror=(*mirrors, None)[0])


def default_cache() -> Path:
    """Return the default folder of finished steps; see `find_cache`."""
    return find_cache().folder


def check_cache(folder: Path) -> Path:
    """Return the cache folder if it exists or could be created; creates nothing.

    Raises:
        ConfigError: It or a parent is a file, or it is a URI (`s3:bucket/steps`).
    """
    if _URI.search(str(folder)):
        raise ConfigError(
            f"cache '{folder}' is a URI, but a local folder is needed here. To use a mirror, pass "
            "its URI, such as s3://bucket/prefix, to --cache of `packhouse prepare` or `packhouse "
            "ci`, or set PACKHOUSE_CACHE or PACKHOUSE_CACHE_MIRROR"
        )
    place = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not place.is_dir():
        raise ConfigError(
            f"cache '{folder}': '{place}' is not a folder. Choose a folder with --cache or "
            "PACKHOUSE_CACHE"
        )
    return folder


def make_cache(folder: Path) -> None:
    """Create the cache folder if it is missing.

    Raises:
        ConfigError: It cannot be created.
        DiskError: The disk is full or read-only.
    """
    try:
        with disk_errors(check_cache(folder)):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cache '{folder}' cannot be created: {error.strerror}. Choose a folder with --cache "
            "or PACKHOUSE_CACHE"
        ) from None

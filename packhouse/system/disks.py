"""Files that are seen whole or not at all, errors of disks with what helps, and the cache's place.

One rule says where finished steps lie, for every command, flow and loader: `find_cache`.
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
    """Write digest and content beside their final name, then move them there at once."""
    body = orjson.dumps(content)
    digest = hashlib.sha256(body).hexdigest().encode()
    write_whole(file, digest + b"\n" + body)


def read_checked(file: Path) -> dict[str, Any] | None:
    """Read what `write_checked` wrote, or None if it is not there as it was written."""
    try:
        digest, _, body = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    content: dict[str, Any] = orjson.loads(body)
    return content


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OF_DISKS = (*_FULL, errno.EROFS)
"""Error numbers of disks that cannot take what is written."""
_OTHER_CACHE = "name another folder with `cache`, --cache or PACKHOUSE_CACHE"
_OTHER_TMP = "set TMPDIR to another folder"
_LOCKED_BY_S = 60
"""Seconds after which a temporary folder without a lock is nobody's: it is locked when made."""


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """What this user can still write on a file system."""

    bytes: int
    inodes: int | None
    """New files that fit; None where the file system has no such limit."""


def free_space(place: Path) -> FreeSpace:
    """Return the free space of the file system that holds `place`, which need not exist yet."""
    exists = next(p for p in (place, *place.absolute().parents) if p.exists())
    facts = os.statvfs(exists)
    return FreeSpace(facts.f_bavail * facts.f_frsize, facts.f_favail if facts.f_files else None)


@contextmanager
def disk_errors(place: Path, what: str = "the cache", remedy: str = _OTHER_CACHE) -> Iterator[None]:
    """Turn the errors of a disk that cannot take what is written to `place` into a `DiskError`.

    An error that names a file elsewhere is let through, and so is one of a file that is missing.

    Raises:
        DiskError: the disk is full, out of inodes or read-only, or the user may not write there.
    """
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(os.fsdecode(error.filename)).absolute()
        is_elsewhere = named is not None and not named.is_relative_to(place.absolute())
        is_of_disks = error.errno in OF_DISKS  # Arrow's errors name no file
        if is_elsewhere or error.errno == errno.ENOENT or (named is None and not is_of_disks):
            raise
        raise disk_error(error, place, what, remedy) from error


def disk_error(error: OSError, place: Path, what: str, remedy: str) -> DiskError:
    """Say what is wrong with the disk of `place`, which holds `what`, and what helps."""
    free = free_space(place)
    if error.errno in _FULL:
        reason = f"{os.strerror(error.errno)} ({free.bytes:,} bytes free)"
        if free.inodes == 0:
            reason = "its disk takes no more files (no inode is free)"
        cure = f"make room there, or {remedy}; then run again"
    else:
        is_read_only = error.errno == errno.EROFS
        reason = "its disk is mounted read-only" if is_read_only else str(error.strerror)
        cure = f"make it writable, or {remedy}"
    return DiskError(
        f"cannot write to {what} '{place}': {reason}; {cure}", place=str(place), errno=error.errno
    )


def write_whole(path: Path, body: bytes) -> None:
    """Write a file of the cache so that nobody ever sees a part of it.

    Raises:
        DiskError: the cache cannot take it.
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
    """Make a temporary folder, `packhouse-<purpose>-<random>`, that is gone after the block.

    It is locked, so that the next one of its purpose removes what a killed process left.

    Raises:
        DiskError: it cannot be made, or its disk cannot take what is written into it.
    """
    try:
        root = Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # none of those that Python tries can be written
        raise DiskError(f"no place for temporary files: {error.strerror}; {_OTHER_TMP}") from error
    what = "the folder of temporary files"
    with disk_errors(root, what, _OTHER_TMP):
        for left in root.glob(f"packhouse-{purpose}-*"):
            with suppress(FileNotFoundError), _locked(left) as is_nobodys:
                if is_nobodys and time.time() - left.stat().st_mtime > _LOCKED_BY_S:
                    shutil.rmtree(left, ignore_errors=True)
        made = tempfile.TemporaryDirectory(prefix=f"packhouse-{purpose}-", dir=root)
    with made as name, _locked(Path(name)), disk_errors(root, what, _OTHER_TMP):
        yield Path(name)  # a full disk is told before what fills it is removed


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder until the block or the process ends; give False where it cannot be locked."""
    is_locked = False
    with ExitStack() as stack:
        with suppress(OSError):  # another's, gone by now, a link, or a disk that has no locks
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        yield is_locked


# A URI whose slashes are missing or went when it became a path; `a:b/c` and `x/b:c` are folders.
_URI = re.compile(
    r"(?:^(?P<first>[a-z][a-z0-9+.-]+)"
    r"|/(?P<inner>[a-z][a-z0-9+.-]+(?=:/)|s3|gs|gcs|az|abfss?|file)):",
    re.I,
)
_SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "file")


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlace:
    """Where finished steps lie."""

    folder: Path
    """On this machine."""
    mirror: str | None = None
    """URI of an object store through which machines without a common disk share steps."""


def find_cache(setting: str | None = None) -> CachePlace:
    """Return where finished steps lie: the one rule for every command, flow and loader.

    A setting is a folder, or the URI of a mirror. Folder and mirror are each the first one named by
    `setting` (a `--cache`), PACKHOUSE_CACHE or PACKHOUSE_CACHE_MIRROR. Else there is no mirror, and
    the folder is `.packhouse`, if the working directory has finished steps there, else the one of
    the user for all projects: `~/.cache/packhouse`, on Linux.

    Raises:
        ConfigError: PACKHOUSE_CACHE_MIRROR is a folder.

    Example:
        >>> find_cache("s3://bucket/steps").mirror, find_cache("/data/cache").folder
        ('s3://bucket/steps', PosixPath('/data/cache'))
    """
    shared = os.environ.get("PACKHOUSE_CACHE_MIRROR") or None
    if shared is not None and "://" not in shared:
        raise ConfigError(
            f"PACKHOUSE_CACHE_MIRROR is '{shared}'; give a URI such as s3://bucket/prefix"
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
    """Return the folder of finished steps where no setting names another; see `find_cache`."""
    return find_cache().folder


def check_cache(folder: Path) -> Path:
    """Return the folder of cached steps if it is one, or can become one; nothing is made.

    Raises:
        ConfigError: a file stands there or above it, or it looks like a URI (`s3:bucket/steps`).
    """
    if found := _URI.search(str(folder)):
        scheme = (found["first"] or found["inner"]).lower()
        if scheme not in _SCHEMES and ":/" not in str(folder):
            raise ConfigError(
                f"cache '{folder}' looks like a URI, and '{scheme}:' is none that packhouse knows "
                f"({', '.join(_SCHEMES)}); give a folder of that name by its absolute path"
            )
        slashes = "///" if scheme == "file" else "//"  # a Path keeps one of them
        rest = str(folder)[found.end() :].lstrip("/")
        raise ConfigError(
            f"cache '{folder}' is a URI, and a folder of this machine is needed here. Runs take a "
            "mirror as --cache (`packhouse prepare`, `packhouse ci`), PACKHOUSE_CACHE or "
            f"PACKHOUSE_CACHE_MIRROR: write '{scheme}:{slashes}{rest}' there"
        )
    place = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not place.is_dir():
        raise ConfigError(
            f"cache '{folder}': '{place}' is no folder; give a folder with --cache or "
            "PACKHOUSE_CACHE"
        )
    return folder


def make_cache(folder: Path) -> None:
    """Make the folder of cached steps where it is missing.

    Raises:
        ConfigError: it cannot be made.
        DiskError: the disk is full or read-only.
    """
    try:
        with disk_errors(check_cache(folder)):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cache '{folder}' cannot be made ({error.strerror}); give a folder with --cache or "
            "PACKHOUSE_CACHE"
        ) from None

"""A local folder as an object store: create-only by hard link, compare-and-swap under flock.

Bytes are written to a temporary file, hashed meanwhile, fsynced, and only then linked to their
name. So a name never shows a partial object, and the link of a second writer fails. The kernel
releases the lock of a killed process. Costs two fsyncs per object. NFS works if it supports hard
links and flock; a filesystem without hard links (exFAT, some FUSE mounts) is refused.
"""

import errno
import fcntl
import hashlib
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from typing_extensions import override

from packhouse.errors import StoreError, StoreRefusedError, TransientError
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
)
from packhouse.system.disks import OF_DISKS, disk_error

_OWN = ".packhouse"  # temporary files and locks; hidden from listings
_CHUNK_BYTES = 2**20
# ESTALE and EIO: NFS answers them while its server restarts.
_AGAIN = (errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.EIO)
# Linux answers EPERM where the filesystem has no hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class LocalStore(ObjectStore):
    """Objects as files under `root`, which the first write creates; tags are sha256."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - keep symlinks as given
        self.uri = str(self.root)

    @override
    def get(self, key: str) -> Blob:
        with self._reading(key) as file:
            data = file.read(MAX_GET_BYTES + 1)
        return Blob(data, hashlib.sha256(data).hexdigest())

    @override
    def chunks(self, key: str, start: int = 0) -> Iterator[bytes]:
        with self._reading(key) as file:
            file.seek(start)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    @override
    def get_range(self, key: str, start: int, length: int) -> Part:
        with self._reading(key) as file:
            found = os.fstat(file.fileno())
            data = os.pread(file.fileno(), length, start)
        # Not the sha256, as elsewhere: each part would read the whole file.
        return Part(data, found.st_size, f"{found.st_ino} {found.st_mtime_ns}")

    @override
    def head(self, key: str) -> ObjectInfo:
        with self._reading(key) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found = os.fstat(file.fileno())
        return ObjectInfo(key, found.st_size, found.st_mtime, digest)

    @override
    def put_create(self, key: str, body: bytes | FileBody) -> str:
        target = self.path(key)
        if os.path.lexists(target):  # only saves the copy; the link below decides
            raise PreconditionFailedError(f"'{key}' exists in {self.uri}", key=key)
        with self._staged(body) as (staged, tag), self._writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(staged, target)
            # Any of the folders may be new, so the entry of each must reach the disk. Otherwise a
            # power failure could take back a version that was acknowledged.
            for folder in target.parents:
                _sync(folder)
                if folder == self.root:
                    break
        return tag

    @override
    def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        target = self.path(key)
        # Staged before the lock is taken: writing and fsync of the bytes take longest.
        with self._staged(body) as (staged, tag), self._locked(key), self._writing(target):
            try:
                current = self.get(key).etag
            except ObjectNotFoundError:
                current = ""
            if current != etag:
                raise PreconditionFailedError(f"'{key}' has changed in {self.uri}", key=key)
            os.replace(staged, target)
            _sync(target.parent)
        return tag

    @override
    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        base = self._inside(prefix.rpartition("/")[0])
        paths = [Path(folder) / name for folder, _, names in os.walk(base) for name in names]
        listed = []
        for path in sorted(paths):
            key = path.relative_to(self.root).as_posix()
            if key.startswith(prefix) and not key.startswith(_OWN + "/"):
                with suppress(FileNotFoundError):  # deleted after the folder was listed
                    found = path.lstat()
                    listed.append(ObjectInfo(key, found.st_size, found.st_mtime))
        return listed

    @override
    def list_folders(self, prefix: str) -> Sequence[str]:
        base = self._inside(prefix)
        if os.path.lexists(self.root) and not self.root.is_dir():
            raise self._no_folder(self.root)
        if not base.is_dir():
            return []
        return sorted(p.name for p in base.iterdir() if p.is_dir() and p.name != _OWN)

    @override
    def delete(self, key: str) -> None:
        path = self.path(key)
        with self._writing(path):
            path.unlink(missing_ok=True)
        folder = path.parent
        with suppress(OSError):  # remove emptied folders; a concurrent writer creates them again
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent

    @override
    def clock(self) -> float:
        # Not `time.time()`: files on NFS have the times of its server.
        probe = self._own("tmp") / f"clock-{uuid.uuid4().hex}"
        with self._writing(probe):
            probe.touch()
            now = probe.stat().st_mtime
            probe.unlink()
        return now

    @override
    def delete_unfinished_uploads(self, older_than_s: float, *, dry_run: bool) -> int:
        """Remove temporary files of killed writers."""
        folder = self.root / _OWN / "tmp"
        if not folder.is_dir():
            return 0
        # By the clock of the store: a machine whose own clock is ahead would take the files of live
        # writers for old ones.
        now, found = self.clock(), 0
        for path in sorted(folder.iterdir()):
            with suppress(FileNotFoundError):  # its writer has just finished and removed it
                if now - path.stat().st_mtime >= older_than_s:
                    found += 1
                    if not dry_run:
                        path.unlink()
        return found

    def check_usable(self) -> None:
        """Check that files can be written and linked here; leaves no files.

        Raises:
            StoreError: The place is not a folder, or is not writable, read-only or full.
            StoreRefusedError: The filesystem has no hard links.
        """
        folder = next(place for place in (self.root, *self.root.parents) if os.path.lexists(place))
        if not folder.is_dir():
            raise self._no_folder(folder)
        probe = folder / f".packhouse-probe-{uuid.uuid4().hex}"
        try:
            with self._translated():
                probe.touch()
                _link(probe, probe.with_suffix(".link"))
        except FileNotFoundError:  # no files can be created in /proc and /sys
            raise self._no_folder(self.root) from None
        finally:
            for left in (probe.with_suffix(".link"), probe):
                with suppress(OSError):  # a read-only disk refuses this too, but has nothing on it
                    left.unlink()

    def path(self, key: str) -> Path:
        """Return the path of an object, even if it does not exist.

        Raises:
            ConfigError: The key is not valid.
            StoreError: A symbolic link leads out of the store.
        """
        return self._inside(check_key(key))

    def _inside(self, key: str) -> Path:
        path = self.root / key
        root = os.path.realpath(self.root)
        if not Path(os.path.realpath(path)).is_relative_to(root):
            raise StoreError(
                f"store {self.uri}: a symbolic link at {key!r} leads outside the store. Remove "
                "the link, or mount the other folder in its place"
            )
        return path

    def _own(self, name: str) -> Path:
        """Return the folder for temporary files or locks; create it if it is missing."""
        folder = self.root / _OWN / name
        try:
            with self._translated():
                folder.mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, NotADirectoryError):  # no folder can be created in /proc, /sys
            raise self._no_folder(folder) from None
        return folder

    @contextmanager
    def _staged(self, body: bytes | FileBody) -> Iterator[tuple[Path, str]]:
        """Write the bytes to a temporary file and fsync it; yield its path and sha256."""
        staged, digest = self._own("tmp") / uuid.uuid4().hex, hashlib.sha256()
        try:
            with self._translated(), staged.open("xb") as out:
                for chunk in (body,) if isinstance(body, bytes) else body.chunks():
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
            yield staged, digest.hexdigest()
        finally:
            staged.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        # 256 lock files for all keys: few enough to keep, and two keys that share one only wait.
        lock = self._own("locks") / hashlib.sha256(key.encode()).hexdigest()[:2]
        with self._translated():
            file = lock.open("ab")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _reading(self, key: str) -> Iterator[BufferedReader]:
        """Open the file of an object; O_NONBLOCK, so that a pipe in its place does not block."""
        try:
            with self._translated():
                handle = os.open(self.path(key), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                with os.fdopen(handle, "rb") as file:
                    if not stat.S_ISREG(os.fstat(handle).st_mode):
                        raise IsADirectoryError(key)
                    yield file
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            if os.path.lexists(self.root) and not self.root.is_dir():
                raise self._no_folder(self.root) from None
            raise ObjectNotFoundError(f"no object '{key}' in {self.uri}", key=key) from None

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            with self._translated():
                yield
        except FileNotFoundError:  # another process emptied and removed the folder meanwhile
            raise TransientError(f"'{path}' in {self.uri}: its folder was removed") from None
        except (IsADirectoryError, NotADirectoryError):
            raise self._no_folder(path) from None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate errors of the operating system; the caller handles missing files itself."""
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise
        except FileExistsError as error:  # from mkdir: a file has the folder's name
            raise self._no_folder(Path(error.filename)) from None
        except OSError as error:
            if error.errno in OF_DISKS:
                other = "publish to another store (publish.store)"
                raise disk_error(error, self.root, "the store", other) from error
            kind = TransientError if error.errno in _AGAIN else StoreError
            raise kind(f"store {self.uri}: {error}") from error

    def _no_folder(self, folder: Path) -> StoreError:
        """Return the error for a file, or something else, in the place of a folder."""
        place = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        if place.is_dir():
            problem = f"folder '{folder}' cannot be created in '{place}'"
        else:
            problem = f"'{place}' is {'a file' if place.is_file() else 'not a folder'}"
        return StoreError(
            f"store {self.uri}: {problem}. Move the file, or use another store", path=str(place)
        )


def _link(staged: Path, target: Path) -> None:
    try:
        os.link(staged, target)
    except FileExistsError:
        raise PreconditionFailedError(f"'{target}' exists", key=str(target)) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise StoreRefusedError(
            f"the filesystem of '{target.parent}' has no hard links, which safe publishing needs. "
            "Use another filesystem or an S3 store"
        ) from error


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

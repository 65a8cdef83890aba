"""Which steps of the cache runs hold: these are never removed, whatever their age or size.

```
<cache>/running/lock                     locked while a run says what it holds, and by removals
<cache>/running/<version>-<random>.keys  keys of the steps of one run, a line each; locked by it
```

The locks are `flock`, which the operating system frees when a process ends, however it ends. A file
that nobody has locked is of a run that failed or was killed: its steps are kept for a week more, so
that the next run goes on there. A run that succeeds removes its file, and those of earlier tries;
`packhouse cache gc --unfinished` removes those of all runs that ended without success.
"""

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from packhouse.system.disks import disk_errors

UNFINISHED_DAYS = 7
"""How long the steps of a run that failed or was killed are held."""

Hold = Callable[[Iterable[str]], None]
"""Holds more steps, by their keys."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def hold_steps(cache: Path, version_id: str, keys: Iterable[str]) -> Iterator[Hold]:
    """Hold the steps of a run while the block runs, and for a week if it does not succeed.

    Args:
        cache: folder of finished steps.
        version_id: 16 hex digits; runs of the same version are tries of the same work.
        keys: of the steps that the run will read or write; call what is given with more.

    Raises:
        DiskError: the cache cannot be written.
    """
    path = cache / "running" / f"{version_id}-{uuid.uuid4().hex}.keys"

    def hold(more: Iterable[str]) -> None:
        lines = "".join(f"{key}\n" for key in more).encode()
        with disk_errors(cache), cache_lock(cache):
            while lines:
                lines = lines[file.write(lines) :]

    staged = path.with_suffix(".new")
    with disk_errors(cache):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = staged.open("xb", buffering=0)  # nothing is left to be written when it is closed
    with file:
        with suppress(OSError):  # no locks there: then nothing is ever removed
            fcntl.flock(file, fcntl.LOCK_EX)
        with disk_errors(cache):
            staged.rename(path)  # it is never seen unlocked: another try would forget it
        try:
            hold(keys)
        except BaseException:
            path.unlink()
            raise
        forget_tries(cache, version_id)  # the new file names all that theirs do
        yield hold
        path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # someone removed the cache while the run was on
        forget_tries(cache, version_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldFile:
    """What one run holds."""

    version_id: str
    keys: frozenset[str]
    """Of its steps."""
    until: float | None
    """When they are free, seconds since 1970; None while the run goes on."""


def hold_files(cache: Path) -> list[HoldFile]:
    """List what runs hold, and forget runs that ended without success over a week ago."""
    found = []
    now = file_clock(cache)
    for path in (cache / "running").glob("*.keys"):
        until = None
        with suppress(OSError):  # its run has just ended
            if not has_ended(path):
                os.utime(path)  # so that its week begins when it ends
            else:
                until = path.stat().st_mtime + UNFINISHED_DAYS * 86400
                if now > until:
                    path.unlink()
                    continue
        with suppress(FileNotFoundError):
            keys = frozenset(path.read_text().split())
            version_id = path.name.partition("-")[0]
            found.append(HoldFile(version_id=version_id, keys=keys, until=until))
    return found


def held_keys(cache: Path) -> set[str]:
    """Return the keys of all steps that runs hold.

    Steps that are removed must be looked up here and renamed under one `cache_lock`.
    """
    return {key for file in hold_files(cache) for key in file.keys}


@contextmanager
def cache_lock(cache: Path) -> Iterator[bool]:
    """Wait for the cache's own lock and hold it for the block: a matter of milliseconds.

    Gives False where the file system has no locks: runs go on, and nothing may be removed.
    """
    with (cache / "running" / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield False
        else:
            yield True


def file_clock(cache: Path) -> float:
    """Return the time by the clock that stamps the cache's files, which need not be this machine's.

    Seconds since 1970; this machine's own where the cache cannot be written.
    """
    lock = cache / "running" / "lock"
    try:
        os.utime(lock)
        return lock.stat().st_mtime
    except OSError:
        return time.time()


def has_ended(path: Path) -> bool:
    """Return True if the process that locked a file is gone; False where that cannot be told."""
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def forget_tries(cache: Path, version_id: str = "*") -> None:
    """Let go of what runs hold that ended without success: of one version, or of all."""
    with cache_lock(cache):
        for path in (cache / "running").glob(f"{version_id}-*.keys"):
            if has_ended(path):
                path.unlink(missing_ok=True)

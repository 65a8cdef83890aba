"""Manage the size of the step cache: pins of running jobs, deletion and limits.

Every run deletes steps when it begins and again after it succeeds:

- steps made from data that is gone (the file grew or changed since the last run);
- steps that no run has used for PACKHOUSE_CACHE_MAX_DAYS (30);
- the least recently used steps, until the cache is at most PACKHOUSE_CACHE_MAX_GB. If that is not
  set, the limit is half of the cache plus free disk space, and steps used by the last run of any
  dataset stay.

A step that a run has pinned is never deleted, whatever its age or size. Nothing here affects
correctness: a deleted step is computed again, with the same bytes.

```
<cache>/runs/<dataset>.json              jobs of a dataset's last run, also read by `explain`
<cache>/running/lock                     held while a run pins steps and during deletions
<cache>/running/<version>-<random>.keys  keys that one run has pinned, one per line; locked by it
```

The locks use `flock`, which the operating system frees however a process ends. An unlocked file
belongs to a run that failed or was killed: its steps are kept for another week, so that the next
run can resume. A successful run deletes its own file and those of earlier attempts.
`packhouse cache gc --unfinished` deletes the files of all unsuccessful runs.
"""

import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field, TypeAdapter

from packhouse.errors import ConfigError
from packhouse.read import SourceShard
from packhouse.run.step import AnyJob
from packhouse.run.step_cache import has_ended, locked_file
from packhouse.system.disks import disk_errors, free_space, write_whole

log = logging.getLogger("packhouse.run.step_cache")

# A recipe that nobody has run for a month is more likely done than due.
_USUAL_DAYS = 30
# Days that the steps of a failed or killed run stay pinned, so that the next run can resume.
UNFINISHED_DAYS = 7

CachePins = Callable[[Iterable[str]], None]
"""Pins more steps by key."""

# Errors of `flock` on file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def pin_steps(cache: Path, version_id: str, keys: Iterable[str]) -> Iterator[CachePins]:
    """Pin the steps of a run while the block runs, and for another week if it fails.

    Args:
        cache: folder of finished steps.
        version_id: 16 hex digits; runs of the same version are attempts at the same work.
        keys: steps that the run reads or writes. Call the yielded function to pin more.

    Raises:
        DiskError: the cache cannot be written.
    """
    # Several runs of one version may be active: each has a file of its own.
    path = cache / "running" / f"{version_id}-{uuid.uuid4().hex}.keys"

    def hold(more: Iterable[str]) -> None:
        lines = "".join(f"{key}\n" for key in more).encode()
        with disk_errors(cache), cache_lock(cache):
            while lines:  # an unbuffered write may be short
                lines = lines[file.write(lines) :]

    with ExitStack() as stack:
        with disk_errors(cache):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(locked_file(path))
        try:
            hold(keys)
        except BaseException:
            path.unlink()
            raise
        # The new file includes all keys of earlier attempts.
        forget_tries(cache, version_id)
        yield hold
        path.unlink(missing_ok=True)
    # Someone may have deleted the cache during the run.
    with suppress(FileNotFoundError):
        forget_tries(cache, version_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldFile:
    """Steps that one run has pinned."""

    version_id: str
    keys: frozenset[str]
    """Keys of the steps."""
    until: float | None
    """Time at which the pin expires, in seconds since 1970; None while the run is active."""


def hold_files(cache: Path) -> list[HoldFile]:
    """List the pins of all runs, deleting those of runs that failed over a week ago."""
    found = []
    now = time.time()
    for path in (cache / "running").glob("*.keys"):
        until = None
        with suppress(OSError):  # the run may end at this moment
            if not has_ended(path):
                os.utime(path)  # the week starts when the run ends
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
    """Return the keys of all pinned steps.

    Before deleting steps, call this and rename them away under one `cache_lock`.
    """
    return {key for file in hold_files(cache) for key in file.keys}


@contextmanager
def cache_lock(cache: Path) -> Iterator[bool]:
    """Hold the lock of the cache during the block, which should take milliseconds.

    Yields False if the file system has no locks; then nothing may be deleted.
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


def forget_tries(cache: Path, version_id: str = "*") -> None:
    """Unpin the steps of unsuccessful runs, of one version or of all."""
    with cache_lock(cache):
        for path in (cache / "running").glob(f"{version_id}-*.keys"):
            if has_ended(path):
                path.unlink(missing_ok=True)


# Files jobs that read all shards, but have a digest of their keys in their own key, not the keys.
_OF_ALL_SHARDS = ("quarantine", "dropped")


@dataclass(frozen=True, kw_only=True, slots=True)
class LastJob:
    """A job of a dataset's last run."""

    step: str
    label: str
    key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Name of a folder in the cache."""
    parts: dict[str, Any]
    """Everything that went into the key, as plain JSON."""
    shard: dict[str, Any] | None = None
    """The `SourceShard` that it read, as plain JSON; None if it read none."""


_LAST_JOBS = TypeAdapter(list[LastJob])


def save_last_run(cache: Path, dataset: str, executed: Iterable[AnyJob]) -> None:
    """Save the key and key parts of every job, and the location of its source rows."""
    jobs = []
    for job in executed:
        shard = getattr(job.parameters, "shard", None)
        last = LastJob(
            step=job.step.name,
            label=job.label,
            key=job.key,
            parts=dict(job.parts),
            shard=None if shard is None else asdict(shard),
        )
        jobs.append(last)
    write_whole(_path(cache, dataset), _LAST_JOBS.dump_json(jobs))


def load_last_run(cache: Path, dataset: str) -> dict[tuple[str, str], LastJob]:
    """Return the jobs of the last run by (step, label); empty if there is none or it is damaged."""
    try:
        jobs = _LAST_JOBS.validate_json(_path(cache, dataset).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return {(job.step, job.label): job for job in jobs}


def touch_last_run(cache: Path, dataset: str) -> None:
    """Mark the steps of the last run as used now, because a refresh found nothing changed."""
    with suppress(OSError):  # no last run, or a read-only cache
        os.utime(_path(cache, dataset))


def obsolete_keys(before: Iterable[LastJob], now: Iterable[SourceShard]) -> set[str]:
    """Return the keys of steps made from bytes that a source no longer contains.

    When a file grows, its last shard changes: no recipe needs the old shard or anything made from
    it. Steps with other settings are not obsolete, because someone may go back to them.

    Args:
        before: jobs of the previous run, from `load_last_run`.
        now: shards of this run.
    """
    shards = list(now)
    files = {shard.file for shard in shards}
    contents = {(shard.sha256, shard.row_start, shard.byte_start) for shard in shards}
    gone: set[str] = set()
    # a.jsonl had shards 1 and 2; after an append it has 1 and 3. Everything made from shard 2 is
    # obsolete: its validate, format and tokenize jobs, then pack and all later steps.
    # A job comes after the jobs that it reads.
    for job in before:
        parts = job.parts
        shard = parts.get("shard", {})
        place = tuple(map(shard.get, ("sha256", "row_start", "byte_start")))
        is_changed = shard.get("file") in files and place not in contents
        is_of_changed = gone.intersection(parts.get("inputs", [parts.get("input")]))
        if is_changed or is_of_changed or (gone and parts.get("of") in _OF_ALL_SHARDS):
            gone.add(job.key)
    return gone


def _path(cache: Path, dataset: str) -> Path:
    return cache / "runs" / f"{dataset}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cached:
    """One finished job in the cache."""

    step: str
    key: str
    num_bytes: int
    used_at: float
    """Time at which a run last made or found it, in seconds since 1970."""
    is_used: bool
    """True if the last run of some dataset used it."""
    is_held: bool = False
    """True if an active or unsuccessful run has pinned it."""


def _limit(name: str) -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    # Not `float`, which accepts `nan` and `inf`; no size is over a limit of `nan`.
    if not text.replace(".", "", 1).isdecimal():
        raise ConfigError(f"{name} is '{text}'. Set it to a number, 0 or more.")
    return float(text)


def max_cache_bytes() -> int | None:
    """Return PACKHOUSE_CACHE_MAX_GB in bytes, or None if it is not set.

    Raises:
        ConfigError: the value is negative or not a number.
    """
    max_gb = _limit("PACKHOUSE_CACHE_MAX_GB")
    return None if max_gb is None else int(max_gb * 10**9)


def list_steps(cache: Path) -> list[Cached]:
    """List the finished jobs of a cache by step and key. Reads the size of every file."""
    # Key -> time of the last run of any dataset that used it.
    last_used: dict[str, float] = {}
    for path in (cache / "runs").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            at = path.stat().st_mtime
            for job in orjson.loads(path.read_bytes()):
                last_used[job["key"]] = max(at, last_used.get(job["key"], 0.0))
    held = held_keys(cache)
    found = []
    for folder in sorted((cache / "steps").glob("*/*")):
        if folder.parent.name == "tmp":
            continue
        # Another process may delete it now.
        with suppress(FileNotFoundError, NotADirectoryError):
            sizes = [file.stat().st_size for file in folder.iterdir()]
            used_at = (folder / "receipt.json").stat().st_mtime
            found.append(
                Cached(
                    step=folder.parent.name,
                    key=folder.name,
                    num_bytes=sum(sizes),
                    used_at=max(used_at, last_used.get(folder.name, 0.0)),
                    is_used=folder.name in last_used,
                    is_held=folder.name in held,
                )
            )
    return found


def choose_steps(
    found: Sequence[Cached],
    most_bytes: int | None = None,
    *,
    oldest: float = float("inf"),
    spare_used: bool = False,
) -> list[Cached]:
    """Choose steps to delete, least recently used first; pinned steps are never chosen.

    Args:
        found: steps in the cache.
        most_bytes: size to reach, deleting used steps if necessary; None: all unused steps.
        oldest: keep steps used at or after this time, in seconds since 1970.
        spare_used: never choose used steps, whatever the size.

    Example:
        >>> def step(key, used_at, is_used):
        ...     return Cached(step="s", key=key, num_bytes=10, used_at=used_at, is_used=is_used)
        >>> found = [step("a", 1.0, True), step("b", 3.0, False), step("c", 2.0, False)]
        >>> [each.key for each in choose_steps(found)]
        ['c', 'b']
        >>> [each.key for each in choose_steps(found, most_bytes=20)]
        ['c']
        >>> [each.key for each in choose_steps(found, most_bytes=0)]
        ['c', 'b', 'a']
    """
    old = sorted(
        (each for each in found if each.used_at < oldest and not each.is_held),
        key=lambda each: (each.is_used, each.used_at, each.step, each.key),
    )
    if most_bytes is None or spare_used:
        old = [each for each in old if not each.is_used]
    # Three steps of 10 bytes, last used at 1 (in use), 3 and 2: to reach 20, delete the one at 2.
    chosen, size = [], sum(each.num_bytes for each in found)
    for each in old:
        if most_bytes is not None and size <= most_bytes:
            break
        chosen.append(each)
        size -= each.num_bytes
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRoom:
    """Size and limit of the step cache and free space on its disk, in bytes."""

    num_bytes: int
    held_bytes: int
    """Size of pinned steps."""
    max_bytes: int
    free_bytes: int
    free_inodes: int | None
    """Number of files that can still be created; None if the file system has no such limit."""

    def __str__(self) -> str:
        inodes = "" if self.free_inodes is None else f" and {self.free_inodes:,} files"
        return (
            f"{in_mb(self.num_bytes)} used of {in_mb(self.max_bytes)} allowed "
            f"({in_mb(self.held_bytes)} in use by runs); {in_mb(self.free_bytes)}{inodes} free "
            "on disk"
        )


def cache_room(cache: Path, found: Sequence[Cached] | None = None) -> CacheRoom:
    """Return the size and limits of the cache. Pass `found` to avoid listing it again."""
    found = list_steps(cache) if found is None else found
    size, free = sum(each.num_bytes for each in found), free_space(cache)
    limit = max_cache_bytes()
    return CacheRoom(
        num_bytes=size,
        held_bytes=sum(each.num_bytes for each in found if each.is_held),
        # Of both together, so that the limit does not sink while the cache grows.
        max_bytes=(size + free.bytes) // 2 if limit is None else limit,
        free_bytes=free.bytes,
        free_inodes=free.inodes,
    )


def in_mb(num_bytes: int) -> str:
    """Format a number of bytes in megabytes.

    Example:
        >>> in_mb(404_100_000)
        '404.1 MB'
    """
    return f"{num_bytes / 1e6:,.1f} MB"


def keep_limits(cache: Path, obsolete: Collection[str] = ()) -> CacheRoom:
    """Delete steps until the cache is within its limits, and return its size afterwards.

    Args:
        cache: folder of finished steps.
        obsolete: keys of steps to delete now, unless the last run of some dataset used them.
    """
    max_days = _limit("PACKHOUSE_CACHE_MAX_DAYS")
    oldest = time.time() - (_USUAL_DAYS if max_days is None else max_days) * 86400
    is_limited = max_cache_bytes() is not None
    found = list_steps(cache)

    gone, left = list[Cached](), list[Cached]()
    for each in found:
        is_obsolete = each.key in obsolete and not each.is_used
        is_over = not each.is_held and (is_obsolete or each.used_at < oldest)
        (gone if is_over else left).append(each)
    most = cache_room(cache, left).max_bytes
    # Without a limit that somebody set, spare what the last run of each dataset used: the next one
    # would compute it again.
    gone += choose_steps(left, most, spare_used=not is_limited)
    freed = remove_steps(cache, gone)
    if freed:
        log.info("cache '%s': %s freed", cache, in_mb(freed))
    # List again after deleting: steps that a run has pinned in the meantime are still there.
    return cache_room(cache, None if gone else found)


def remove_steps(cache: Path, chosen: Sequence[Cached]) -> int:
    """Delete steps, except those that a run has pinned in the meantime.

    Returns:
        Freed bytes; 0 on a file system without locks.

    Raises:
        DiskError: the cache cannot be written.
    """
    if not chosen:
        return 0
    tmp = cache / "steps" / "tmp"
    moved: list[tuple[Path, int]] = []
    with disk_errors(cache):
        tmp.mkdir(parents=True, exist_ok=True)
        (cache / "running").mkdir(exist_ok=True)
        with cache_lock(cache) as is_locked:
            held = held_keys(cache)
            for each in chosen if is_locked else ():
                gone = tmp / f"gone-{uuid.uuid4().hex[:12]}"
                with suppress(FileNotFoundError):
                    if each.key not in held:
                        # Rename first: no reader ever sees a half-deleted step.
                        (cache / "steps" / each.step / each.key).rename(gone)
                        moved.append((gone, each.num_bytes))
    # Outside of the lock, which other runs need to pin their steps.
    for gone, _ in moved:
        shutil.rmtree(gone, ignore_errors=True)
    return sum(num_bytes for _, num_bytes in moved)

"""Room in the cache of steps: what runs hold, what may go, and the limits that runs keep.

Every run removes, when it begins and when it has succeeded:

- steps of data that is no longer there (its file has grown or changed since the last run);
- steps that no run has used for PACKHOUSE_CACHE_MAX_DAYS (30);
- the longest unused steps, until the cache is at most PACKHOUSE_CACHE_MAX_GB. Without that, half
  of the room that the cache and the free part of its disk make together, and then only steps that
  the last run of no dataset used.

A step that a run holds is never removed, whatever its age or size. Nothing here is needed for
correctness: a step that is gone is done again, and gives the same bytes.

```
<cache>/runs/<dataset>.json              the jobs of a dataset's last run, for `explain` too
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
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field, TypeAdapter

from packhouse.errors import ConfigError
from packhouse.read import SourceShard
from packhouse.run.cache import has_ended
from packhouse.run.step import AnyJob
from packhouse.system.disks import disk_errors, free_space, write_whole

log = logging.getLogger("packhouse.run.cache")

_USUAL_DAYS = 30
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
    now = time.time()
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


def forget_tries(cache: Path, version_id: str = "*") -> None:
    """Let go of what runs hold that ended without success: of one version, or of all."""
    with cache_lock(cache):
        for path in (cache / "running").glob(f"{version_id}-*.keys"):
            if has_ended(path):
                path.unlink(missing_ok=True)


_OF_ALL_SHARDS = ("quarantine", "dropped")


@dataclass(frozen=True, kw_only=True, slots=True)
class LastJob:
    """A job of a dataset's last run."""

    step: str
    label: str
    key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Name of a folder in the cache."""
    parts: dict[str, Any]
    """What the key was made of, as plain JSON."""
    shard: dict[str, Any] | None = None
    """A `SourceShard`, as plain JSON: where its rows lay, if it read some of a source."""


_LAST_JOBS = TypeAdapter(list[LastJob])


def save_last_run(cache: Path, dataset: str, executed: Iterable[AnyJob]) -> None:
    """Remember every job's key and what it was made of; and where the rows of shards lay."""
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
    """Return the jobs of the last run by (step, label); empty where there was none to be read."""
    try:
        jobs = _LAST_JOBS.validate_json(_path(cache, dataset).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return {(job.step, job.label): job for job in jobs}


def touch_last_run(cache: Path, dataset: str) -> None:
    """Count the steps of the last run as used now, as a look that finds nothing changed does."""
    with suppress(OSError):  # there was none, or the cache is only read
        os.utime(_path(cache, dataset))


def obsolete_keys(before: Iterable[LastJob], now: Iterable[SourceShard]) -> set[str]:
    """Return the keys of what was made from bytes that a source no longer holds.

    A file that grew has another last shard: the former one, and all that was made from it, is
    needed by no recipe. Steps of other settings are not obsolete: someone may go back to them.

    Args:
        before: jobs of the run before, as `load_last_run` gives them.
        now: shards of this run.
    """
    shards = list(now)
    files, contents = {shard.file for shard in shards}, {shard.sha256 for shard in shards}
    gone: set[str] = set()
    # a.jsonl had shards 1 and 2, and was appended to: it has 1 and 3 now. Gone is what was made of
    # 2: its jobs of validate, format and tokenize, pack, and all behind it.
    for job in before:  # each comes after those that it reads
        parts = job.parts
        shard = parts.get("shard", {})
        is_changed = shard.get("file") in files and shard["sha256"] not in contents
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
    """When it was made, or last found by a run: seconds since 1970."""
    is_used: bool
    """True if the last run of some dataset used it."""
    is_held: bool = False
    """True if a run that goes on, or did not succeed, reads or writes it."""


def _limit(name: str) -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.replace(".", "", 1).isdecimal():
        raise ConfigError(f"{name} is '{text}'; it must be a number from 0 on")
    return float(text)


def max_cache_bytes() -> int | None:
    """Return PACKHOUSE_CACHE_MAX_GB in bytes; None: half of the room there is.

    Raises:
        ConfigError: it is not a number from 0 on.
    """
    max_gb = _limit("PACKHOUSE_CACHE_MAX_GB")
    return None if max_gb is None else int(max_gb * 10**9)


def list_steps(cache: Path) -> list[Cached]:
    """List the finished jobs of a cache, by step and key. Costs a look at each file's size."""
    last_used = _last_runs(cache)
    held = held_keys(cache)
    found = []
    for folder in sorted((cache / "steps").glob("*/*")):
        if folder.parent.name == "tmp":
            continue
        with suppress(FileNotFoundError, NotADirectoryError):  # another process took it away
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


def _last_runs(cache: Path) -> dict[str, float]:
    """Key of each step that the last run of a dataset used -> when that was."""
    keys: dict[str, float] = {}
    for path in (cache / "runs").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            at = path.stat().st_mtime
            for job in orjson.loads(path.read_bytes()):
                keys[job["key"]] = max(at, keys.get(job["key"], 0.0))
    return keys


def choose_steps(
    found: Sequence[Cached],
    most_bytes: int | None = None,
    *,
    oldest: float = float("inf"),
    spare_used: bool = False,
) -> list[Cached]:
    """Choose what may go: longest unused first, and nothing that a run holds.

    Args:
        found: what lies there.
        most_bytes: size to come down to, with steps in use if it must be; None: all out of use.
        oldest: steps made or found at this time or later stay; seconds since 1970.
        spare_used: leave steps in use alone whatever the size.

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
    # Steps of 10 bytes each, last used at 1 (in use), 3 and 2: to come to 20, the one of 2 goes.
    chosen, size = [], sum(each.num_bytes for each in found)
    for each in old:
        if most_bytes is not None and size <= most_bytes:
            break
        chosen.append(each)
        size -= each.num_bytes
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRoom:
    """What finished steps take, what they may take, and what is left on their disk; in bytes."""

    num_bytes: int
    held_bytes: int
    """Of steps that runs hold."""
    max_bytes: int
    free_bytes: int
    free_inodes: int | None
    """New files that fit; None where the file system has no such limit."""

    def __str__(self) -> str:
        inodes = "" if self.free_inodes is None else f" and {self.free_inodes:,} files"
        return (
            f"{in_mb(self.num_bytes)} in finished steps, {in_mb(self.held_bytes)} of them held by "
            f"runs; limit {in_mb(self.max_bytes)}; {in_mb(self.free_bytes)}{inodes} free"
        )


def cache_room(cache: Path, found: Sequence[Cached] | None = None) -> CacheRoom:
    """Return what the steps take, and how much more they may; `found` spares a listing."""
    found = list_steps(cache) if found is None else found
    size, free = sum(each.num_bytes for each in found), free_space(cache)
    limit = max_cache_bytes()
    return CacheRoom(
        num_bytes=size,
        held_bytes=sum(each.num_bytes for each in found if each.is_held),
        max_bytes=(size + free.bytes) // 2 if limit is None else limit,
        free_bytes=free.bytes,
        free_inodes=free.inodes,
    )


def in_mb(num_bytes: int) -> str:
    """Write a number of bytes for people.

    Example:
        >>> in_mb(404_100_000)
        '404.1 MB'
    """
    return f"{num_bytes / 1e6:,.1f} MB"


def keep_limits(cache: Path, obsolete: Collection[str] = ()) -> CacheRoom:
    """Bring a cache within its limits; returns what there is then.

    Args:
        cache: folder of finished steps.
        obsolete: keys of steps that go at once, but for those that some dataset's last run used.
    """
    max_days = _limit("PACKHOUSE_CACHE_MAX_DAYS")
    oldest = time.time() - (_USUAL_DAYS if max_days is None else max_days) * 86400
    is_limited = max_cache_bytes() is not None
    found = list_steps(cache)

    def is_over(each: Cached) -> bool:
        is_obsolete = each.key in obsolete and not each.is_used
        return not each.is_held and (is_obsolete or each.used_at < oldest)

    gone = [each for each in found if is_over(each)]
    left = [each for each in found if not is_over(each)]
    most = cache_room(cache, left).max_bytes
    gone += choose_steps(left, most, spare_used=not is_limited)
    freed = remove_steps(cache, gone)
    if freed:
        log.info("cache '%s': %s freed", cache, in_mb(freed))
    return cache_room(cache, None if gone else found)  # what a run took up meanwhile is still there


def remove_steps(cache: Path, chosen: Sequence[Cached]) -> int:
    """Remove steps, each as a whole, but for those that a run holds by now.

    Returns:
        Bytes that were freed: 0 on a file system without locks.

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
                        (cache / "steps" / each.step / each.key).rename(gone)  # never seen half
                        moved.append((gone, each.num_bytes))
    for gone, _ in moved:
        shutil.rmtree(gone, ignore_errors=True)
    return sum(num_bytes for _, num_bytes in moved)

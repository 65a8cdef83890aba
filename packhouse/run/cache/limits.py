"""Room in the cache of steps: what lies there, what may go, and the limits that runs keep.

Every run removes, when it begins and when it has succeeded:

- steps of data that is no longer there (its file has grown or changed since the last run);
- steps that no run has used for PACKHOUSE_CACHE_MAX_DAYS (30);
- the longest unused steps, until the cache is at most PACKHOUSE_CACHE_MAX_GB. Without that, half
  of the room that the cache and the free part of its disk make together, and then only steps that
  the last run of no dataset used.

A step that a run holds (`packhouse.run.cache.holds`) is never removed. Nothing here is needed for
correctness: a step that is gone is done again, and gives the same bytes.
"""

import logging
import os
import shutil
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson

from packhouse.errors import ConfigError
from packhouse.run.cache.holds import cache_lock, file_clock, held_keys, hold_files
from packhouse.system.disks import disk_errors, free_space

log = logging.getLogger("packhouse.run.cache")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLimits:
    """What runs keep the cache to."""

    max_bytes: int | None
    """None: half of the room there is, and no step that some dataset's last run used goes."""
    max_age_s: float


def cache_limits() -> CacheLimits:
    """Read PACKHOUSE_CACHE_MAX_GB (10^9 bytes) and PACKHOUSE_CACHE_MAX_DAYS.

    Raises:
        ConfigError: one of them is not a number from 0 on.
    """
    values = {}
    for name, usual in (("PACKHOUSE_CACHE_MAX_GB", ""), ("PACKHOUSE_CACHE_MAX_DAYS", "30")):
        text = os.environ.get(name) or usual
        if text and not text.replace(".", "", 1).isdecimal():
            raise ConfigError(f"{name} is '{text}'; it must be a number from 0 on")
        values[name] = float(text) if text else None
    max_gb, max_days = values.values()
    assert max_days is not None
    return CacheLimits(
        max_bytes=None if max_gb is None else int(max_gb * 10**9), max_age_s=max_days * 86400
    )


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
class Unfinished:
    """What is kept for runs that failed or were killed, so that their next tries go on there."""

    num_runs: int
    """Tries of one version count as one."""
    steps: tuple[Cached, ...]
    """Without those that other runs need."""
    until: datetime | None
    """When the last of them is free, in UTC; None if there is none."""


def find_unfinished(cache: Path, found: Sequence[Cached]) -> Unfinished:
    """Return what only runs hold that ended without success; `found` is what lies there."""
    files = hold_files(cache)
    running = {key for file in files if file.until is None for key in file.keys}
    ended = [file for file in files if file.until is not None]
    keys = {key for file in ended for key in file.keys} - running
    until = max((file.until or 0.0 for file in ended), default=None)
    return Unfinished(
        num_runs=len({file.version_id for file in ended}),
        steps=tuple(each for each in found if each.key in keys and not each.is_used),
        until=None if until is None else datetime.fromtimestamp(until, UTC),
    )


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
    limit = cache_limits().max_bytes
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
    limits, now, found = cache_limits(), file_clock(cache), list_steps(cache)

    def is_over(each: Cached) -> bool:
        is_obsolete = each.key in obsolete and not each.is_used
        return not each.is_held and (is_obsolete or now - each.used_at > limits.max_age_s)

    gone = [each for each in found if is_over(each)]
    left = [each for each in found if not is_over(each)]
    most = cache_room(cache, left).max_bytes
    gone += choose_steps(left, most, spare_used=limits.max_bytes is None)
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

"""`packhouse cache`: list and delete the finished steps on this machine; runs keep its limits.

Every run deletes steps when it begins and again after it succeeds (`keep_limits`):

- steps made from data that is gone (the file grew or changed since the last run);
- steps that no run has used for PACKHOUSE_CACHE_MAX_DAYS (30);
- the least recently used steps, until the cache is at most PACKHOUSE_CACHE_MAX_GB. If that is not
  set, the limit is half of the cache plus free disk space, and steps used by the last run of any
  dataset stay.

Pinned steps (`packhouse.run.step_cache`) stay, whatever their age. Nothing here affects
correctness: a deleted step is computed again, with the same bytes. Without this add-on, the cache
grows until somebody deletes its folder.
"""

import logging
import math
import os
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
import orjson

from packhouse.cli import cache_option, json_option
from packhouse.cli.store_commands import echo_json
from packhouse.errors import ConfigError
from packhouse.read import SourceShard
from packhouse.run.step_cache import LastJob, cache_lock, forget_tries, has_ended
from packhouse.system.disks import check_cache, disk_errors, free_space
from packhouse.system.terminal import echo, print_table, print_text
from packhouse.system.wording import counted, in_mb

log = logging.getLogger("packhouse.run.step_cache")

# A recipe that nobody has run for a month is more likely done than due.
_USUAL_DAYS = 30
# Days that the steps of a failed or killed run stay pinned, so that the next run can resume.
UNFINISHED_DAYS = 7
# Files jobs that read all shards, but have a digest of their keys in their own key, not the keys.
_OF_ALL_SHARDS = ("quarantine", "dropped")


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


def obsolete_keys(before: Iterable[LastJob], now: Sequence[SourceShard]) -> set[str]:
    """Return the keys of steps made from bytes that a source no longer contains.

    When a file grows, its last shard changes: no recipe needs the old shard or anything made from
    it. Steps with other settings are not obsolete, because someone may go back to them.
    """
    files = {shard.file for shard in now}
    contents = {(shard.sha256, shard.row_start, shard.byte_start) for shard in now}
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


def keep_limits(
    cache: Path, before: Iterable[LastJob] = (), now: Sequence[SourceShard] = ()
) -> CacheRoom:
    """Delete steps until the cache is within its limits, and return its size afterwards.

    Args:
        cache: folder of finished steps.
        before: jobs of the previous run. Those that read data which is gone are deleted now, unless
            the last run of some dataset used them.
        now: shards of this run.
    """
    obsolete = obsolete_keys(before, now)
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


@click.group()
def cache() -> None:
    """List the cached steps on this machine, and delete those no longer needed.

    \b
    Example:
      $ packhouse cache gc --max-gb 50
      158,409 bytes in 1 job: nothing was deleted; to delete them, pass --delete
    """


@cache.command("ls")
@cache_option()
@json_option()
def list_command(cache: Path, as_json: bool) -> None:
    """List cached steps with the number and size of their jobs.

    Jobs of a dataset's last run are "in use"; those of an unfinished run are "held" for it.

    \b
    Example:
      $ packhouse cache ls
      step   jobs   bytes  in use  bytes in use  held  bytes held
      audit    12   6,341       9         5,167     0           0
      ...
      3,634,645 bytes in 35 jobs
    """
    place = check_cache(cache)
    found = list_steps(place)
    steps: dict[str, list[Cached]] = defaultdict(list)
    for entry in found:
        steps[entry.step].append(entry)
    counts = {step: _json(entries) for step, entries in sorted(steps.items())}
    if as_json:
        echo_json({"steps": counts})
        return
    rows = [(step, *own.values()) for step, own in counts.items()]
    print_table(("step", "jobs", "bytes", "in use", "bytes in use", "held", "bytes held"), rows)
    echo(f"{counted(_bytes(found), 'byte')} in {counted(len(found), 'job')}")
    print_text(str(cache_room(place, found)))


@cache.command("gc")
@cache_option()
@click.option(
    "--max-gb",
    type=click.FloatRange(min=0),
    help="Delete only what is needed to reach this size, least recently used first.",
)
@click.option(
    "--grace-hours",
    default=1.0,
    show_default=True,
    help="Keep steps created or used in the last N hours.",
)
@click.option(
    "--unfinished",
    is_flag=True,
    help="Also delete steps kept for failed or killed runs, regardless of --grace-hours.",
)
@click.option("--delete", is_flag=True, help="Delete the listed steps. [default: only list them]")
@json_option()
def gc_command(
    cache: Path,
    max_gb: float | None,
    grace_hours: float,
    unfinished: bool,
    delete: bool,
    as_json: bool,
) -> None:
    """Delete cached steps that no dataset used in its last run (dry run by default).

    With --max-gb, delete only what is needed to reach that size, least recently used first; if
    that is not enough, steps in use are deleted too. Steps of a run in progress are never deleted.
    Steps of a failed or killed run are kept for a week, so that its next attempt can continue,
    unless you pass --unfinished. Deleted steps are computed again when a run needs them.

    \b
    Example:
      $ packhouse cache gc --max-gb 50 --delete
      step    key             bytes  in use
      format  0bc8b616aa87  158,409
      158,409 bytes in 1 job: 158,409 bytes freed
    """
    place = check_cache(cache)
    if not all(map(math.isfinite, (max_gb or 0, grace_hours))):
        raise click.UsageError("--max-gb and --grace-hours must be numbers, not nan or inf")
    most_bytes = None if max_gb is None else int(max_gb * 10**9)
    oldest = time.time() - grace_hours * 3600
    found = list_steps(place)
    holds = hold_files(place)
    # A hold without an end belongs to a run that is still going on.
    running = {key for hold in holds if hold.until is None for key in hold.keys}
    ended = [hold for hold in holds if hold.until is not None]
    held_keys = {key for hold in ended for key in hold.keys} - running
    kept = [entry for entry in found if entry.key in held_keys and not entry.is_used]
    chosen = list(kept) if unfinished else []
    rest = [entry for entry in found if entry not in chosen]
    chosen += choose_steps(rest, most_bytes, oldest=oldest)
    if unfinished and delete and kept:
        with disk_errors(place):
            forget_tries(place)
    freed = remove_steps(place, chosen) if delete else 0
    num_bytes, kept_bytes = _bytes(chosen), _bytes(kept)
    num_runs = len({hold.version_id for hold in ended})  # attempts at one version count once
    until = None
    if ended:
        released = datetime.fromtimestamp(max(hold.until or 0.0 for hold in ended), UTC)
        until = released.isoformat(sep=" ", timespec="minutes")
    if as_json:
        removable = [{"step": e.step, "key": e.key, "bytes": e.num_bytes} for e in chosen]
        facts = {"dry_run": not delete, "bytes": num_bytes, "freed": freed, "steps": removable}
        held = {"runs": num_runs, "bytes": kept_bytes, "until": until}
        echo_json(facts | {"unfinished": held})
        return
    if chosen:
        print_table(
            ("step", "key", "bytes", "in use"),
            [(e.step, e.key[:12], e.num_bytes, "yes" if e.is_used else "") for e in chosen],
        )
    verb = "nothing was deleted; to delete them, pass --delete"
    if delete:
        verb = f"{counted(freed, 'byte')} freed"
    size = f"{counted(num_bytes, 'byte')} in {counted(len(chosen), 'job')}"
    echo(f"{size}: {verb}" if chosen else "nothing to delete")
    if kept and not unfinished:
        runs = counted(num_runs, "unfinished run")
        echo(
            f"{counted(kept_bytes, 'byte')} in {counted(len(kept), 'job')}: kept until {until} at "
            f"most, so that {runs} can continue. To delete them as well, pass --unfinished."
        )


def _json(entries: list[Cached]) -> dict[str, object]:
    used = [entry for entry in entries if entry.is_used]
    held = [entry for entry in entries if entry.is_held]
    return {
        **{"jobs": len(entries), "bytes": _bytes(entries)},
        **{"used": len(used), "used_bytes": _bytes(used)},
        **{"held": len(held), "held_bytes": _bytes(held)},
    }


def _bytes(entries: Iterable[Cached]) -> int:
    return sum(entry.num_bytes for entry in entries)

"""`packhouse cache`: what finished steps lie on this machine, and which of them may go."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from packhouse.cli.options import json_option
from packhouse.cli.versions import echo_json, print_table
from packhouse.run.cache_room import (
    Cached,
    cache_room,
    choose_steps,
    forget_tries,
    hold_files,
    list_steps,
    remove_steps,
)
from packhouse.system.disks import check_cache, default_cache, disk_errors
from packhouse.system.terminal import echo, print_text
from packhouse.system.wording import counted

_folder = click.option(
    "--cache",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder of finished steps. [default: PACKHOUSE_CACHE, else the user's]",
)


@click.group()
def cache() -> None:
    """Look at the finished steps that lie on this machine, and make room.

    \b
    packhouse cache ls
    packhouse cache gc --max-gb 50
    packhouse cache gc --max-gb 50 --delete
    packhouse cache gc --unfinished --delete
    """


@cache.command("ls")
@_folder
@json_option()
def list_command(folder: Path | None, as_json: bool) -> None:
    """List steps: jobs that are done, their bytes; those that the last runs used, or runs hold."""
    place = check_cache(folder or default_cache())
    found = list_steps(place)
    steps: dict[str, list[Cached]] = defaultdict(list)
    for entry in found:
        steps[entry.step].append(entry)
    if as_json:
        echo_json({"steps": {step: _json(entries) for step, entries in sorted(steps.items())}})
        return
    rows = [(step, *_json(entries).values()) for step, entries in sorted(steps.items())]
    print_table(("step", "jobs", "bytes", "in use", "bytes in use", "held", "bytes held"), rows)
    num_bytes = sum(entry.num_bytes for entry in found)
    echo(f"{counted(num_bytes, 'byte')} in {counted(len(found), 'job')}")
    print_text(str(cache_room(place, found)))


@cache.command("gc")
@_folder
@click.option("--max-gb", type=click.FloatRange(min=0), help="Make it this small if need be.")
@click.option(
    "--grace-hours",
    default=1.0,
    show_default=True,
    help="Leave steps alone that were made or used in the last hours.",
)
@click.option(
    "--unfinished",
    is_flag=True,
    help="Remove what runs hold that ended without success, whatever the grace.",
)
@click.option("--delete", is_flag=True, help="Delete what is shown; without it, only show.")
@json_option()
def gc_command(
    folder: Path | None,
    max_gb: float | None,
    grace_hours: float,
    unfinished: bool,
    delete: bool,
    as_json: bool,
) -> None:
    """Remove steps that the last run of no dataset used; shows what first.

    With --max-gb only as many as needed, those used longest ago first, and then, if that is not
    enough, steps in use, too. Never those of a run that goes on. Those of a run that failed or was
    killed stay for a week, so that its next try goes on there, unless you say --unfinished. What is
    gone is done again when a run needs it.
    """
    place = check_cache(folder or default_cache())
    if not all(map(math.isfinite, (max_gb or 0, grace_hours))):
        raise click.UsageError("--max-gb and --grace-hours must be numbers, not nan or inf")
    most_bytes = None if max_gb is None else int(max_gb * 10**9)
    oldest = time.time() - grace_hours * 3600
    found = list_steps(place)
    kept = find_unfinished(place, found)
    chosen = list(kept.steps) if unfinished else []
    rest = [entry for entry in found if entry not in chosen]
    chosen += choose_steps(rest, most_bytes, oldest=oldest)
    if unfinished and delete and kept.steps:
        with disk_errors(place):
            forget_tries(place)
    freed = remove_steps(place, chosen) if delete else 0
    num_bytes = sum(entry.num_bytes for entry in chosen)
    kept_bytes = sum(entry.num_bytes for entry in kept.steps)
    until = kept.until and kept.until.isoformat(sep=" ", timespec="minutes")
    if as_json:
        removable = [{"step": e.step, "key": e.key, "bytes": e.num_bytes} for e in chosen]
        facts = {"dry_run": not delete, "bytes": num_bytes, "freed": freed, "steps": removable}
        held = {"runs": kept.num_runs, "bytes": kept_bytes, "until": until}
        echo_json(facts | {"unfinished": held})
        return
    if chosen:
        print_table(
            ("step", "key", "bytes", "in use"),
            [(e.step, e.key[:12], e.num_bytes, "yes" if e.is_used else "") for e in chosen],
        )
    verb = f"{counted(freed, 'byte')} freed" if delete else "nothing deleted; add --delete"
    echo(f"{counted(num_bytes, 'byte')} in {counted(len(chosen), 'job')}: {verb}")
    if kept.steps and not unfinished:
        runs = counted(kept.num_runs, "unfinished run")
        echo(
            f"{counted(kept_bytes, 'byte')} in {counted(len(kept.steps), 'job')}: held for {runs} "
            f"to go on from, until {until} at the latest; --unfinished frees them"
        )


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


def _json(entries: list[Cached]) -> dict[str, object]:
    used = [entry for entry in entries if entry.is_used]
    return {
        "jobs": len(entries),
        "bytes": sum(entry.num_bytes for entry in entries),
        "used": len(used),
        "used_bytes": sum(entry.num_bytes for entry in used),
        "held": sum(entry.is_held for entry in entries),
        "held_bytes": sum(entry.num_bytes for entry in entries if entry.is_held),
    }

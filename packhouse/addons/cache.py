"""`packhouse cache`: list the finished steps on this machine, and delete those not needed."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import click

from packhouse.cli import cache_option, json_option
from packhouse.cli.store_commands import echo_json
from packhouse.run.cache_eviction import (
    Cached,
    cache_room,
    choose_steps,
    forget_tries,
    hold_files,
    list_steps,
    remove_steps,
)
from packhouse.system.disks import check_cache, disk_errors
from packhouse.system.terminal import echo, print_table, print_text
from packhouse.system.wording import counted


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
    echo(f"{counted(num_bytes, 'byte')} in {counted(len(chosen), 'job')}: {verb}")
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

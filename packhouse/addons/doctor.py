"""`packhouse doctor`: check that a store can guard publications, and that the cache has room.

`examine` tries everything that publishing relies on, in a temporary folder under the root that it
removes again. Takes about 15 s on a local S3 server.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import click

from packhouse.cli import json_option
from packhouse.cli.store_commands import echo_json
from packhouse.errors import (
    DiskError,
    IntegrityError,
    PackhouseError,
    StoreError,
    StoreRefusedError,
    TransientError,
)
from packhouse.registry import function_of_addon
from packhouse.run.chain import bytes_needed, plan_jobs
from packhouse.run.prepare_arguments import read_recipe
from packhouse.run.step_cache import Workspace, cache_lock, open_mirror, pin_steps
from packhouse.store import conditional_writes
from packhouse.store.conditional_writes import FailedCheckError, expect, stored, write
from packhouse.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    file_body,
    open_store,
)
from packhouse.store.store_requests import ask, read, run
from packhouse.system.disks import CachePlace, check_cache, find_cache, free_space, temporary_folder
from packhouse.system.terminal import print_table
from packhouse.system.wording import in_mb

_MAX_SKEW_S = 15 * 60.0
"""S3 rejects requests signed more than this from its own time."""

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check."""

    name: str
    status: Status
    """`warn`: publishing works, but a useful feature is missing."""
    detail: str


@click.group()
def doctor() -> None:
    """Before a run, check that a store works or that the cache has enough free space.

    \b
    Example:
      $ packhouse doctor storage ./store
      check                   detail
      create races      pass  50 races of 16 writers, one winner each
      ...
    """


@doctor.command("storage")
@click.argument("root", metavar="STORE")
@click.option(
    "--races",
    default=50,
    show_default=True,
    help="Number of rounds in which concurrent writers try to create the same key.",
)
@json_option()
def storage(root: str, races: int, as_json: bool) -> None:
    """Test everything that publishing relies on, in a temporary folder in STORE.

    \b
    Example:
      $ packhouse doctor storage s3://bucket/store
      check                   detail
      create races      pass  50 races of 16 writers, one winner each
      ...
    """
    store = open_store(root)
    checks = examine(store, num_races=races)
    _print(checks, as_json)
    failed = [check.name for check in checks if check.status == "fail"]
    if failed and as_json:
        raise click.exceptions.Exit(StoreRefusedError.exit_code)
    if failed:
        names = ", ".join(failed)
        message = f"{store.uri} cannot be used as a store. Failed checks: {names}."
        raise StoreRefusedError(message, failed=failed)


@doctor.command("cache")
@click.argument("recipe_path", metavar="[RECIPE]", type=click.Path(), required=False)
@click.option("--cache", "setting", metavar="PATH|URI", help="Cache folder, or a mirror.")
@json_option()
def cache(recipe_path: str | None, setting: str | None, as_json: bool) -> None:
    """Show the cache location, its free space and how much a run of RECIPE needs.

    \b
    Example:
      $ packhouse doctor cache recipe.yaml
      check         detail
      folder  pass  '/home/ann/.cache/packhouse' can be written
      run     pass  a run of recipe.yaml adds about 812.4 MB to the cache
    """
    place = find_cache(setting)
    folder = check_cache(place.folder)
    checks = [
        _check("folder", lambda: _try_folder(folder)),
        _check("space", lambda: str(function_of_addon("cache_room")(folder))),
        _check("mirror", lambda: _try_mirror(place)),
    ]
    if recipe_path is not None:
        needed = bytes_needed(plan_jobs(read_recipe(recipe_path)), Workspace(cache=folder))
        is_enough = needed <= free_space(folder).bytes
        detail = f"a run of {recipe_path} adds about {in_mb(needed)} to the cache"
        checks.append(Check("run", "pass" if is_enough else "fail", detail))
    _print(checks, as_json)
    if any(check.status == "fail" for check in checks):
        raise click.exceptions.Exit(DiskError.exit_code)


def _print(checks: Sequence[Check], as_json: bool) -> None:
    if as_json:
        echo_json([asdict(check) for check in checks])
    else:
        print_table(("check", "", "detail"), [astuple(check) for check in checks])


def _check(name: str, trial: Callable[[], str]) -> Check:
    try:
        return Check(name, "pass", trial())
    except PackhouseError as error:
        return Check(name, "fail", str(error))


def _try_folder(folder: Path) -> str:
    with pin_steps(folder, "doctor", [""]), cache_lock(folder) as is_locked:
        locks = ", but file locks do not work there, so nothing is ever deleted from it"
    return f"'{folder}' can be written{'' if is_locked else locks}"


def _try_mirror(place: CachePlace) -> str:
    mirror = open_mirror(place)
    if mirror is None:
        return "none"
    with suppress(ObjectNotFoundError):
        mirror.store.get("none/none/receipt.json")
    return f"{mirror.store.uri} can be read"


def examine(store: ObjectStore, *, num_races: int = 50, num_racers: int = 16) -> list[Check]:
    """Try everything that publishing relies on.

    Args:
        store: store to examine; objects are written under `_doctor-<random>/` and deleted.
        num_races: number of create-only races for one key, and of compare-and-swap rounds.
        num_racers: number of threads per race.

    Returns:
        Checks in a fixed order; the store can be used if none is `fail`.

    Raises:
        StoreError: nothing can be tried, because of a missing bucket or wrong credentials.
        TransientError: the store was not reached within 10 s.
    """
    # A wrong address fails here once, instead of in every check.
    run(store, ask(ObjectStore.clock), retry=conditional_writes.PROBE_RETRY)
    trials: dict[str, Callable[[ObjectStore, str], str]] = {
        "create-only": conditional_writes.check_create_only,
        "compare-and-swap": conditional_writes.check_compare_and_swap,
        "create races": partial(_create_races, num_races=num_races, num_racers=num_racers),
        "swap races": partial(_swap_races, num_swaps=num_races, num_racers=num_racers),
        "read after write": _read_after_write,
        "list after write": _list_after_write,
        "ranged reads": _ranges,
        "damaged upload": _damaged_upload,
        "clock": _clock,
    }
    checks = []
    with conditional_writes.probe_folder(store) as folder:
        for name, trial in trials.items():
            try:
                status: Status = "pass"
                detail = trial(store, f"{folder}/{name.replace(' ', '-')}")
            except _WarningError as warning:
                status, detail = "warn", str(warning)
            except StoreRefusedError as failure:
                status, detail = "fail", str(failure)
            except (StoreError, TransientError) as error:
                status, detail = "fail", f"{type(error).__name__}: {error}"
            checks.append(Check(name, status, detail))
    return checks


class _WarningError(Exception):
    """The store lacks something that publishing can do without."""


def _create_races(store: ObjectStore, key: str, num_races: int, num_racers: int) -> str:
    """Let several writers create one key at the same time with different bytes; one must win."""

    def wins(place: str, body: bytes, start: threading.Barrier) -> bool:
        start.wait(timeout=60)
        for _ in range(100):
            try:
                store.put_create(place, body)
            except PreconditionFailedError:
                return bool(store.get(place).data == body)  # a success whose response was lost
            except TransientError:
                time.sleep(0.02)  # lets the other writers go first
            else:
                return True
        raise FailedCheckError("a race had no winner after 100 attempts")

    counts = []
    with ThreadPoolExecutor(num_racers) as pool:
        # A store may fail in few of them: moto had two winners in 1 of 60 races.
        for race in range(num_races):
            place, start = f"{key}-{race}", threading.Barrier(num_racers)
            bodies = [f"racer {n} of race {race}".encode() for n in range(num_racers)]
            won = list(pool.map(partial(wins, place, start=start), bodies))
            counts.append(sum(won))
            is_winners = sum(won) != 1 or store.get(place).data == bodies[won.index(True)]
            expect(is_winners, f"race {race}: the store contains the loser's bytes")
    wrong = [count for count in counts if count != 1]
    expect(not wrong, f"{len(wrong)} of {num_races} races had {max(wrong, default=1)} winners")
    return f"{num_races} races of {num_racers} writers, one winner each"


def _swap_races(store: ObjectStore, key: str, num_swaps: int, num_racers: int) -> str:
    """Let all racers add 1 to a counter repeatedly; no addition may be lost."""
    # Rounded up: 50 swaps by 16 racers are 4 each.
    each = -(-num_swaps // num_racers)

    def count_up() -> None:
        num_added = 0
        while num_added < each:
            blob = store.get(key)
            # A unique name in each body, because equal bodies would have equal tags.
            body = f"{int(blob.data.split()[0]) + 1} {uuid.uuid4().hex}".encode()
            try:
                store.put_if_match(key, body, blob.etag)
            except PreconditionFailedError:
                continue
            except TransientError:
                if store.get(key).data != body:
                    continue
            num_added += 1

    store.put_create(key, b"0 start")
    with ThreadPoolExecutor(num_racers) as pool:
        for future in [pool.submit(count_up) for _ in range(num_racers)]:
            future.result()
    total = int(store.get(key).data.split()[0])
    accepted = each * num_racers
    expect(total == accepted, f"{accepted} swaps were accepted, but {total} took effect")
    return f"{total} swaps by {num_racers} writers, none lost"


def _read_after_write(store: ObjectStore, key: str, times: int = 50) -> str:
    tag = write(store, key, b"0")
    for number in range(1, times):
        body = str(number).encode()
        tag = write(store, key, body, tag)
        is_new = stored(store, key) == body
        expect(is_new, f"write {number} was acknowledged, but a read returned an older one")
    run(store, read(f"{key}-new"))  # some stores cache for a while that it is missing
    write(store, f"{key}-new", b"here")
    is_there = stored(store, f"{key}-new") == b"here"
    expect(is_there, "a new object is still missing after it was written")
    return f"{times} writes, each read back immediately"


def _list_after_write(store: ObjectStore, key: str, times: int = 20) -> str:
    for number in range(times):
        write(store, f"{key}/{number:03d}", b"x")
        is_listed = len(store.list(f"{key}/")) == number + 1
        expect(is_listed, f"object {number} was acknowledged, but is not listed")
    for number in range(times):
        store.delete(f"{key}/{number:03d}")
    expect(not store.list(f"{key}/"), "deleted objects are listed")
    return f"{times} writes and deletions, each reflected in the listing immediately"


def _ranges(store: ObjectStore, key: str) -> str:
    write(store, key, bytes(range(200)))
    with temporary_folder("doctor") as folder:
        path = folder / "part"
        path.write_bytes(bytes(range(100)))
        store.download(key, path, offset=100)
        expect(path.read_bytes() == bytes(range(200)), "downloads do not resume")
    return "ranges are exact, and downloads resume"


def _damaged_upload(store: ObjectStore, key: str) -> str:
    """Send bytes that do not match their checksum, as a damaged request would."""
    with temporary_folder("doctor") as folder:
        path = folder / "body"
        path.write_bytes(b"as hashed")
        body = file_body(path)
        _ = body.md5  # computed now, from the original bytes
        path.write_bytes(b"otherwise")
        try:
            store.put_create(key, body)
        except (IntegrityError, TransientError):
            return "uploads that do not match their checksum are refused"
    raise _WarningError("damaged uploads are accepted, so publishing compares ETags instead")


def _clock(store: ObjectStore, _: str) -> str:
    skew = run(store, ask(ObjectStore.clock)) - time.time()
    text = f"its clock differs from this machine's by {skew:+,.0f} s"
    expect(abs(skew) <= _MAX_SKEW_S, f"{text}, over {_MAX_SKEW_S:.0f} s")
    if abs(skew) > 60:
        raise _WarningError(text)
    return f"{skew:+.1f} s from this machine's clock"

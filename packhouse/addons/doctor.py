"""`packhouse doctor`: prove that a store can guard a publication, and that the cache has room."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from packhouse.cli.options import json_option
from packhouse.cli.versions import echo_json, print_table
from packhouse.errors import DiskError, PackhouseError, StoreRefusedError
from packhouse.run.cache import Workspace, open_mirror
from packhouse.run.cache_room import cache_lock, cache_room, hold_steps, in_mb
from packhouse.run.given import read_recipe
from packhouse.run.steps.plan import bytes_needed, plan_jobs
from packhouse.store.doctor import Check, examine
from packhouse.store.objects import ObjectNotFoundError, open_store
from packhouse.system.disks import CachePlace, check_cache, find_cache


@click.group()
def doctor() -> None:
    """Check a store, or the room in the cache, before a run.

    \b
    packhouse doctor storage s3://bucket/store
    packhouse doctor cache recipe.yaml
    """


@doctor.command("storage")
@click.argument("root")
@click.option("--races", default=50, show_default=True, help="Races for one key.")
@json_option()
def storage(root: str, races: int, as_json: bool) -> None:
    """Try everything that publication relies on, in a folder of its own under ROOT."""
    store = open_store(root)
    checks = examine(store, num_races=races)
    _print(checks, as_json)
    failed = [check.name for check in checks if check.status == "fail"]
    if failed and not as_json:
        raise StoreRefusedError(
            f"{store.uri} cannot guard a publication: {', '.join(failed)}", failed=failed
        )
    if failed:
        raise click.exceptions.Exit(StoreRefusedError.exit_code)


@doctor.command("cache")
@click.argument("recipe_path", metavar="[RECIPE]", type=click.Path(), required=False)
@click.option("--cache", "setting", metavar="PLACE", help="Folder of finished steps, or a mirror.")
@json_option()
def cache(recipe_path: str | None, setting: str | None, as_json: bool) -> None:
    """Say where finished steps lie, what room they have, and what a run of RECIPE would take."""
    place = find_cache(setting)
    folder = check_cache(place.folder)
    checks = [
        _check("folder", lambda: _try_folder(folder)),
        _check("room", lambda: str(cache_room(folder))),
        _check("mirror", lambda: _try_mirror(place)),
    ]
    if recipe_path is not None:
        needed = bytes_needed(plan_jobs(read_recipe(recipe_path)), Workspace(cache=folder))
        is_enough = needed <= cache_room(folder).free_bytes
        detail = f"a run of {recipe_path} adds about {in_mb(needed)} to the cache"
        checks.append(Check("run", "pass" if is_enough else "fail", detail))
    _print(checks, as_json)
    if any(check.status == "fail" for check in checks):
        raise click.exceptions.Exit(DiskError.exit_code)


def _print(checks: Sequence[Check], as_json: bool) -> None:
    if as_json:
        echo_json([{"name": c.name, "status": c.status, "detail": c.detail} for c in checks])
    else:
        print_table(("check", "", "detail"), [(c.name, c.status, c.detail) for c in checks])


def _check(name: str, trial: Callable[[], str]) -> Check:
    try:
        return Check(name, "pass", trial())
    except PackhouseError as error:
        return Check(name, "fail", str(error))


def _try_folder(folder: Path) -> str:
    with hold_steps(folder, "doctor", [""]), cache_lock(folder) as is_locked:
        locks = "" if is_locked else "; no file locks there, so nothing is ever removed from it"
    return f"'{folder}' can be written{locks}"


def _try_mirror(place: CachePlace) -> str:
    mirror = open_mirror(place)
    if mirror is None:
        return "none"
    try:
        mirror.store.get("none/none/receipt.json")
    except ObjectNotFoundError:
        pass
    return f"{mirror.store.uri} can be read"

"""Command lines of the flows that need no recipe: verify, promote, rollback, gc.

The same as `packhouse verify`, `ref set`, `ref rollback` and `gc`, but as runs that the server
keeps, with retries, states and artifacts.
"""

import json
from dataclasses import asdict
from pathlib import Path

import click

from flows.command import SETTINGS, on_server, reporting_errors
from packhouse.cache.places import check_cache, default_cache
from packhouse.commands.options import json_option
from packhouse.runtime.progress import show_progress
from packhouse.store.address import parse_address
from packhouse.terminal import echo

_json = json_option("Print the result as one line of JSON.")
_ref = click.option("--ref", default="latest", show_default=True, help="The ref to move.")


@click.command(context_settings=SETTINGS)
@click.argument("place", metavar="ROOT/DATASET[@NAME]")
@_json
def verify(place: str, as_json: bool) -> None:
    """Check every byte, schema, count and value of a version, from its store alone.

    \b
    Exit codes: 0 intact, 5 damaged or not there, 6 network or storage hiccups.
    """
    _run("verify", as_json, *_version(place))


@click.command(context_settings=SETTINGS)
@click.argument("place", metavar="ROOT/DATASET[@NAME]")
@_ref
@click.option("--expected", help="Move only if the ref points to this version now.")
@_json
def promote(place: str, ref: str, expected: str | None, as_json: bool) -> None:
    """Point a ref to a version; without NAME, to the one that waits for approval.

    \b
    Exit codes: 0 moved, 5 no such version or the ref was elsewhere, 6 hiccups.
    """
    root, dataset, name = _version(place)
    if "@" not in place.rpartition("/")[2]:
        name = f"{ref}.candidate"
    _run("promote", as_json, root, dataset, name, ref, expected)


@click.command(context_settings=SETTINGS)
@click.argument("place", metavar="ROOT/DATASET")
@_ref
@click.option("--steps", default=1, show_default=True, help="How many moves back.")
@_json
def rollback(place: str, ref: str, steps: int, as_json: bool) -> None:
    """Point a ref to where it pointed before.

    \b
    Exit codes: 0 moved, 5 no such past or the ref moved meanwhile, 6 hiccups.
    """
    root, dataset, _ = _version(place)
    _run("rollback", as_json, root, dataset, ref, steps)


@click.command(context_settings=SETTINGS)
@click.argument("place", metavar="ROOT/DATASET")
@click.option(
    "--grace-hours", default=24.0, show_default=True, help="Leave younger attempts alone."
)
@click.option("--delete", is_flag=True, help="Delete what is found; without it, only show.")
@_json
def gc(place: str, grace_hours: float, delete: bool, as_json: bool) -> None:
    """Show what dead publishers left, and delete it if told to; versions are never touched."""
    root, dataset, _ = _version(place)
    _run("gc", as_json, root, dataset, grace_hours, delete)


COMMANDS = {"verify": verify, "promote": promote, "rollback": rollback, "gc": gc}


def _version(place: str) -> tuple[str, str, str]:
    with reporting_errors(as_json=False):
        address = parse_address(place)
    return address.root, address.dataset, address.name


def _run(name: str, as_json: bool, *arguments: object) -> None:
    with reporting_errors(as_json, keeps_steps=False), show_progress():
        cache: Path = check_cache(default_cache().absolute())
        state = on_server(name, cache, *arguments, return_state=True)
        result = state.result()
    if not as_json:
        echo(state.message)
        return
    # Of `verify` and `gc` a report for each dataset; of the others the ref that moved.
    is_list = isinstance(result, list)
    plain = [{"dataset": n, **asdict(r)} for n, r in result] if is_list else asdict(result)
    echo(json.dumps({"message": state.message, "result": plain}))

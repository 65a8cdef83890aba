"""`packhouse ref ls | log | set | rollback`: names that point to versions."""

from dataclasses import asdict, astuple

import click

from packhouse.cli.options import json_option
from packhouse.cli.versions import echo_json, print_table, warning_of
from packhouse.errors import VersionNotFoundError
from packhouse.store.read import open_dataset, open_version
from packhouse.store.refs import Ref, load_ref, rollback_ref, scan_refs, set_ref
from packhouse.system.terminal import echo


@click.group()
def ref() -> None:
    """List, set or roll back refs such as `latest` and `prod`."""


_reason_option = click.option("--reason", default="", help="Why; `packhouse ref log` shows it.")


def _json(found: Ref) -> dict[str, object]:
    now, *past = (
        {"version": move.version, "seq": move.seq, **asdict(move.note)} for move in found.moves
    )
    return {"name": found.name, "parent": found.parent, **now, "past": past}


@ref.command("ls")
@click.argument("dataset", metavar="ROOT/DATASET")
@json_option()
def ls(dataset: str, as_json: bool) -> None:
    """List the refs of a dataset."""
    found, damaged = scan_refs(*open_dataset(dataset))
    rows = [
        (item.name, item.version, item.note.time, item.seq, item.parent or "") for item in found
    ]
    with warning_of(damaged):
        if as_json:
            echo_json([_json(item) for item in found])
        else:
            print_table(("ref", "version", "moved", "moves", "before"), rows)


@ref.command("log")
@click.argument("dataset", metavar="ROOT/DATASET")
@click.argument("name")
@json_option()
def log(dataset: str, name: str, as_json: bool) -> None:
    """Show where a ref pointed, newest first: when, by whom and why it was moved.

    Moves from before packhouse kept notes have none.
    """
    store, dataset_name = open_dataset(dataset)
    found = load_ref(store, dataset_name, name)
    if found is None:
        raise VersionNotFoundError(
            f"'{dataset}' has no ref '{name}'; see `packhouse ref ls {store.uri}/{dataset_name}`"
        )
    if as_json:
        echo_json(_json(found))
    else:
        rows = [(move.seq, move.version, *astuple(move.note)) for move in found.moves]
        print_table(("move", "version", "time", "by", "reason"), rows)


@ref.command("set")
@click.argument("dataset", metavar="ROOT/DATASET")
@click.argument("name")
@click.argument("version")
@click.option("--expected", help="Move only if the ref points to this version now.")
@click.option("--force", is_flag=True, help="Replace a damaged ref too; its past is lost.")
@_reason_option
@json_option()
def set_(
    dataset: str,
    name: str,
    version: str,
    expected: str | None,
    force: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Point ref NAME to VERSION, which may itself be a ref: `set ./store/alpaca prod latest`."""
    store, dataset_name = open_dataset(dataset)
    target = open_version(store, dataset_name, version).version
    reason = reason or f"set to {version}"
    moved = set_ref(
        store, dataset_name, name, target, expected=expected, force=force, reason=reason
    )
    _say(moved, as_json)


@ref.command("rollback")
@click.argument("dataset", metavar="ROOT/DATASET")
@click.argument("name")
@click.option(
    "--steps", default=1, show_default=True, type=click.IntRange(min=1), help="How many moves back."
)
@_reason_option
@json_option()
def rollback(dataset: str, name: str, steps: int, reason: str, as_json: bool) -> None:
    """Point ref NAME to where it pointed before."""
    _say(rollback_ref(*open_dataset(dataset), name, steps, reason), as_json)


def _say(moved: Ref, as_json: bool) -> None:
    if as_json:
        echo_json(_json(moved))
    else:
        echo(f"{moved.name} -> {moved.version} (move {moved.seq}, before: {moved.parent})")

"""`packhouse ref ls | log | set | rollback`: names that point to versions."""

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


def _json(found: Ref) -> dict[str, object]:
    return {
        "name": found.name,
        "version": found.version,
        "seq": found.seq,
        "parent": found.parent,
        "past": [{"version": move.version, "seq": move.seq} for move in found.past],
    }


@ref.command("ls")
@click.argument("dataset", metavar="ROOT/DATASET")
@json_option()
def ls(dataset: str, as_json: bool) -> None:
    """List the refs of a dataset."""
    found, damaged = scan_refs(*open_dataset(dataset))
    rows = [(item.name, item.version, item.seq, item.parent or "") for item in found]
    with warning_of(damaged):
        if as_json:
            echo_json([_json(item) for item in found])
        else:
            print_table(("ref", "version", "moves", "before"), rows)


@ref.command("log")
@click.argument("dataset", metavar="ROOT/DATASET")
@click.argument("name")
@json_option()
def log(dataset: str, name: str, as_json: bool) -> None:
    """Show where a ref pointed, newest first."""
    store, dataset_name = open_dataset(dataset)
    found = load_ref(store, dataset_name, name)
    if found is None:
        raise VersionNotFoundError(
            f"'{dataset}' has no ref '{name}'; see `packhouse ref ls {store.uri}/{dataset_name}`"
        )
    if as_json:
        echo_json(_json(found))
    else:
        moves = [(move.seq, move.version) for move in found.past]
        print_table(("move", "version"), [(found.seq, found.version), *moves])


@ref.command("set")
@click.argument("dataset", metavar="ROOT/DATASET")
@click.argument("name")
@click.argument("version")
@click.option("--expected", help="Move only if the ref points to this version now.")
@click.option("--force", is_flag=True, help="Replace a damaged ref too; its past is lost.")
@json_option()
def set_(
    dataset: str, name: str, version: str, expected: str | None, force: bool, as_json: bool
) -> None:
    """Point ref NAME to VERSION, which may itself be a ref: `set ./store/alpaca prod latest`."""
    store, dataset_name = open_dataset(dataset)
    target = open_version(store, dataset_name, version).version
    moved = set_ref(store, dataset_name, name, target, expected=expected, force=force)
    _say(moved, as_json)


@ref.command("rollback")
@click.argument("dataset", metavar="ROOT/DATASET")
@click.argument("name")
@click.option(
    "--steps", default=1, show_default=True, type=click.IntRange(min=1), help="How many moves back."
)
@json_option()
def rollback(dataset: str, name: str, steps: int, as_json: bool) -> None:
    """Point ref NAME to where it pointed before."""
    _say(rollback_ref(*open_dataset(dataset), name, steps), as_json)


def _say(moved: Ref, as_json: bool) -> None:
    if as_json:
        echo_json(_json(moved))
    else:
        echo(f"{moved.name} -> {moved.version} (move {moved.seq}, before: {moved.parent})")

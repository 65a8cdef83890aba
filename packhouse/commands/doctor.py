"""`packhouse doctor storage`: prove that a store can guard a publication."""

import click

from packhouse.commands.versions import as_json, echo_json, print_table
from packhouse.errors import StoreRefusedError
from packhouse.store.doctor import examine
from packhouse.store.objects import open_store

__all__ = ["doctor"]


@click.group()
def doctor() -> None:
    """Examine what packhouse stands on."""


@doctor.command("storage")
@click.argument("root")
@click.option("--races", default=50, show_default=True, help="Races for one key.")
@as_json
def storage(root: str, races: int, as_json: bool) -> None:
    """Try everything that publication relies on, in a folder of its own under ROOT."""
    store = open_store(root)
    checks = examine(store, num_races=races)
    if as_json:
        echo_json([{"name": c.name, "status": c.status, "detail": c.detail} for c in checks])
    else:
        print_table(("check", "", "detail"), [(c.name, c.status, c.detail) for c in checks])
    failed = [check.name for check in checks if check.status == "fail"]
    if failed and not as_json:
        raise StoreRefusedError(
            f"{store.uri} cannot guard a publication: {', '.join(failed)}", failed=failed
        )
    if failed:
        raise click.exceptions.Exit(StoreRefusedError.exit_code)

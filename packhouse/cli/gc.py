"""`packhouse gc`: reclaim what no reader can reach."""

import click

from packhouse.cli.options import json_option
from packhouse.cli.versions import echo_json, print_table
from packhouse.errors import IntegrityError
from packhouse.store.gc import GcReport, collect_garbage
from packhouse.store.read import open_dataset
from packhouse.system.terminal import echo
from packhouse.system.wording import counted


@click.command()
@click.argument("dataset", metavar="ROOT/DATASET")
@click.option("--delete", is_flag=True, help="Delete what is shown; without it, only show.")
@click.option(
    "--grace-hours",
    default=24.0,
    show_default=True,
    help="Leave uncommitted attempts alone that were written to in the last hours.",
)
@json_option()
def gc(dataset: str, delete: bool, grace_hours: float, as_json: bool) -> None:
    """Reclaim what dead publishers left. Shows what first; committed versions are never touched.

    A version whose manifest is damaged is named and left as it is; the exit code is then 5.
    """
    store, name = open_dataset(dataset)
    report = collect_garbage(store, name, grace_s=grace_hours * 3600, dry_run=not delete)
    if as_json:
        echo_json(_json(report))
    else:
        _print(report)
    if any(garbage.reason == "damaged" for garbage in report.garbage):
        raise click.exceptions.Exit(IntegrityError.exit_code)


def _print(report: GcReport) -> None:
    rows = [(g.version, g.reason, len(g.objects), g.num_bytes) for g in report.garbage]
    print_table(("version", "why", "objects", "bytes"), rows)
    verb = f"deleted {report.num_deleted:,} objects"
    if report.dry_run:
        verb = "nothing deleted; add --delete"
    echo(
        f"{counted(report.num_bytes, 'byte')} of garbage, "
        f"{counted(report.num_unfinished_uploads, 'unfinished upload')}, "
        f"{counted(report.num_probes, 'object')} of store checks: {verb}"
    )


def _json(report: GcReport) -> dict[str, object]:
    return {
        "dry_run": report.dry_run,
        "deleted": report.num_deleted,
        "bytes": report.num_bytes,
        "unfinished_uploads": report.num_unfinished_uploads,
        "probes": report.num_probes,
        "garbage": [
            {
                "version": garbage.version,
                "reason": garbage.reason,
                "bytes": garbage.num_bytes,
                "keys": [info.key for info in garbage.objects],
            }
            for garbage in report.garbage
        ],
    }

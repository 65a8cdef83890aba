"""`packhouse report VERSION|RECIPE`: one HTML file that shows what is trained."""

import json
import webbrowser
from pathlib import Path

import click

from packhouse.addons.report.diff_report import diff_report
from packhouse.addons.report.recipe_report import recipe_report
from packhouse.addons.report.version_report import version_report
from packhouse.cli.options import cache_option, json_option
from packhouse.recipe.reading import is_recipe_path
from packhouse.run.cache import Workspace
from packhouse.run.given import read_recipe
from packhouse.store.read import open_address, open_beside
from packhouse.system.terminal import echo


@click.command()
@click.argument("targets", metavar="VERSION|RECIPE", nargs=-1, required=True)
@click.option("--diff", "is_diff", is_flag=True, help="Compare two versions: --diff OLD NEW.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="The file to write.",
)
@click.option("--open", "is_opened", is_flag=True, help="Open it in the browser.")
@cache_option("Folder of tokenizers and finished steps.")
@json_option()
def report(
    targets: tuple[str, ...],
    is_diff: bool,
    output: Path,
    is_opened: bool,
    cache: Path,
    as_json: bool,
) -> None:
    """Write a report of a version: one HTML file with charts and samples, for any browser.

    Of a RECIPE (a .yaml file) that ran, the report of its version; else what a run would make.

    \b
    packhouse report ./store/alpaca
    packhouse report s3://bucket/store/alpaca@prod -o alpaca.html --open
    packhouse report --diff ./store/alpaca@prod latest

    With --diff, NEW may be a bare NAME of the same dataset.
    """
    if len(targets) != 1 + is_diff:
        raise click.UsageError("give one VERSION or RECIPE, or --diff and two of them")
    tokenizers = Workspace(cache=cache).tokenizers
    if is_diff:
        opened = open_address(targets[0])
        html = diff_report(opened, open_beside(opened, targets[1]), tokenizers)
    elif is_recipe_path(targets[0]):
        html = recipe_report(read_recipe(targets[0]), cache)
    else:
        html = version_report(open_address(targets[0]), tokenizers)
    output.write_text(html, encoding="utf-8")
    if as_json:
        echo(json.dumps({"report": str(output), "bytes": output.stat().st_size}))
    else:
        echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    if is_opened:
        webbrowser.open(output.absolute().as_uri())

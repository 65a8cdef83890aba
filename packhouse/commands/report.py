"""`packhouse report VERSION`: one HTML file that shows what a version trains."""

import json
import webbrowser
from pathlib import Path

import click

from packhouse.cache.places import default_cache
from packhouse.engine.workspace import Workspace
from packhouse.report.version_report import version_report
from packhouse.store.address import open_address
from packhouse.terminal import echo

__all__ = ["report"]


@click.command()
@click.argument("target", metavar="VERSION")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="The file to write.",
)
@click.option("--open", "is_opened", is_flag=True, help="Open it in the browser.")
@click.option("--cache", type=click.Path(path_type=Path), default=default_cache)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(target: str, output: Path, is_opened: bool, cache: Path, as_json: bool) -> None:
    """Write a report of a version: one HTML file with charts and samples, for any browser.

    \b
    packhouse report ./store/alpaca
    packhouse report s3://bucket/store/alpaca@prod -o alpaca.html --open
    """
    html = version_report(open_address(target), Workspace(cache=cache).tokenizers)
    output.write_text(html, encoding="utf-8")
    if as_json:
        echo(json.dumps({"report": str(output), "bytes": output.stat().st_size}))
    else:
        echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    if is_opened:
        webbrowser.open(output.absolute().as_uri())

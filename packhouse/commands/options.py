"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from packhouse.cache.places import default_cache

__all__ = ["recipe_options"]


def recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add RECIPE, --set, --cache and --json."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--cache",
            type=click.Path(path_type=Path),
            default=default_cache,
            help="Folder of finished steps. [default: PACKHOUSE_CACHE, else the user's]",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Put a value over the recipe's: --set pack.seq_len=4096.",
        ),
        click.argument("recipe_path", metavar="RECIPE", type=click.Path()),
    ):
        command = decorate(command)
    return command

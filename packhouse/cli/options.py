"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path

import click

from packhouse.system.disks import default_cache

Decorator = Callable[[Callable[..., object]], Callable[..., object]]


def set_option(what: str = "Override a recipe value: --set pack.seq_len=4096.") -> Decorator:
    """Return --set, which may be given several times."""
    return click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=what)


def cache_option(what: str = "Cache folder.") -> Decorator:
    """Return --cache, a folder of this machine."""
    return click.option(
        "--cache",
        type=click.Path(path_type=Path),
        default=default_cache,
        help=f"{what} [default: $PACKHOUSE_CACHE, or ~/.cache/packhouse]",
    )


def number_option(
    name: str, what: str, *, default: int | None = None, least: int = 0, into: str | None = None
) -> Decorator:
    """Return an option with a whole number of at least `least`; `into` names its parameter."""
    names, kind = filter(None, (name, into)), click.IntRange(min=least)
    return click.option(*names, default=default, show_default=True, type=kind, help=what)


def json_option(what: str = "Print JSON.") -> Decorator:
    """Return --json."""
    return click.option("--json", "as_json", is_flag=True, help=what)


def recipe_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add RECIPE, --set, --cache and --json."""
    for decorate in (
        json_option(),
        cache_option(),
        set_option(),
        click.argument("recipe_path", metavar="RECIPE", type=click.Path()),
    ):
        command = decorate(command)
    return command


def run_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add --cache, which may be a mirror, and --workers."""
    for decorate in (
        number_option(
            "--workers",
            "Number of worker processes. Does not affect the output. "
            "[default: one per 128 MiB of input, up to one per core]",
            least=1,
        ),
        click.option(
            "--cache",
            metavar="PATH|URI",
            help="Cache folder, or s3://bucket/prefix to share the cache between machines.",
        ),
    ):
        command = decorate(command)
    return command

"""The command line of the flow: `python -m flows.prepare RECIPE`, with or without a server."""

import json
import logging
import os
import sys
from pathlib import Path

import click

from packhouse.chain import LocalRunner, Prepared
from packhouse.chain import prepare as prepare_chain
from packhouse.cli import exit_with
from packhouse.errors import ConfigError, PackhouseError, TransientError
from packhouse.progress import show_progress
from packhouse.recipe import Recipe, load_recipe
from packhouse.report import print_report, report_json
from packhouse.workspace import Workspace, check_cache, default_cache

__all__ = ["main"]

HELD_BACK = 7
"""Exit code: the version is published, and its ref stays because it drifted too far."""

# The embedded server: started by Prefect when no PREFECT_API_URL is set, gone when the run ends.
_PREFECT_DEFAULTS = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "packhouse",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",  # of the embedded one, which writes to stderr
    "DO_NOT_TRACK": "1",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe_path", metavar="RECIPE", type=click.Path())
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Put a value over the recipe's: --set pack.seq_len=4096. May be repeated.",
)
@click.option("--local", is_flag=True, help="Run in this process, without any Prefect server.")
@click.option(
    "--encoder",
    type=click.Choice(["auto", "hf", "fast"]),
    help="Which encoder makes the ids; never changes them. [default: the recipe's]",
)
@click.option("--cache", type=click.Path(path_type=Path), help="Folder of finished steps.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON.")
def command(
    recipe_path: str,
    overrides: tuple[str, ...],
    local: bool,
    encoder: str | None,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Prepare the dataset that RECIPE describes, and publish it as a version.

    \b
    validate -> format -> tokenize -> pack -> split -> publish

    Steps that are done already, with the same inputs and settings, are found in the cache and not
    done again. Nothing becomes visible in the store unless every step succeeded.

    \b
    Exit codes: 0 published or unchanged, 2 the recipe is wrong, 3 a source or the tokenizer cannot
    be read or nothing is left, 4 refused (too many bad rows, a contract or an audit limit broken),
    5 the store, 6 network or storage hiccups, 7 published but the ref was held back by drift.

    \b
    python -m flows.prepare deployments/demo/recipe.yaml --local
    python -m flows.prepare deployments/recipes/alpaca.yaml --set pack.seq_len=8192
    """
    try:
        if encoder:
            overrides = (*overrides, f"tokenize.encoder={encoder}")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no torch: as it should be
        recipe = load_recipe(recipe_path, overrides)
        folder = _made(check_cache((cache or default_cache()).absolute()))
        with show_progress():
            prepared = _local(recipe, folder) if local else _with_server(recipe, folder)
    except PackhouseError as error:
        exit_with(error, as_json=as_json)
    if as_json:
        click.echo(json.dumps(report_json(prepared), sort_keys=True))
    else:
        print_report(prepared)
    if prepared.facts["held_back"]:
        sys.exit(HELD_BACK)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cache '{folder}' cannot be made: {error.strerror}; give a folder with --cache"
        ) from None
    return folder


def _local(recipe: Recipe, cache: Path) -> Prepared:
    import schemas

    workspace = Workspace(cache=cache, check=schemas.check)
    return prepare_chain(recipe, LocalRunner(recipe=recipe, workspace=workspace), cache)


def _with_server(recipe: Recipe, cache: Path) -> Prepared:
    for name, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    log_file = _log_to_file(cache / "logs" / "prefect.log")
    if not os.environ.get("PREFECT_API_URL"):
        click.echo(f"starting Prefect's embedded server (about 10 s; log: {log_file})", err=True)
    from flows.prepare import prepare

    _keep_prefect_off_the_terminal()
    try:
        return prepare(recipe, cache=str(cache))
    except RuntimeError as error:
        if "Failed to reach API" not in str(error):
            raise
        raise TransientError(
            f"no Prefect server answers ({str(error).rstrip('.')}); start it, unset "
            f"PREFECT_API_URL, or run with --local (log: {log_file})"
        ) from None


def _log_to_file(path: Path) -> Path:
    """Give the root logger a file handler first: Prefect then leaves the root alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("packhouse").setLevel(logging.INFO)
    return path


def _keep_prefect_off_the_terminal() -> None:
    """Its console handlers would write through the progress bars; the file has every line."""
    for name in [*logging.root.manager.loggerDict, ""]:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if type(handler).__name__ == "PrefectConsoleHandler":
                logger.removeHandler(handler)
                logger.propagate = True


def main() -> int:
    """Run the command; the exit code says how it went."""
    command(prog_name="python -m flows.prepare", standalone_mode=True)
    return 0

"""The command lines of the flows: `python -m flows.prepare RECIPE`, `python -m flows.refresh ...`.

Each runs its flow in this process: on the server at PREFECT_API_URL, else on Prefect's embedded
one, which is gone when the run ends; `prepare` also without any. Flows are imported when they are
called, after Prefect's settings are set. `flows.store_command` holds the commands that need no
recipe.
"""

import gc
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flows.embedded_server import start_embedded_server
from packhouse.api import prepare_recipe
from packhouse.cache.places import CachePlace, check_cache, find_cache
from packhouse.chain import Prepared
from packhouse.cli import exit_interrupted, exit_with
from packhouse.commands.options import json_option, set_option
from packhouse.errors import HELD_BACK, ConfigError, PackhouseError, TransientError
from packhouse.given import read_recipe
from packhouse.recipe import Recipe
from packhouse.recipe.reading import changes_data
from packhouse.result import print_report, print_result, report_json
from packhouse.runtime.disks import disk_errors
from packhouse.runtime.interrupts import Interrupted, handle_signals
from packhouse.runtime.memory import leave_without_collecting
from packhouse.runtime.progress import show_progress, start_phase
from packhouse.runtime.without_pandas import WITHOUT_PANDAS
from packhouse.sources.records import gc_paused
from packhouse.terminal import echo, print_note

if TYPE_CHECKING:
    from prefect import Flow

SETTINGS = {"help_option_names": ["-h", "--help"]}

# The embedded server: started by Prefect when no PREFECT_API_URL is set, gone when the run ends.
_PREFECT_DEFAULTS = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "packhouse",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",  # of the embedded one, which writes to stderr
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",  # of processes that do tasks
    "DO_NOT_TRACK": "1",
}

_NO_SERVER = ("Failed to reach API", "connect to ephemeral Prefect API server")
"""What Prefect says, as a RuntimeError, where the server at hand or its own does not answer."""

_set = set_option("Put a value over the recipe's: --set pack.seq_len=4096. May be repeated.")
_cache = click.option(
    "--cache",
    metavar="PLACE",
    help="Folder of finished steps, or s3://bucket/prefix to share them between machines.",
)
_json = json_option("Print the result as one line of JSON.")
_approval = click.option(
    "--approval", is_flag=True, help="Publish, and leave it to someone to move the ref."
)


def _engine(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --runner, --runner-address and --workers."""
    for decorate in (
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            help="Tasks at the same time; of `prepare --local`, processes. [default: the cores; "
            "--local: 1]",
        ),
        click.option(
            "--runner-address",
            metavar="ADDRESS",
            help="Scheduler of a Dask or Ray cluster that is there. "
            "[default: a temporary one here]",
        ),
        click.option(
            "--runner",
            type=click.Choice(["threads", "processes", "dask", "ray"]),
            help="What does the work; the bytes are the same. [default: PACKHOUSE_RUNNER, else "
            "threads]",
        ),
    ):
        command = decorate(command)
    return command


@click.command(context_settings=SETTINGS)
@click.argument("recipe_path", metavar="RECIPE", type=click.Path())
@_set
@click.option("--local", is_flag=True, help="Run without any Prefect server.")
@_engine
@click.option(
    "--encoder",
    type=click.Choice(["auto", "hf", "fast"]),
    help="Which encoder makes the ids; never changes them. [default: the recipe's]",
)
@click.option(
    "--move-ref", is_flag=True, help="Move `latest` to the version although --set changed RECIPE."
)
@_cache
@_json
def command(
    recipe_path: str,
    overrides: tuple[str, ...],
    move_ref: bool,
    local: bool,
    runner: str | None,
    runner_address: str | None,
    workers: int | None,
    encoder: str | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Prepare the dataset that RECIPE describes, and publish it as a version.

    \b
    validate -> format -> tokenize -> pack -> split -> publish

    Steps that are done already, with the same inputs and settings, are found in the cache and not
    done again. Nothing becomes visible in the store unless every step succeeded.

    A recipe that is changed by --set is published, and `latest` stays at its version, for others
    may read it; --move-ref moves it.

    \b
    Exit codes: 0 published or unchanged, 2 the recipe is wrong, 3 a source or the tokenizer cannot
    be read or nothing is left, 4 refused (too many bad rows, a contract or an audit limit broken),
    5 the store, 6 network or storage hiccups, 7 published but the ref was held back by drift,
    130 stopped by Ctrl-C, 143 by SIGTERM.

    \b
    python -m flows.prepare deployments/demo/recipe.yaml --local
    python -m flows.prepare deployments/recipes/alpaca.yaml --set pack.seq_len=8192
    python -m flows.prepare deployments/recipes/alpaca.yaml --runner dask --workers 4
    """
    with reporting_errors(as_json):
        if move_ref:
            overrides = (*overrides, "publish.move_ref=true")
        elif changes_data(overrides):
            overrides = ("publish.move_ref=false", *overrides)
        if encoder:
            overrides = (*overrides, f"tokenize.encoder={encoder}")
        if local and (runner or runner_address):
            raise ConfigError("--runner chooses what Prefect's tasks run on; --local has --workers")
        recipe, place = read_recipe(recipe_path, overrides), _cache_place(cache)
        _take_engine(runner_address, workers)
        with show_progress():
            prepared = (
                _local(recipe, place, workers or 1)
                if local
                else on_server("prepare", place.folder, recipe, cache=cache, runner=runner)
            )
    print_result(prepared, as_json=as_json)


@click.command(context_settings=SETTINGS)
@click.argument("recipe_path", metavar="RECIPE", type=click.Path())
@_approval
@_set
@_engine
@_cache
@_json
def refresh(
    recipe_path: str,
    approval: bool,
    overrides: tuple[str, ...],
    runner: str | None,
    runner_address: str | None,
    workers: int | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Publish a new version of RECIPE if its sources, tokenizer or settings changed.

    Nothing changed: checks the gates, and says so. With --approval the version is published, and
    REF.candidate points to it until someone moves the ref (`python -m flows.promote`).

    \b
    Exit codes: those of `python -m flows.prepare`.
    """
    with reporting_errors(as_json):
        recipe, place = read_recipe(recipe_path, overrides), _cache_place(cache)
        _take_engine(runner_address, workers)
        options = {"approval": approval, "cache": cache, "runner": runner}
        with show_progress():
            done = on_server("refresh", place.folder, recipe, **options)
    if as_json:
        facts = {"outcome": done.outcome, "version": done.version, "message": done.message}
        prepared = report_json(done.prepared) if done.prepared else None
        echo(json.dumps({**facts, "prepared": prepared}, sort_keys=True))
    else:
        if done.prepared:
            print_report(done.prepared)
        echo(f"{done.dataset}: {done.message}")
    if done.outcome == "held":
        sys.exit(HELD_BACK)


@click.command(context_settings=SETTINGS)
@click.argument("recipe_paths", metavar="RECIPE...", type=click.Path(), nargs=-1, required=True)
@_approval
@_set
@_engine
@_cache
@_json
def backfill(
    recipe_paths: tuple[str, ...],
    approval: bool,
    overrides: tuple[str, ...],
    runner: str | None,
    runner_address: str | None,
    workers: int | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Refresh many recipes, each as a run of its own; one that fails does not stop the others.

    Exits with 4 if any failed.
    """
    with reporting_errors(as_json):
        recipes = [read_recipe(path, overrides) for path in recipe_paths]
        folder = _cache_place(cache).folder
        _take_engine(runner_address, workers)
        options = {"approval": approval, "cache": cache, "runner": runner}
        with show_progress():
            state = on_server("backfill", folder, recipes, **options, return_state=True)
        messages = state.result(raise_on_failure=False)
    if not isinstance(messages, dict):
        raise messages
    if as_json:
        echo(json.dumps({"completed": state.is_completed(), "recipes": messages}))
    else:
        for name, message in messages.items():
            echo(f"{name}: {message}")
        echo(state.message)
    if not state.is_completed():
        sys.exit(4)


@contextmanager
def reporting_errors(as_json: bool, *, keeps_steps: bool = True) -> Iterator[None]:
    """End the program with a sentence and an exit code after an error of packhouse or a signal."""
    try:
        yield
    except PackhouseError as error:
        exit_with(error, as_json=as_json)
    except Interrupted as error:
        exit_interrupted(error, keeps_steps=keeps_steps)


def on_server(name: str, folder: Path, /, *arguments: object, **options: object) -> Any:
    """Run the flow of this name in this process, on the server at hand or an embedded one.

    Raises:
        TransientError: no server answers.
    """
    for variable, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    log_file = _log_to_file(folder / "logs" / "prefect.log")
    start_phase("importing Prefect")
    flow = _import_flow(name)
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    _keep_prefect_off_the_terminal()
    try:
        if not os.environ.get("PREFECT_API_URL"):
            start_phase("starting Prefect's server")
        start_embedded_server()
        start_phase("creating the run")
        # No automation watches a command, and waiting for the heartbeats' end takes half a second.
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            return flow(*arguments, **options)
    except RuntimeError as error:
        if not any(text in str(error) for text in _NO_SERVER):
            raise
        remedy = "on a busy machine raise PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
        if os.environ.get("PREFECT_API_URL"):
            remedy = "start it, unset PREFECT_API_URL"
        raise TransientError(
            f"no Prefect server answers ({str(error).rstrip('.')}); {remedy}, or run "
            f"`flows.prepare` with --local (log: {log_file})"
        ) from None


def _import_flow(name: str) -> "Flow[..., Any]":
    """Import a flow, and let it write its parameters itself.

    Python's collector would walk what Prefect's import makes again and again while it is made, and
    later whenever the heap has grown: a tenth of the import's time, and none of it is ever freed.
    """
    with gc_paused():
        module = importlib.import_module(f"flows.{'collect_garbage' if name == 'gc' else name}")
        from tasks.parameters import write_parameters_alone
    gc.freeze()
    flow: Flow[..., Any] = getattr(module, name)
    write_parameters_alone(flow)
    return flow


def main(name: str = "prepare") -> int:
    """Run the command of a flow; the exit code says how it went."""
    own_process()
    commands: dict[str, click.Command] = {
        "prepare": command,
        "refresh": refresh,
        "backfill": backfill,
    }
    if name not in commands:
        from flows.store_command import COMMANDS

        commands = COMMANDS
    module = "collect_garbage" if name == "gc" else name
    commands[name](prog_name=f"python -m flows.{module}", standalone_mode=True)
    return 0


def own_process() -> None:
    """Say that this process is the command's own: nobody else's code runs in it.

    A SIGTERM then ends it as Ctrl-C does, so that Prefect's embedded server is stopped with it.
    """
    handle_signals()
    os.environ.setdefault(WITHOUT_PANDAS, "1")
    leave_without_collecting()


def _take_engine(address: str | None, workers: int | None) -> None:
    """Leave in the environment what a run's parameters must not choose."""
    if address:
        os.environ["PACKHOUSE_RUNNER_ADDRESS"] = address
    if workers:
        os.environ["PACKHOUSE_WORKERS"] = str(workers)


def _cache_place(cache: str | None) -> CachePlace:
    """Find the cache, and make its folder, which the log lies in."""
    place = find_cache(cache)
    try:
        with disk_errors(check_cache(place.folder)):
            place.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cache '{place.folder}' cannot be made: {error.strerror}; give a folder with --cache"
        ) from None
    return place


def _local(recipe: Recipe, cache: CachePlace, workers: int) -> Prepared:
    import schemas

    prepared, notes = prepare_recipe(recipe, cache, workers, schemas.check)
    for note in notes:
        print_note(f"note: {note}")
    return prepared


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

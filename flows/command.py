"""`python -m flows.prepare RECIPE`: run the flow `prepare` in this process, on a Prefect server.

All else comes from the environment: the server (PREFECT_API_URL), the cache (PACKHOUSE_CACHE) and
what runs the tasks (PACKHOUSE_RUNNER, PACKHOUSE_RUNNER_ADDRESS, PACKHOUSE_WORKERS). The other flows
are run by deployments.
"""

import atexit
import gc
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from contextvars import copy_context
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from packhouse.cli import exit_interrupted, exit_with, own_process
from packhouse.cli.result import print_result
from packhouse.errors import PackhouseError, TransientError
from packhouse.read.records import gc_paused
from packhouse.recipe import Recipe
from packhouse.run.chain import Prepared
from packhouse.run.given import read_recipe
from packhouse.system.disks import find_cache, make_cache
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.terminal import Interrupted

if TYPE_CHECKING:
    from prefect import Flow

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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe_path", metavar="RECIPE", type=click.Path())
def command(recipe_path: str) -> None:
    """Run the flow `prepare`: prepare the dataset of RECIPE, and publish it as a version.

    The run is kept by the server at PREFECT_API_URL. Without one, Prefect's embedded server is
    started, and is gone when the run ends.

    \b
    Environment:
    PACKHOUSE_CACHE           folder of finished steps, or s3://bucket/prefix to share them
    PACKHOUSE_RUNNER          what runs the tasks: threads (default), processes, dask, ray
    PACKHOUSE_RUNNER_ADDRESS  scheduler of a Dask or Ray cluster; default: a temporary one here
    PACKHOUSE_WORKERS         tasks at the same time; default: the cores

    `packhouse prepare RECIPE` does the same without Prefect, and has options. Version, bytes and
    exit codes are the same.
    """
    try:
        recipe, cache = read_recipe(recipe_path), find_cache().folder
        make_cache(cache)
        with show_progress():
            prepared = run_flow(recipe, cache)
    except PackhouseError as error:
        exit_with(error, as_json=False)
    except Interrupted as error:
        exit_interrupted(error, keeps_steps=True)
    print_result(prepared, as_json=False)


def main() -> NoReturn:
    """Run the command line, and exit."""
    own_process()
    sys.exit(command(prog_name="python -m flows.prepare"))


def run_flow(recipe: Recipe, cache: Path) -> Prepared:
    """Run the flow in this process, on the server at hand or an embedded one.

    Raises:
        PackhouseError: nothing was published. A `TransientError`, if no server answers.
    """
    for variable, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    log_file = _log_to_file(cache / "logs" / "prefect.log")
    start_phase("importing Prefect")
    # Python's collector would walk what this import makes again and again, a tenth of its time.
    with gc_paused():
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        from flows.prepare import prepare
    gc.freeze()
    write_parameters_alone(prepare)
    _keep_prefect_off_the_terminal()
    try:
        if not os.environ.get("PREFECT_API_URL"):
            start_phase("starting Prefect's server")
        start_embedded_server()
        start_phase("creating the run")
        # No automation watches a command, and waiting for the heartbeats' end takes half a second.
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            return cast(Prepared, prepare(recipe))  # Prefect's types give None
    except RuntimeError as error:
        if not any(text in str(error) for text in _NO_SERVER):
            raise
        remedy = "on a busy machine raise PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
        if os.environ.get("PREFECT_API_URL"):
            remedy = "start it, unset PREFECT_API_URL"
        raise TransientError(
            f"no Prefect server answers ({str(error).rstrip('.')}); {remedy}, or run "
            f"`packhouse prepare`, which needs none (log: {log_file})"
        ) from None


def write_parameters_alone(flow: "Flow[..., Any]") -> None:
    """Let a flow write its parameters as JSON itself; what is none of ours is left to Prefect.

    Prefect would use FastAPI's encoder, and importing FastAPI takes 0.15 s of CPU. For what our
    flows take, pydantic gives the same.
    """
    theirs = flow.serialize_parameters

    def serialize_parameters(parameters: dict[str, object]) -> dict[str, object]:
        known = BaseModel | str | bool | int | float | None
        if not all(isinstance(value, known) for value in parameters.values()):
            return theirs(parameters)
        return {name: to_jsonable_python(value) for name, value in parameters.items()}

    flow.serialize_parameters = serialize_parameters  # type: ignore[method-assign]  # Prefect offers no hook


def _log_to_file(path: Path) -> Path:
    """Give the root logger a file handler first: Prefect then leaves the root alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("packhouse").setLevel(logging.INFO)
    return path


def _keep_prefect_off_the_terminal() -> None:
    """Remove its console handlers, which would write through the progress bars.

    The log file has every line.
    """
    for name in [*logging.root.manager.loggerDict, ""]:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if type(handler).__name__ == "PrefectConsoleHandler":
                logger.removeHandler(handler)
                logger.propagate = True


def start_embedded_server() -> None:
    """Start the server that Prefect would start at the flow's first request, if it would.

    A terminal sends Ctrl-C to all processes in the foreground. A server that it ended could not be
    told that the run has ended, and Prefect would ask it again for minutes. A process inherits
    which signals are blocked from the thread that starts it, hence the thread. Prefect ends the
    server by SIGTERM when this process exits; if it is killed, a shell that waits for it does.

    Raises:
        RuntimeError: it does not come up.
    """
    from prefect.client.base import ServerType, determine_server_type

    if determine_server_type() is not ServerType.EPHEMERAL:
        return
    from prefect.server.api.server import SubprocessASGIServer

    class Server(SubprocessASGIServer):
        def _run_uvicorn_command(self) -> "subprocess.Popen[Any]":
            server = super()._run_uvicorn_command()
            _end_with_this_process(server.pid)
            return server

    started: Future[None] = Future()

    def start() -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            Server().start()
            started.set_result(None)
        except BaseException as error:  # whatever it is, the caller's thread has to tell it
            started.set_exception(error)

    Thread(target=copy_context().run, args=(start,), name="embedded-server", daemon=True).start()
    started.result()


def _end_with_this_process(pid: int) -> None:
    """Let a shell end a process when this one was killed, which closes the pipe that it reads."""
    watcher = subprocess.Popen(["/bin/sh", "-c", f"read _; kill {pid}"], stdin=subprocess.PIPE)

    @atexit.register
    def leave() -> None:  # Prefect has ended the server, and its number may be another's
        watcher.kill()
        watcher.communicate()

"""`python -m flows.prepare RECIPE`: run the flow `prepare` in this process, on a Prefect server.

Settings come from the environment: the server (PREFECT_API_URL), the cache (PACKHOUSE_CACHE) and
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
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from packhouse.cli import exit_interrupted, exit_with, own_process
from packhouse.cli.result_summary import print_result
from packhouse.errors import ConfigError, PackhouseError, TransientError
from packhouse.read.json_parsing import gc_paused
from packhouse.recipe import Recipe
from packhouse.run.chain import Prepared
from packhouse.run.prepare_arguments import read_recipe
from packhouse.system.disks import find_cache, make_cache
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.terminal import Interrupted
from packhouse.system.wording import last_error

if TYPE_CHECKING:
    from prefect import Flow

_PREFECT_DEFAULTS = {
    # Prefect waits 20 s, but a busy machine takes minutes to make the database.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "packhouse",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",  # of processes that do tasks
    "DO_NOT_TRACK": "1",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe_path", metavar="RECIPE", type=click.Path())
def command(recipe_path: str) -> None:
    """Run the Prefect flow `prepare`: prepare the dataset of RECIPE and publish a version.

    The run is recorded by the server at PREFECT_API_URL. Without one, an embedded server runs
    until the command ends.

    \b
    Environment:
    PACKHOUSE_CACHE           folder of the cache, or s3://bucket/prefix to share it
    PACKHOUSE_RUNNER          what runs the tasks: threads (default), processes, dask, ray
    PACKHOUSE_RUNNER_ADDRESS  Dask or Ray cluster; default: a temporary one on this machine
    PACKHOUSE_WORKERS         number of tasks at once; default: number of cores

    `packhouse prepare RECIPE` does the same without Prefect and has more options. The version, its
    bytes and the exit codes are the same.
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
    """Run the flow in this process, on the server at PREFECT_API_URL or an embedded one.

    Raises:
        PackhouseError: nothing was published. A `TransientError` if no server answers.
    """
    for variable, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    # Give the root logger a file handler first: Prefect then leaves the root alone.
    log_file = cache / "logs" / "prefect.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log_file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("packhouse").setLevel(logging.INFO)
    if home := os.environ.get("PREFECT_HOME"):  # Prefect makes it, but not its parents
        try:
            Path(home).expanduser().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"PREFECT_HOME '{home}' cannot be created ({error.strerror}). Choose another folder"
            ) from None
    start_phase("importing Prefect")
    # Python's collector would take a tenth of the time of this import.
    with gc_paused():
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        from flows.prepare import prepare
    gc.freeze()
    write_parameters_alone(prepare)
    _keep_prefect_off_the_terminal()
    try:
        if not os.environ.get("PREFECT_API_URL"):
            start_phase("starting Prefect's server")
        start_embedded_server(log_file.with_name("server.log"))
        start_phase("creating the run")
        # No automation watches a command, and stopping the heartbeats takes half a second.
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            return cast(Prepared, prepare(recipe))  # Prefect's types give None
    except RuntimeError as error:
        if "Failed to reach API" not in str(error):
            raise
        raise TransientError(
            f"cannot reach a Prefect server ({str(error).rstrip('.')}). Start one, unset "
            f"PREFECT_API_URL, or run `packhouse prepare`, which works without one "
            f"(log: {log_file})"
        ) from None


def write_parameters_alone(flow: "Flow[..., Any]") -> None:
    """Encode a flow's parameters with pydantic; parameters of other types are left to Prefect.

    Prefect would use FastAPI's encoder, and importing FastAPI takes 0.15 s of CPU. For the
    parameters of these flows, the result is the same.
    """
    theirs = flow.serialize_parameters

    def serialize_parameters(parameters: dict[str, object]) -> dict[str, object]:
        known = BaseModel | str | bool | int | float | None
        if not all(isinstance(value, known) for value in parameters.values()):
            return theirs(parameters)
        return {name: to_jsonable_python(value) for name, value in parameters.items()}

    flow.serialize_parameters = serialize_parameters  # type: ignore[method-assign]  # Prefect offers no hook


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


def start_embedded_server(log_file: Path) -> None:
    """Start the embedded server that Prefect would start at the flow's first request, if it would.

    Prefect discards the server's output, and restarts one that fails at its start again and again.

    A terminal sends Ctrl-C to all processes in the foreground. If it ended the server, Prefect
    would try for minutes to report the end of the run. A process inherits blocked signals from the
    thread that starts it, hence the thread. Prefect ends the server by SIGTERM when this process
    exits; if this process is killed, a waiting shell does.

    Args:
        log_file: gets the output of the server; is overwritten.

    Raises:
        TransientError: the server does not start; the message quotes its last error.
    """
    from prefect.client.base import ServerType, determine_server_type

    if determine_server_type() is not ServerType.EPHEMERAL:
        return
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings

    server = SubprocessASGIServer()  # the only one: Prefect's clients find it
    server.port = server.find_available_port()
    settings = get_current_settings()
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--port", str(server.port), "--log-level", "error", "--lifespan", "on"]
    env = os.environ | settings.to_environment_variables(exclude_unset=True)
    env |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
    env |= {"PREFECT__SERVER_FINAL": "1"}

    def start() -> "subprocess.Popen[Any]":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with log_file.open("wb") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log)

    with ThreadPoolExecutor(1) as thread:
        process = server.server_process = thread.submit(start).result()
    server.running = True
    atexit.register(server.stop)
    _end_with_this_process(process.pid)
    patience_s = settings.server.ephemeral.startup_timeout_seconds
    deadline = time.monotonic() + patience_s
    while not _is_up(server.port):
        if process.poll() is not None:
            cause = last_error(log_file.read_text("utf-8", "replace"))
            raise TransientError(
                f"Prefect's embedded server did not start: {cause} "
                f"(log: {log_file}). `packhouse prepare` needs no server"
            )
        if time.monotonic() > deadline:
            raise TransientError(
                f"Prefect's embedded server did not answer within {patience_s} s. Raise "
                "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS on a busy machine, or run "
                f"`packhouse prepare`, which works without one (log: {log_file})"
            )
        time.sleep(0.1)  # until it answers


def _is_up(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _end_with_this_process(pid: int) -> None:
    """Start a shell that ends a process if this one is killed, which closes the shell's pipe."""
    watcher = subprocess.Popen(["/bin/sh", "-c", f"read _; kill {pid}"], stdin=subprocess.PIPE)

    @atexit.register
    def leave() -> None:  # Prefect has ended the server, and its pid may belong to another process
        watcher.kill()
        watcher.communicate()

"""Choose and start the engine that runs the tasks of a flow run. All give the same bytes.

| engine | where tasks run | when to use it |
|---|---|---|
| `threads` | in the process of the flow run | by default: most steps release Python's lock |
| `processes` | in processes on this machine | if steps hold the lock (`tokenize.encoder: hf`) |
| `dask` | on an existing Dask cluster, or a temporary one here | one machine is too small |
| `ray` | on an existing Ray cluster, or a temporary one here | the same, if Ray is installed |

The workers of an existing cluster need packhouse in their Python and the cache under the same path.
The address comes from the environment or a shell, never from the parameters of a run: Dask and Ray
exchange pickles, so whoever answers at the address could run any code here.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

from packhouse.errors import ConfigError, TransientError
from packhouse.system.plugins import pip_install
from packhouse.system.worker import begin_pool_process

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner

log = logging.getLogger("packhouse.tasks")

Runner = Literal["threads", "processes", "dask", "ray"]

ENGINES: tuple[Runner, ...] = get_args(Runner)

# Bytes per task at which scheduling takes under 5% of its time.
_LEAST_BYTES = {"threads": 2**20, "processes": 2**25, "dask": 2**25, "ray": 2**25}

# Small, because only keys and receipts are sent.
_RAY_STORE_BYTES = 128 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Engine with its number of workers and address."""

    runner: Runner = "threads"
    workers: int
    """Number of parallel tasks; for an existing cluster, its assumed size."""
    address: str | None = None
    """Address of an existing cluster; None for a temporary one on this machine."""

    @property
    def least_bytes(self) -> int:
        """Minimum bytes that a task should process."""
        return _LEAST_BYTES[self.runner]


def choose_engine(runner: str | None = None) -> Engine:
    """Return the engine of a run.

    PACKHOUSE_WORKERS sets the number of workers (by default the number of cores), and
    PACKHOUSE_RUNNER_ADDRESS the address of an existing cluster.

    Args:
        runner: name of the engine; by default PACKHOUSE_RUNNER, else `threads`.

    Raises:
        ConfigError: there is no such engine, its package is not installed, or the address does not
            fit it.
    """
    asked = runner or os.environ.get("PACKHOUSE_RUNNER") or "threads"
    name = next((known for known in ENGINES if known == asked), None)
    if name is None:
        raise ConfigError(f"unknown runner '{asked}'. Known: {', '.join(ENGINES)}")
    is_cluster = name in ("dask", "ray")
    if is_cluster and find_spec(f"prefect_{name}") is None:
        raise ConfigError(f"runner '{name}' is not installed: {pip_install(name)}")
    address = os.environ.get("PACKHOUSE_RUNNER_ADDRESS") or None
    if address and not is_cluster:
        raise ConfigError(
            f"runner '{name}' does not accept an address. Use dask or ray, or remove the address"
        )
    workers = os.environ.get("PACKHOUSE_WORKERS") or str(os.cpu_count() or 1)
    if not workers.isdecimal() or int(workers) < 1:
        raise ConfigError(
            f"PACKHOUSE_WORKERS is '{workers}'. Set it to a whole number of at least 1"
        )
    return Engine(runner=name, workers=int(workers), address=address)


@contextmanager
def started(engine: Engine) -> Iterator["TaskRunner[Any]"]:
    """Start the engine's Prefect task runner for the block.

    Raises:
        TransientError: the cluster does not answer, or a temporary one does not start.
    """
    with ExitStack() as stack:
        stack.enter_context(_server_for(engine))
        for tries_left in (2, 1, 0):
            try:
                runner = stack.enter_context(_task_runner(engine))
                if engine.runner == "dask":
                    # Reading `client`, which only Dask's runner has, connects to the cluster here,
                    # where a failure is tried again; otherwise the first task would connect.
                    getattr(runner, "client")  # noqa: B009 - mypy knows no `client`
                break
            except Exception as error:
                # A temporary cluster may lose a race for its ports; an existing one is down.
                if tries_left and not engine.address:
                    log.warning("runner '%s' did not start (%s); retrying", engine.runner, error)
                    continue
                where = "did not start"
                if engine.address:
                    where = f"at '{engine.address}' cannot be reached"
                raise TransientError(
                    f"runner '{engine.runner}' {where}: {str(error).splitlines()[0]}. Start it, or "
                    "choose another runner with PACKHOUSE_RUNNER or the run's `runner`"
                ) from error
        yield runner


@contextmanager
def _server_for(engine: Engine) -> Iterator[None]:
    """Let other processes find the embedded server; otherwise each would start its own."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if engine.runner == "threads" or PREFECT_API_URL.value():
        yield
        return
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer()
    server.start()
    with temporary_settings({PREFECT_API_URL: server.api_url}):
        yield


def _task_runner(engine: Engine) -> "TaskRunner[Any]":
    """Create the engine's task runner without starting it; import only the chosen one."""
    if engine.runner == "threads":
        from prefect.task_runners import ThreadPoolTaskRunner

        return ThreadPoolTaskRunner(max_workers=engine.workers)
    if engine.runner == "processes":
        from prefect.task_runners import ProcessPoolTaskRunner

        return ProcessPoolTaskRunner(max_workers=engine.workers, initializer=begin_pool_process)
    if engine.runner == "dask":
        from prefect_dask.task_runners import DaskTaskRunner

        if engine.address:
            return DaskTaskRunner(address=engine.address)
        return DaskTaskRunner(
            cluster_kwargs={
                "n_workers": engine.workers,
                "threads_per_worker": 1,  # a job uses several threads itself
                "processes": True,
                "dashboard_address": None,
                "host": "127.0.0.1",  # whoever connects may run any code here
                "local_directory": tempfile.gettempdir(),
            }
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported
    from prefect_ray import RayTaskRunner  # type: ignore[import-untyped]

    ray: TaskRunner[Any] = (
        RayTaskRunner(address=engine.address)
        if engine.address
        else RayTaskRunner(
            init_kwargs={
                "num_cpus": engine.workers,
                "include_dashboard": False,
                "object_store_memory": _RAY_STORE_BYTES,
                "log_to_driver": False,
                "_node_ip_address": "127.0.0.1",
            }
        )
    )
    return ray


# Names of exceptions of Dask and Ray, since these are imported only if chosen.
_LOST = (
    *("KilledWorker", "CommClosedError", "FutureCancelledError", "FuturesCancelledError"),
    *("WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError"),
    *("LocalRayletDiedError", "OwnerDiedError", "RaySystemError"),
)


def is_lost_worker(error: BaseException) -> bool:
    """Return True if a task failed because its worker died, not because of the task itself."""
    from concurrent.futures import BrokenExecutor, CancelledError

    from prefect.exceptions import CrashedRun

    if isinstance(error, BrokenExecutor | CancelledError | CrashedRun):
        return True
    return type(error).__name__ in _LOST

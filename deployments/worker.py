"""`prefect worker start` that waits for the server, ends its runs in order and releases memory.

python deployments/worker.py --pool packhouse [--limit 2] [other options of `prefect worker start`]

Prefect opens clients for each run, each with its own copy of all CA certificates (half a megabyte),
and leaves them in reference cycles. Python rarely collects cycles of old objects, so a worker grows
by 0.3 to 0.5 MiB a run until it has twice its size. This one collects every ten seconds and returns
free pages to the system (docs/performance.md has numbers). That takes a few milliseconds, because
objects loaded before the first run are skipped.

When Prefect's worker stops, it kills its runs before they can report it, and the server shows them
as Running until their heartbeats are missed. This one sends them SIGTERM and waits: a run finishes
its current jobs and marks itself Crashed.
"""

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

EVERY_S = 10.0
# docker/compose.yaml and the Kubernetes job kill a worker after 60 s.
RUNS_END_WITHIN_S = 30.0


def main() -> None:
    """Start Prefect's worker with the arguments of this command."""
    from prefect.cli import app

    end_runs_in_order()
    give_memory_back()  # after the imports
    if not {"-h", "--help"} & set(sys.argv):
        wait_for_server()
    # A shell starts background jobs with SIGINT ignored, and Prefect answers SIGTERM with SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


def end_runs_in_order(within_s: float = RUNS_END_WITHIN_S) -> None:
    """Let a worker that stops end its process runs by SIGTERM and wait for them.

    Args:
        within_s: seconds after which runs are killed; the worker then marks them Crashed.
    """
    from prefect.workers.process import ProcessWorker

    run, teardown = ProcessWorker.run, ProcessWorker.teardown
    alive: set[int] = set()

    async def noted(
        worker: ProcessWorker, flow_run: Any, configuration: Any, task_status: Any = None
    ) -> Any:
        pids: list[int] = []

        class Status:
            @staticmethod
            def started(pid: int) -> None:
                pids.append(pid)
                alive.add(pid)
                if task_status is not None:
                    task_status.started(pid)

        try:
            # Not all of anyio's TaskStatus: Prefect calls `started` with the process ID.
            return await run(worker, flow_run, configuration, Status())  # type: ignore[arg-type]
        finally:
            alive.difference_update(pids)

    async def wait_for_runs(worker: ProcessWorker, *_: Any) -> None:
        def kill() -> None:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # Prefect gives each run its own group

        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        asyncio.get_running_loop().call_later(within_s, kill)
        # With the exception that stops the worker, this would kill the runs instead of waiting.
        await teardown(worker, None, None, None)

    # Prefect has no setting for this, so its methods are replaced, which mypy does not allow.
    ProcessWorker.run = noted  # type: ignore[method-assign]
    ProcessWorker.teardown = wait_for_runs  # type: ignore[method-assign]


def wait_for_server(every_s: float = 2.0) -> None:
    """Wait until the server at PREFECT_API_URL answers; Prefect's worker would end at once."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        is_said = False
        while error := client.api_healthcheck():
            if not is_said:
                print(f"waiting for Prefect's server at {client.api_url}: {error}", flush=True)
            is_said = True
            time.sleep(every_s)  # until it answers


def give_memory_back(every_s: float = EVERY_S) -> None:
    """Collect cycles and return free pages to the system, from now on.

    Call it once, when everything is loaded: objects that exist now are skipped.

    Args:
        every_s: seconds between two collections.
    """
    gc.collect()
    gc.freeze()
    threading.Thread(target=_give_back, args=(every_s,), name="memory", daemon=True).start()


def _give_back(every_s: float) -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; macOS and musl have none
    pause = threading.Event()
    while not pause.wait(every_s):
        gc.collect()
        if trim:
            trim(0)


if __name__ == "__main__":
    main()

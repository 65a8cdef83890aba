"""`prefect worker start` that waits for the server and releases the memory of finished runs.

python deployments/worker.py --pool packhouse [--limit 2] [other options of `prefect worker start`]

Prefect opens clients for each run, each with its own copy of all CA certificates (half a megabyte),
and leaves them in reference cycles. Python rarely collects cycles of old objects, so a worker grows
by 0.3 to 0.5 MiB a run until it has twice its size. This one collects every ten seconds and returns
free pages to the system (docs/performance.md has numbers). That takes a few milliseconds, because
objects loaded before the first run are skipped.
"""

import ctypes
import gc
import importlib
import signal
import sys
import threading
import time

EVERY_S = 10.0


def main() -> None:
    """Start Prefect's worker with the arguments of this command."""
    from prefect.cli import app

    importlib.import_module("prefect.workers.process")  # must be loaded before gc.freeze
    give_memory_back()
    if not {"-h", "--help"} & set(sys.argv):
        wait_for_server()
    # A shell starts background jobs with SIGINT ignored, and Prefect answers SIGTERM with SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


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

"""`prefect worker start`, but it waits for the server, and gives back memory of runs that ended.

python deployments/worker.py --pool packhouse [--limit 2] [what else `prefect worker start` takes]

Prefect opens some clients for each run, each with its own copy of all CA certificates (half a
megabyte, outside of Python's objects), and leaves them in reference cycles. Python looks for cycles
among old objects only once these are a quarter more, which takes some 40 runs, and malloc keeps
what was freed. So a worker grows by 0.3 to 0.5 MiB a run, and levels off at twice its size after
some hundred runs. Here cycles are looked for every ten seconds, and free pages go back to the
system: docs/performance.md has the figures. It costs some ms each time, for what was loaded before
the first run is left out of the search.
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
    """Start Prefect's worker with this command's arguments; ends as it does."""
    from prefect.cli import app

    importlib.import_module("prefect.workers.process")  # before what is loaded is left out
    give_memory_back()
    if not {"-h", "--help"} & set(sys.argv):
        wait_for_server()
    # A shell starts background jobs with SIGINT ignored, and Prefect answers SIGTERM with SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


def wait_for_server(every_s: float = 2.0) -> None:
    """Return when the server at PREFECT_API_URL answers; Prefect's worker would end at once."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        is_said = False
        while error := client.api_healthcheck():
            if not is_said:
                print(f"waiting for Prefect's server at {client.api_url}: {error}", flush=True)
            is_said = True
            time.sleep(every_s)  # a server that is not there cannot say when it is


def give_memory_back(every_s: float = EVERY_S) -> None:
    """Free what lies in cycles, and return free pages to the system, from now on.

    Call it once, when everything is loaded: what lives now is not looked at again.

    Args:
        every_s: seconds from one search to the next.
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

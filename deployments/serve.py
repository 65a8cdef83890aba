"""Run server, worker and deployments on this machine until Ctrl-C.

python deployments/serve.py [--port 4200] [--home .packhouse/server]

The home folder keeps the database (SQLite) with the history of runs. Only this machine can reach
the server. For several workers or people use docker/compose.yaml: SQLite makes clients wait for
each other.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from packhouse.system.wording import last_error

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
POOL = "packhouse"
# The first start makes the database; a busy machine is slow at it.
_STARTS_WITHIN_S = 300
# A worker gives its runs 30 (deployments/worker.py), then reports those that it killed.
_STOPS_WITHIN_S = 60
_LOOKS_EVERY_S = 0.5
# A worker that cannot start does not keep the machine busy.
_RESTARTS_AFTER_S = 5


def main() -> int:
    """Serve until interrupted or the server ends; a worker that ends is replaced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--port", type=int, default=4200)
    parser.add_argument("--home", type=Path, default=ROOT / ".packhouse" / "server")
    arguments = parser.parse_args()
    if _is_taken(arguments.port):
        print(f"port {arguments.port} is in use. Choose another: make serve PORT=4201")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    environment = settings(arguments.port, arguments.home.absolute())
    parts: list[subprocess.Popen[bytes]] = []
    try:
        return _serve(arguments.port, arguments.home.absolute(), environment, parts)
    except KeyboardInterrupt:
        print("\nstopping; runs have 30 s to finish their current jobs", flush=True)
        return 0
    finally:
        stop(parts)


def settings(port: int, home: Path) -> dict[str, str]:
    """Return the environment of server, worker and runs."""
    home.mkdir(parents=True, exist_ok=True)
    url = f"http://{HOST}:{port}"
    ours = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_UI_API_URL": f"{url}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # Keep the slots of datasets when the server restarts.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
        # Free the slot of a dead run after 75 s instead of 105 s: a lease of 60 s and these two.
        "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "5",
        "PREFECT_SERVER_CONCURRENCY_MAXIMUM_CONCURRENCY_SLOT_WAIT_SECONDS": "10",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "packhouse",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PACKHOUSE_CACHE": os.environ.get("PACKHOUSE_CACHE", str(ROOT / ".packhouse")),
    }
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return os.environ | ours | {"PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT)}


def stop(parts: list[subprocess.Popen[bytes]]) -> None:
    """End the parts in reverse order, each with all processes that it started."""
    for part in reversed(parts):
        if not _has_ended(part):
            part.terminate()
            # After a second Ctrl-C it does not wait.
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                part.wait(_STOPS_WITHIN_S)
        with suppress(ProcessLookupError):
            os.killpg(part.pid, signal.SIGKILL)  # whatever it started and did not end
        part.wait()


def _serve(
    port: int, home: Path, environment: dict[str, str], parts: list[subprocess.Popen[bytes]]
) -> int:
    server = (str(ROOT / "deployments" / "server.py"), "--host", HOST, "--port", str(port))
    print("starting the server; the first start makes its database, which can take two minutes ...")
    sys.stdout.flush()
    log = home / "server.log"
    before = log.stat().st_size if log.exists() else 0
    parts.append(_start("server", server, home, environment))
    if not _is_up(port, parts[0]):
        said = log.read_bytes()[before:].decode("utf-8", "replace")
        print(f"the server did not start: {last_error(said)} (log: {log})")
        return 1
    print("deploying flows and automations ...", flush=True)
    deployed = subprocess.run(
        [sys.executable, str(ROOT / "deployments" / "deploy.py"), POOL],
        cwd=ROOT,
        env=environment,
        check=False,
    )
    if deployed.returncode:
        return deployed.returncode
    worker = (str(ROOT / "deployments" / "worker.py"), "--pool", POOL)
    parts.append(_start("worker", worker, home, environment))
    print(f"Prefect's UI: http://{HOST}:{port}   (Ctrl-C stops it; logs in {home})", flush=True)
    while not _has_ended(parts[0]):
        time.sleep(_LOOKS_EVERY_S)  # waiting for the processes would return at once for a zombie
        if _has_ended(parts[-1]):
            print(
                f"the worker exited and is being restarted; see {home / 'worker.log'}", flush=True
            )
            time.sleep(_RESTARTS_AFTER_S)  # or it would be started over and over
            parts.append(_start("worker", worker, home, environment))
    print(f"the server exited; see {log}")
    return 1


def _has_ended(part: subprocess.Popen[bytes]) -> bool:
    """Return True if it ended. It is not reaped: a zombie keeps the id of its process group."""
    return os.waitid(os.P_PID, part.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _start(
    name: str, command: tuple[str, ...], home: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    with (home / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only this process, which stops them in order
        )


def _is_up(port: int, server: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while not _has_ended(server) and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/api/ready", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except OSError:
            time.sleep(0.3)  # not listening yet
    return False


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


class _AsWritten(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Print the docstring unchanged, and defaults."""


if __name__ == "__main__":
    sys.exit(main())

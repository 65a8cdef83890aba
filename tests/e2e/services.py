"""Start servers for tests on the loopback interface, and stop them by process ID.

Starts the services of docker/compose.yaml from Debian's packages and this environment: PostgreSQL,
Prefect's server with a password and CSRF tokens, and a process worker.
The S3 store is Ceph's gateway, in tests/store/ceph.py.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from tests.server_logs import watched
from tests.store.ceph import _accepts, free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PREFECT_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "packhouse",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "DO_NOT_TRACK": "1",
}


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that point to a user's own servers."""
    led_astray = ("PREFECT_", "AWS_", "PACKHOUSE_CACHE", "HF_TOKEN", "WANDB_", "PG")
    return {k: v for k, v in os.environ.items() if not k.startswith(led_astray)}


def find_postgres() -> Path | None:
    """Return the folder of PostgreSQL's programs: the newest of Debian's, or the one on PATH."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4])
    )
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def wait_until(
    is_ready: Callable[[], bool],
    what: str,
    process: "subprocess.Popen[bytes] | None" = None,
    timeout_s: float = 600,
) -> None:
    """Poll until the server is ready, or fail at once if its process ended."""
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{what} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not ready after {timeout_s:.0f} s")
        time.sleep(0.1)


@contextlib.contextmanager
def process(
    command: list[str], log: Path, environment: Mapping[str, str], **options: object
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server in the background, log to a file, and stop it with all its child processes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        started = subprocess.Popen(  # type: ignore[call-overload]
            command, env=dict(environment), stdout=sink, stderr=sink, cwd=ROOT, **options
        )
    try:
        yield started
    finally:
        stop(started)


def stop(started: "subprocess.Popen[bytes]", patience_s: float = 20) -> None:
    """Ask a process to end, and check that it and its children do."""
    try:
        family = psutil.Process(started.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(patience_s)
    for survivor in [*family, started]:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            survivor.kill()
    started.wait(10)


@dataclass(frozen=True, kw_only=True)
class Database:
    """A PostgreSQL server for one test run."""

    port: int
    password: str
    programs: Path
    pid: int
    user: str = "prefect"
    name: str = "prefect"

    def dump(self) -> str:
        """Return every row of every table as text."""
        return self._call("pg_dump", "--data-only", "--inserts", self.name)

    def ask(self, query: str) -> list[list[str]]:
        """Return the rows of a query, with fields as text."""
        out = self._call("psql", "-qtAF\t", "-c", query, self.name)
        return [line.split("\t") for line in out.splitlines()]

    def _call(self, program: str, *args: str) -> str:
        address = ["-h", "127.0.0.1", "-p", str(self.port), "-U", self.user]
        done = subprocess.run(
            [str(self.programs / program), *address, *args],
            env=clean_environment() | {"PGPASSWORD": self.password},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr}")
        return done.stdout


@contextlib.contextmanager
def postgres(password: str) -> Iterator[Database]:
    """Start an empty PostgreSQL server; as user `postgres` if we are root, which it refuses."""
    programs = find_postgres()
    assert programs is not None
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="packhouse-postgres-"))  # short: it holds sockets
    data, word = folder / "data", folder / "password"
    word.write_text(password)
    if user:
        owner = pwd.getpwnam(user)
        for path in (folder, word):
            os.chown(path, owner.pw_uid, owner.pw_gid)
    options = {"user": user, "group": user, "extra_groups": []} if user else {}
    port = free_port()
    # fsync off: it does not matter what a test loses in a power cut.
    settings = [
        f"-cport={port}", f"-cunix_socket_directories={folder}", "-clisten_addresses=127.0.0.1",
        "-cfsync=off", "-cfull_page_writes=off", "-cmax_connections=100",
    ]  # fmt: skip
    try:
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "prefect", "-A", "scram-sha-256",
             f"--pwfile={word}", "--no-sync", "--locale=C.UTF-8"],
            check=True, capture_output=True, cwd="/", **options,
        )  # fmt: skip
        command = [str(programs / "postgres"), "-D", str(data), *settings]
        with process(command, folder / "log", clean_environment(), **options) as server:
            database = Database(port=port, password=password, programs=programs, pid=server.pid)
            ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
            wait_until(
                lambda: subprocess.run(ready, check=False).returncode == 0, "PostgreSQL", server
            )
            replace(database, name="postgres").ask("create database prefect")
            yield database
            server.send_signal(signal.SIGINT)  # fast: disconnect clients
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def documented_server() -> str:
    """Return the commands of docs/how-to/server.md for a server on PostgreSQL, as a script."""
    section = (
        (ROOT / "docs" / "how-to" / "server.md").read_text().split("## Server with PostgreSQL")[1]
    )
    block = section.split("```console\n")[1].split("```")[0]
    assert block.endswith("\n$ prefect server start --host 127.0.0.1\n")
    return block.replace("\n$ prefect", "\n$ exec prefect").replace("$ ", "")


@contextlib.contextmanager
def prefect_server(
    folder: Path, auth: str, database: Database, port: int | None = None
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start Prefect's server as docs/how-to/server.md does, with the paths of this test."""
    port = port or free_port()
    origin = f"http://127.0.0.1:{port}"
    words = folder / "server-secrets"
    words.mkdir(mode=0o700, exist_ok=True)
    (words / "database_password").write_text(database.password)
    (words / "prefect_auth_string").write_text(auth)
    places = {
        "/var/lib/packhouse/prefect": str(folder / "server"),
        "HOST=db ": "HOST=127.0.0.1 ",
        "PORT=5432": f"PORT={database.port}",
        "/run/secrets": str(words),
        "https://prefect.example.org": origin,
    }
    script = documented_server()
    for documented, own in places.items():
        assert documented in script, documented
        script = script.replace(documented, own)
    environment = clean_environment()
    environment["PATH"] = os.pathsep.join([str(BIN), environment["PATH"]])
    command = ["bash", "-euc", f"{script.strip()} --port {port}"]
    log = folder / "logs" / "server.log"
    with watched(log), process(command, log, environment) as server:
        wait_until(lambda: _is_ready(f"{origin}/api/ready", port), "Prefect's server", server)
        yield origin, server


def _is_ready(url: str, port: int) -> bool:
    if not _accepts(port):
        return False
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def worker(
    pool: str,
    folder: Path,
    environment: Mapping[str, str],
    limit: int = 2,
    loses_its_server: bool = False,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a worker, which creates its process pool, and wait until it reports that it is healthy.

    A worker that loses its server writes many tracebacks, so its log is not watched.
    """
    port = free_port()
    settings = {
        "PREFECT_HOME": str(folder / "worker"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
        "PREFECT_WORKER_WEBSERVER_PORT": str(port),
    }
    command = [sys.executable, "deployments/worker.py", "--pool", pool, "--type", "process"]
    command += ["--limit", str(limit), "--with-healthcheck"]
    log = folder / "logs" / "worker.log"
    watch = contextlib.nullcontext() if loses_its_server else watched(log)
    with watch, process(command, log, {**environment, **settings}) as started:
        wait_until(lambda: _is_ready(f"http://127.0.0.1:{port}/health", port), "worker", started)
        yield started

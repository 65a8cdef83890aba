"""A real server, worker and deployments for tests, started as `make serve` does."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tests.server_logs import watched
from tests.store.ceph import free_port

ROOT = Path(__file__).resolve().parents[2]
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass
class Served:
    """A running `make serve` and its API."""

    process: subprocess.Popen
    port: int
    home: Path
    store: Path
    notes: list[dict[str, str]] = field(default_factory=list)
    """Notifications: subject and body."""

    def call(self, path, body=None, method=None):
        """Return the API's answer: (status, document)."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
            method=method or ("GET" if body is None else "POST"),
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                raw = answer.read()
                return answer.status, json.loads(raw) if raw else None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def deployment(self, name):
        status, found = self.call(f"/deployments/name/{name}")
        assert status == 200, found
        return found

    def start(self, name, *, tags=(), **parameters):
        status, run = self.call(
            f"/deployments/{self.deployment(name)['id']}/create_flow_run",
            {"parameters": parameters, "tags": list(tags)},
        )
        assert status in (200, 201), run
        return run["id"]

    def state(self, run):
        return self.call(f"/flow_runs/{run}")[1]["state"]

    def wait(self, run, states=FINAL, seconds=400):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = self.state(run)
            if state["type"] in states or state["name"] in states:
                return state
            time.sleep(0.3)  # between two requests to the server
        raise AssertionError(f"run {run} is {self.state(run)}")

    def set_state(self, run, kind):
        return self.call(f"/flow_runs/{run}/set_state", {"state": {"type": kind}, "force": False})

    def event(self, name, about):
        """Return the event about a version, dataset or run; it arrives soon after the run."""
        wanted = {"event": {"name": [name]}, "occurred": {"since": "2020-01-01T00:00:00Z"}}
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            for each in self.call("/events/filter", {"filter": wanted})[1]["events"]:
                if about in str((each["resource"], each["related"], each["payload"])):
                    return each
            time.sleep(0.3)  # between two requests to the server
        raise AssertionError(f"no event {name}")

    def artifact(self, key):
        found = self.call("/artifacts/latest/filter", {"artifacts": {"key": {"any_": [key]}}})[1]
        return found[0]["data"] if found else None

    def processes(self, run):
        """Processes of a flow run, identified by their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"PREFECT__FLOW_RUN_ID={run}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


def serve(home, held, root=ROOT, python=sys.executable, webhook=""):
    """Start `make serve` in a separate process; `held` is the folder of the held flow.

    `root` is the checkout, or a project of `packhouse new`; `python` runs it.
    """
    port, store = free_port(), home / "store"
    environment = os.environ | {
        "PACKHOUSE_STORE": str(store),
        "PACKHOUSE_CACHE": str(home / "cache"),
        "PACKHOUSE_SOURCES": str(root / "deployments" / "sources.yaml"),
        "HELD_FOLDER": str(held),
        "PACKHOUSE_NOTIFY": webhook,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # the shortest that Prefect accepts
        "PREFECT_SERVER_LOG_RETRYABLE_ERRORS": "true",  # such as "database is locked"
    }
    environment.pop("PREFECT_API_URL", None)
    with (home / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [str(python), "deployments/serve.py", "--port", str(port), "--home", f"{home}/p"],
            cwd=root,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # A shell's background processes ignore SIGINT, and so would the server.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    deadline = time.monotonic() + 600
    while "Prefect's UI: " not in (home / "serve.log").read_text():
        assert process.poll() is None, (home / "serve.log").read_text()
        assert time.monotonic() < deadline, (home / "serve.log").read_text()
        time.sleep(0.2)  # between two reads of the log
    return Served(process, port, home, store)


@contextmanager
def serving(home, held):
    """Run `make serve` with the deployment `prepare/held`, watch its logs, and press Ctrl-C."""
    notes = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self):
            notes.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as webhook,
        watched(home / "p" / "server.log"),
        watched(home / "p" / "worker.log"),
    ):
        Thread(target=webhook.serve_forever, daemon=True).start()
        served = serve(home, held, webhook=f"http://127.0.0.1:{webhook.server_port}/hook")
        served.notes = notes
        try:
            deploy_held(served)
            yield served
        finally:
            webhook.shutdown()
            if served.process.poll() is None:
                interrupt(served)


def deploy_held(served):
    """Deploy the flows of `held_flow.py` as `prepare/held` and `backfill/held`."""
    for flow, name in (("prepare", "form-prepare"), ("backfill", "backfill-recipes")):
        shipped = served.deployment(f"{flow}/{name}")
        kept = ("flow_id", "parameter_openapi_schema", "pull_steps", "parameters")
        body = {key: shipped[key] for key in kept} | {"name": "held", "work_pool_name": "packhouse"}
        body["entrypoint"] = f"tests.served.held_flow.{flow}"
        status, made = served.call("/deployments/", body)
        assert status in (200, 201), made


def until(is_so, seconds=400):
    """Wait until a condition is true; no test depends on how soon, only on the limit."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)  # between two checks


def interrupt(served):
    """Press Ctrl-C; return its exit code and the remaining processes."""
    session = served.process.pid
    served.process.send_signal(signal.SIGINT)
    code = served.process.wait(300)
    left = [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if folder.name != str(session) and _mentions(folder, str(served.home))
    ]
    return code, left


def _mentions(folder, text):
    try:
        return text.encode() in (folder / "environ").read_bytes()
    except OSError:
        return False

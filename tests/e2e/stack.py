"""The whole stack of docker/compose.yaml on this machine, without containers.

    python -m tests.e2e.stack FOLDER     # runs until interrupted, and prints how to reach it

PostgreSQL, Ceph's S3 gateway, Prefect's server with password and CSRF tokens, and a process worker.
All are ready after about 35 s and use 1.3 GB of memory. Everything listens on the loopback
interface and ends with this process.
"""

import base64
import contextlib
import json
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e import services
from tests.prepared import DEMO
from tests.store import ceph

POOL = "packhouse"
BUCKET = "packhouse"
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def missing() -> str | None:
    """Return what is not installed here and how to install it, or None if the stack can start."""
    if not ceph.is_installed():
        return "no Ceph here: apt-get install radosgw ceph-mon ceph-mgr ceph-osd"
    if services.find_postgres() is None:
        return "no PostgreSQL here: apt-get install postgresql"
    return None


@dataclass(frozen=True, kw_only=True)
class Secrets:
    """Passwords and keys of one run: random, and easy to search for."""

    auth: str = field(default_factory=lambda: f"admin:canary-auth-{secrets.token_hex(12)}")
    database: str = field(default_factory=lambda: f"canary-db-{secrets.token_hex(12)}")
    hub: str = field(default_factory=lambda: f"hf_canary{secrets.token_hex(12)}")
    wandb: str = field(default_factory=lambda: f"canary{secrets.token_hex(17)}")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A running stack, and functions to use it."""

    folder: Path
    origin: str
    secrets: Secrets
    database: services.Database
    server: "subprocess.Popen[bytes]"
    worker: "subprocess.Popen[bytes]"
    environment: dict[str, str]
    """Environment of clients and of the worker, with access to the server and the store."""
    api: "Api"
    """URL of the server's API, with password and token."""

    @property
    def store(self) -> str:
        """Store of published versions."""
        return f"s3://{BUCKET}"

    def call(self, *command: str, **extra: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(services.BIN / command[0]), *command[1:]],
            env=self.environment | extra,
            capture_output=True, text=True, timeout=600, check=False, cwd=services.ROOT,
        )  # fmt: skip


class Api:
    """Call Prefect's REST API with a password and a CSRF token."""

    def __init__(self, origin: str, auth: str) -> None:
        word = base64.b64encode(auth.encode()).decode()
        self.client = httpx.Client(
            base_url=f"{origin}/api", headers={"Authorization": f"Basic {word}"}, timeout=60
        )
        name = str(uuid.uuid4())
        token = self.client.get("/csrf-token", params={"client": name}).json()["token"]
        self.client.headers.update({"Prefect-Csrf-Client": name, "Prefect-Csrf-Token": token})

    def close(self) -> None:
        self.client.close()

    def get(self, path: str) -> Any:
        return self._json(self.client.get(path))

    def post(self, path: str, **body: Any) -> Any:
        return self._json(self.client.post(path, json=body))

    @staticmethod
    def _json(answer: httpx.Response) -> Any:
        if answer.is_error:
            raise RuntimeError(f"{answer.request.url}: {answer.status_code} {answer.text[:2000]}")
        return answer.json() if answer.content else None

    def start(self, deployment: str, **parameters: Any) -> str:
        found = self.get(f"/deployments/name/{deployment}")
        run = self.post(f"/deployments/{found['id']}/create_flow_run", parameters=parameters)
        return str(run["id"])

    def count(self, deployment: str) -> int:
        found = self.get(f"/deployments/name/{deployment}")
        return int(self.post("/flow_runs/count", deployments={"id": {"any_": [found["id"]]}}))

    def wait(self, run_id: str, timeout_s: float = 600) -> dict[str, Any]:
        """Wait until a run has ended and return it as the server stores it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            run = self.get(f"/flow_runs/{run_id}")
            if run["state_type"] in ENDED:
                return run
            time.sleep(0.3)
        raise TimeoutError(f"run {run_id} is {run['state_name']} after {timeout_s:.0f} s")

    def logs(self, run_id: str) -> str:
        rows = self.post("/logs/filter", logs={"flow_run_id": {"any_": [run_id]}}, limit=200)
        return "\n".join(row["message"] for row in rows)

    def artifacts(self, run_id: str) -> dict[str, dict[str, Any]]:
        rows = self.post("/artifacts/filter", artifacts={"flow_run_id": {"any_": [run_id]}})
        return {row["key"]: row for row in rows}


@contextlib.contextmanager
def running(folder: Path, endpoint: str) -> Iterator[Stack]:
    """Start everything except the store, which is at `endpoint`, and stop it afterwards."""
    words = Secrets()
    with contextlib.ExitStack() as started:
        database = started.enter_context(services.postgres(words.database))
        origin, server = started.enter_context(
            services.prefect_server(folder, words.auth, database)
        )
        write_places(folder, BUCKET)
        environment = client_environment(folder, origin, words, endpoint)
        _make_bucket(environment, BUCKET)
        worker = started.enter_context(services.worker(POOL, folder, environment))
        api = Api(origin, words.auth)
        started.callback(api.close)
        yield Stack(
            folder=folder,
            origin=origin,
            secrets=words,
            database=database,
            server=server,
            worker=worker,
            environment=environment,
            api=api,
        )


def write_places(folder: Path, bucket: str) -> None:
    """Write the names for run forms, and the paths that runs may read and write."""
    raw = f"s3://{bucket}/raw"
    places = {
        "sources": {
            "demo-instructions": f"{raw}/instructions.jsonl",
            "demo-chats": f"{raw}/chats.jsonl",
        },
        "tokenizers": {"demo": str(DEMO / "tokenizer")},
        "stores": {"main": f"s3://{bucket}"},
        "recipes": {"demo": str(DEMO / "recipe.yaml")},
        "allow": {"read": [f"{raw}/"], "write": [f"s3://{bucket}/"]},
    }
    (folder / "sources.yaml").write_text(json.dumps(places, indent=1))  # JSON is YAML


def client_environment(folder: Path, origin: str, words: Secrets, endpoint: str) -> dict[str, str]:
    """Return the environment that the compose file gives to workers."""
    return services.clean_environment() | services.PREFECT_QUIET | {
        "PREFECT_HOME": str(folder / "client"),
        "PREFECT_API_URL": f"{origin}/api",
        "PREFECT_API_AUTH_STRING": words.auth,
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",
        "PACKHOUSE_CACHE": str(folder / "cache"),
        "PACKHOUSE_SOURCES": str(folder / "sources.yaml"),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ceph.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": ceph.SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "HF_TOKEN": words.hub,
        "WANDB_API_KEY": words.wandb,
        "PYTHONPATH": str(services.ROOT),
    }  # fmt: skip


def s3_client(environment: dict[str, str]) -> Any:
    """Return a boto3 client of the store, independent of this process's environment."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_DEFAULT_REGION"],
    )


def _make_bucket(environment: dict[str, str], name: str) -> None:
    client = s3_client(environment)
    try:
        client.create_bucket(Bucket=name)
    finally:
        client.close()


def main() -> None:
    """Run a stack until it is interrupted."""
    if lacking := missing():
        sys.exit(lacking)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    folder = Path(sys.argv[1]).resolve()
    with ceph.running(folder / "ceph", ceph.free_port()) as at, running(folder, at) as stack:
        names = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "AWS_ENDPOINT_URL",
                 "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")  # fmt: skip
        lines = [f"export {name}={stack.environment[name]}" for name in names]
        sys.stdout.write("\n".join([f"# UI: {stack.origin}  store: {stack.store}", *lines, ""]))
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()

"""Run many flow runs at once on a real server: none lost, none duplicated, memory flat.

    python -m tests.load.load --runs 200 --at-once 20      # what `make load` runs

Starts Prefect's server on PostgreSQL, with password and CSRF tokens, and a worker that takes at
most `--at-once` runs. The runs of the deployment `prepare/load` are created like an hour's
schedule, compressed into the time that they take. Each run publishes a different version, and the
runs of a dataset come together, so some must queue for its slot. Memory of server, worker and
database is sampled throughout.

With `--processes`, packhouse's own worker starts a process for each run, which costs 5 to 8 s of
CPU before any work. Without it, a worker of the same base class runs each in a thread of its
process, so 200 runs take minutes on two cores. With `--nothing`, the processes do nothing
(`tests.load.nothing`), which shows the worker's own work per run.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tests.e2e import services
from tests.e2e.stack import ENDED, Api, Secrets
from tests.prepared import DEMO
from tests.server_logs import watched

POOL = "load"
RUNS_TOGETHER = 4
"""Runs created together for one dataset, so that some must queue for its slot."""
DATASETS = 25
"""Prefect keeps a thread and a connection for each dataset whose slot a process ever held."""
ROWS = 40


MOST_GROWTH_MIB = 0.25
"""For each process per run, after a quarter of the runs. Measurements: docs/performance.md."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result and cost of the runs."""

    runs: int
    completed: int
    started_more_than_once: int
    versions: int
    doubled_versions: int
    seconds: float
    median_run_s: float
    most_at_once: int
    memory_mib: dict[str, list[float]]
    """By process: after about 1/4, 1/2, 3/4 and all of the runs, and the highest."""
    growth_mib_a_run: dict[str, float]
    """From a quarter of the runs to the last, so that start-up is not counted."""
    publish: bool = True
    """True if each run publishes a version."""

    def is_flat(self) -> bool:
        """Return True if memory stays flat, which cannot be judged from fewer than 100 runs."""
        return self.runs < 100 or max(self.growth_mib_a_run.values()) <= MOST_GROWTH_MIB

    def is_sound(self) -> bool:
        return (
            self.completed == self.runs
            and self.versions == self.runs * self.publish
            and self.started_more_than_once == 0
            and self.doubled_versions == 0
        )


def write_source(folder: Path) -> Path:
    lines = (DEMO / "instructions.jsonl").read_bytes().splitlines(keepends=True)
    file = folder / "load.jsonl"
    file.write_bytes(b"".join([line for line in lines if _is_good(line)][:ROWS]))
    return file


def _is_good(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    keys = ("instruction", "output")
    return isinstance(row, dict) and all(row.get(k) and isinstance(row[k], str) for k in keys)


def recipe(number: int, source: str, tokenizer: str, store: str) -> dict[str, Any]:
    """Return the recipe of a run; every number gives a different version."""
    return {
        "dataset": f"load-{number // RUNS_TOGETHER % DATASETS}",
        "sources": [{"path": source, "format": "alpaca"}],
        "tokenizer": tokenizer,
        "validate": {"max_quarantined": 0.5},
        "pack": {"seq_len": 256 + number},
        "publish": {"store": store},
        "audit": {"max_duplicates": 1},
    }


def create_runs(api: Api, deployment: str, recipes: list[dict[str, Any]], seconds: float) -> None:
    """Create the runs evenly over the seconds, as schedules do over an hour."""
    found = api.get(f"/deployments/name/{deployment}")
    start = time.monotonic()

    def create(numbered: tuple[int, dict[str, Any]]) -> None:
        number, each = numbered
        time.sleep(max(0.0, start + seconds * number / len(recipes) - time.monotonic()))
        api.post(f"/deployments/{found['id']}/create_flow_run", parameters={"recipe": each})

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(create, enumerate(recipes)))


def count_ended(api: Api, deployment: str) -> int:
    found = api.get(f"/deployments/name/{deployment}")
    return int(
        api.post(
            "/flow_runs/count",
            deployments={"id": {"any_": [found["id"]]}},
            flow_runs={"state": {"type": {"any_": sorted(ENDED)}}},
        )
    )


def runs_of(api: Api, deployment: str) -> list[dict[str, Any]]:
    found = api.get(f"/deployments/name/{deployment}")
    rows = []
    while True:
        page = api.post(
            "/flow_runs/filter",
            deployments={"id": {"any_": [found["id"]]}},
            offset=len(rows), limit=200, sort="START_TIME_ASC",
        )  # fmt: skip
        rows += page
        if len(page) < 200:
            return rows


def most_at_once(runs: list[dict[str, Any]]) -> int:
    edges = [(run["start_time"], 1) for run in runs if run["start_time"]]
    edges += [(run["end_time"], -1) for run in runs if run["end_time"]]
    now = most = 0
    for _, step in sorted(edges):
        now += step
        most = max(most, now)
    return most


def _memory(processes: dict[str, int]) -> dict[str, float]:
    """Return the MiB of each process, and of the processes that the worker started."""
    found = {}
    for name, pid in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            started = sum(map(_private, process.children(recursive=True))) / 2**20
            own = _private(process) / 2**20
            found |= {name: own, "runs": started} if name == "worker" else {name: own + started}
    return found


def _private(process: psutil.Process) -> int:
    """Return the bytes that only this process uses: PostgreSQL's processes share most of theirs."""
    with contextlib.suppress(psutil.Error):
        memory = process.memory_full_info()
        return int(memory.uss)
    return 0


def by_quarter(samples: list[tuple[int, float]], runs: int) -> list[float]:
    """Return the medians around each quarter of the runs, and the maximum.

    Args:
        samples: number of ended runs, and MiB.
        runs: total number of runs.

    Example:
        >>> by_quarter([(0, 10), (25, 20), (50, 31), (51, 30), (52, 32), (75, 30), (100, 31)], 100)
        [20, 31, 30, 31, 32]
    """
    found = []
    for quarter in (1, 2, 3, 4):
        at = runs * quarter / 4
        near = sorted(samples, key=lambda sample: abs(sample[0] - at))[:1]
        near += [sample for sample in samples if abs(sample[0] - at) <= runs / 20]
        found.append(sorted(mib for _, mib in near)[len(near) // 2])
    return [round(mib, 1) for mib in (*found, max(mib for _, mib in samples))]


def measure(arguments: argparse.Namespace) -> Outcome:
    words = Secrets()
    with contextlib.ExitStack() as started:
        folder = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="packhouse-load-")))
        database = started.enter_context(services.postgres(words.database))
        origin, server = started.enter_context(
            services.prefect_server(folder, words.auth, database)
        )
        api = started.enter_context(contextlib.closing(Api(origin, words.auth)))
        environment = _environment(folder, origin, words)
        worker = started.enter_context(_worker(folder, environment, arguments))
        services.wait_until(lambda: _has_pool(api), "the worker's pool", worker)
        _deploy(folder, environment, arguments.nothing)
        processes = {"server": server.pid, "worker": worker.pid, "database": database.pid}
        return _run(folder, api, processes, arguments)


def _run(
    folder: Path, api: Api, processes: dict[str, int], arguments: argparse.Namespace
) -> Outcome:
    store = folder / "store"
    source = write_source(folder)
    tokenizer = str(DEMO / "tokenizer")
    recipes = [recipe(n, str(source), tokenizer, str(store)) for n in range(arguments.runs)]
    memory = {}
    start, shown, ended = time.monotonic(), 0.0, 0
    with ThreadPoolExecutor(1) as beside:
        created = beside.submit(create_runs, api, "prepare/load", recipes, arguments.spread)
        while ended < arguments.runs and time.monotonic() < start + arguments.patience:
            # Until the next memory sample: dozens of runs that do nothing end within five seconds.
            time.sleep(1 if arguments.nothing else 5)
            ended = count_ended(api, "prepare/load")
            for name, mib in _memory(processes).items():
                memory.setdefault(name, []).append((ended, mib))
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                now = {name: round(samples[-1][1]) for name, samples in memory.items()}
                sys.stderr.write(f"{shown - start:6.0f} s {ended} ended, MiB {now}\n")
                sys.stderr.flush()
        created.result()
    seconds = time.monotonic() - start
    outcome = _outcome(runs_of(api, "prepare/load"), store, seconds, memory)
    return replace(outcome, publish=not arguments.nothing)


def _outcome(
    runs: list[dict[str, Any]],
    store: Path,
    seconds: float,
    memory: dict[str, list[tuple[int, float]]],
) -> Outcome:
    versions = [path.parent.name for path in store.glob("*/v/*/manifest.json")]
    addresses = [name.split(".")[0] for name in versions]
    times = sorted(run["total_run_time"] for run in runs)
    quarters = {name: by_quarter(samples, len(runs)) for name, samples in memory.items()}
    return Outcome(
        runs=len(runs),
        completed=sum(run["state_type"] == "COMPLETED" for run in runs),
        started_more_than_once=sum(run["run_count"] != 1 for run in runs),
        versions=len(versions),
        doubled_versions=len(addresses) - len(set(addresses)),
        seconds=round(seconds, 1),
        median_run_s=round(times[len(times) // 2], 2),
        most_at_once=most_at_once(runs),
        memory_mib=quarters,
        growth_mib_a_run={
            name: round((mib[3] - mib[0]) / (len(runs) * 3 / 4), 3)
            for name, mib in quarters.items()
        },
    )


def _environment(folder: Path, origin: str, words: Secrets) -> dict[str, str]:
    places = {"allow": {"read": [str(folder), str(DEMO)], "write": [str(folder)]}}
    (folder / "sources.yaml").write_text(json.dumps(places))
    own = {
        "PREFECT_HOME": str(folder / "client"),
        "PREFECT_API_URL": f"{origin}/api",
        "PREFECT_API_AUTH_STRING": words.auth,
        "PACKHOUSE_CACHE": str(folder / "cache"),
        "PACKHOUSE_SOURCES": str(folder / "sources.yaml"),
        "PYTHONPATH": str(services.ROOT),
    }
    return services.clean_environment() | services.PREFECT_QUIET | own


@contextlib.contextmanager
def _worker(
    folder: Path, environment: dict[str, str], arguments: argparse.Namespace
) -> Iterator[Any]:
    if arguments.processes or arguments.nothing:
        with services.worker(POOL, folder, environment, arguments.at_once) as started:
            yield started
        return
    command = [sys.executable, "-m", "tests.load.thread_worker", POOL, str(arguments.at_once)]
    settings = {"PREFECT_HOME": str(folder / "worker"), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    log = folder / "logs" / "worker.log"
    with watched(log), services.process(command, log, {**environment, **settings}) as started:
        yield started


def _has_pool(api: Api) -> bool:
    return bool(api.post("/work_pools/filter", work_pools={"name": {"any_": [POOL]}}))


def _deploy(folder: Path, environment: dict[str, str], nothing: bool) -> None:
    file = folder / "prefect.yaml"
    program = f"{sys.executable} -S {Path(__file__).with_name('nothing.py')}"
    deployment = {
        "name": "load",
        "entrypoint": "flows.prepare.prepare",
        "work_pool": {"name": POOL, "job_variables": {"command": program} if nothing else {}},
    }
    file.write_text(json.dumps({"deployments": [deployment]}))
    command = [str(services.BIN / "prefect"), "--no-prompt", "deploy", "--all", "--prefect-file"]

    done = subprocess.run(
        [*command, str(file)],
        env=environment, cwd=services.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"prefect deploy: {done.stdout}{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=20)
    parser.add_argument("--spread", type=float, default=60, help="seconds over which runs come")
    parser.add_argument("--patience", type=float, default=3600, help="seconds until giving up")
    parser.add_argument("--processes", action="store_true", help="a process for each run")
    parser.add_argument("--nothing", action="store_true", help="the same, and they do nothing")
    outcome = measure(parser.parse_args())
    sys.stdout.write(json.dumps(asdict(outcome), indent=1) + "\n")
    sys.exit(not (outcome.is_sound() and outcome.is_flat()))


if __name__ == "__main__":
    main()

"""The same flow on every engine (real processes, Dask, Ray), with kill -9."""

import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

import schemas
from packhouse.errors import ConfigError, TransientError
from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare as prepare_chain
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from tests.prepared import TOKENIZER

pytestmark = [
    pytest.mark.usefixtures("real_reports"),  # processes of other engines draw them
    pytest.mark.prefect,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # clusters start slowly on a busy machine
    # Clusters leave sockets and streams to the garbage collector and use deprecated functions.
    pytest.mark.filterwarnings("ignore"),
]

ENGINES = ["processes", "dask", "ray"]  # threads: test_prepare_flow.py
TITLES = {f"ray::{name}" for name in ("validate", "format", "tokenize")}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [
        {
            "instruction": f"What is {n} plus {n + 1}?",
            "output": f"It is {2 * n + 1}. " * (n % 9 + 1),
        }
        for n in range(120)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr("packhouse.run.steps.validate.MAX_SHARD_BYTES", 1500)  # about 9 shards
    monkeypatch.setattr("tasks.engines._LEAST_BYTES", dict.fromkeys(ENGINES, 0))


def recipe_to(folder, rows):
    path = folder / "recipe.yaml"
    path.write_text(
        "dataset: sums\n"
        f"sources: [{{path: {rows}, format: alpaca}}]\n"
        f"tokenizer: {TOKENIZER}\n"
        "pack: {seq_len: 128}\n"
        "split: {eval_fraction: 0.2}\n"
        f"publish: {{store: {folder / 'store'}}}\n"
    )
    return load_recipe(path)


def published(recipe):
    root = Path(recipe.publish.store) / recipe.dataset / "v"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def expected(tmp_path, rows, small_shards):
    """The version that one process publishes."""
    folder = tmp_path / "local"
    folder.mkdir()
    recipe = recipe_to(folder, rows)
    workspace = Workspace(cache=folder / "cache", check=schemas.check)
    prepare_chain(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)
    return published(recipe)


@pytest.fixture(scope="module")
def dask_cluster():
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray_cluster():
    os.environ.update(RAY_USAGE_STATS_ENABLED="0")
    import ray

    for tries_left in (2, 1, 0):
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                log_to_driver=False,
                namespace="prefect",
            )
            break
        except Exception:  # Ray gives a node 30 seconds to start
            if not tries_left:
                raise
    yield ray
    ray.shutdown()


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """An engine with two workers; for Dask and Ray, on an existing cluster."""
    monkeypatch.setenv("PACKHOUSE_WORKERS", "2")
    if request.param == "dask":
        cluster = request.getfixturevalue("dask_cluster")
        monkeypatch.setenv("PACKHOUSE_RUNNER_ADDRESS", cluster.scheduler_address)
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        monkeypatch.setenv("PACKHOUSE_RUNNER_ADDRESS", "auto")
    return request.param


def worker_pids(engine, request):
    if engine == "dask":
        cluster = request.getfixturevalue("dask_cluster")
        return [worker.pid for worker in cluster.workers.values() if worker.pid]
    if engine == "ray":
        return [  # by the titles that Ray gives them; its agents are called ray:: too
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if "".join(process.info["cmdline"] or [""]).strip() in TITLES
        ]
    return [process.pid for process in multiprocessing.active_children()]


def kill_in_the_middle(cache, pids, step):
    """Kill a worker with SIGKILL as soon as a job of the step is done; return its number."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        found = pids() if list((cache / "steps" / step).glob("*/receipt.json")) else []
        if found:
            os.kill(found[0], signal.SIGKILL)
            return found[0]
        time.sleep(0.002)
    raise AssertionError("no worker was seen")


def has_chain(edges):
    """Return True if the run graph leads from validate to publish."""
    steps = ("validate", "format", "tokenize", "pack", "split", "publish")
    return all(before in edges[after] for before, after in pairwise(steps))


def test_every_engine_publishes_the_same_bytes_even_if_a_worker_is_killed(
    engine, expected, rows, tmp_path, request, read_graph
):
    from flows.prepare import prepare

    recipe, cache = recipe_to(tmp_path, rows), tmp_path / "cache"
    with ThreadPoolExecutor(1) as pool:
        pids = lambda: worker_pids(engine, request)  # noqa: E731
        killed = pool.submit(kill_in_the_middle, cache, pids, "validate")
        state = prepare(recipe, cache=str(cache), runner=engine, return_state=True)
        assert not psutil.pid_exists(killed.result())
    assert published(recipe) == expected
    assert has_chain(read_graph(state.state_details.flow_run_id))


def test_processes_without_a_server_publish_the_same_bytes_even_if_one_is_killed(
    expected, rows, tmp_path, monkeypatch
):
    monkeypatch.setattr("packhouse.run.step._LEAST_BYTES", 0)
    recipe, cache = recipe_to(tmp_path, rows), tmp_path / "cache"
    workspace = Workspace(cache=cache, check=schemas.check)
    with (
        LocalRunner(recipe=recipe, workspace=workspace, workers=2) as run,
        ThreadPoolExecutor(1) as pool,
    ):
        pids = lambda: [process.pid for process in multiprocessing.active_children()]  # noqa: E731
        killed = pool.submit(kill_in_the_middle, cache, pids, "validate")
        prepare_chain(recipe, run, cache)
        assert killed.result()
    assert published(recipe) == expected


def test_an_engine_that_keeps_dying_is_reported_in_a_sentence(
    rows, tmp_path, small_shards, monkeypatch
):
    from concurrent.futures.process import BrokenProcessPool

    monkeypatch.setattr("packhouse.run.step._LEAST_BYTES", 0)
    monkeypatch.setattr(
        "packhouse.run.step.LocalRunner._run_in_pool",
        lambda *_: (_ for _ in ()).throw(BrokenProcessPool("killed")),
    )
    recipe = recipe_to(tmp_path, rows)
    run = LocalRunner(recipe=recipe, workspace=Workspace(cache=tmp_path / "cache"), workers=2)
    with pytest.raises(TransientError, match="were killed 4 times, perhaps because 2 shards"):
        prepare_chain(recipe, run, tmp_path / "cache")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"PACKHOUSE_RUNNER": "spark"},
            "unknown runner 'spark'. Known: threads, processes, dask, ray",
        ),
        ({"PACKHOUSE_WORKERS": "0"}, "PACKHOUSE_WORKERS is '0'"),
        ({"PACKHOUSE_RUNNER_ADDRESS": "tcp://x:1"}, "runner 'threads' does not accept an address"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_before_any_work(environment, message, monkeypatch):
    from tasks.engines import choose_engine

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        choose_engine()

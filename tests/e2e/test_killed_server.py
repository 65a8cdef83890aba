"""Kill the server of docs/how-to/server.md while runs hold slots and wait for them."""

import contextlib
import json

import psutil
import pytest

from tests.e2e import services
from tests.e2e.stack import Api, Secrets
from tests.prepared import DEMO

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

POOL = "killed"


@pytest.fixture
def environment(tmp_path):
    """Environment of worker and runs, without the server's address and password."""
    places = {"allow": {"read": [str(DEMO)], "write": [str(tmp_path)]}}
    (tmp_path / "sources.yaml").write_text(json.dumps(places))
    own = {
        "PACKHOUSE_CACHE": str(tmp_path / "cache"),
        "PACKHOUSE_SOURCES": str(tmp_path / "sources.yaml"),
        "PYTHONPATH": str(services.ROOT),
        "HELD_FOLDER": str(tmp_path),
    }
    return services.clean_environment() | services.PREFECT_QUIET | own


def deploy(api):
    flow = api.post("/flows/", name="prepare")["id"]
    entrypoint = "tests.served.held_flow.prepare"
    api.post("/deployments/", name="held", flow_id=flow, entrypoint=entrypoint, work_pool_name=POOL)


def recipe(tmp_path, seq_len):
    return {
        "dataset": "killed",
        "sources": [{"path": str(DEMO / "instructions.jsonl"), "format": "alpaca"}],
        "tokenizer": str(DEMO / "tokenizer"),
        "validate": {"max_quarantined": 0.05},
        "pack": {"seq_len": seq_len},
        "publish": {"store": str(tmp_path / "store")},
    }


def kill(server):
    for process in [*psutil.Process(server.pid).children(recursive=True), server]:
        process.kill()
    server.wait()


@pytest.mark.skipif(
    services.find_postgres() is None, reason="no PostgreSQL: apt-get install postgresql"
)
def test_every_run_ends_although_the_server_was_killed_in_the_middle(tmp_path, environment):
    """One run holds the slot of the dataset, and the others wait for it."""
    words, port = Secrets(), services.free_port()
    with contextlib.ExitStack() as servers, contextlib.ExitStack() as started:
        database = servers.enter_context(services.postgres(words.database))
        first = servers.enter_context(contextlib.ExitStack())
        origin, server = first.enter_context(
            services.prefect_server(tmp_path, words.auth, database, port)
        )
        environment |= {"PREFECT_API_URL": f"{origin}/api", "PREFECT_API_AUTH_STRING": words.auth}
        worker = services.worker(POOL, tmp_path, environment, limit=5, loses_its_server=True)
        started.enter_context(worker)
        api = started.enter_context(contextlib.closing(Api(origin, words.auth)))
        pool = {"name": {"any_": [POOL]}}
        services.wait_until(lambda: bool(api.post("/work_pools/filter", work_pools=pool)), "pool")
        deploy(api)
        (tmp_path / "hold-killed-pack").touch()
        runs = [
            api.start("prepare/held", recipe=recipe(tmp_path, 256 + number)) for number in range(3)
        ]
        services.wait_until(
            lambda: (
                (tmp_path / "killed-pack").exists()
                and all("waiting until no other run works on" in api.logs(run) for run in runs)
            ),
            "run that holds the slot, and two that wait for it",
        )

        kill(server)
        first.close()
        servers.enter_context(services.prefect_server(tmp_path, words.auth, database, port))
        (tmp_path / "hold-killed-pack").unlink()

        ended = [api.wait(run, 600) for run in runs]
        assert [run["state_type"] for run in ended] == ["COMPLETED"] * 3
        limits = api.post("/v2/concurrency_limits/filter")
        assert [limit["active_slots"] for limit in limits] == [0]

"""An embedded Prefect server shared by all tests of flows."""

import os
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.server_logs import watched

_MARKS = (
    pytest.mark.prefect,
    # Prefect's server and client leave sockets and streams to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
)

# Set here because Prefect reads it at import. The user's profile and results are not touched.
_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "packhouse",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in _MARKS:
                item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("prefect")
    os.environ.update(_SETTINGS, PREFECT_HOME=str(home))
    from prefect.server.api import server
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    log = home / "server.log"
    with (
        log.open("ab") as sink,
        # Prefect's own server on SQLite refuses a write that began as a read during another write.
        watched(log, "database is locked"),
        pytest.MonkeyPatch.context() as patch,
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),  # saves 1 s per flow run
    ):
        logged = partial(subprocess.Popen, stdout=sink, stderr=sink)
        with_log = SimpleNamespace(**vars(subprocess) | {"Popen": logged})
        patch.setattr(server, "subprocess", with_log)  # of that module only
        with prefect_test_harness(server_startup_timeout=600):
            patch.undo()
            yield


@pytest.fixture(scope="session")
def read_graph():
    """Return the edges of Prefect's run graph: for each step, the steps that it depends on."""
    from prefect.client.orchestration import get_client

    def read(flow_run_id: object) -> dict[str, set[str]]:
        deadline = time.monotonic() + 120
        nodes = {}
        with get_client(sync_client=True) as client:
            while not any(
                node["label"].startswith("publish") and node["state_type"] == "COMPLETED"
                for node in nodes.values()
            ):
                assert time.monotonic() < deadline, f"the server knows of {nodes}"
                time.sleep(0.1)  # task runs reach the server as events, a little later
                graph = client.request(
                    "GET", "/flow_runs/{id}/graph-v2", path_params={"id": flow_run_id}
                )
                nodes = dict(graph.json()["nodes"])
        step = {number: node["label"].split(":")[0] for number, node in nodes.items()}
        edges = {name: set() for name in step.values()}
        for number, node in nodes.items():
            edges[step[number]] |= {step[parent["id"]] for parent in node["parents"]}
        return edges

    return read

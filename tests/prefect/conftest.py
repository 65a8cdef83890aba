"""One embedded Prefect server for all tests of flows."""

import os
from collections.abc import Iterator

import pytest

# Read when Prefect is imported, hence here: nothing of the user's profile or results is touched.
_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "packhouse",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


@pytest.fixture(scope="session", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ.update(_SETTINGS, PREFECT_HOME=str(tmp_path_factory.mktemp("prefect")))
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    with (
        prefect_test_harness(server_startup_timeout=90),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),  # saves 1 s a flow run
    ):
        yield

"""A small `make load` and its totals: three runs through the real process worker.

120 runs that do nothing measure the worker's own memory.
"""

from argparse import Namespace

import pytest

from tests.e2e.services import find_postgres
from tests.load.load import measure


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_runs_that_come_together_are_neither_lost_nor_doubled(deployed):
    """Two runs share a dataset and queue for its slot; every run publishes a different version."""
    from tests.e2e.deployments import demo_recipe
    from tests.e2e.stack import BUCKET, s3_client

    recipes = [demo_recipe(f"load-{n // 2}", pack={"seq_len": 600 + n}) for n in range(3)]
    started = [deployed.api.start("prepare/form-prepare", recipe=recipe) for recipe in recipes]
    ended = [deployed.api.wait(run_id, 600) for run_id in started]
    assert [run["state_type"] for run in ended] == ["COMPLETED"] * 3
    assert [run["run_count"] for run in ended] == [1] * 3
    client = s3_client(deployed.environment)
    try:
        found = client.list_objects_v2(Bucket=BUCKET, Prefix="load-")["Contents"]
    finally:
        client.close()
    versions = [key["Key"] for key in found if key["Key"].endswith("/manifest.json")]
    assert len(versions) == len({key.split("/")[2].split(".")[0] for key in versions}) == 3


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.soak
@pytest.mark.skipif(find_postgres() is None, reason="no PostgreSQL: apt-get install postgresql")
def test_memory_of_the_worker_does_not_grow_with_its_runs():
    """Memory grows by 0.02 MiB per run; with `prefect worker start`, by 0.8."""
    # Over a minute and a half: about ten runs, of a MiB each, end between two collections.
    asked = {"runs": 120, "at_once": 20, "spread": 90, "patience": 1500}
    outcome = measure(Namespace(**asked, processes=False, nothing=True))
    assert outcome.is_sound()
    assert outcome.is_flat(), outcome

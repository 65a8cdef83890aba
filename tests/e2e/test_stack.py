"""The stack of docker/compose.yaml without containers: real worker, PostgreSQL and Ceph."""

import json

import pytest

from packhouse import load_packed
from tests.e2e.deployments import demo_recipe
from tests.e2e.stack import POOL, s3_client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def completed(stack, deployment, **parameters):
    """A run of a deployment through the worker, and its state on the server."""
    run = stack.api.wait(stack.api.start(deployment, **parameters))
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    return run


@pytest.fixture(scope="module")
def prepared(deployed):
    return completed(deployed, "prepare/form-prepare", recipe=demo_recipe("e2e-demo"))


@pytest.fixture(scope="module")
def refreshed(deployed):
    return completed(deployed, "refresh/nightly-refresh", recipe="demo", store="main")


def listing(stack, prefix):
    client = s3_client(stack.environment)
    try:
        found = client.list_objects_v2(Bucket="packhouse", Prefix=prefix)
    finally:
        client.close()
    return [item["Key"] for item in found.get("Contents", [])]


def markdown(stack, run):
    artifacts = stack.api.artifacts(run["id"]).values()
    return "\n".join(a["data"] for a in artifacts if a["type"] == "markdown")


def test_the_server_keeps_its_runs_in_postgresql(stack, prepared):
    rows = stack.database.ask(f"select state_type from flow_run where id = '{prepared['id']}'")
    assert rows == [["COMPLETED"]]


def test_the_worker_is_known_to_be_online(stack):
    workers = stack.api.post(f"/work_pools/{POOL}/workers/filter")
    assert [worker["status"] for worker in workers] == ["ONLINE"]


def test_a_run_through_the_worker_publishes_a_version_that_verifies(stack, prepared):
    done = stack.call("packhouse", "verify", f"{stack.store}/e2e-demo", "--json")
    assert done.returncode == 0, done.stderr
    assert listing(stack, "e2e-demo/v/")


def test_the_published_version_loads(stack, prepared, monkeypatch):
    for name, value in stack.environment.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    train = load_packed(f"{stack.store}/e2e-demo", split="train", cache=stack.folder / "loaded")
    shown = json.loads(stack.call("packhouse", "show", f"{stack.store}/e2e-demo", "--json").stdout)
    facts = shown["counts"]["statistics"]["train"]
    assert len(train) == facts["num_packs"]
    assert sum(len(row["input_ids"]) for row in train) == facts["num_tokens"]


def test_the_run_left_its_account_in_the_ui(stack, prepared):
    page = markdown(stack, prepared)
    assert "| validate | 304 | 295 |" in page
    assert f"{stack.store}/e2e-demo" in page
    assert "no other run works on 'e2e-demo'; starting" in stack.api.logs(prepared["id"])


def test_a_recipe_is_refreshed_and_a_second_refresh_finds_nothing_to_do(stack, refreshed):
    versions = listing(stack, "demo/v/")
    assert versions
    again = completed(stack, "refresh/nightly-refresh", recipe="demo", store="main")
    assert "unchanged" in markdown(stack, again)
    assert listing(stack, "demo/v/") == versions


def test_the_weekly_check_verifies_all_versions_from_the_store(stack, prepared, refreshed):
    run = completed(stack, "verify/weekly-verify", store="main")
    (table,) = stack.api.artifacts(run["id"]).values()
    rows = {row["dataset"]: row["intact"] for row in json.loads(table["data"])}
    assert {"e2e-demo", "demo"} <= set(rows)
    assert set(rows.values()) == {"yes"}

import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter
from prefect.flow_engine import run_flow_sync

import schemas
from flows.prepare import prepare
from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare as prepare_chain
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.run.steps import STEPS

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "recipe.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def recipe(folder):
    return load_recipe(DEMO, (f"publish.store={folder / 'store'}",))


@pytest.fixture(scope="module")
def runs(recipe, folder):
    """Two runs of the demo with the same cache: their states, and the lines of their logs."""
    found = []
    logger, handler = logging.getLogger("packhouse.flows"), Lines()
    logger.addHandler(handler)
    for _ in range(2):
        handler.lines = []
        state = prepare(recipe, cache=str(folder / "cache"), return_state=True)
        found.append(SimpleNamespace(state=state, log=handler.lines, result=state.result()))
    logger.removeHandler(handler)
    return found


class Lines(logging.Handler):
    """Keeps (level, message) of each line, with `1 s` in place of all times."""

    def emit(self, record):
        text = re.sub(r"\d+\.\d s", "1 s", record.getMessage())
        self.lines.append((record.levelname, text))


def task_states(flow_run_id):
    """States of the flow run's tasks; they reach the server as events, a little later."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        states = read_task_states(flow_run_id)
        if "publish: all records" in states and not {"Running", "Pending"} & set(states.values()):
            return states
        time.sleep(0.1)  # between two requests to the server
    raise AssertionError(f"the server knows of {states}")


def read_task_states(flow_run_id):
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run_id]}))
    return {run.name: run.state.name if run.state else "Pending" for run in runs}


def test_the_flow_publishes_the_same_version_and_bytes_as_a_local_run(runs, folder, tmp_path):
    flow = runs[0].result
    workspace = Workspace(cache=tmp_path / "other", check=schemas.check)
    own = load_recipe(DEMO, (f"publish.store={tmp_path / 'store'}",))
    local = prepare_chain(own, LocalRunner(recipe=own, workspace=workspace), tmp_path)

    def files(place):
        version = place / "store" / "demo" / "v" / flow.version
        return {path.name: path.read_bytes() for path in version.rglob("*") if path.is_file()}

    assert local.version == flow.version
    assert files(tmp_path) == files(folder)


def test_the_tasks_of_the_flow_are_the_steps_of_the_chain_in_order():
    from flows.prepare import STEPS as tasks

    assert [(task.name, task.description) for task in tasks] == [
        (step.name, step.title) for step in STEPS
    ]


def test_the_run_graph_shows_the_way_of_the_data(runs, read_graph):
    assert read_graph(runs[0].state.state_details.flow_run_id) == {
        "validate": set(),
        "format": {"validate"},
        "tokenize": {"format"},
        "pack": {"tokenize"},
        "split": {"pack"},
        "audit": {"pack"},
        "files": {"pack"},
        "publish": {"split", "audit", "files"},
    }


def test_workers_with_separate_disks_share_their_steps_through_a_mirror(tmp_path, monkeypatch):
    recipe = load_recipe(DEMO, (f"publish.store={tmp_path / 'store'}",))
    monkeypatch.setenv("PACKHOUSE_CACHE_MIRROR", f"file://{tmp_path / 'mirror'}")
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "one"))
    first = prepare(recipe)
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "two"))
    second = prepare(recipe)

    assert (first.created, second.created) == (True, False)
    assert not any(receipt.cached for receipt in first.receipts)
    assert all(receipt.cached for receipt in second.receipts)
    assert second.receipts[0].folder.startswith(str(tmp_path / "two"))


def test_a_second_run_shows_every_step_as_cached(runs):
    first, again = (task_states(run.state.state_details.flow_run_id) for run in runs)
    assert set(first.values()) == {"Completed"}
    assert set(again) <= set(first)
    assert set(again.values()) == {"Cached"}


def test_the_log_tells_what_each_step_did_with_the_rows(runs):
    first, again = (run.log for run in runs)
    (warning,) = [text for level, text in first if level == "WARNING"]
    assert warning.startswith("validate: 304 rows in, 295 rows out; quarantined: duplicate_key 1, ")
    assert warning.endswith(
        "(1 s); the first duplicate_key is instructions/instructions.jsonl line 84: the key "
        "'output' occurs twice in one object"
    )
    assert ("INFO", "tokenize: 295 rows in, 295 rows out, 30,246 tokens (1 s)") in first
    assert ("INFO", "files: 4 jobs (1 s)") in first
    (ledger,) = [text for _, text in first if text.startswith("the ledger of the run\n")]
    assert "validate      304       295            9 " in ledger
    assert "pack dropped: over_seq_len 1 row with 759 tokens" in ledger.splitlines()[-1]
    assert ("INFO", "tokenize: 295 rows in, 295 rows out, 30,246 tokens (cached)") in again


def test_artifacts_show_the_ledger_and_the_bad_rows(runs):
    prepared = runs[0].result
    run_id = ArtifactFilterFlowRunId(any_=[runs[0].state.state_details.flow_run_id])
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=run_id))
    artifacts = {a.key: a for a in found}

    code = artifacts["demo-version"].data.partition("```python\n")[2].partition("```")[0]
    found = {}
    exec(code, found)
    assert len(found["train"]) == prepared.published.statistics["train"].num_packs
    assert prepared.version in artifacts["demo-version"].data
    assert "| validate | 304 | 295 |" in artifacts["demo-version"].data
    assert "unknown_role" in artifacts["demo-quarantine"].data
    assert '"source": "instructions"' in artifacts["demo-audit"].data
    assert "100.00%" in artifacts["demo-audit"].data


def test_the_version_is_an_asset_made_from_its_sources(runs, folder):
    prepared = runs[0].result
    version = f"file://{folder}/store/demo/v/{prepared.version}"
    made = received("prefect.asset.materialization.succeeded", version)
    assert made["resource"]["prefect.resource.name"] == f"demo {prepared.version}"
    related = {
        (each["prefect.resource.role"], each["prefect.resource.id"]) for each in made["related"]
    }
    sources = {f"file://{DEMO.parent / name}" for name in ("chats.jsonl", "instructions.jsonl")}
    assert {key for role, key in related if role == "asset"} == sources
    assert ("asset-materialized-by", "packhouse") in related
    train = prepared.published.statistics["train"]
    assert made["payload"]["tokens"]["train"] == train.num_tokens
    assert made["payload"]["quarantined"] == 9
    for source in sources:
        received("prefect.asset.referenced", source)


def received(event, resource):
    """Return the event of this resource on the server; events arrive a little later."""
    wanted = {"event": {"name": [event]}, "resource": {"id": [resource]}}
    wanted["occurred"] = {"since": "2020-01-01T00:00:00Z"}
    deadline = time.monotonic() + 120
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            answer = client.request("POST", "/events/filter", json={"filter": wanted})
            if found := answer.json()["events"]:
                return found[0]
            time.sleep(0.1)  # between two requests to the server
    raise AssertionError(f"no event {event} of {resource}")


def test_only_a_name_that_a_person_typed_stays(recipe, runs, folder):
    """The doctest of `tasks.hooks.is_made_up` has other names."""
    given = {"recipe": recipe, "cache": str(folder / "cache")}
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(prepare, parameters=given, name="Small-fix")
        run_flow_sync(prepare, flow_run=run, parameters=given)  # as a worker does
        assert client.read_flow_run(run.id).name == "Small-fix"
        named_by_prefect = runs[0].state.state_details.flow_run_id
        assert client.read_flow_run(named_by_prefect).name == "prepare demo"

import re
import shutil
import time
from pathlib import Path

import pytest

import schemas
from packhouse.errors import QuarantineLimitError
from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare as prepare_chain
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.run.steps import STEPS

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "recipe.yaml"


@pytest.fixture
def recipe(tmp_path):
    return load_recipe(DEMO, (f"publish.store={tmp_path / 'store'}",))


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
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run_id]}))
    return {run.name: run.state.name if run.state else "Pending" for run in runs}


def test_the_flow_publishes_the_same_version_and_bytes_as_a_local_run(recipe, tmp_path):
    from flows.prepare import prepare

    flow = prepare(recipe, cache=str(tmp_path / "cache"))
    version = tmp_path / "store" / "demo" / "v" / flow.version
    through_prefect = {p.name: p.read_bytes() for p in version.rglob("*") if p.is_file()}
    shutil.rmtree(tmp_path / "store")
    workspace = Workspace(cache=tmp_path / "other", check=schemas.check)
    local = prepare_chain(recipe, LocalRunner(recipe=recipe, workspace=workspace), tmp_path)

    assert local.version == flow.version
    assert {p.name: p.read_bytes() for p in version.rglob("*") if p.is_file()} == through_prefect


def test_the_tasks_of_the_flow_are_the_steps_of_the_chain_in_order():
    from flows.prepare import STEPS as tasks

    assert [(task.name, task.description) for task in tasks] == [
        (step.name, step.title) for step in STEPS
    ]


def test_the_run_graph_shows_the_way_of_the_data(recipe, tmp_path, read_graph):
    from flows.prepare import prepare

    state = prepare(recipe, cache=str(tmp_path / "cache"), return_state=True)
    assert read_graph(state.state_details.flow_run_id) == {
        "validate": set(),
        "format": {"validate"},
        "tokenize": {"format"},
        "pack": {"tokenize"},
        "split": {"pack"},
        "audit": {"pack"},
        "files": {"pack"},
        "publish": {"split", "audit", "files"},
    }


def test_workers_with_separate_disks_share_their_steps_through_a_mirror(
    recipe, tmp_path, monkeypatch
):
    from flows.prepare import prepare

    monkeypatch.setenv("PACKHOUSE_CACHE_MIRROR", f"file://{tmp_path / 'mirror'}")
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "one"))
    first = prepare(recipe)
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "two"))
    second = prepare(recipe)

    assert (first.created, second.created) == (True, False)
    assert not any(receipt.cached for receipt in first.receipts)
    assert all(receipt.cached for receipt in second.receipts)
    assert second.receipts[0].folder.startswith(str(tmp_path / "two"))


def test_a_second_run_shows_every_step_as_cached(recipe, tmp_path):
    from flows.prepare import prepare

    first = prepare(recipe, cache=str(tmp_path / "cache"), return_state=True)
    second = prepare(recipe, cache=str(tmp_path / "cache"), return_state=True)

    states = task_states(first.state_details.flow_run_id)
    assert set(states.values()) == {"Completed"}
    again = task_states(second.state_details.flow_run_id)
    assert set(again) <= set(states)
    assert set(again.values()) == {"Cached"}


def test_a_user_mistake_fails_the_flow_at_once_and_publishes_nothing(tmp_path):
    from flows.prepare import prepare

    overrides = (f"publish.store={tmp_path / 'store'}", "validate.max_quarantined=0")
    recipe = load_recipe(DEMO, overrides)
    with pytest.raises(QuarantineLimitError, match="9 of 304"):
        prepare(recipe, cache=str(tmp_path / "cache"))
    assert not (tmp_path / "store").exists()


def test_the_log_tells_what_each_step_did_with_the_rows(recipe, tmp_path, caplog):
    from flows.prepare import prepare

    def told():
        caplog.clear()
        prepare(recipe, cache=str(tmp_path / "cache"))
        lines = [r for r in caplog.records if r.name == "packhouse.flows"]
        return [(r.levelname, re.sub(r"\d+\.\d s", "1 s", r.getMessage())) for r in lines]

    first = told()
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
    assert "pack dropped: over_seq_len 1 row\n" in ledger
    assert ("INFO", "tokenize: 295 rows in, 295 rows out, 30,246 tokens (cached)") in told()


def test_artifacts_show_the_ledger_and_the_bad_rows(recipe, tmp_path):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import ArtifactSort

    from flows.prepare import prepare

    prepared = prepare(recipe, cache=str(tmp_path / "cache"))
    with get_client(sync_client=True) as client:  # the server also has those of other tests
        newest_first = client.read_artifacts(sort=ArtifactSort.CREATED_DESC)
    artifacts = {a.key: a for a in reversed(newest_first)}

    code = artifacts["demo-version"].data.partition("```python\n")[2].partition("```")[0]
    found = {}
    exec(code, found)
    assert len(found["train"]) == prepared.published.statistics["train"].num_packs
    assert prepared.version in artifacts["demo-version"].data
    assert "| validate | 304 | 295 |" in artifacts["demo-version"].data
    assert "unknown_role" in artifacts["demo-quarantine"].data
    assert '"source": "instructions"' in artifacts["demo-audit"].data
    assert "100.00%" in artifacts["demo-audit"].data


def test_the_version_is_an_asset_made_from_its_sources(recipe, tmp_path):
    from flows.prepare import prepare

    prepared = prepare(recipe, cache=str(tmp_path / "cache"))
    version = f"file://{tmp_path}/store/demo/v/{prepared.version}"
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
    from prefect.client.orchestration import get_client

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


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("diligent-loon", "prepare demo"),
        ("Ergonomic-Sushi", "prepare demo"),
        ("theta42-kepler", "prepare demo"),
        ("Small-fix", "Small-fix"),
    ],
)
def test_a_name_that_a_person_typed_stays(given, shown, recipe, tmp_path):
    from prefect.client.orchestration import get_client

    from flows.prepare import prepare

    with get_client(sync_client=True) as client:
        run = client.create_flow_run(prepare, parameters={"recipe": recipe}, name=given)
    state = run_flow(prepare, run, {"recipe": recipe, "cache": str(tmp_path / "cache")})
    assert state.is_completed()
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run.id).name == shown


def run_flow(flow, run, parameters):
    """Execute a flow run that already exists on the server, as a worker does."""
    from prefect.flow_engine import run_flow_sync

    return run_flow_sync(flow, flow_run=run, parameters=parameters, return_type="state")


def test_the_form_refuses_a_bad_value_before_a_run_starts(recipe):
    from prefect.exceptions import ParameterTypeError

    from flows.prepare import prepare

    raw = recipe.model_dump(mode="json", by_alias=True)
    raw["pack"]["seq_len"] = 0
    with pytest.raises(ParameterTypeError, match="seq_len"):
        prepare(raw)

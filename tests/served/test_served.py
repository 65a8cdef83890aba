"""`make serve` as people use it: forms, runs by a worker, kills, cancellations, queues, events."""

import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from prefect.settings.models.flows import FlowsSettings

from tests.served.served import FINAL, ROOT, interrupt, serving, until

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    return tmp_path_factory.mktemp("held")


@pytest.fixture(scope="module")
def served(tmp_path_factory, held):
    """Server, worker and deployments; the last test presses Ctrl-C."""
    with serving(tmp_path_factory.mktemp("served"), held) as running:
        yield running


@pytest.fixture(scope="module")
def killed():
    """The killed run, passed from the test that kills it to the one that sees it end."""
    return {}


def recipe(served, dataset, **changes):
    form = served.deployment("prepare/form-prepare")["parameters"]["recipe"]
    return form | {"dataset": dataset} | changes


def test_every_flow_is_deployed_with_its_schedule(served):
    found = served.call("/deployments/filter", {"limit": 50})[1]
    by_name = {}
    for deployment in found:
        flow = served.call(f"/flows/{deployment['flow_id']}")[1]["name"]
        by_name[f"{flow}/{deployment['name']}"] = deployment
    assert set(by_name) == {
        "refresh/nightly-refresh",
        "refresh/ci-refresh",
        "prepare/form-prepare",
        "prepare/held",
        "verify/weekly-verify",
        "promote/promote-version",
        "rollback/rollback-ref",
        "backfill/backfill-recipes",
        "backfill/held",
        "gc/weekly-gc",
    }
    crons = {
        name: schedule["schedule"]["cron"]
        for name, deployment in by_name.items()
        for schedule in deployment["schedules"]
        if schedule["active"]
    }
    assert crons == {
        "refresh/nightly-refresh": "0 2 * * *",
        "verify/weekly-verify": "0 4 * * 0",
        "gc/weekly-gc": "0 5 * * 0",
    }


def test_a_schedule_of_every_minute_publishes_a_version(served):
    deployment = served.deployment("refresh/nightly-refresh")["id"]
    every_minute = {"schedule": {"cron": "* * * * *", "timezone": "UTC"}, "active": True}
    status, made = served.call(f"/deployments/{deployment}/schedules", [every_minute])
    assert status == 201, made
    try:
        until(lambda: list(served.store.glob("demo/v/*/manifest.json")))
    finally:
        (schedule,) = made
        path = f"/deployments/{deployment}/schedules/{schedule['id']}"
        status, answer = served.call(path, method="DELETE")
    assert status == 204, answer
    ended = {"deployments": {"id": {"any_": [deployment]}}, "sort": "START_TIME_ASC"}
    ended["flow_runs"] = {"state": {"type": {"any_": sorted(FINAL)}}}
    until(lambda: served.call("/flow_runs/filter", ended)[1])
    run = served.call("/flow_runs/filter", ended)[1][0]
    assert run["auto_scheduled"]
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    (manifest,) = served.store.glob("demo/v/*/manifest.json")
    assert manifest.parent.name in run["state"]["message"]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("pack", {"seq_len": 0}, "less than or equal to the minimum"),
        ("pack", {"seq_length": 1}, "'seq_length' does not match any of the regexes"),
        ("sources", [{"path": "s3://k:s@bucket/a.jsonl"}], "is not valid under any"),
        ("sources", [], "non-empty"),
    ],
)
def test_a_bad_value_is_refused_before_a_run_is_made(key, value, says, served):
    deployment = served.deployment("prepare/form-prepare")["id"]
    wanted = {"deployments": {"id": {"any_": [deployment]}}}  # schedules make other runs
    before = served.call("/flow_runs/count", wanted)[1]
    status, answer = served.call(
        f"/deployments/{deployment}/create_flow_run",
        {"parameters": {"recipe": recipe(served, "bad", **{key: value})}},
    )
    assert status in (409, 422), answer
    assert says in str(answer) or "should be non-empty" in str(answer)
    assert served.call("/flow_runs/count", wanted)[1] == before


def test_a_parameter_that_a_deployed_run_may_not_have_is_refused(served):
    deployment = served.deployment("refresh/ci-refresh")["id"]
    status, answer = served.call(
        f"/deployments/{deployment}/create_flow_run",
        {"parameters": {"recipe": "demo", "cache": "/tmp/elsewhere"}},
    )
    assert status in (409, 422), answer
    assert "cache" in str(answer)


def done(held, dataset):
    """Return the jobs of a dataset that really ran, as `step shard`."""
    lines = (held / "done").read_text().splitlines() if (held / "done").exists() else []
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{dataset} ")]


def test_a_killed_run_is_crashed_and_keeps_its_finished_shards(served, held, killed):
    (held / "hold-killed-pack").touch()
    form = recipe(served, "killed", split={"group_by": "record", "eval_fraction": 0.1})
    run = served.start("prepare/held", recipe=form)
    until((held / "killed-pack").exists)
    for process in served.processes(run):
        os.kill(process, signal.SIGKILL)
    assert served.wait(run)["type"] == "CRASHED"
    # Prefect reports it twice; the second report would undo requests made in between.
    served.event("prefect.worker.executed-flow-run", run)
    killed["before"] = done(held, "killed")
    assert sorted(line.split()[0] for line in killed["before"]) == [
        *(["format"] * 2),
        *(["tokenize"] * 2),
        *(["validate"] * 2),
    ]
    (held / "hold-killed-pack").unlink()
    assert served.set_state(run, "SCHEDULED")[0] in (200, 201)
    killed["run"] = run  # its slot is free within a minute; attempts before that come next


def test_a_worker_prepares_the_form_and_reports_it(served):
    run = served.start("prepare/form-prepare", tags=["packhouse"])
    state = served.wait(run)
    assert state["type"] == "COMPLETED", state
    assert state["message"].startswith("published demo-form ")
    version = state["message"].split()[-1]
    assert (served.store / "demo-form" / "v" / version / "manifest.json").is_file()
    assert version in served.artifact("demo-form-version")

    published = served.event("packhouse.version.published", version)
    assert published["resource"]["prefect.resource.id"] == "packhouse.dataset.demo-form"
    assert published["resource"]["packhouse.version"] == version
    asset = served.event("prefect.asset.materialization.succeeded", version)
    assert asset["resource"]["prefect.resource.id"].endswith(f"demo-form/v/{version}")
    ended = served.event("packhouse.run.ended", run)
    assert ended["payload"] == {"state": "Published"}
    assert "prefect.tag.packhouse" in str(ended["related"])
    assert served.event("prefect.flow-run.heartbeat", run)["occurred"] < ended["occurred"]


def test_a_refused_version_triggers_an_automation(served):
    nightly = served.deployment("verify/weekly-verify")["id"]
    automation = {
        "name": "verify after a refusal",
        "trigger": {
            "type": "event",
            "posture": "Reactive",
            "expect": ["packhouse.run.quarantine.exceeded"],
            "match": {"prefect.resource.id": "packhouse.dataset.refused"},
            "threshold": 1,
            "within": 0,
        },
        "actions": [
            {"type": "run-deployment", "source": "selected", "deployment_id": nightly}
            | {"parameters": {"store": "main", "dataset": "demo-form"}}
        ],
    }
    status, made = served.call("/automations/", automation)
    assert status == 201, made
    bad = recipe(served, "refused", validate={"max_quarantined": 0})
    state = served.wait(served.start("prepare/form-prepare", recipe=bad))
    assert state["type"] == "FAILED"
    assert (state["name"], "quarantine gate" in state["message"]) == ("Refused", True)
    assert "refused by its quarantine gate" in served.artifact("refused-refused")
    assert not (served.store / "refused").exists()
    said = served.event("packhouse.version.refused", "packhouse.dataset.refused")
    assert said["payload"]["gate"] == "quarantine"

    wanted = {"flow_runs": {"deployment_id": {"any_": [nightly]}, "tags": {"all_": []}}}
    wanted["flow_runs"]["state"] = {"type": {"not_any_": ["SCHEDULED"]}}
    deadline = time.monotonic() + 100
    runs = []
    while not runs and time.monotonic() < deadline:
        runs = served.call("/flow_runs/filter", wanted)[1]
        time.sleep(0.3)  # between two requests to the server
    assert served.wait(runs[0]["id"])["message"].startswith("1 version intact")


def test_a_cancelled_run_leaves_nothing_and_two_of_one_dataset_queue(served, held):
    (held / "hold-cancelled-files").touch()
    form = recipe(served, "cancelled", pack={"seq_len": 480})
    first = served.start("prepare/held", recipe=form)
    until((held / "cancelled-files").exists)
    limits = served.call("/v2/concurrency_limits/filter", {"limit": 50})[1]
    (slot,) = [limit for limit in limits if limit["name"].startswith("packhouse.cancelled.")]
    assert slot["active_slots"] == 1

    second = served.start("prepare/held", recipe=form)
    until(lambda: _said(served, second, "waiting until no other run works on"))
    assert not _said(served, second, "; starting")

    assert served.set_state(first, "CANCELLING")[0] in (200, 201)
    assert served.wait(first)["type"] == "CANCELLED"
    assert "outcome:cancelled" in served.call(f"/flow_runs/{first}")[1]["tags"]
    assert served.processes(first) == []
    assert not (served.store / "cancelled").exists()
    (held / "hold-cancelled-files").unlink()
    assert served.wait(second)["type"] == "COMPLETED"
    assert served.call(f"/v2/concurrency_limits/{slot['id']}")[1]["active_slots"] == 0
    versions = [p.name for p in (served.store / "cancelled" / "v").iterdir()]
    assert len(versions) == 1
    assert versions[0].endswith(".g0")


def test_the_killed_run_goes_on_without_doing_its_shards_again(served, held, killed):
    """Its slot was still taken; the lease of the killed process expired meanwhile."""
    state = served.wait(killed["run"], {"COMPLETED", "FAILED"})
    assert state["type"] == "COMPLETED", state
    after = done(held, "killed")[len(killed["before"]) :]
    assert not {"validate", "format", "tokenize"} & {line.split()[0] for line in after}
    assert "pack all records" in after
    assert len(after) == len(set(after))
    assert not any((served.home / "cache" / "steps" / "tmp").iterdir())


def test_a_run_that_gives_no_sign_of_life_is_crashed(served, held):
    """The rule of `deployments/automations.yaml` with shorter timeouts leaves a live run alone.

    Runs of this server send heartbeats every 30 s (`tests/served/served.py`).
    """
    shipped = yaml.safe_load((ROOT / "deployments" / "automations.yaml").read_text())[0]
    names = [each["name"] for each in served.call("/automations/filter", {})[1]]
    assert shipped["name"] in names
    assert (
        shipped["trigger"]["within"] > 2 * FlowsSettings.model_fields["heartbeat_frequency"].default
    )
    sooner = shipped | {"name": "sooner", "trigger": shipped["trigger"] | {"within": 45}}
    status, made = served.call("/automations/", sooner)
    assert status == 201, made
    (held / "hold-silent-pack").touch()
    form = recipe(served, "silent", pack={"seq_len": 448})  # a cached step does not wait
    run = served.start("prepare/held", tags=["packhouse"], recipe=form)
    try:
        until((held / "silent-pack").exists)
        until(lambda: heartbeats(served, run) >= 2)
        assert served.state(run)["type"] == "RUNNING"  # alive, and left alone for 30 s
        assert served.artifact("silent-pack") == 0  # progress of the step, in percent
        for process in served.processes(run):
            os.kill(process, signal.SIGSTOP)  # it is alive, so its worker sees nothing wrong
        state = served.wait(run)
        assert state["type"] == "CRASHED"
        assert state["message"].startswith("No heartbeat for ten minutes")
    finally:
        served.call(f"/automations/{made['id']}", method="DELETE")
        for process in served.processes(run):
            os.kill(process, signal.SIGKILL)
        (held / "hold-silent-pack").unlink()


def heartbeats(served, run):
    wanted = {"event": {"name": ["prefect.flow-run.heartbeat"]}}
    wanted |= {"occurred": {"since": "2020-01-01T00:00:00Z"}}
    wanted |= {"resource": {"id": [f"prefect.flow-run.{run}"]}}
    return len(served.call("/events/filter", {"filter": wanted})[1]["events"])


def test_ctrl_c_stops_server_worker_and_runs(served):
    code, left = interrupt(served)
    assert (code, left) == (0, [])
    assert "stopping" in (served.home / "serve.log").read_text()


def _said(served, run, text):
    logs = served.call("/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}})[1]
    return any(text in line["message"] for line in logs)


def test_the_deployments_name_flows_that_exist():
    document = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
    for deployment in document["deployments"]:
        module = deployment["entrypoint"].rpartition(".")[0]
        assert Path(ROOT, *module.split(".")).with_suffix(".py").is_file()

"""Runs killed or cancelled at a bad moment, on a real `make serve`."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Timer
from uuid import uuid4

import psutil
import pytest
import yaml

from tests.served.served import ROOT, interrupt, serving, until

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(1200)]


STALE = "packhouse-stale"


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    return tmp_path_factory.mktemp("held")


@pytest.fixture(scope="module")
def served(tmp_path_factory, held):
    with serving(tmp_path_factory.mktemp("served"), held) as running:
        yield running


def form(served, dataset, **changes):
    made = served.deployment("prepare/form-prepare")["parameters"]["recipe"]
    return made | {"dataset": dataset} | changes


def task_runs(served, run, *states):
    wanted = {"flow_runs": {"id": {"any_": [run]}}, "task_runs": {"state": {"type": {}}}}
    wanted["task_runs"]["state"]["type"]["any_"] = list(states)
    return served.call("/task_runs/filter", wanted)[1]


def pool_processes(served, run):
    """Pool processes of the run, which `multiprocessing` starts with `spawn_main`."""
    found = []
    for pid in served.processes(run):
        try:
            if "spawn_main" in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_killed_run_takes_its_processes_along_and_is_crashed(served):
    run = served.start("prepare/form-prepare", recipe=form(served, "pool"), runner="processes")
    until(lambda: pool_processes(served, run))
    parents = {psutil.Process(pid).ppid() for pid in pool_processes(served, run)}
    assert len(parents) == 1
    os.kill(parents.pop(), signal.SIGKILL)
    assert served.wait(run, seconds=200)["type"] == "CRASHED"  # ten minutes, if children live
    until(lambda: not served.processes(run), 60)


def test_no_task_of_a_killed_run_stays_running(served, held):
    (held / "hold-tasks-pack").touch()
    split = {"group_by": "record", "eval_fraction": 0.1}
    tags = ["packhouse", "auto-scheduled"]
    run = served.start("prepare/held", tags=tags, recipe=form(served, "tasks", split=split))
    until((held / "tasks-pack").exists)
    until(lambda: task_runs(served, run, "RUNNING"))
    for pid in served.processes(run):
        os.kill(pid, signal.SIGKILL)
    assert served.wait(run)["type"] == "CRASHED"
    until(lambda: not task_runs(served, run, "RUNNING", "PENDING"), 100)
    (crashed,) = task_runs(served, run, "CRASHED")
    assert crashed["state"]["message"].startswith("its run crashed: Process exited")
    until(lambda: made_by_automations(served))
    (again,) = made_by_automations(served)  # although the worker reports the crash twice
    assert again["created_by"]["display_value"] == "packhouse-run-again"
    assert "auto-scheduled" not in again["tags"]
    assert served.wait(again["id"])["type"] == "COMPLETED"


def made_by_automations(served):
    runs = served.call("/flow_runs/filter", {"limit": 200})[1]
    return [run for run in runs if (run["created_by"] or {}).get("type") == "AUTOMATION"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("FAILED", "Failed"),
        ("FAILED", "Refused"),
        ("CRASHED", "Crashed"),
        ("COMPLETED", "Held"),
        ("PAUSED", "WaitingForApproval"),
    ],
)
def test_people_are_told_of_runs_that_need_them(kind, name, served):
    flow = served.call("/flows/", {"name": "prepare"})[1]["id"]
    for tag in ("packhouse", "another"):
        run = {"flow_id": flow, "name": f"{tag} run {name}", "tags": [tag]}
        made = served.call("/flow_runs/", run)[1]["id"]
        state = {"type": kind, "name": name, "message": "why"}
        served.call(f"/flow_runs/{made}/set_state", {"state": state, "force": True})
    subject = f"packhouse: packhouse run {name} is {name}"
    until(lambda: subject in [note["subject"] for note in served.notes], 100)
    (note,) = [note for note in served.notes if f"run {name}" in note["subject"]]
    assert note["body"].startswith(f"why\nhttp://127.0.0.1:{served.port}/")


def test_people_are_told_of_a_dataset_without_a_new_version(served):
    """The shipped automation with shorter timeouts."""
    (stale,) = served.call("/automations/filter", {"automations": {"name": {"any_": [STALE]}}})[1]
    assert stale["trigger"]["within"] == 7 * 24 * 3600
    sooner = {"trigger": stale["trigger"] | {"within": 15}, "actions": stale["actions"]}
    status, made = served.call("/automations/", sooner | {"name": "stale sooner"})
    assert status == 201, made

    def publish(dataset, flow):
        said = {"id": str(uuid4()), "event": "packhouse.version.published"}
        said["occurred"] = datetime.now(UTC).isoformat()
        said["payload"] = {"dataset": dataset, "version": "v2", "ref": "latest"}
        said["payload"]["ref_version"] = "v1"  # the new version is held
        said["resource"] = {"prefect.resource.id": f"packhouse.dataset.{dataset}"}
        by = {"prefect.resource.id": "prefect.flow.x", "prefect.resource.role": "flow"}
        said["related"] = [by | {"prefect.resource.name": flow}]
        assert served.call("/events", [said])[0] == 204
        return any(dataset in key for key in watched(served))

    try:
        until(lambda: publish("old", "refresh"))  # an automation takes a moment to start
        publish("by-hand", "prepare")
        subject = "packhouse: no new version of old for 15 seconds"
        until(lambda: subject in [note["subject"] for note in served.notes], 100)
        (body,) = (note["body"] for note in served.notes if note["subject"] == subject)
        assert re.fullmatch(
            r"The last new version is v2, published at \d{4}-\d\d-\d\d \d\d:\d\d UTC\. "
            r"After that run, 'latest' pointed to v1\.",
            body,
        )
        assert not [note for note in served.notes if "by-hand" in note["subject"]]
    finally:
        served.call(f"/automations/{made['id']}", method="DELETE")


def test_a_dead_worker_is_replaced(served):
    def workers():
        wanted = str(ROOT / "deployments" / "worker.py")
        processes = psutil.Process(served.process.pid).children()
        return [p for p in processes if p.status() != "zombie" and wanted in p.cmdline()]

    (worker,) = workers()
    worker.kill()
    until(lambda: any(each != worker for each in workers()), 60)
    assert "the worker exited and is being restarted" in (served.home / "serve.log").read_text()
    served.wait(served.start("verify/weekly-verify"))


def test_a_cancellation_after_the_commit_still_announces_the_version(served, held):
    (held / "hold-committed-artifacts").touch()
    run = served.start("prepare/held", recipe=form(served, "committed", pack={"seq_len": 416}))
    until((held / "committed-artifacts").exists)  # the version exists, but nobody knows about it
    (version,) = (served.store / "committed" / "v").iterdir()
    assert served.set_state(run, "CANCELLING")[0] in (200, 201)
    published = served.event("packhouse.version.published", version.name)
    assert published["resource"]["prefect.resource.id"] == "packhouse.dataset.committed"
    assert version.name in served.artifact("committed-version")
    until(lambda: served.state(run)["type"] == "CANCELLED")
    history = served.call(f"/flow_run_states/?flow_run_id={run}")[1]
    assert "CRASHED" not in [state["type"] for state in history]


def test_no_automation_fires_on_a_run_whose_last_heartbeat_comes_late(served):
    """Run the shipped automation with shorter timeouts on three runs that exist only as events.

    The server hears of the end of `late` before its last heartbeat. `in_state_held` ends in a state
    with a custom name. `dead` sends nothing more.
    """
    shipped = yaml.safe_load((ROOT / "deployments" / "automations.yaml").read_text())[0]
    sooner = shipped | {"name": "soonest", "trigger": shipped["trigger"] | {"within": 40}}
    sooner["trigger"]["match_related"] = [{"prefect.resource.id": "prefect.tag.by-events"}]
    status, made = served.call("/automations/", sooner)
    assert status == 201, made
    late, in_state_held, dead = (str(uuid4()) for _ in range(3))
    start = datetime.now(UTC)

    def say(run, name, after_s):
        said = {"id": str(uuid4()), "event": name, "payload": {}}
        said["occurred"] = (start + timedelta(seconds=after_s)).isoformat()
        said["resource"] = {"prefect.resource.id": f"prefect.flow-run.{run}"}
        tag = {"prefect.resource.id": "prefect.tag.by-events", "prefect.resource.role": "tag"}
        assert served.call("/events", [said | {"related": [tag]}])[0] == 204
        return any(run in key for key in watched(served))

    first = str(uuid4())
    # An automation takes a moment to start, and misses what comes before.
    until(lambda: say(first, "prefect.flow-run.heartbeat", 0))
    say(first, "packhouse.run.ended", 1)
    for run, name, after_s in [
        (late, "prefect.flow-run.Completed", 2),
        (late, "prefect.flow-run.heartbeat", 1),
        (late, "packhouse.run.ended", 3),
        (in_state_held, "prefect.flow-run.heartbeat", 1),
        (in_state_held, "prefect.flow-run.Held", 2),
        (dead, "prefect.flow-run.heartbeat", 4),
    ]:
        say(run, name, after_s)
        if name == "prefect.flow-run.heartbeat":  # the server accepts two events with the same time
            until(lambda: any(run in key for key in watched(served)))  # noqa: B023 - called here
    wanted = {"event": {"name": ["prefect.automation.triggered"]}}

    def triggered():
        return str(served.call("/events/filter", {"filter": wanted})[1]["events"])

    try:
        until(lambda: dead in triggered())
        assert late not in triggered()
        assert in_state_held not in triggered()
    finally:
        served.call(f"/automations/{made['id']}", method="DELETE")


def watched(served):
    """Return the runs that an automation waits for, from the server's database."""
    with closing(
        sqlite3.connect(f"file:{served.home / 'p' / 'prefect.db'}?mode=ro", uri=True)
    ) as db:
        return [key for (key,) in db.execute("select bucketing_key from automation_bucket")]


def test_a_worker_in_the_background_ends_on_sigterm(served, tmp_path):
    """A shell starts commands that end in `&` with SIGINT ignored."""
    log = tmp_path / "worker.log"
    command = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    command += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    worker = [str(ROOT / "deployments" / "worker.py"), "--pool", "background", "--type", "process"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", command, *worker],
            cwd=ROOT,
            env=os.environ | {"PREFECT_API_URL": f"http://127.0.0.1:{served.port}/api"},
            stdout=out,
            stderr=out,
        )
    try:
        until(lambda: "started!" in log.read_text())
        process.terminate()
        process.wait(100)
    finally:
        process.kill()
        process.wait()


def test_a_dead_run_frees_its_dataset_within_90_s(served):
    """Allow for its lease, the server's next check of leases, and the waiting run's next try."""
    from tasks.dataset_slot import LEASE_S

    settings = served.call("/admin/settings")[1]["server"]
    look_s = settings["services"]["repossessor"]["loop_seconds"]
    try_s = settings["concurrency"]["maximum_concurrency_slot_wait_seconds"]
    assert LEASE_S + look_s + try_s <= 80  # the rest of the time is for the two runs
    deployments = served.call("/deployments/filter", {"limit": 50})[1]
    assert not [each["name"] for each in deployments if each["global_concurrency_limit"]]


def test_the_server_never_found_its_database_locked(served):
    """Everything in this file, partly at the same time."""
    assert "database is locked" not in Path(served.home / "p" / "server.log").read_text()


def test_a_stop_lets_runs_end_and_marks_them_crashed(served, held):
    """A run and the child of a backfill finish their current jobs; another run never does."""
    split = {"group_by": "record", "eval_fraction": 0.15}
    forms = {name: form(served, name, split=split) for name in ("ends", "child", "stays")}
    for name in forms:
        (held / f"hold-{name}-pack").touch()
    backfill = served.start("backfill/held", recipes=[forms["child"]])
    stays = served.start("prepare/held", recipe=forms["stays"])
    ends = served.start("prepare/held", recipe=forms["ends"])
    until(lambda: all((held / f"{name}-pack").exists() for name in forms))
    for name in ("ends", "child"):
        Timer(3, (held / f"hold-{name}-pack").unlink).start()
    assert interrupt(served) == (0, [])
    with closing(sqlite3.connect(served.home / "p" / "prefect.db")) as db:
        child = "select id from flow_run where parent_task_run_id is not null"
        (children,) = db.execute(f"{child} and tags like '%dataset:child%'")
        for run, says in [
            (ends, "termination signal"),
            (backfill, "termination signal"),
            (*children, "termination signal"),
            (stays, "-9"),  # its worker killed it
        ]:
            (tags,) = db.execute("select tags from flow_run where id = ?", [run])
            assert "outcome:crashed" in tags[0]
            states = "select type, message from flow_run_state where flow_run_id = ?"
            (*_, (kind, message)) = db.execute(f"{states} order by timestamp", [run])
            assert kind == "CRASHED"
            assert says in message
            tasks = "select state_type from task_run where flow_run_id = ?"
            assert not {("RUNNING",), ("PENDING",)} & set(db.execute(tasks, [run]))

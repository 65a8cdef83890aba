"""What a command's run does without: Prefect's own heartbeats, FastAPI, needless questions.

Each stands for something of Prefect's, and is held against it, so that a release that does it
otherwise is noticed here.
"""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from fastapi.encoders import jsonable_encoder
from prefect import flow, flow_engine, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    get_current_settings,
    temporary_settings,
)

from flows.backfill import backfill
from flows.collect_garbage import gc
from flows.prepare import prepare
from flows.promote import promote
from flows.refresh import refresh
from flows.rollback import rollback
from flows.verify import verify
from packhouse.recipe import Recipe, load_recipe
from tasks import guard
from tasks import heartbeats as own
from tasks.heartbeats import heartbeats, own_heartbeats
from tasks.parameters import write_parameters_alone

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deployments" / "demo" / "recipe.yaml"
EVERY_FLOW = [backfill, gc, prepare, promote, refresh, rollback, verify]


@pytest.fixture
def sent(monkeypatch):
    """Heartbeats, by whose they are."""
    sent = {"prefect": [], "own": []}
    monkeypatch.setattr(flow_engine, "emit_event", lambda **event: sent["prefect"].append(event))
    monkeypatch.setattr(own, "emit_event", lambda **event: sent["own"].append(event))
    monkeypatch.setattr(own, "FIRST_AFTER_S", 0.0)
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 30}):
        yield sent


@flow(name="living")
def living(sent, seconds=10.0):
    """Live until there was a heartbeat."""
    with heartbeats():
        deadline = time.monotonic() + seconds
        while not any(sent.values()) and time.monotonic() < deadline:
            time.sleep(0.01)  # between looks: heartbeats come from another thread
    assert not any(each.name == "packhouse-heartbeats" for each in threading.enumerate())


def _plain(event):
    """An event without what differs from run to run: its id and its name."""
    resource = {
        key.value if hasattr(key, "value") else key: v for key, v in event["resource"].items()
    }
    resource["prefect.resource.name"] = bool(resource["prefect.resource.name"])
    resource["prefect.resource.id"] = resource["prefect.resource.id"].rsplit(".", 1)[0]
    related = [dict(getattr(each, "root", each)) for each in event["related"]]
    return {"event": event["event"], "resource": resource, "related": related}


def test_own_heartbeats_are_prefects_in_all_but_the_thread(sent):
    with tags("b", "a"):
        living(sent)
        assert not sent["own"]
        theirs = sent["prefect"].pop()
        with own_heartbeats():
            living(sent)
    assert not sent["prefect"]
    assert _plain(sent["own"][0]) == _plain(theirs)


def test_heartbeats_go_on_until_the_block_ends(sent):
    @flow
    def long():
        own._every_s.set(0.05)  # of this flow's context
        with heartbeats():
            time.sleep(0.5)  # ten heartbeats long, of which three are asked for
        return len(sent["own"])

    with own_heartbeats():
        assert get_current_settings().flows.heartbeat_frequency is None
        assert 3 <= long() == len(sent["own"])
    assert own._every_s.get() is None


def test_who_wants_no_heartbeats_gets_none(sent):
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}), own_heartbeats():
        living(sent, seconds=0.1)
    assert not any(sent.values())


@pytest.mark.parametrize("each", EVERY_FLOW, ids=lambda each: each.name)
def test_every_flow_beats(each):
    """A command takes the heartbeats of its flow from Prefect, whichever flow it is."""
    assert "with heartbeats()" in inspect.getsource(each.fn)


@pytest.mark.parametrize(
    "path", [DEMO, *sorted((ROOT / "deployments" / "recipes").glob("*.yaml"))], ids=lambda p: p.stem
)
def test_parameters_are_written_as_fastapi_does(path, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_SHARED", "/nowhere")
    recipe = Recipe.model_validate(
        yaml.safe_load(path.read_text().replace("${PACKHOUSE_SHARED:-../shared}", "/nowhere"))
    )
    given = {"recipe": recipe, "cache": "/c", "runner": None, "recipes": [recipe, "x"], "n": 1.5}
    written = flow(lambda: None, name="writes")
    write_parameters_alone(written)
    assert written.serialize_parameters(given) == jsonable_encoder(given)


def test_parameters_of_a_kind_that_is_not_ours_are_left_to_prefect():
    written = flow(lambda: None, name="writes")
    write_parameters_alone(written)
    odd = {"path": Path("/a"), "thread": threading.Lock()}
    assert written.serialize_parameters(odd) == {"path": "/a", "thread": "<lock>"}


def test_several_commands_of_a_process_change_a_flow_once():
    written = flow(lambda: None, name="writes")
    write_parameters_alone(written)
    own_way = written.serialize_parameters
    write_parameters_alone(written)
    assert written.serialize_parameters is own_way


def test_sigterm_stops_what_a_command_started():
    """Prefect stops its embedded server as the process exits, which a bare SIGTERM prevents."""
    run = (
        "import atexit, os, signal, time; from flows.command import own_process\n"
        "own_process()\n"
        "atexit.register(print, 'stopped', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)"  # never slept to its end: the signal comes first
    )
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (143, "stopped\n"), done.stderr


def test_ctrl_c_of_a_terminal_leaves_the_embedded_server_until_the_run_has_ended(tmp_path):
    """It goes to all processes; without its server Prefect would try again for minutes."""
    arguments = [str(DEMO), "--cache", str(tmp_path / "c"), "--set", f"publish.store={tmp_path}/s"]
    env = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    command = subprocess.Popen(
        [sys.executable, "-m", "flows.prepare", *arguments],
        cwd=ROOT,
        env=env | {"PREFECT_HOME": str(tmp_path / "home")},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "c" / "steps").exists():
        assert command.poll() is None, command.communicate()
        time.sleep(0.05)  # between looks whether the other process has begun
    os.killpg(command.pid, signal.SIGINT)
    try:
        _, said = command.communicate(timeout=100)
    finally:
        command.kill()
    assert command.returncode == 130
    says = "stopped by SIGINT; finished steps are kept. To go on, run again:\n"
    assert f"{says}  python -m flows.prepare {DEMO} --cache " in said
    assert not (tmp_path / "s" / "demo" / "v").exists()


def test_a_run_of_its_own_asks_no_server_whether_it_is_deployed(monkeypatch):
    """One below another does: its parent may be of a deployment."""
    asked = []

    class Deployment:
        @property
        def id(self):
            asked.append(FlowRunContext.get().flow_run.name)
            return "of the parent"

    monkeypatch.setattr(guard, "deployment", Deployment())

    @flow(flow_run_name="below")
    def below():
        return guard._is_deployed()

    @flow(flow_run_name="above")
    def above():
        return guard._is_deployed(), below()

    assert above() == (False, True)
    assert asked == ["below"]


def test_a_run_of_a_deployment_knows_it(monkeypatch):
    run = FlowRun.model_construct(deployment_id=uuid4(), parent_task_run_id=None)
    monkeypatch.setattr(FlowRunContext, "get", lambda: FlowRunContext.model_construct(flow_run=run))
    monkeypatch.setattr(guard, "deployment", type("Deployment", (), {"id": "its own"}))
    assert guard._is_deployed()


def test_a_command_imports_no_fastapi_and_says_that_it_lives(tmp_path):
    recipe = load_recipe(DEMO)
    run = (
        "import sys; from flows.command import command; from tasks import heartbeats\n"
        "heartbeats.FIRST_AFTER_S = 0.0\n"
        f"command({[str(DEMO), '--json', '--cache', str(tmp_path / 'c')]!r}"
        f" + ['--set', 'publish.store={tmp_path / 's'}'], standalone_mode=False)\n"
        "sys.exit('fastapi' in sys.modules)"
    )
    settings = {"PREFECT_API_URL": PREFECT_API_URL.value(), "PREFECT_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", run],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with get_client(sync_client=True) as client:
        (last,) = client.read_flow_runs(limit=1, sort="START_TIME_DESC")
        assert last.name == f"prepare {recipe.dataset}"
        resource = {"id": [f"prefect.flow-run.{last.id}"]}
        wanted = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": resource}
        deadline = time.monotonic() + 30
        while not client._client.post("/events/filter", json={"filter": wanted}).json()["events"]:
            assert time.monotonic() < deadline, "no heartbeat came"
            time.sleep(0.1)  # between questions: the server stores events when it likes

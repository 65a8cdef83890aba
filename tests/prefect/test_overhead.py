"""A command's run avoids heartbeats, FastAPI and needless requests.

Each test compares packhouse with Prefect's own behaviour, so that a release that changes it is
noticed here.
"""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import yaml
from fastapi.encoders import jsonable_encoder
from prefect import flow
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, get_current_settings

from flows.command import write_parameters_alone
from packhouse.recipe import Recipe
from tasks import allowed_places
from tests.prepared import python

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deployments" / "demo" / "recipe.yaml"


@pytest.mark.parametrize(
    "path", [DEMO, *sorted((ROOT / "deployments" / "recipes").glob("*.yaml"))], ids=lambda p: p.stem
)
def test_parameters_are_written_as_fastapi_does(path, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_SHARED", "/nowhere")
    recipe = Recipe.model_validate(
        yaml.safe_load(path.read_text().replace("${PACKHOUSE_SHARED:-../shared}", "/nowhere"))
    )
    given = {"recipe": recipe, "cache": "/c", "runner": None, "n": 1.5}
    written = flow(lambda: None, name="writes")
    write_parameters_alone(written)
    assert written.serialize_parameters(given) == jsonable_encoder(given)


def test_parameters_of_a_kind_that_is_not_ours_are_left_to_prefect():
    written = flow(lambda: None, name="writes")
    write_parameters_alone(written)
    odd = {"path": Path("/a"), "thread": threading.Lock()}
    assert written.serialize_parameters(odd) == {"path": "/a", "thread": "<lock>"}


def test_sigterm_stops_what_a_command_started():
    """Prefect stops its embedded server when the process exits, which a bare SIGTERM prevents."""
    run = (
        "import atexit, os, signal, time; from packhouse.cli import own_process\n"
        "own_process()\n"
        "atexit.register(print, 'stopped', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)"  # never sleeps to the end, because the signal comes first
    )
    done = python("-c", run, cwd=ROOT)
    assert (done.returncode, done.stdout) == (143, "stopped\n"), done.stderr


def test_ctrl_c_of_a_terminal_leaves_the_embedded_server_until_the_run_has_ended(tmp_path):
    """The signal goes to all processes; without its server, Prefect would retry for minutes."""
    env = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    env |= {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path / "home")}
    copy_database(tmp_path / "home")
    command = subprocess.Popen(
        [sys.executable, "-m", "flows.prepare", str(DEMO)],
        cwd=tmp_path,
        env=env | {"PACKHOUSE_CACHE": str(tmp_path / "c")},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "c" / "steps").exists():
        assert command.poll() is None, command.communicate()
        time.sleep(0.05)  # between checks whether the other process has begun
    started = {
        " ".join(each.cmdline()): each.pid for each in psutil.Process(command.pid).children()
    }
    (server,) = (pid for words, pid in started.items() if "uvicorn" in words)
    assert any(f"kill {server}" in words for words in started)  # test_prepare_command.py
    os.killpg(command.pid, signal.SIGINT)
    try:
        _, said = command.communicate(timeout=250)
    finally:
        command.kill()
    assert command.returncode == 130
    says = "stopped by SIGINT; finished steps are kept. To continue, run:\n"
    assert f"{says}  python -m flows.prepare {DEMO}\n" in said
    assert not list(tmp_path.glob(".packhouse/demo-store/demo/v/*"))
    assert not psutil.pid_exists(server)


def copy_database(home):
    """Creating the tables of a new server takes 16 s."""
    home.mkdir()
    url = get_current_settings().server.database.connection_url.get_secret_value()
    with (
        closing(sqlite3.connect(url.removeprefix("sqlite+aiosqlite:///"))) as source,
        closing(sqlite3.connect(home / "prefect.db")) as copy,
    ):
        source.backup(copy)


def test_a_run_of_its_own_asks_no_server_whether_it_is_deployed(monkeypatch):
    """A nested flow run sends heartbeats, because its parent may belong to a deployment."""
    asked = []

    class Deployment:
        @property
        def id(self):
            asked.append(FlowRunContext.get().flow_run.name)
            return "of the parent"

    monkeypatch.setattr(allowed_places, "deployment", Deployment())

    @flow(flow_run_name="below")
    def below():
        return allowed_places._is_deployed()

    @flow(flow_run_name="above")
    def above():
        return allowed_places._is_deployed(), below()

    assert above() == (False, True)
    assert asked == ["below"]


def test_a_run_of_a_deployment_knows_it(monkeypatch):
    run = FlowRun.model_construct(deployment_id=uuid4(), parent_task_run_id=None)
    monkeypatch.setattr(FlowRunContext, "get", lambda: FlowRunContext.model_construct(flow_run=run))
    monkeypatch.setattr(allowed_places, "deployment", type("Deployment", (), {"id": "its own"}))
    assert allowed_places._is_deployed()


def test_a_command_imports_no_fastapi_and_sends_no_heartbeats(tmp_path):
    run = (
        "import sys; from prefect import flow_engine; from flows.command import command\n"
        "sent = []; flow_engine.emit_event = lambda **event: sent.append(event['event'])\n"
        f"command([{str(DEMO)!r}], standalone_mode=False)\n"
        "print(sent, 'fastapi' in sys.modules)"
    )
    settings = {"PREFECT_API_URL": PREFECT_API_URL.value(), "PREFECT_HOME": str(tmp_path / "home")}
    settings |= {"PYTHONPATH": str(ROOT), "PACKHOUSE_CACHE": str(tmp_path / "c")}
    done = python("-c", run, cwd=tmp_path, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] False"

"""The wheel alone: a project of one's own, and the three lines in an environment of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.served.served import interrupt, serve
from tests.server_logs import watched
from tests.wheel import build_wheel, install_over_ours

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

OURS = ("PYTHONPATH", "PACKHOUSE_", "PREFECT_")


def run(command, cwd, **environment):
    """Run a command in an environment without this checkout, and return what it printed."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=outside | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return install_over_ours(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def project(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("projects") / "My Data"
    told = run([python.parent / "packhouse", "new", folder, "--json"], folder.parent)
    assert "deployments/prefect.yaml" in json.loads(told)["files"]
    return folder


def test_the_wheel_puts_nothing_but_packhouse_beside_other_packages(python, tmp_path):
    """Trainers have a `tasks` of their own."""
    names = "('flows', 'tasks', 'schemas', 'deployments')"
    script = f"from importlib.util import find_spec; print([n for n in {names} if find_spec(n)])"
    assert run([python, "-c", script], tmp_path) == "[]\n"


def test_a_project_of_ones_own_runs_its_demo(project, python):
    printed = run(["make", "demo", f"PYTHON={python}"], project)

    (version,) = re.findall(r"published demo (\w{16}\.g0)", printed)
    store = project / ".packhouse" / "demo-store" / "demo"
    assert (store / "v" / version / "manifest.json").exists()
    assert "validate      304       295            9" in printed


def test_its_deployments_run_on_a_server(project, python, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)
    with watched(tmp_path / "p" / "server.log"), watched(tmp_path / "p" / "worker.log"):
        served = serve(tmp_path, tmp_path, root=project, python=python)
        try:
            deployed = served.call("/deployments/filter", {"limit": 50})[1]
            assert {"nightly-refresh", "form-prepare"} <= {each["name"] for each in deployed}
            state = served.wait(served.start("refresh/nightly-refresh"))
            assert state["type"] == "COMPLETED", state
        finally:
            interrupt(served)
    assert list(served.store.glob("demo/v/*/manifest.json"))


def test_its_image_is_built_of_files_that_are_there(project):
    dockerfile = (project / "docker" / "Dockerfile").read_text()
    ignored = (project / "docker" / "Dockerfile.dockerignore").read_text()
    let_through = set(re.findall(r"^!(\S+)$", ignored, re.MULTILINE))
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*)$", dockerfile, re.MULTILINE)
    sources = {source for line in copied for source in line.split()[:-1]}
    assert sources <= let_through
    assert [s for s in sources if not (project / s).exists()] == ["docker/packhouse-*.whl"]
    hadolint = Path(sys.executable).parent / "hadolint"
    run([hadolint, project / "docker" / "Dockerfile"], project)


def test_a_folder_that_holds_something_is_refused(project, python):
    command = [python.parent / "packhouse", "new", project]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not an empty folder" in done.stderr

"""The wheel alone: a new project, and the three lines of the README in a separate environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.served.served import interrupt, serve
from tests.server_logs import watched
from tests.wheel import ROOT, build_wheel, install_over_ours

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

OURS = ("PYTHONPATH", "PACKHOUSE_", "PREFECT_")


def run(command, cwd, **environment):
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


def test_the_wheel_holds_packhouse_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"packhouse"}
    assert {"packhouse/py.typed", "packhouse/addons/report/vega.js"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or "secrets/" in name]


def test_the_wheel_installs_only_packhouse(python, tmp_path):
    """Trainers have a package `tasks` too."""
    names = "('flows', 'tasks', 'schemas', 'deployments')"
    script = f"from importlib.util import find_spec; print([n for n in {names} if find_spec(n)])"
    assert run([python, "-c", script], tmp_path) == "[]\n"


def test_a_project_of_ones_own_runs_its_demo(project, python):
    printed = run(["make", "demo", "LOCAL=1", f"PYTHON={python}"], project)

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


NOT_IN_THE_BASE = {
    *("prefect", "torch", "boto3", "botocore", "s3fs", "adlfs", "gcsfs", "obstore"),
    *("polars", "pandera", "wandb", "dask", "ray"),
}

THREE_LINES = """
import packhouse
version = packhouse.prepare("data.jsonl", tokenizer="tokenizer", seq_len=512, progress=False)
print(version.id, version.train.num_rows, len(version.train[0]["input_ids"]), version.eval)
"""


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """Python of an environment made by `pip install <the wheel>` from the index."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--no-cache-dir", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution found" in done.stderr:
        pytest.skip("pip finds no index of packages here")
    assert done.returncode == 0, done.stderr
    assert "taking longer than usual" not in done.stdout  # pip tries one version after another
    return python


def test_the_base_is_light(fresh):
    (site,) = fresh.parents[1].glob("lib/python*/site-packages")
    installed = json.loads(run([fresh, "-m", "pip", "list", "--format", "json"], site))
    names = {each["name"] for each in installed} - {"pip", "setuptools"}
    assert not names & NOT_IN_THE_BASE
    assert len(names) < 56
    files = [file for file in site.rglob("*") if file.suffix != ".pyc" and file.is_file()]
    assert sum(file.stat().st_size for file in files) < 540e6  # pip and setuptools are 20 of them


def test_three_lines_in_a_fresh_environment(fresh, tmp_path):
    sample = ROOT / "deployments" / "demo"
    rows = (sample / "instructions.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "data.jsonl").write_bytes(b"".join(rows[:17]))  # the rest has bad rows
    shutil.copytree(sample / "tokenizer", tmp_path / "tokenizer")
    (fresh.parents[1] / "home").mkdir()
    home = {"XDG_CACHE_HOME": str(fresh.parents[1] / "home")}

    version, num_packs, num_ids, no_eval = run([fresh, "-c", THREE_LINES], tmp_path, **home).split()

    assert re.fullmatch(r"\w{16}\.g0", version)
    assert int(num_packs) > 0
    assert 0 < int(num_ids) <= 512
    assert no_eval == "None"
    command = ["prepare", "data.jsonl", "--tokenizer", "tokenizer", "--seq-len", "512", "--json"]
    again = json.loads(run([fresh.parent / "packhouse", *command], tmp_path, **home))
    assert (again["version"], again["created"]) == (version, False)
    assert run([fresh.parent / "packhouse", "--version"], tmp_path) == "packhouse, version 0.1.0\n"

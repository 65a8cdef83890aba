"""`packhouse new` in a checkout; tests/e2e/test_wheel.py tests it in an installed wheel."""

import json
import os
import signal
import subprocess
import time
import tomllib

import yaml
from click.testing import CliRunner

from packhouse.cli import cli


def test_a_checkout_writes_a_project_with_everything_that_it_needs(tmp_path):
    folder = tmp_path / "My Data"
    done = CliRunner().invoke(cli, ["new", str(folder), "--json"])
    assert done.exit_code == 0, done.output

    files = set(json.loads(done.stdout)["files"])
    assert {"flows/prepare.py", "tasks/artifacts.py", "schemas/__init__.py"} <= files
    assert {"Makefile", "README.md", ".gitignore", "docker/Dockerfile"} <= files
    assert {"deployments/demo/recipe.yaml", "deployments/sources.yaml"} <= files
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "my-data"
    yaml.safe_load((folder / "deployments" / "sources.yaml").read_text())
    dockerfile = (folder / "docker" / "Dockerfile").read_text()
    assert "@NAME@" not in dockerfile
    assert "@VERSION@" not in dockerfile


def test_the_demo_keeps_its_steps_in_the_project_whatever_the_environment_says(tmp_path):
    assert CliRunner().invoke(cli, ["new", str(tmp_path / "new")]).exit_code == 0
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "cache: $PACKHOUSE_CACHE"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "demo", f"PYTHON={python}"],
        cwd=tmp_path / "new",
        env=os.environ | {"PACKHOUSE_CACHE": "/no/such/folder"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"cache: {tmp_path / 'new' / '.packhouse'}"


def test_a_sigterm_of_make_reaches_the_program_that_serves(tmp_path):
    assert CliRunner().invoke(cli, ["new", str(tmp_path / "new")]).exit_code == 0
    python, pid = tmp_path / "python", tmp_path / "pid"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit\necho $$ >"{pid}.new"\n')
    with python.open("a") as script:
        script.write(f'mv "{pid}.new" "{pid}"\nexec sleep 600\n')
    python.chmod(0o755)
    with subprocess.Popen(["make", "serve", f"PYTHON={python}"], cwd=tmp_path / "new") as make:
        deadline = time.monotonic() + 60
        while not pid.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)  # the file appears when it serves; there is nothing to wait on
        make.terminate()
    serving = int(pid.read_text())
    try:
        os.kill(serving, 0)
    except ProcessLookupError:
        return
    os.kill(serving, signal.SIGKILL)
    raise AssertionError("it still runs")

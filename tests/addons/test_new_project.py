"""`packhouse new` in a checkout; tests/e2e/test_wheel.py tests it in an installed wheel."""

import json
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

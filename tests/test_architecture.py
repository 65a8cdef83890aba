"""Guarantees about the packages themselves."""

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import packhouse

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("packhouse", "schemas", "tasks", "flows")
FLOW_FILES = sorted((ROOT / "flows").glob("*.py"))


def modules_loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(result.stdout.split())


def test_importing_the_library_loads_nothing_heavy():
    loaded = modules_loaded_by("import packhouse.cli; from packhouse import load_packed")
    assert not {"prefect", "torch", "transformers", "datasets", "pandera"} & loaded


def test_the_flows_command_imports_no_prefect_before_its_settings_are_set():
    assert "prefect" not in modules_loaded_by("import flows.command, schemas")


@pytest.mark.parametrize("name", sorted(set(packhouse.__all__) - {"__version__"}))
def test_every_public_object_has_an_example_that_runs(name):
    """Examples are tests too: `--doctest-modules` runs them in their module."""
    public = getattr(packhouse, name)
    module = importlib.import_module(public.__module__)
    found = doctest.DocTestFinder(recurse=False).find(public, name, module=module)
    is_result = re.search("(Returned by|Result of) `", public.__doc__)  # see that function
    assert is_result or [example for test in found for example in test.examples]
    assert public.__doc__.splitlines()[0].endswith((".", ":", "?"))


@pytest.mark.parametrize("path", FLOW_FILES, ids=lambda path: path.name)
def test_flow_files_hold_no_class_and_no_task(path):
    for node in ast.parse(path.read_text()).body:
        assert not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.FunctionDef):
            names = [ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list]
            assert not any("task" in name for name in names)


@pytest.mark.parametrize("path", FLOW_FILES, ids=lambda path: path.name)
def test_no_flow_file_shadows_a_module(path):
    """`flows/x.py:flow` puts flows/ first on sys.path, so x must not be importable elsewhere."""
    if path.stem == "__init__":
        return
    assert path.stem not in sys.stdlib_module_names
    assert path.stem not in {*PACKAGES, "docker", "tests", "bench", "deployments"}
    found = importlib.util.find_spec(path.stem)
    assert found is None, f"{path.stem} is also {found}"

"""A small dataset, runs of it in separate processes, and small real disks."""

import os
import subprocess
from pathlib import Path

import pytest

from packhouse.addons.cache import list_steps
from tests.chain.conftest import Project
from tests.chain.killed_run import Run


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    project.write_rows(range(60))
    project.recipe()
    with (tmp_path / "recipe.yaml").open("a") as file:
        file.write(f"publish: {{store: {tmp_path / 'store'}}}\n")
    return project


@pytest.fixture
def start(project):
    """Start a run as a process that can kill itself at a step (`tests.chain.killed_run`)."""
    started = []

    def start(name: str = "recipe.yaml", kill: tuple[str, int, str] = ("publish", 1, "never")):
        started.append(Run(project.root / name, project.cache, *kill))
        return started[-1]

    yield start
    for run in started:
        run.close()


def steps_in(cache: Path) -> set[tuple[str, str]]:
    return {(each.step, each.key) for each in list_steps(cache)}


@pytest.fixture
def mount(tmp_path):
    """Mount small file systems; skip the test if mounting is not allowed."""
    mounted = []

    def mount(name: str, options: str) -> Path:
        place = tmp_path / name
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if os.getuid() or done.returncode:
            pytest.skip(f"mounting a file system needs root: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)

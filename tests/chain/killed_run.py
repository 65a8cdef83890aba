"""A run in a process that may kill itself.

`when` is `before` (before the `nth` job of a step computes), `written` (its files are written but
not yet visible), or `never`. Input and output shards are small, so every step has several jobs.
"""

import os
import resource
import signal
import tempfile
from pathlib import Path

import schemas
from packhouse.addons.report import version_report
from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.run.steps import STEPS, files, validate
from tests.forked import forks_of

SMALL = {
    (validate, "MAX_SHARD_BYTES"): 1500,
    (files, "_RECORDS_PER_FILE"): 25,
    (files, "_BYTES_PER_TOKEN"): {"labels": 2**18, "compact": 2**18},  # 1,024 tokens per file
}


class Run:
    """Starts at once; it is a fork, because importing everything takes 4 s."""

    def __init__(
        self, recipe: Path, cache: Path, step: str, nth: int, when: str, num_files: int = 1024
    ) -> None:
        self._said = tempfile.NamedTemporaryFile()
        arguments = (self._said.name, recipe, cache, step, nth, when, num_files)
        self._process = forks_of("tests.chain.killed_run").Process(target=main, args=arguments)
        self._process.start()

    def wait(self) -> tuple[int | None, str]:
        """Return the exit code, and what it wrote to stderr."""
        self._process.join(600)
        return self._process.exitcode, Path(self._said.name).read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._said.close()


def main(
    said: str, recipe_path: Path, cache: Path, name: str, nth: int, when: str, num_files: int
) -> None:
    os.dup2(os.open(said, os.O_WRONLY), 2)
    os.fsync = lambda handle: None  # as in tests/conftest.py
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    version_report.unpublished_report = lambda *_: "<!doctype html>\n"  # as in tests/conftest.py
    for (module, setting), value in SMALL.items():
        setattr(module, setting, value)
    (step,) = [step for step in STEPS if step.name == name]
    compute = step.compute
    seen = 0

    def killing(*arguments):
        nonlocal seen
        seen += 1
        if when == "before" and seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        facts = compute(*arguments)
        if when == "written" and seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return facts

    object.__setattr__(step, "compute", killing)  # a step is frozen
    recipe = load_recipe(recipe_path)
    workspace = Workspace(cache=cache, check=schemas.check)
    prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)

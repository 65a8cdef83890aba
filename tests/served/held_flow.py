"""The flow `prepare` with a step that waits: for tests that kill or cancel a run in its middle.

While HELD_FOLDER holds a file `hold-<dataset>-<step>`, that step waits and says so with a file
`<dataset>-<step>`.
`done` there gets a line for each job that is really done: dataset, step and shard.
"""

import os
import time
from pathlib import Path

from flows.prepare import prepare  # noqa: F401 - the entrypoint of the tests' deployment
from packhouse import steps
from packhouse.steps import _COMPUTE

FOLDER = Path(os.environ.get("HELD_FOLDER", "."))


def held(step, compute):
    def hold_and_compute(job, recipe, workspace, folder):
        (folder / "half-done").write_bytes(b"x")
        name = f"{recipe.dataset}-{step}"
        while (FOLDER / f"hold-{name}").exists():
            (FOLDER / name).touch()
            time.sleep(0.05)
        (folder / "half-done").unlink()
        facts = compute(job, recipe, workspace, folder)
        with (FOLDER / "done").open("a") as log:
            log.write(f"{recipe.dataset} {step} {job.label}\n")
        return facts

    return hold_and_compute


for name, compute in list(_COMPUTE.items()):
    steps._COMPUTE[name] = held(name, compute)

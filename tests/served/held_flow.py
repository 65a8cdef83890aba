"""The flows `prepare` and `backfill` with a step that waits, for tests that kill or cancel a run.

While HELD_FOLDER contains a file `hold-<dataset>-<step>`, that step waits and creates a file
`<dataset>-<step>`.
The file `done` gets a line for each job that really runs: dataset, step and shard. With a file
`hold-<dataset>-artifacts`, a run that has committed its version waits for a signal.
"""

import os
import signal
import time
from pathlib import Path

from flows.backfill import backfill  # noqa: F401 - the entrypoints of the tests' deployments
from flows.prepare import prepare  # noqa: F401 - likewise
from packhouse.run.steps import STEPS
from tasks import chain

FOLDER = Path(os.environ.get("HELD_FOLDER", "."))


def held(step, compute):
    def hold_and_compute(work, folder):
        recipe = work.recipe
        (folder / "half-done").write_bytes(b"x")
        name = f"{recipe.dataset}-{step}"
        while (FOLDER / f"hold-{name}").exists():
            (FOLDER / name).touch()
            time.sleep(0.05)
        (folder / "half-done").unlink()
        facts = compute(work, folder)
        with (FOLDER / "done").open("a") as log:
            log.write(f"{recipe.dataset} {step} {work.job.label}\n")
        return facts

    return hold_and_compute


def held_artifacts(recipe, prepared):
    name = f"{prepared.dataset}-artifacts"
    if (FOLDER / f"hold-{name}").exists():
        came, says = os.pipe()
        os.set_blocking(says, False)
        signal.set_wakeup_fd(says)
        (FOLDER / name).touch()
        os.read(came, 1)  # one byte per signal
        signal.set_wakeup_fd(-1)
    return publish_artifacts(recipe, prepared)


publish_artifacts = chain.publish_artifacts
if "HELD_FOLDER" in os.environ:  # not when tests are collected, which also reads this file
    chain.publish_artifacts = held_artifacts
    for each in STEPS:
        object.__setattr__(each, "compute", held(each.name, each.compute))  # a step is frozen

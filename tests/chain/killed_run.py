"""A run that kills itself: python -m tests.chain.killed_run RECIPE CACHE STEP NTH WHEN.

WHEN is `before` (before the NTH job of STEP computes), `written` (its files are written but not
yet visible), or `never`. Input and output shards are small, so every step has several jobs.
"""

import os
import signal
import sys
from pathlib import Path

import schemas
from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.run.steps import STEPS, files, validate

SMALL = {
    (validate, "MAX_SHARD_BYTES"): 1500,
    (files, "_RECORDS_PER_FILE"): 25,
    (files, "_BYTES_PER_TOKEN"): {"labels": 2**18, "compact": 2**18},  # 1,024 tokens per file
}


def main(recipe_path: str, cache: str, name: str, nth: str, when: str) -> None:
    for (module, setting), value in SMALL.items():
        setattr(module, setting, value)
    (step,) = [step for step in STEPS if step.name == name]
    compute = step.compute
    seen = 0

    def killing(*arguments):
        nonlocal seen
        seen += 1
        if when == "before" and seen == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        facts = compute(*arguments)
        if when == "written" and seen == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        return facts

    object.__setattr__(step, "compute", killing)  # a step is frozen
    recipe = load_recipe(Path(recipe_path))
    workspace = Workspace(cache=Path(cache), check=schemas.check)
    prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), workspace.cache)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""prepare: validate -> format -> tokenize -> pack -> split -> publish, as a Prefect flow.

python -m flows.prepare RECIPE.yaml [--set pack.seq_len=4096] [--local]
"""

import sys

from flows.command import main

if __name__ == "__main__":  # before Prefect is imported: `--local` does without it
    sys.exit(main())

import os
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from packhouse.chain import Prepared
from packhouse.chain import prepare as prepare_chain
from packhouse.recipe import Recipe
from packhouse.workspace import default_cache
from tasks.artifacts import publish_artifacts
from tasks.runner import PrefectRunner

__all__ = ["prepare"]


# A thread per core: each holds a shard in memory, and Prefect's default knows no limit.
_THREADS: Any = ThreadPoolTaskRunner(max_workers=os.cpu_count() or 1)


@flow(name="prepare", flow_run_name="prepare {recipe.dataset}", task_runner=_THREADS)
def prepare(recipe: Recipe, cache: str | None = None) -> Prepared:
    """Turn raw instruction data into a published version of packed token data.

    Args:
        recipe: everything that decides what the version holds.
        cache: folder of finished steps; by default the worker's PACKHOUSE_CACHE.
    """
    folder = Path(cache) if cache else default_cache()
    run = PrefectRunner(recipe=recipe, cache=str(folder))
    prepared = prepare_chain(recipe, run, folder)
    publish_artifacts(prepared)
    return prepared

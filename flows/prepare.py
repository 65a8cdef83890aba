"""prepare: validate -> format -> tokenize -> pack -> split -> publish, as a Prefect flow.

In a shell: python -m flows.prepare RECIPE.yaml
"""

if __name__ == "__main__":  # before Prefect is imported: its settings are read then
    from flows.command import main

    main()

from typing import Any

from prefect import flow
from prefect.utilities.hashing import file_hash

from packhouse.recipe import Recipe
from packhouse.recipe.sections import Uri
from tasks.allowed_places import allowed_recipe, worker_cache
from tasks.chain import prepare_run
from tasks.dataset_slot import dataset_slot
from tasks.engines import Runner
from tasks.hooks import FLOW, recipe_run_name
from tasks.outcomes import with_stops
from tasks.steps import audit, files, format_, pack, publish, split, tokenize, validate

STEPS = (validate, format_, tokenize, pack, split, audit, files, publish)
"""One task per step. `packhouse.run.chain` decides when they run; `tasks.runner` submits them."""


@flow(name="prepare", version=file_hash(__file__), flow_run_name=recipe_run_name, **FLOW)
@with_stops
def prepare(recipe: Recipe, cache: Uri | None = None, runner: Runner | None = None) -> Any:
    """Prepare instruction data and publish it as a version of a dataset of packed tokens.

    Args:
        recipe: sources, tokenizer and settings of the version.
        cache: cache folder; by default the worker's PACKHOUSE_CACHE.
        runner: how tasks run: threads, processes, dask or ray; by default the worker's
            PACKHOUSE_RUNNER, or threads. Does not affect the output.
    """
    place = worker_cache(cache)
    allowed = allowed_recipe(recipe)
    with dataset_slot(allowed):
        return prepare_run(allowed, place, STEPS, runner)

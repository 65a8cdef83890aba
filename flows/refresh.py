"""refresh: publish a new version if something changed, then move the ref or ask for approval."""

from typing import Any

from prefect import flow
from prefect.utilities.hashing import file_hash

from flows.prepare import STEPS
from packhouse.recipe import Recipe
from packhouse.recipe.sections import Uri
from schemas.places import RecipeName, StorePlace
from tasks.allowed_places import allowed_recipe, worker_cache
from tasks.chain import refresh_run
from tasks.dataset_slot import dataset_slot
from tasks.engines import Runner
from tasks.hooks import FLOW, recipe_run_name
from tasks.outcomes import with_stops


@flow(name="refresh", version=file_hash(__file__), flow_run_name=recipe_run_name, **FLOW)
@with_stops
def refresh(
    recipe: RecipeName | Recipe,
    approval: bool = False,
    store: StorePlace | None = None,
    cache: Uri | None = None,
    runner: Runner | None = None,
) -> Any:
    """Publish a new version if the sources, the recipe or the tokenizer changed.

    Args:
        recipe: name of a recipe in sources.yaml, or a complete recipe.
        approval: publish the version, but move the ref only when someone approves it.
        store: store to publish to: a name from sources.yaml or a URI; by default the recipe's
            store.
        cache: cache folder; by default the worker's PACKHOUSE_CACHE.
        runner: how tasks run: threads, processes, dask or ray; by default the worker's
            PACKHOUSE_RUNNER, or threads. Does not affect the output.
    """
    place = worker_cache(cache)
    allowed = allowed_recipe(recipe, store)
    with dataset_slot(allowed):
        return refresh_run(allowed, place, STEPS, approval=approval, runner=runner)

"""backfill: refresh many recipes; one failure does not stop the others."""

from typing import Annotated, Any

from prefect import flow, runtime, tags
from prefect.utilities.hashing import file_hash
from pydantic import Field

from flows.refresh import refresh
from packhouse.recipe import Recipe
from packhouse.recipe.sections import Uri
from schemas.places import RecipeName, StorePlace
from tasks.artifacts import backfill_artifacts
from tasks.engines import Runner
from tasks.hooks import FLOW, backfill_run_name
from tasks.outcomes import filled, log_recipe, name_of, with_stops


@flow(name="backfill", version=file_hash(__file__), flow_run_name=backfill_run_name, **FLOW)
@with_stops
def backfill(
    recipes: Annotated[list[RecipeName | Recipe], Field(min_length=1)],
    approval: bool = False,
    store: StorePlace | None = None,
    cache: Uri | None = None,
    runner: Runner | None = None,
) -> Any:
    """Refresh many recipes, one run each; one failure does not stop the others.

    Args:
        recipes: names of recipes from sources.yaml, or whole recipes.
        approval: publish the versions, but move a ref only when someone approves it.
        store: where to publish: a name or a URI; by default the store of each recipe.
        cache: cache folder; by default the worker's PACKHOUSE_CACHE.
        runner: how tasks run: threads, processes, dask or ray; by default the worker's
            PACKHOUSE_RUNNER, or threads. Does not affect the output.
    """
    with tags(*runtime.flow_run.tags):  # automations that watch this run watch its children
        states: list[tuple[str, Any]] = []
        for recipe in recipes:
            state: Any = refresh(recipe, approval, store, cache, runner, return_state=True)
            states.append((name_of(recipe), state))
            log_recipe(*states[-1])
    backfill_artifacts(states)
    return filled(states)

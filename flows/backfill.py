"""backfill: refresh many recipes; one that fails does not stop the others."""

from typing import Annotated, Any

from prefect import flow, runtime, tags
from pydantic import Field

from flows.refresh import refresh
from packhouse.recipe import Recipe
from packhouse.recipe.settings import Uri
from schemas.places import RecipeName, StorePlace
from tasks.artifacts import backfill_artifacts
from tasks.backfill import filled, name_of
from tasks.engines import Runner
from tasks.hooks import FLOW, backfill_run_name


@flow(name="backfill", flow_run_name=backfill_run_name, **FLOW)
def backfill(
    recipes: Annotated[list[RecipeName | Recipe], Field(min_length=1)],
    approval: bool = False,
    store: StorePlace | None = None,
    cache: Uri | None = None,
    runner: Runner | None = None,
) -> Any:
    """Refresh many recipes, each as a run of its own; one that fails does not stop the others.

    Args:
        recipes: names of recipes of this deployment (deployments/sources.yaml).
        approval: publish the versions, and leave it to someone to move the refs.
        store: where to publish, a name or a URI; by default each recipe's.
        cache: folder of finished steps; by default the worker's PACKHOUSE_CACHE.
        runner: the engine that does the work; by default the worker's PACKHOUSE_RUNNER, else
            threads.
    """
    with tags(*runtime.flow_run.tags):  # what watches this run watches those below it
        states: Any = [
            (name_of(recipe), refresh(recipe, approval, store, cache, runner, return_state=True))
            for recipe in recipes
        ]
    backfill_artifacts(states)
    return filled(states)

"""What a cancelled run leaves is taken away: half-done steps, objects of an uncommitted version.

A run that is told to stop gives back its slot at once and ends when its jobs in hand are done; one
that takes over half a minute for that is killed by its worker. Neither leaves anything that a
reader can see. The rest is removed here, by the worker; what a whole machine takes down with it is
removed by the next run there, or by `gc`.
"""

import logging
from typing import Any

from prefect.client.schemas.objects import FlowRun, State

from packhouse.recipe import Recipe
from packhouse.step_store import StepStore
from packhouse.store import open_store
from packhouse.store.gc import collect_steps, find_garbage
from packhouse.store.steps import run
from packhouse.workspace import default_cache
from tasks.guard import allowed_recipe

__all__ = ["clean_up", "recipe_of"]

log = logging.getLogger("packhouse.flows")


def clean_up(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Remove what a cancelled run left; a hook of every flow."""
    folders = StepStore(default_cache() / "steps").sweep()
    recipe = recipe_of(flow_run)
    if recipe is None:
        return
    store = open_store(recipe.publish.store)
    found = [
        item
        for item in find_garbage(store, recipe.dataset, grace_s=0)
        if item.reason == "abandoned"
    ]
    objects = sum(run(store, collect_steps(item)) for item in found)
    log.info("removed %d folders and %d objects of an unfinished run", folders, objects)


def recipe_of(flow_run: FlowRun) -> Recipe | None:
    """Return the recipe that a run was given, resolved as the run resolves it."""
    given = flow_run.parameters.get("recipe")
    if given is None:
        return None
    recipe = given if isinstance(given, str | Recipe) else Recipe.model_validate(given)
    deployed = flow_run.deployment_id is not None
    return allowed_recipe(recipe, flow_run.parameters.get("store"), deployed=deployed)

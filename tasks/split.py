"""Prove that train and eval share nothing, and count both."""

from prefect.client.schemas.objects import State

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.groups import group_task, run_group

__all__ = ["split"]


@group_task(name="split")
def split(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Prove that train and eval share nothing, and count both."""
    return run_group(group, recipe, cache)

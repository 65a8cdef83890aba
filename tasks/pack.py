"""Plan the packs of the whole dataset, each side by itself: lengths in, places out."""

from prefect.client.schemas.objects import State

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.groups import group_task, run_group

__all__ = ["pack"]


@group_task(name="pack")
def pack(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Plan the packs of the whole dataset, each side by itself: lengths in, places out."""
    return run_group(group, recipe, cache)

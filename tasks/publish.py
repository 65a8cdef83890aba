"""Publish the packs as an immutable version."""

from prefect.client.schemas.objects import State

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.groups import group_task, run_group

__all__ = ["publish"]


@group_task(name="publish")
def publish(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Publish the packs as an immutable version."""
    return run_group(group, recipe, cache)

"""Validate one shard: raw rows in, conversations and quarantined rows out."""

from prefect.client.schemas.objects import State

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.groups import group_task, run_group

__all__ = ["validate"]


@group_task(name="validate")
def validate(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Validate one shard: raw rows in, conversations and quarantined rows out."""
    return run_group(group, recipe, cache)

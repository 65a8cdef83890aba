"""Tokenize one shard: text in, ids with their trained ranges out."""

from prefect.client.schemas.objects import State

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.groups import group_task, run_group

__all__ = ["tokenize"]


@group_task(name="tokenize")
def tokenize(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Tokenize one shard: text in, ids with their trained ranges out."""
    return run_group(group, recipe, cache)

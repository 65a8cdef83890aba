"""Gather the packs of one output shard: a plan in, training rows of seq_len out."""

from prefect.client.schemas.objects import State

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.groups import group_task, run_group

__all__ = ["gather"]


@group_task(name="gather")
def gather(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Gather the packs of one output shard: a plan in, training rows of seq_len out."""
    return run_group(group, recipe, cache)

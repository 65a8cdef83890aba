"""Format one shard: conversations in, text with its trained spans out."""

from prefect.client.schemas.objects import State

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.groups import group_task, run_group

__all__ = ["format_"]


@group_task(name="format")
def format_(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Format one shard: conversations in, text with its trained spans out."""
    return run_group(group, recipe, cache)

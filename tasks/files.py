"""Write one file of the version, as it will lie in the store."""

from prefect.client.schemas.objects import State

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.groups import group_task, run_group

__all__ = ["files"]


@group_task(name="files")
def files(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Write one file of the version, as it will lie in the store."""
    return run_group(group, recipe, cache)

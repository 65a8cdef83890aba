"""Audit a shard, gathered packs, or all records: what would their tokens teach?"""

from prefect.client.schemas.objects import State

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.groups import group_task, run_group

__all__ = ["audit"]


@group_task(name="audit")
def audit(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Audit a shard, gathered packs, or all records: what would their tokens teach?"""
    return run_group(group, recipe, cache)

"""Audit a shard, gathered packs, or all records: what would their tokens teach?"""

from prefect.client.schemas.objects import State

from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["audit"]


@step_task(name="audit")
def audit(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Audit a shard, gathered packs, or all records: what would their tokens teach?"""
    return run_step(job, recipe, cache)

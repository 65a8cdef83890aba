"""Validate one shard: raw rows in, conversations and quarantined rows out."""

from prefect.client.schemas.objects import State

from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["validate"]


@step_task(name="validate")
def validate(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Validate one shard: raw rows in, conversations and quarantined rows out."""
    return run_step(job, recipe, cache)

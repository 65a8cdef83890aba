"""Publish the packs as an immutable version."""

from prefect.client.schemas.objects import State

from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["publish"]


@step_task(name="publish")
def publish(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Publish the packs as an immutable version."""
    return run_step(job, recipe, cache)

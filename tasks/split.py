"""Prove that train and eval share nothing, and count both."""

from prefect.client.schemas.objects import State

from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["split"]


@step_task(name="split")
def split(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Prove that train and eval share nothing, and count both."""
    return run_step(job, recipe, cache)

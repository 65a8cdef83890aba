"""Plan the packs of the whole dataset, each side by itself: lengths in, places out."""

from prefect.client.schemas.objects import State

from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["pack"]


@step_task(name="pack")
def pack(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Plan the packs of the whole dataset, each side by itself: lengths in, places out."""
    return run_step(job, recipe, cache)

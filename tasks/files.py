"""Write one file of the version, as it will lie in the store."""

from prefect.client.schemas.objects import State

from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["files"]


@step_task(name="files")
def files(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Write one file of the version, as it will lie in the store."""
    return run_step(job, recipe, cache)

"""Format one shard: conversations in, text with its trained spans out."""

from prefect.client.schemas.objects import State

from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["format_"]


@step_task(name="format")
def format_(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Format one shard: conversations in, text with its trained spans out."""
    return run_step(job, recipe, cache)

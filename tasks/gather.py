"""Gather the packs of one output shard: a plan in, training rows of seq_len out."""

from prefect.client.schemas.objects import State

from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["gather"]


@step_task(name="gather")
def gather(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Gather the packs of one output shard: a plan in, training rows of seq_len out."""
    return run_step(job, recipe, cache)

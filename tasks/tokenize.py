"""Tokenize one shard: text in, ids with their trained ranges out."""

from prefect.client.schemas.objects import State

from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["tokenize"]


@step_task(name="tokenize")
def tokenize(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Tokenize one shard: text in, ids with their trained ranges out."""
    return run_step(job, recipe, cache)

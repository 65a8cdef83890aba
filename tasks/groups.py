"""A task run does a group of neighbouring jobs of one step: see `packhouse.grouping`."""

from functools import partial

from prefect.client.schemas.objects import State
from prefect.states import Completed

from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.policies import run_step, step_task

__all__ = ["group_task", "run_group"]

group_task = partial(step_task, task_run_name="{group.step}: {group.label}")
"""Decorate a task that does a group of jobs of the chain."""


def run_group(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Do the jobs in order, or find all of them done and say so with the state `Cached`.

    If one fails, those before it are done, and found when the task is tried again.
    """
    done = [run_step(job, recipe, cache) for job in group.jobs]
    receipts = [each.result() if isinstance(each, State) else each for each in done]
    if all(receipt.cached for receipt in receipts):
        keys = ", ".join(job.key for job in group.jobs[:3])
        return Completed(name="Cached", data=receipts, message=f"found under {keys}")
    return receipts

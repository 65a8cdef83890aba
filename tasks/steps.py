"""The steps of the chain as Prefect tasks, in the order in which data passes through them.

A task run processes a group of consecutive jobs of one step (`packhouse.run.step`). All eight
tasks do the same: they look up each job's result in the step store and compute it if it is missing.
`packhouse.run.steps` defines what a step computes and the name of its task.
"""

import logging
from pathlib import Path
from typing import Any

from prefect import Task, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed

import schemas
from packhouse.recipe import Recipe
from packhouse.run.step import AnyStep, JobGroup, execute
from packhouse.run.step_cache import AnyReceipt, Workspace
from packhouse.run.steps import STEPS
from tasks.retries import retried_task

log = logging.getLogger("packhouse.tasks")

Receipts = list[AnyReceipt]


def this_run() -> str:
    """Return the name and ID of the current flow run, to record who moved a ref."""
    return f"run {runtime.flow_run.name} {runtime.flow_run.id}"


def run_group(group: JobGroup, recipe: Recipe, cache: str) -> Receipts | State[Receipts]:
    """Run the jobs in order; if all are cached, return the state `Cached`.

    If one fails, the results of those before it are kept and found when the task is retried.
    """
    workspace = Workspace(cache=Path(cache), check=schemas.check, moved_by=this_run())
    receipts = []
    for job in group.jobs:
        receipt = execute(job, recipe, workspace)
        done = "cached" if receipt.cached else f"done in {receipt.seconds:.1f} s"
        log.debug("%s %s: %s (key %s)", receipt.step, job.label, done, job.key[:12])
        receipts.append(receipt)
    if all(receipt.cached for receipt in receipts):
        keys = ", ".join(job.key[:12] for job in group.jobs[:3])
        return Completed(name="Cached", data=receipts, message=f"found under {keys}")
    return receipts


def step_task(step: AnyStep) -> Task[..., Any]:
    """Return the task that runs groups of jobs of a step."""
    return retried_task(
        name=step.name, description=step.title, task_run_name="{group.step}: {group.label}"
    )(run_group)


# In the order of the chain; each task is named like its step.
validate, format_, tokenize, pack, split, audit, files, publish = map(step_task, STEPS)

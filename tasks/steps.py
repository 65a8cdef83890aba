"""The steps of the chain as Prefect tasks, in the order in which data passes through them.

A task run does a group of neighbouring jobs of one step (`packhouse.grouping`). All nine tasks do
the same: look for each job's result in the step store, and compute it where it is missing. What a
step computes is in `packhouse.steps`.
"""

import logging
from pathlib import Path
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State
from prefect.states import Completed

import schemas
from packhouse.grouping import JobGroup
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from packhouse.steps import execute
from packhouse.workspace import Workspace
from tasks.policies import retried_task

__all__ = [
    "audit",
    "files",
    "format_",
    "gather",
    "pack",
    "publish",
    "split",
    "tokenize",
    "validate",
]

log = logging.getLogger("packhouse.tasks")


def run_group(group: JobGroup, recipe: Recipe, cache: str) -> list[Receipt] | State[list[Receipt]]:
    """Do the jobs in order, or find all of them done and say so with the state `Cached`.

    If one fails, those before it are done, and found when the task is tried again.
    """
    workspace = Workspace(cache=Path(cache), check=schemas.check)
    receipts = []
    for job in group.jobs:
        receipt = execute(job, recipe, workspace)
        done = "cached" if receipt.cached else f"done in {receipt.seconds:.1f} s"
        log.info("%s %s: %s (key %s)", job.step, job.label, done, job.key[:12])
        receipts.append(receipt)
    if all(receipt.cached for receipt in receipts):
        keys = ", ".join(job.key for job in group.jobs[:3])
        return Completed(name="Cached", data=receipts, message=f"found under {keys}")
    return receipts


def step_task(step: str, description: str) -> Task[..., Any]:
    """Return the task that does groups of jobs of a step."""
    return retried_task(
        name=step, description=description, task_run_name="{group.step}: {group.label}"
    )(run_group)


validate = step_task("validate", "Raw rows in, conversations and quarantined rows out.")
format_ = step_task("format", "Conversations in, text with its trained spans out.")
tokenize = step_task("tokenize", "Text in, ids with their trained ranges out.")
pack = step_task("pack", "Plan the packs of the whole dataset: lengths in, places out.")
gather = step_task("gather", "Gather the packs of one output shard: rows of seq_len out.")
split = step_task("split", "Prove that train and eval share nothing, and count both.")
audit = step_task("audit", "What would the tokens of a shard, of packs, of all records teach?")
files = step_task("files", "Write files of the version, as they will lie in the store.")
publish = step_task("publish", "Publish the packs as an immutable version.")

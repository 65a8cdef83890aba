"""The steps as functions of a job: find it done in the step store, or do it there.

Each step lives in the file of its name and has one entry, `compute`, that reads the files of the
jobs before it, writes its own into a folder, and returns its counts. `execute` wraps it in the
cache and is what both the local runner and Prefect's tasks call.
"""

from packhouse.dedup import needs_fingerprints
from packhouse.interrupts import check_interrupted
from packhouse.jobs import Job
from packhouse.memory import keep_freed_memory
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from packhouse.steps import (
    audit,
    files,
    format_step,
    gather,
    pack,
    publish,
    split,
    tokenize_step,
    validate,
)
from packhouse.steps.selection import fingerprint_shard
from packhouse.steps.shard_io import inputs_of
from packhouse.without_pandas import settle_pyarrow
from packhouse.workspace import Workspace

__all__ = ["execute"]

_COMPUTE = {
    "validate": validate.compute,
    "format": format_step.compute,
    "tokenize": tokenize_step.compute,
    "pack": pack.compute,
    "gather": gather.compute,
    "split": split.compute,
    "audit": audit.compute,
    "files": files.compute,
    "publish": publish.compute,
}


def execute(job: Job, recipe: Recipe, workspace: Workspace) -> Receipt:
    """Do a job, or find it done; its result is durable when this returns.

    Raises:
        PackhouseError: nothing of a failed job remains.
        Interrupted: a signal came before it began.
    """
    check_interrupted()
    settle_pyarrow()
    keep_freed_memory()
    compute = _COMPUTE[job.step]
    receipt = workspace.steps.run(
        job.step, job.key, lambda folder: compute(job, recipe, workspace, folder)
    )
    if job.step == "format" and needs_fingerprints(recipe.dedup):
        (validated,) = inputs_of(job, workspace, "validate")
        fingerprint_shard(validated, receipt, recipe, workspace)  # here, where shards are parallel
    if job.step == "publish":
        return publish.commit(job, recipe, receipt, workspace)
    return receipt

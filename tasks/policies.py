"""What every task has in common: when it is retried, how a hit shows, what it is given.

Prefect's own caching is off: its results carry no checksum, stay "Cached" when their file is gone,
and lose a failed write silently. The step store decides, and a hit is shown as state `Cached`.
Arguments and results are references (keys, receipts), never tables.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed
from prefect.tasks import exponential_backoff

import schemas
from packhouse.errors import TransientError
from packhouse.jobs import Job
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from packhouse.steps import execute
from packhouse.workspace import Workspace

__all__ = ["is_transient", "run_step", "step_task"]

log = logging.getLogger("packhouse.tasks")


def is_transient(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Retry hiccups of network and storage only; a user's mistake fails at once."""
    try:
        state.result()
    except TransientError:
        return True
    except Exception:
        return False
    return False


step_task = partial(
    task,
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=3,
    retry_delay_seconds=exponential_backoff(backoff_factor=2),
    retry_jitter_factor=0.5,
    retry_condition_fn=is_transient,
    task_run_name="{job.step}: {job.label}",
)


def run_step(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Do a job, or find it done and say so with the state `Cached`."""
    workspace = Workspace(cache=Path(cache), check=schemas.check)
    receipt = execute(job, recipe, workspace)
    done = "cached" if receipt.cached else f"done in {receipt.seconds:.1f} s"
    log.info("%s %s: %s (key %s)", job.step, job.label, done, job.key[:12])
    if receipt.cached:
        return Completed(name="Cached", data=receipt, message=f"found under key {job.key}")
    return receipt

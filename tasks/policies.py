"""What every task and flow has in common: when it is retried, how a hit shows, what it is given.

Prefect's own caching is off: its results carry no checksum, stay "Cached" when their file is gone,
and lose a failed write silently. The step store decides, and a hit is shown as state `Cached`.
Arguments and results are references (keys, receipts), never tables. What Prefect itself keeps of a
result (the exception of a failed run) is JSON, never a pickle.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task, task
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

__all__ = ["is_transient", "retried_task", "run_step", "step_task"]

log = logging.getLogger("packhouse.tasks")

P = ParamSpec("P")
R = TypeVar("R")


def is_transient(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Retry hiccups of network and storage only; a user's mistake fails at once."""
    try:
        state.result()
    except TransientError:
        return True
    except Exception:
        return False
    return False


def retried_task(**options: Any) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Decorate a task that is retried after a hiccup of network or storage, and after nothing else.

    Args:
        options: arguments of Prefect's `task`, put over the house's.
    """
    house: dict[str, Any] = {
        "cache_policy": NO_CACHE,
        "persist_result": False,
        "result_serializer": "json",
        "retries": 3,
        "retry_delay_seconds": exponential_backoff(backoff_factor=2),
        "retry_jitter_factor": 0.5,
        "retry_condition_fn": is_transient,
    }
    decorate: Any = task(**(house | options))
    return cast("Callable[[Callable[P, R]], Task[P, R]]", decorate)


step_task = partial(retried_task, task_run_name="{job.step}: {job.label}")
"""Decorate a task that does one job of the chain."""


def run_step(job: Job, recipe: Recipe, cache: str) -> Receipt | State[Receipt]:
    """Do a job, or find it done and say so with the state `Cached`."""
    workspace = Workspace(cache=Path(cache), check=schemas.check)
    receipt = execute(job, recipe, workspace)
    done = "cached" if receipt.cached else f"done in {receipt.seconds:.1f} s"
    log.info("%s %s: %s (key %s)", job.step, job.label, done, job.key[:12])
    if receipt.cached:
        return Completed(name="Cached", data=receipt, message=f"found under key {job.key}")
    return receipt

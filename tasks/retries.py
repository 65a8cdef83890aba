"""Common settings of all tasks: retries and stored results.

Prefect's own caching is off: its results have no checksum, stay "Cached" when their file is gone,
and failed writes are lost silently. The step store is used instead, and a hit is shown as state
`Cached`. Arguments and results are references (keys, receipts), never tables. Results that Prefect
itself keeps (the exception of a failed run) are JSON, never a pickle.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.tasks import exponential_backoff

from packhouse.errors import TransientError

P = ParamSpec("P")
R = TypeVar("R")


def is_transient(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Return True for transient errors of network and storage; other errors fail at once."""
    try:
        state.result()
    except TransientError:
        return True
    except Exception:
        return False
    return False


def retried_task(**options: Any) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Decorate a task that is retried only after transient errors of network or storage.

    Args:
        options: arguments of Prefect's `task`; they override the defaults here.
    """
    defaults: dict[str, Any] = {
        "cache_policy": NO_CACHE,
        "persist_result": False,
        "result_serializer": "json",
        # After 2, 4 and 8 s: requests to a store have been retried for 120 s before that. With
        # jitter, so that tasks that failed together do not ask again together.
        "retries": 3,
        "retry_delay_seconds": exponential_backoff(backoff_factor=2),
        "retry_jitter_factor": 0.5,
        "retry_condition_fn": is_transient,
    }
    decorate: Any = task(**(defaults | options))
    return cast("Callable[[Callable[P, R]], Task[P, R]]", decorate)

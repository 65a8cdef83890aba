"""Run flows in threads of the worker's process: Prefect's machinery without processes.

    python -m tests.load.thread_worker POOL LIMIT

Polling, submission, the limit and every state are Prefect's own (`BaseWorker`). Only the place of
execution differs from the process worker, so two cores can run 20 flows at once. Memory is
released in the same way as by packhouse's own worker.
"""

import asyncio
import sys
from typing import Any

import anyio
import anyio.to_thread
from prefect.flow_engine import run_flow
from prefect.workers.base import (
    BaseJobConfiguration,
    BaseVariables,
    BaseWorker,
    BaseWorkerResult,
)

from deployments.worker import give_memory_back
from flows.prepare import prepare


class ThreadWorkerResult(BaseWorkerResult):
    """Outcome of a run in a thread."""


class ThreadWorker(BaseWorker[BaseJobConfiguration, BaseVariables, ThreadWorkerResult]):
    """Run the flow `prepare`, each run in a thread."""

    type = "thread"
    job_configuration = BaseJobConfiguration

    async def run(
        self, flow_run: Any, configuration: BaseJobConfiguration, task_status: Any = None
    ) -> ThreadWorkerResult:
        """Run to the end; the state is on the server."""
        if task_status:
            task_status.started(str(flow_run.id))
        limiter = anyio.CapacityLimiter(1)  # anyio's own is shared by all workers
        await anyio.to_thread.run_sync(self._execute, flow_run, limiter=limiter)
        return ThreadWorkerResult(status_code=0, identifier=str(flow_run.id))

    @staticmethod
    def _execute(flow_run: Any) -> None:
        run_flow(prepare, flow_run=flow_run, return_type="state")


if __name__ == "__main__":
    worker = ThreadWorker(work_pool_name=sys.argv[1], limit=int(sys.argv[2]))
    give_memory_back()
    asyncio.run(worker.start())

"""A worker that runs flows in threads of its own process: Prefect's machinery, without processes.

    python -m tests.load.thread_worker POOL LIMIT

Polling, submission, the limit and every state are Prefect's own (`BaseWorker`); only the place of
execution differs from the process worker: two cores can then have 20 runs at once. Memory is given
back as by the worker that packhouse is deployed with.
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
    """How a run in a thread ended."""


class ThreadWorker(BaseWorker[BaseJobConfiguration, BaseVariables, ThreadWorkerResult]):
    """Runs the flow `prepare`, each run in a thread."""

    type = "thread"
    job_configuration = BaseJobConfiguration

    async def run(
        self, flow_run: Any, configuration: BaseJobConfiguration, task_status: Any = None
    ) -> ThreadWorkerResult:
        """Run to the end; the state is the server's."""
        if task_status:
            task_status.started(str(flow_run.id))
        limiter = anyio.CapacityLimiter(1)  # anyio's own would hold all workers' threads together
        await anyio.to_thread.run_sync(self._execute, flow_run, limiter=limiter)
        return ThreadWorkerResult(status_code=0, identifier=str(flow_run.id))

    @staticmethod
    def _execute(flow_run: Any) -> None:
        run_flow(prepare, flow_run=flow_run, return_type="state")


if __name__ == "__main__":
    worker = ThreadWorker(work_pool_name=sys.argv[1], limit=int(sys.argv[2]))
    give_memory_back()
    asyncio.run(worker.start())

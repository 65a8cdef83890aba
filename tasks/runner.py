"""Run the chain's jobs as Prefect tasks on an engine; all tasks of a step run in parallel.

Each task run names the task runs whose output it reads, so Prefect's run graph shows the data flow.
It gets their IDs, not their futures: when a step starts, the previous one has ended, so there is
nothing to wait for, and IDs can be sent to other processes and survive a restart of the engine.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect import Task
from prefect.client.schemas.objects import TaskRunResult

from packhouse.errors import TransientError
from packhouse.recipe import Recipe
from packhouse.run.step import AnyJob, JobGroup, group_jobs
from packhouse.run.step_cache import AnyReceipt
from packhouse.system.progress import job_done, step_progress
from tasks.engines import Engine, choose_engine, is_lost_worker, started

log = logging.getLogger("packhouse.tasks")

# As in `packhouse.run.step`: a job that is too large ends its worker each time.
_MOST_RESTARTS = 3


@contextmanager
def prefect_runner(
    recipe: Recipe, cache: str, steps: Sequence[Task[..., Any]], runner: str | None = None
) -> Iterator["PrefectRunner"]:
    """Start the engine of a flow run, and yield the runner of its jobs.

    Args:
        recipe: recipe of the run.
        cache: folder of finished steps, at the same path on every worker.
        steps: one task for each step of the chain, named like the step.
        runner: name of the engine; see `tasks.engines`.

    Raises:
        ConfigError: there is no such engine.
    """
    with ExitStack() as stack:
        engine = choose_engine(runner)
        tasks = {task.name: task for task in steps}
        yield PrefectRunner(recipe=recipe, cache=cache, tasks=tasks, engine=engine, stack=stack)


@dataclass(kw_only=True)
class PrefectRunner:
    """Runs jobs as task runs of the calling flow."""

    recipe: Recipe
    cache: str
    tasks: Mapping[str, Task[..., Any]]
    """Task of each step, by the step's name."""
    engine: Engine
    stack: ExitStack
    """Stack with the running engine, which is replaced after a worker is lost."""
    _task_runner: Any = None
    _done_by: dict[str, UUID] = field(default_factory=dict)
    """Key of a finished job -> its task run."""
    _before: dict[UUID, set[UUID]] = field(default_factory=dict)
    """Task run -> all task runs that it depends on, directly or indirectly."""

    def __call__(self, jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
        """Submit the jobs of one step in groups and wait for all of them.

        Work of a lost worker is repeated, by the cluster itself if it can, otherwise on a restarted
        engine. Jobs that were already finished are found in the cache.

        Raises:
            TransientError: workers were lost repeatedly.
        """
        groups = group_jobs(jobs, self.engine.workers, self.engine.least_bytes)
        done: dict[int, list[AnyReceipt]] = {}
        with step_progress(jobs[0].step.name if jobs else "", len(jobs)):
            for _ in range(1 + _MOST_RESTARTS):
                lost = self._try(groups, done)
                if lost is None:
                    return [receipt for number in range(len(groups)) for receipt in done[number]]
                log.warning("a worker was lost (%r); restarting '%s'", lost, self.engine.runner)
                self.stack.close()
                self._task_runner = None
        raise TransientError(
            f"workers of runner '{self.engine.runner}' were lost {1 + _MOST_RESTARTS} times in "
            f"step '{jobs[0].step.name}' (last: {lost!r}), perhaps because they ran out of "
            "memory. Run again with fewer workers (PACKHOUSE_WORKERS); finished jobs are cached"
        )

    def _try(self, groups: list[JobGroup], done: dict[int, list[AnyReceipt]]) -> Exception | None:
        """Run the unfinished groups; return the error that stopped them, if any."""
        futures = {n: self._submit(group) for n, group in enumerate(groups) if n not in done}
        lost = None
        for number, future in futures.items():
            try:
                done[number] = future.result()
                self._done_by.update({job.key: future.task_run_id for job in groups[number].jobs})
            except Exception as error:
                if not is_lost_worker(error):
                    raise
                lost = error
            job_done(sum(map(len, done.values())))
        return lost

    def _submit(self, group: JobGroup) -> Any:
        if self._task_runner is None:
            self._task_runner = self.stack.enter_context(started(self.engine))
        # validate -> format -> tokenize, and tokenize also reads validate: both are direct inputs,
        # but tokenize already depends on validate through format, so only one edge is drawn.
        reads = {key for job in group.jobs for _, key in job.inputs}
        direct = {self._done_by[key] for key in reads & self._done_by.keys()}
        behind = set().union(*(self._before[run] for run in direct))
        future = self._task_runner.submit(
            self.tasks[group.step],
            parameters={"group": group, "recipe": self.recipe, "cache": self.cache},
            # publish reads all steps; edges from all of them would clutter the graph
            dependencies={"group": {TaskRunResult(id=run) for run in direct - behind}},
        )
        self._before[future.task_run_id] = direct | behind
        return future

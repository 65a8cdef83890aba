"""Runs the chain's jobs as Prefect tasks on an engine; all tasks of a step at the same time."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from packhouse.errors import TransientError
from packhouse.grouping import JobGroup, group_jobs
from packhouse.jobs import Job
from packhouse.progress import job_done, step_progress
from packhouse.recipe import Recipe
from packhouse.step_store import Receipt
from tasks.audit import audit
from tasks.engines import Engine, choose_engine, is_lost_worker, started
from tasks.files import files
from tasks.format import format_
from tasks.gather import gather
from tasks.pack import pack
from tasks.publish import publish
from tasks.split import split
from tasks.tokenize import tokenize
from tasks.validate import validate

__all__ = ["PrefectRunner", "prefect_runner"]

log = logging.getLogger("packhouse.tasks")

TASKS: dict[str, Any] = {
    "validate": validate,
    "format": format_,
    "tokenize": tokenize,
    "pack": pack,
    "gather": gather,
    "split": split,
    "audit": audit,
    "files": files,
    "publish": publish,
}

_MOST_RESTARTS = 3


@contextmanager
def prefect_runner(
    recipe: Recipe, cache: str, runner: str | None = None
) -> Iterator["PrefectRunner"]:
    """Start the engine of a flow run, and give what does jobs on it.

    Args:
        recipe: of the run.
        cache: folder of finished steps, as every worker sees it.
        runner: name of the engine; see `tasks.engines`.

    Raises:
        ConfigError: no such engine.
    """
    with ExitStack() as stack:
        engine = choose_engine(runner)
        yield PrefectRunner(recipe=recipe, cache=cache, engine=engine, stack=stack)


@dataclass(kw_only=True)
class PrefectRunner:
    """Does jobs as task runs of the flow that calls it."""

    recipe: Recipe
    cache: str
    engine: Engine
    stack: ExitStack
    """Holds the started engine, which a lost worker may have to be replaced by a new one."""
    _task_runner: Any = None

    def __call__(self, jobs: Sequence[Job]) -> list[Receipt]:
        """Submit the jobs of one step in groups and wait for all of them.

        What a lost worker was doing is done again: by the cluster itself where it can, else on an
        engine started anew. Jobs that were finished by then are found in the cache.

        Raises:
            TransientError: workers were lost again and again.
        """
        groups = group_jobs(jobs, self.engine.workers, self.engine.least_bytes)
        done: dict[int, list[Receipt]] = {}
        with step_progress(jobs[0].step if jobs else "", len(jobs)):
            for _ in range(1 + _MOST_RESTARTS):
                lost = self._try(groups, done)
                if lost is None:
                    return [receipt for number in range(len(groups)) for receipt in done[number]]
                log.warning("a worker was lost (%r); starting '%s' anew", lost, self.engine.runner)
                self.stack.close()
                self._task_runner = None
        raise TransientError(
            f"workers of runner '{self.engine.runner}' were lost {1 + _MOST_RESTARTS} times in "
            f"step '{jobs[0].step}' (the last time: {lost!r}); is there enough memory for a shard? "
            "What was done is cached: run again, with fewer workers (PACKHOUSE_WORKERS)"
        )

    def _try(self, groups: list[JobGroup], done: dict[int, list[Receipt]]) -> Exception | None:
        """Do the groups that are not done; return why the rest is still not, if so."""
        futures = {n: self._submit(group) for n, group in enumerate(groups) if n not in done}
        lost = None
        for number, future in futures.items():
            try:
                done[number] = future.result()
            except Exception as error:
                if not is_lost_worker(error):
                    raise
                lost = error
            job_done(sum(map(len, done.values())))
        return lost

    def _submit(self, group: JobGroup) -> Any:
        if self._task_runner is None:
            self._task_runner = self.stack.enter_context(started(self.engine))
        parameters = {"group": group, "recipe": self.recipe, "cache": self.cache}
        return self._task_runner.submit(TASKS[group.step], parameters=parameters)

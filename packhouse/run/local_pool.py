"""Jobs on several processes of this machine, without any server: `packhouse prepare --workers N`.

Processes are started anew (spawned), which takes them a second or two; they live as long as the
runner, and get jobs in groups (`group_jobs`). Only jobs and receipts travel. A process that
is killed breaks the pool: another one is started, and does what was not finished. If the runner
itself is killed, its processes end with it.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread

from packhouse.errors import ConfigError, TransientError
from packhouse.recipe import Recipe
from packhouse.recipe.model import plugins_of
from packhouse.run.cache import AnyReceipt, Workspace
from packhouse.run.step import AnyJob, execute
from packhouse.system.progress import job_done, step_progress

_OVERHEAD_BYTES = 2**15
"""What opening, checking and writing the files of a job costs, in bytes that it could have read."""
_TASKS_PER_WORKER = 4
"""Tasks of a step for each worker: the last ones to end leave the others idle for less."""


class JobGroup:
    """Neighbouring jobs of one step.

    No list or dataclass on purpose: engines that look for futures in all parts of what a task is
    given leave it alone.
    """

    __slots__ = ("jobs",)

    def __init__(self, jobs: Sequence[AnyJob]) -> None:
        self.jobs = tuple(jobs)

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def step(self) -> str:
        """Name of the step of all its jobs."""
        return self.jobs[0].step.name

    @property
    def label(self) -> str:
        """For people: `chats/a.jsonl and 7 more`."""
        more = f" and {len(self) - 1:,} more" if len(self) > 1 else ""
        return f"{self.jobs[0].label}{more}"


def group_jobs(jobs: Sequence[AnyJob], workers: int, least_bytes: int) -> list[JobGroup]:
    """Group neighbouring jobs of one step.

    Args:
        jobs: of one step, in order.
        workers: how many work at the same time.
        least_bytes: bytes that a task should work on at least, if there are that many.

    Returns:
        The same jobs in the same order, none left out, in groups of about equal size.

    Example:
        >>> from types import SimpleNamespace as Job
        >>> jobs = [Job(size=2**20) for _ in range(6)]
        >>> [len(group) for group in group_jobs(jobs, workers=1, least_bytes=2**21)]
        [2, 2, 2]
        >>> [len(group) for group in group_jobs(jobs, workers=2, least_bytes=0)]
        [1, 1, 1, 1, 1, 1]
    """
    sizes = [job.size + _OVERHEAD_BYTES for job in jobs]
    target = max(least_bytes, sum(sizes) // (workers * _TASKS_PER_WORKER))
    groups: list[list[AnyJob]] = []
    filled = target
    for job, size in zip(jobs, sizes, strict=True):
        if filled >= target or filled + size // 2 > target:  # at least half of a job must fit
            groups.append([])
            filled = 0
        groups[-1].append(job)
        filled += size
    return [JobGroup(group) for group in groups]


Run = Callable[[Sequence[AnyJob]], list[AnyReceipt]]
"""Does the jobs of one step, in any order, and returns their receipts in the order of the jobs."""

_LEAST_BYTES = 2**22  # a task takes a millisecond to hand out
_MOST_RESTARTS = 3


@contextmanager
def local_runner(recipe: Recipe, workspace: Workspace, workers: int) -> Iterator[Run]:
    """Give what does jobs on this machine: in this process, or in as many processes.

    Raises:
        ConfigError: several processes, and a plug-in that was given as a function.
    """
    if workers == 1:
        yield LocalRunner(recipe=recipe, workspace=workspace)
        return
    unshared = [plugin for plugin in plugins_of(recipe) if not plugin.distribution]
    if unshared:
        raise ConfigError(
            f"{unshared[0]} is known to this process alone; leave `workers` at 1, or offer it by "
            "entry point, which every process finds"
        )
    with PoolRunner(recipe=recipe, workspace=workspace, workers=workers) as run:
        yield run


@dataclass(frozen=True, kw_only=True)
class LocalRunner:
    """Does jobs in this process, one after another; parallel work happens inside a step."""

    recipe: Recipe
    workspace: Workspace

    def __call__(self, jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
        """Do the jobs in order."""
        receipts = []
        with step_progress(jobs[0].step.name if jobs else "", len(jobs)):
            for job in jobs:
                receipts.append(execute(job, self.recipe, self.workspace))
                job_done(len(receipts))
        return receipts


@dataclass(kw_only=True)
class PoolRunner:
    """Does jobs in processes; close it, or use it as a context manager."""

    recipe: Recipe
    workspace: Workspace
    workers: int
    _pool: ProcessPoolExecutor | None = field(default=None, init=False)

    def __enter__(self) -> "PoolRunner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        if is_interrupted and self._pool is not None:
            for process in list(self._pool._processes.values()):  # a job may take minutes
                process.terminate()
        self.close()

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __call__(self, jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
        """Do the jobs of one step.

        Raises:
            TransientError: processes were killed again and again.
        """
        groups = group_jobs(jobs, self.workers, _LEAST_BYTES)
        receipts: dict[int, list[AnyReceipt]] = {}
        with step_progress(jobs[0].step.name if jobs else "", len(jobs)):
            for _ in range(1 + _MOST_RESTARTS):
                try:
                    self._do(groups, receipts)
                except BrokenProcessPool:
                    self.close()
                    continue
                return [receipt for number in range(len(groups)) for receipt in receipts[number]]
        raise TransientError(
            f"processes of step '{jobs[0].step.name}' were killed {1 + _MOST_RESTARTS} times; is "
            f"there enough memory for {self.workers} shards at a time? What was done is cached: "
            "run again, with fewer --workers"
        )

    def _do(self, groups: list[JobGroup], receipts: dict[int, list[AnyReceipt]]) -> None:
        if len(groups) == 1 and self._pool is None:
            receipts[0] = _do_group(groups[0], self.recipe, self.workspace)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self.workers, mp_context=context, initializer=end_with_parent
            )
        # Processes inherit which signals are blocked. A terminal sends Ctrl-C, and its own end, to
        # all of them; they would each print a traceback. `__exit__` ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            futures = {
                number: self._pool.submit(_do_group, group, self.recipe, self.workspace)
                for number, group in enumerate(groups)
                if number not in receipts
            }
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, future in futures.items():
            receipts[number] = future.result()
            job_done(sum(map(len, receipts.values())))


def end_with_parent() -> None:
    """End this process when the one that started it dies, even by SIGKILL; for pools' processes.

    They wait for work on a pipe that they hold open themselves, so its end never comes: each would
    stay, with its memory, and so would the open output by which a worker sees that a run is alive.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("end_with_parent is for processes that multiprocessing started")

    def wait() -> None:
        parent.join()  # by a pipe that only the parent holds, so it ends however the parent ends
        os._exit(1)

    Thread(target=wait, name="end-with-parent", daemon=True).start()


def _do_group(group: JobGroup, recipe: Recipe, workspace: Workspace) -> list[AnyReceipt]:
    return [execute(job, recipe, workspace) for job in group.jobs]

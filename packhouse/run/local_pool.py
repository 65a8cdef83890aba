"""Run jobs in several processes on this machine, without a server: `packhouse prepare --workers N`.

Processes are spawned, which takes a second or two, live as long as the runner and receive jobs in
groups (`group_jobs`). Only jobs and receipts are sent between processes. If a process is killed, a
new pool finishes the remaining work. If the runner itself is killed, its processes exit too.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field

from packhouse.errors import ConfigError, TransientError
from packhouse.recipe import Recipe
from packhouse.recipe.model import plugins_of
from packhouse.run.cache import AnyReceipt, Workspace
from packhouse.run.step import AnyJob, execute
from packhouse.system.progress import job_done, step_progress
from packhouse.system.worker import begin_pool_process

_OVERHEAD_BYTES = 2**15
"""Fixed cost of a job (opening, checking and writing files), in bytes read in the same time."""
_TASKS_PER_WORKER = 4
"""Tasks per worker and step. More than one, so that workers finish at about the same time."""


class JobGroup:
    """Consecutive jobs of one step.

    Deliberately not a list or dataclass: Prefect would search every part of those for futures.
    """

    __slots__ = ("jobs",)

    def __init__(self, jobs: Sequence[AnyJob]) -> None:
        self.jobs = tuple(jobs)

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def step(self) -> str:
        """Step name of its jobs."""
        return self.jobs[0].step.name

    @property
    def label(self) -> str:
        """Name shown to users: `chats/a.jsonl and 7 more`."""
        more = f" and {len(self) - 1:,} more" if len(self) > 1 else ""
        return f"{self.jobs[0].label}{more}"


def group_jobs(jobs: Sequence[AnyJob], workers: int, least_bytes: int) -> list[JobGroup]:
    """Group consecutive jobs of one step.

    Args:
        jobs: jobs of one step, in order.
        workers: number of workers.
        least_bytes: smallest input of a group in bytes, if there is that much.

    Returns:
        All jobs in the same order, in groups of about equal size.

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
        # Start a new group unless at least half of the job fits into this one.
        if filled >= target or filled + size // 2 > target:
            groups.append([])
            filled = 0
        groups[-1].append(job)
        filled += size
    return [JobGroup(group) for group in groups]


Run = Callable[[Sequence[AnyJob]], list[AnyReceipt]]
"""Runs the jobs of one step in any order and returns their receipts in the order of the jobs."""

_LEAST_BYTES = 2**25  # takes two seconds, like starting a process
_BYTES_PER_WORKER = 2**27
_MOST_RESTARTS = 3


@contextmanager
def local_runner(recipe: Recipe, workspace: Workspace, workers: int | None) -> Iterator[Run]:
    """Yield a function that runs jobs in this process, or in `workers` processes if over 1.

    Args:
        recipe: the recipe.
        workspace: cache and contract checks.
        workers: number of processes; None: as many as there are cores, but one for each 128 MiB of
            the first step's input, and one if a plug-in is registered only in this process.

    Raises:
        ConfigError: `workers` is over 1 and a plug-in is registered only in this process.
    """
    unshared = [plugin for plugin in plugins_of(recipe) if not plugin.distribution]
    if workers == 1 or (workers is None and unshared):
        yield LocalRunner(recipe=recipe, workspace=workspace)
        return
    if unshared:
        raise ConfigError(
            f"{unshared[0]} is registered only in this process. Set workers=1, or register it as "
            "an entry point so that worker processes can load it."
        )
    with PoolRunner(recipe=recipe, workspace=workspace, workers=workers) as run:
        yield run


@dataclass(frozen=True, kw_only=True)
class LocalRunner:
    """Runs jobs in this process, one after another; a step may still use several threads."""

    recipe: Recipe
    workspace: Workspace

    def __call__(self, jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
        """Run the jobs in order."""
        receipts = []
        with step_progress(jobs[0].step.name if jobs else "", len(jobs)):
            for job in jobs:
                receipts.append(execute(job, self.recipe, self.workspace))
                job_done(len(receipts))
        return receipts


@dataclass(kw_only=True)
class PoolRunner:
    """Runs jobs in a pool of processes. Close it, or use it as a context manager."""

    recipe: Recipe
    workspace: Workspace
    workers: int | None
    _pool: ProcessPoolExecutor | None = field(default=None, init=False)

    def __enter__(self) -> "PoolRunner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        if is_interrupted and self._pool is not None:
            # Do not wait for running jobs, which may take minutes.
            for process in list(self._pool._processes.values()):
                process.terminate()
        self.close()

    def close(self) -> None:
        """Stop the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __call__(self, jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
        """Run the jobs of one step.

        Raises:
            TransientError: processes were killed repeatedly.
        """
        if self.workers is None:
            num_bytes = sum(job.size for job in jobs)
            self.workers = min(os.cpu_count() or 1, max(1, num_bytes // _BYTES_PER_WORKER))
        if self.workers == 1:
            return LocalRunner(recipe=self.recipe, workspace=self.workspace)(jobs)
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
            f"processes of step '{jobs[0].step.name}' were killed {1 + _MOST_RESTARTS} times, "
            f"perhaps because {self.workers} shards at a time need too much memory. Run again with "
            "fewer --workers; finished work is cached."
        )

    def _do(self, groups: list[JobGroup], receipts: dict[int, list[AnyReceipt]]) -> None:
        if len(groups) == 1 and self._pool is None:
            receipts[0] = _do_group(groups[0], self.recipe, self.workspace)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self.workers, mp_context=context, initializer=begin_pool_process
            )
        # Processes inherit blocked signals. A terminal sends Ctrl-C and its hang-up to all of them,
        # and each would print a traceback. `__exit__` stops them instead.
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


def _do_group(group: JobGroup, recipe: Recipe, workspace: Workspace) -> list[AnyReceipt]:
    return [execute(job, recipe, workspace) for job in group.jobs]

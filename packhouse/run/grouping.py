"""Jobs put together into tasks, so that handing out work costs a small part of doing it.

An engine takes 5 ms (threads) to 150 ms (Dask, processes) to hand out one task, whatever is in it.
Jobs are as small as the files that people have; tasks are groups of neighbours that make up a
worthwhile piece of work, yet so many that every worker has several to do.
"""

from collections.abc import Sequence

from packhouse.run.step import AnyJob

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
        """For people: `a.jsonl from byte 0 and 7 more`."""
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

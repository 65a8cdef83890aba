"""Define steps and jobs: one `Step` object holds a step's name, version, libraries and function.

    TOKENIZE = Step(
        name="tokenize",
        version="1.2",
        libraries=("numpy", "pyarrow"),
        facts=TokenizeFacts,
        compute=compute,
        contracts={"tokenized.arrow": "tokenized"},
    )
    job = TOKENIZE.job(Parameters(...), inputs=[formatted.ref], label="a.jsonl")
    execute(job, recipe, workspace).facts.tokens_out

The planner, the cache, `packhouse explain`, the ledger and the Prefect tasks all read this object,
so adding a parameter or a step changes one file.

The key of a job is the sha256 of everything that determines its output: the keys of its inputs, its
parameters, and the versions of the step and its libraries. A changed `seq_len` changes the keys
of pack and of later steps, but none before it.

`LocalRunner` runs the jobs of a step on this machine, in one process or several. Only jobs and
receipts are sent between processes.
"""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from pydantic import TypeAdapter

from packhouse.errors import ConfigError, TransientError
from packhouse.recipe import Recipe
from packhouse.recipe.recipe import plugins_of
from packhouse.records.table_schemas import read_table
from packhouse.render.renderer import load_encoders
from packhouse.run.moved_shards import Move, copy_moved
from packhouse.run.step_cache import AnyReceipt, Receipt, Workspace
from packhouse.system.fingerprint import canonical_json, digest, library_versions
from packhouse.system.progress import job_done, step_progress
from packhouse.system.terminal import check_interrupted
from packhouse.system.worker import WorkerForks, begin_pool_process, keep_freed_memory
from packhouse.tokenize import TokenizerSnapshot, load_snapshot
from packhouse.tokenize.tokenizer_loading import MEMORY_PER_BYTE, tokenizer_bytes

Ref = tuple[str, str]
"""Name of the step and key of a job."""


class Parameters(Protocol):
    """Parameters of one job, a frozen dataclass."""

    def to_json(self) -> dict[str, object]:
        """Return the parameters that determine the output, as plain JSON for the key.

        Paths, the encoder and the number of workers do not change the output, so they are left out.
        """


P = TypeVar("P", bound=Parameters)
P_co = TypeVar("P_co", covariant=True)
F = TypeVar("F")
G = TypeVar("G")


# An object that holds functions instead of a subclass: functions and dataclasses pickle by name, a
# subclass would need a registry in each process.
@dataclass(frozen=True, kw_only=True, eq=False)
class Step(Generic[P, F]):
    """One step of the chain. Each is defined in its own file in `packhouse.run.steps`."""

    name: str
    title: str
    """One sentence that the Prefect UI shows."""
    version: str
    """Raise it when the step writes different bytes for the same input. Part of every key."""
    libraries: tuple[str, ...]
    """Packages whose version may change the step's output. Part of every key."""
    facts: type[F]
    """Dataclass of a job's counts and findings; stored in the receipt, validated when read."""
    compute: "Callable[[JobContext[P], Path], F]"
    """Runs a job: reads the output of earlier steps, writes files to the folder, returns facts."""
    contracts: Mapping[str, str] = field(default_factory=dict)
    """Output file -> name of the contract that it must satisfy."""
    after_each_run: "Callable[[JobContext[P], Receipt[F]], Receipt[F]] | None" = None
    """Called after each job, cached or not, for work that every run must repeat."""
    move: "Callable[[F, Move], F] | None" = None
    """Changes the row numbers in the facts; None if facts name no rows."""

    def job(
        self,
        parameters: P,
        inputs: Sequence[Ref],
        *,
        label: str = "all records",
        also_reads: Sequence[Ref] = (),
        size: int = 0,
    ) -> "Job[P]":
        """Return a job with its key.

        Args:
            parameters: parameters of the job.
            inputs: jobs whose output it reads; their keys go into its key.
            label: name shown to users, such as the shard.
            also_reads: other jobs whose output it reads; the keys of `inputs` already cover them.
            size: approximate input size in bytes.
        """
        # Keys of inputs, not digests of their files: so the keys up to pack, and the version id,
        # are known before any work is done.
        parts = {
            "step": self.name,
            "engine": self.version,
            "inputs": [key for _, key in inputs],
            "libraries": library_versions(self.libraries),
            **parameters.to_json(),
        }
        return Job(
            step=self,
            key=digest(parts),
            parameters=parameters,
            parts=parts,
            inputs=tuple(chain(inputs, also_reads)),
            label=label,
            size=size,
        )

    def peek(self, key: str, workspace: Workspace) -> Receipt[F] | None:
        """Return the receipt of a finished job without reading the files it lists."""
        return workspace.steps.peek(self.name, key, self.read_facts)

    def read_facts(self, facts: Mapping[str, object]) -> F:
        """Parse the facts of a receipt.

        Raises:
            ValueError: a field is missing or has the wrong type, as in a receipt from another
                release.
        """
        # Strict JSON rejects "5" for 5, but still accepts a list for a tuple.
        adapter = _adapter(cast("Any", self.facts))
        return cast("F", adapter.validate_json(canonical_json(facts), strict=True))

    def write_facts(self, facts: F) -> dict[str, object]:
        """Return facts as plain JSON for the receipt."""
        adapter = _adapter(cast("Any", self.facts))
        return dict(adapter.dump_python(facts, mode="json", by_alias=True))


# A `TypeAdapter` compiles a validator, and the receipts of a step are read once per shard.
@cache
def _adapter(facts: Any) -> TypeAdapter[Any]:
    return TypeAdapter(facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Generic[P_co]):
    """One step applied to one shard or to the whole dataset: the unit of work."""

    step: "AnyStep"
    key: str
    parameters: P_co
    parts: Mapping[str, object]
    """Everything that went into the key, as plain JSON."""
    inputs: tuple[Ref, ...]
    """The jobs whose output it reads."""
    label: str
    size: int = 0
    """Approximate input size in bytes, used to group jobs into tasks."""
    side_jobs: "tuple[AnyJob, ...]" = ()
    """Jobs that run right after it, in the same task."""
    moved_from: Move | None = None
    """Job of the last run whose output it can copy."""

    @property
    def ref(self) -> Ref:
        """Step name and key."""
        return self.step.name, self.key


AnyJob = Job[Any]
AnyStep = Step[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobContext(Generic[P_co]):
    """Context passed to `compute`: the job and access to the output of earlier steps."""

    job: Job[P_co]
    recipe: Recipe
    """Read it only for settings outside the key: paths, the encoder, limits."""
    workspace: Workspace

    @property
    def parameters(self) -> P_co:
        """Parameters of the job."""
        return self.job.parameters

    def inputs(self, step: Step[Any, G]) -> list[Receipt[G]]:
        """Return the receipts of this job's inputs from `step`, in the order of its inputs."""
        receipts = []
        for name, key in self.job.inputs:
            if name == step.name:
                receipt = step.peek(key, self.workspace)
                assert receipt, f"{self.job.ref} was started before {(name, key)} was done"
                receipts.append(receipt)
        return receipts

    def input(self, step: Step[Any, G]) -> Receipt[G]:
        """Return the receipt of this job's only input from `step`."""
        (receipt,) = self.inputs(step)
        return receipt

    def load_tokenizer(self) -> TokenizerSnapshot:
        """Load the recipe's tokenizer."""
        recipe = self.recipe
        return load_snapshot(recipe.tokenizer, self.workspace.tokenizers, recipe.tokenize.pipeline)


def execute(job: AnyJob, recipe: Recipe, workspace: Workspace) -> AnyReceipt:
    """Run a job and its side jobs unless the cache has them; their output is then on disk.

    The local runners and the Prefect tasks both call this, so they write the same bytes.

    Raises:
        PackhouseError: the job failed; none of its files remain.
        Interrupted: a signal arrived before the job began.
    """
    check_interrupted()
    # Here, because every engine runs its jobs through this function, in whatever process.
    keep_freed_memory()
    step, work = job.step, JobContext(job=job, recipe=recipe, workspace=workspace)

    def compute(folder: Path) -> dict[str, object]:
        move = job.moved_from
        old = workspace.steps.find(step.name, move.key, step.read_facts) if move else None
        if move is None or old is None:
            facts = step.compute(work, folder)
        else:
            copy_moved(old, move, folder)
            facts = old.facts if step.move is None else step.move(old.facts, move)
        for name, contract in step.contracts.items():
            if (folder / name).exists():  # a quarantine file exists only if there are bad rows
                workspace.check(contract, read_table(folder / name))
        return step.write_facts(facts)

    receipt = workspace.steps.run(step.name, job.key, compute, step.read_facts)
    for other in job.side_jobs:
        execute(other, recipe, workspace)
    return receipt if step.after_each_run is None else step.after_each_run(work, receipt)


# Fixed cost of a job (opening, checking and writing files), in bytes read in the same time.
_OVERHEAD_BYTES = 2**15
# Tasks per worker and step. More than one, so that workers finish at about the same time. Not one
# task per job: at 5 ms each, 10,000 tiny files cost Prefect four minutes.
_TASKS_PER_WORKER = 4


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

# Takes about two seconds, like starting a process.
_LEAST_BYTES = 2**25
# A further process imports the library again: 1 s of CPU. For 214 MB, two take 13.5 s
# instead of 22.
_BYTES_PER_WORKER = 10**8
# A shard that is too large for the machine kills its process each time, so there is an end to it.
_MOST_RESTARTS = 3


class LocalRunner:
    """Runs jobs in this process, or in several processes that live until it is closed.

    In one process, jobs run one after another; a step may still use several threads. Processes are
    spawned, which takes a second or two. If one is killed, a new pool finishes the remaining work.
    If the runner itself is killed, its processes exit too.

    Args:
        recipe: the recipe.
        workspace: cache and contract checks.
        workers: number of processes; None: as many as there are cores, but one for each 100 MB of
            the first step's input, and one if a plug-in is registered only in this process.

    Raises:
        ConfigError: `workers` is over 1 and a plug-in is registered only in this process.
    """

    def __init__(self, *, recipe: Recipe, workspace: Workspace, workers: int | None = 1) -> None:
        if workers != 1:
            unshared = [plugin for plugin in plugins_of(recipe) if not plugin.distribution]
            if unshared and workers is not None:
                raise ConfigError(
                    f"{unshared[0]} is registered only in this process. Set workers=1, or register "
                    "it as an entry point so that worker processes can load it."
                )
            workers = 1 if unshared else workers
        self.recipe, self.workspace, self.workers = recipe, workspace, workers
        self._pool: ProcessPoolExecutor | None = None
        self._forks: WorkerForks | None = None
        self._has_begun = False

    def __enter__(self) -> "LocalRunner":
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
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    def __call__(self, jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
        """Run the jobs of one step.

        Raises:
            TransientError: processes were killed repeatedly.
        """
        if self.workers is None:
            num_bytes = sum(job.size for job in jobs)
            self.workers = min(os.cpu_count() or 1, max(1, num_bytes // _BYTES_PER_WORKER))
        step, done = jobs[0].step.name, list[AnyReceipt]()
        groups = group_jobs(jobs, self.workers, _LEAST_BYTES)
        with step_progress(step, len(jobs)):
            if not self._has_begun and len(groups) == 1:
                # For later steps, a pool does not pay: two processes took 17 s instead of 12 for
                # 21 MB of Alpaca, and 20 s of CPU instead of 13.
                self.workers = 1
            self._has_begun = True
            if self.workers == 1 or (len(groups) == 1 and self._pool is None):
                for job in jobs:
                    # One after another: two threads took 18 to 20 s instead of 22, but 250 MB more.
                    done.append(execute(job, self.recipe, self.workspace))
                    job_done(len(done))
                return done
            for _ in range(1 + _MOST_RESTARTS):
                try:
                    return self._run_in_pool(groups)
                # An executor cannot replace a killed process. The next pool finds what was finished
                # in the cache.
                except BrokenProcessPool:
                    self.close()
        raise TransientError(
            f"worker processes of step '{step}' were killed {1 + _MOST_RESTARTS} times, perhaps "
            f"because {self.workers} shards at a time need too much memory. Run again with fewer "
            "--workers; finished work is cached."
        )

    def _run_in_pool(self, groups: Sequence[JobGroup]) -> list[AnyReceipt]:
        if self._pool is None:
            requests: socket.socket | None = None
            if sys.platform == "linux":  # libraries of macOS do not survive a fork
                # It forks the workers of the pool's processes, with the tokenizer already loaded.
                num_bytes = tokenizer_bytes(self.recipe.tokenizer)
                load = partial(load_encoders, self.recipe, self.workspace.tokenizers)
                self._forks = WorkerForks(load, num_bytes, num_bytes * MEMORY_PER_BYTE)
                requests = self._forks.requests
            # Spawned: a fork would lose Arrow's threads. `forkserver` saves 1 s, but keeps running
            # after the run, with the environment of the first one.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, spawn, begin_pool_process, (requests,))
        # Processes inherit blocked signals. A terminal sends Ctrl-C and its hang-up to all of them,
        # and each would print a traceback. `__exit__` stops them instead.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            run = partial(execute_group, recipe=self.recipe, workspace=self.workspace)
            futures = [self._pool.submit(run, group) for group in groups]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done: list[AnyReceipt] = []
        for future in futures:
            done += future.result()
            job_done(len(done))
        return done


def execute_group(group: JobGroup, recipe: Recipe, workspace: Workspace) -> list[AnyReceipt]:
    """Run the jobs of a group in order."""
    return [execute(job, recipe, workspace) for job in group.jobs]

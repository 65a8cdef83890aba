"""Simulate runs that are too large for this machine: makespan, skew, retries over N workers.

    python -m bench.simulate                     # 10 TB, 10^9 rows, 8 to 1,024 workers
    python -m bench.simulate --tb 0.01 --workers 2 4 --seed 7
    python -m bench.simulate --costs costs.json  # of bench.shard_costs, instead of those below

A discrete-event simulation of the chain: the steps run one after another, each as a number of tasks
(`packhouse.run.step`). The flow's process hands tasks out one by one to workers, which read
and write a store of limited bandwidth, take longer for some shards than for others, and die. The
work of a dead worker is repeated from the task's first unfinished job. The same arguments and seed
give the same table on every machine; nothing is measured during the run.
"""

import argparse
import heapq
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TASKS_PER_WORKER = 4  # as in packhouse.run.step
FILE_TOKENS = 2**25  # 256 MiB at 8 bytes a token


@dataclass(frozen=True, kw_only=True)
class Costs:
    """CPU seconds and bytes, measured on Alpaca by bench.shard_costs (docs/performance.md)."""

    shard_s_per_mb: dict[str, float]
    """CPU seconds of a step per megabyte of raw rows."""
    token_s_per_million: dict[str, float]
    """CPU seconds of a step per million tokens."""
    record_s_per_million: dict[str, float]
    """CPU seconds, on one worker, per million records."""
    io_ratio: dict[str, float]
    """Bytes read and written per byte of raw rows, shard by shard or by output shard."""
    record_bytes: float = 90.0
    """Bytes read and written per record by the steps that read all of them."""


MEASURED = Costs(
    shard_s_per_mb={"validate": 0.07, "format": 0.065, "tokenize": 0.055, "audit": 0.015},
    token_s_per_million={"files": 0.086},
    record_s_per_million={"pack": 0.4, "split": 2.1},
    io_ratio={
        **{"validate": 2.2, "format": 2.6, "tokenize": 2.6, "audit": 3.8, "files": 1.6},
    },
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines and limits of a run."""

    workers: int
    handout_s: float = 0.15
    """CPU of the flow's process per task; for threads 0.005."""
    worker_mb_s: float = 200.0
    """Bandwidth of one worker to the cache store."""
    store_mb_s: float = 10_000.0
    """Bandwidth of the cache store for all workers together."""
    hours_to_failure: float = 200.0
    """Mean time until a worker dies, in hours."""
    restart_s: float = 60.0
    """Time until a dead worker is replaced."""
    skew: float = 0.25
    """Standard deviation of the logarithm of a job's time."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Input of a run."""

    raw_mb: float
    rows: float
    tokens_per_mb: float = 235_500.0
    shard_mb: float = 256.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the chain, as tasks of equally many jobs."""

    name: str
    num_tasks: int
    jobs_per_task: int
    job_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Simulated time and retries of a step."""

    makespan_s: float
    worked_s: float
    """Total of all workers, without lost work."""
    lost_s: float
    num_retries: int
    longest_idle_s: float
    """Time from the first idle worker to the end of the last task."""


def steps_of(data: Data, costs: Costs, cluster: Cluster) -> list[Step]:
    """Return the tasks of each step, as packhouse would create them."""
    tokens = data.raw_mb * data.tokens_per_mb
    num_shards = max(1, round(data.raw_mb / data.shard_mb))
    num_outputs = max(1, round(tokens / FILE_TOKENS))
    steps = []
    for name, seconds in costs.shard_s_per_mb.items():
        steps.append(_step(name, num_shards, seconds * data.raw_mb, data, costs, cluster))
    for name, seconds in costs.record_s_per_million.items():
        steps.append(_step(name, 1, seconds * data.rows / 1e6, data, costs, cluster))
    for name, seconds in costs.token_s_per_million.items():
        steps.append(_step(name, num_outputs, seconds * tokens / 1e6, data, costs, cluster))
    return steps


def _step(
    name: str, num_jobs: int, cpu_s: float, data: Data, costs: Costs, cluster: Cluster
) -> Step:
    at_once = min(cluster.workers, num_jobs)
    bandwidth = min(cluster.worker_mb_s, cluster.store_mb_s / at_once)
    if name in costs.record_s_per_million:
        io_mb = costs.record_bytes * data.rows / 1e6
    else:
        io_mb = costs.io_ratio[name] * data.raw_mb
    job_s = (cpu_s + io_mb / bandwidth) / num_jobs
    num_tasks = min(num_jobs, TASKS_PER_WORKER * cluster.workers)
    return Step(
        name=name, num_tasks=num_tasks, jobs_per_task=-(-num_jobs // num_tasks), job_s=job_s
    )


def simulate(step: Step, cluster: Cluster, seed: int) -> Outcome:
    """Run the tasks of a step.

    Events are workers becoming free. Each takes the next task, once the flow's process has handed
    it out. A worker that dies loses its current job, and its task goes to the end of the queue with
    the remaining jobs.
    """
    chance = random.Random(f"{seed}/{step.name}")
    waiting = [step.jobs_per_task] * step.num_tasks
    free = [(0.0, worker) for worker in range(min(cluster.workers, step.num_tasks))]
    heapq.heapify(free)
    dies = [_lifetime(chance, cluster) for _ in range(cluster.workers)]
    handed_out = worked = lost = ended = 0.0
    retries = 0
    idle_from = float("inf")
    while waiting:
        now, worker = heapq.heappop(free)
        num_jobs = waiting.pop(0)
        handed_out = max(handed_out, now) + cluster.handout_s
        at, left = handed_out, num_jobs
        while left and dies[worker] > at:
            job_s = step.job_s * chance.lognormvariate(-(cluster.skew**2) / 2, cluster.skew)
            if at + job_s > dies[worker]:
                lost += dies[worker] - at
                break
            at, left, worked = at + job_s, left - 1, worked + job_s
        if left:
            retries += 1
            waiting.append(left)
            at = max(dies[worker], at) + cluster.restart_s
            dies[worker] = at + _lifetime(chance, cluster)
        else:
            ended = max(ended, at)
        if not waiting:
            idle_from = min(idle_from, min([at, *(when for when, _ in free)]))
        heapq.heappush(free, (at, worker))
    return Outcome(
        makespan_s=ended,
        worked_s=worked,
        lost_s=lost,
        num_retries=retries,
        longest_idle_s=max(0.0, ended - idle_from),
    )


def _lifetime(chance: random.Random, cluster: Cluster) -> float:
    return chance.expovariate(1.0 / (3600.0 * cluster.hours_to_failure))


def run(data: Data, costs: Costs, cluster: Cluster, seed: int) -> dict[str, Outcome]:
    """Simulate all steps, one after another."""
    return {step.name: simulate(step, cluster, seed) for step in steps_of(data, costs, cluster)}


def read_costs(path: Path) -> Costs:
    """Read the output of `bench.shard_costs`."""
    raw = json.loads(path.read_text())
    cpu = {name: step["cpu_s"] for name, step in raw["steps"].items()}
    per_mb = {n: cpu[n] / raw["raw_mb"] for n in ("validate", "format", "tokenize")}
    millions, rows = raw["tokens"] / 1e6, raw["rows"] / 1e6
    return Costs(
        shard_s_per_mb={**per_mb, "audit": cpu["audit shard"] / raw["raw_mb"]},
        token_s_per_million={"files": cpu["files data"] / millions},
        record_s_per_million={
            "pack": cpu["pack"] / rows,
            "split": (cpu["split"] + cpu["audit records"] + cpu["files records"]) / rows,
        },
        io_ratio=MEASURED.io_ratio,
    )


def table(data: Data, costs: Costs, clusters: Sequence[Cluster], seed: int) -> str:
    """Return a line for each number of workers."""
    lines = [
        "| workers | hours | slowest step | efficiency | idle at step ends | retries | lost work |",
        "|---|---|---|---|---|---|---|",
    ]
    for cluster in clusters:
        outcomes = run(data, costs, cluster, seed)
        total = sum(each.makespan_s for each in outcomes.values())
        worked = sum(each.worked_s for each in outcomes.values())
        slowest = max(outcomes, key=lambda name: outcomes[name].makespan_s)
        share = outcomes[slowest].makespan_s / total
        idle = sum(each.longest_idle_s for each in outcomes.values())
        lost = sum(each.lost_s for each in outcomes.values())
        retries = sum(each.num_retries for each in outcomes.values())
        lines.append(
            f"| {cluster.workers:,} | {total / 3600:,.1f} | {slowest} ({share:.0%}) "
            f"| {worked / total / cluster.workers:.0%} | {idle / total:.0%} | {retries:,} "
            f"| {lost / (worked + lost):.2%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tb", type=float, default=10.0, help="raw rows, in terabytes")
    parser.add_argument("--rows", type=float, default=1e9)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 128, 512, 1024])
    parser.add_argument("--shard-mb", type=float, default=256.0)
    parser.add_argument("--handout-s", type=float, default=0.15, help="of the engine, per task")
    parser.add_argument("--store-gb-s", type=float, default=10.0, help="of the cache store")
    parser.add_argument("--hours-to-failure", type=float, default=200.0, help="of one worker")
    parser.add_argument("--skew", type=float, default=0.25)
    parser.add_argument("--costs", type=Path, help="what bench.shard_costs printed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    data = Data(raw_mb=options.tb * 1e6, rows=options.rows, shard_mb=options.shard_mb)
    clusters = [
        Cluster(
            workers=workers,
            handout_s=options.handout_s,
            store_mb_s=1000 * options.store_gb_s,
            hours_to_failure=options.hours_to_failure,
            skew=options.skew,
        )
        for workers in options.workers
    ]
    costs = read_costs(options.costs) if options.costs else MEASURED
    print(table(data, costs, clusters, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())

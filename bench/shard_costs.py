"""Measure CPU seconds, bytes and memory of each step per shard, to plan larger runs.

    python -m bench.shard_costs deployments/recipes/alpaca.yaml > costs.json

Runs the chain in this process with a separate cache and records, for each step, the CPU time of all
its processes, the bytes written, and the peak resident set so far. Other work on the machine makes
CPU times longer. `bench.simulate` reads the result.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import schemas
from bench.measuring import tree
from packhouse.recipe import Recipe, load_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import AnyJob, execute
from packhouse.run.step_cache import AnyReceipt, Workspace
from packhouse.run.steps.audit import AuditParameters
from packhouse.run.steps.validate import ValidateParameters


class MeasuringRunner:
    """Run jobs one after another and record the cost of each step."""

    def __init__(self, recipe: Recipe, workspace: Workspace) -> None:
        self.recipe, self.workspace = recipe, workspace
        self.cpu: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.peak_mb: dict[str, int] = {}
        self.raw_bytes = 0

    def __call__(self, jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
        """Run the jobs of one step."""
        receipts = []
        for job in jobs:
            start = cpu_s()
            receipt = execute(job, self.recipe, self.workspace)
            name = kind_of(job)
            self.cpu[name] += cpu_s() - start
            self.written[name] += sum(fact.size for fact in receipt.files.values())
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            self.peak_mb[name] = max(self.peak_mb.get(name, 0), peak)
            if isinstance(job.parameters, ValidateParameters):
                self.raw_bytes += job.size
            receipts.append(receipt)
        return receipts


def cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants, living or waited for."""
    ticks = 0
    for pid in tree(os.getpid()):
        with suppress(OSError):  # it has ended
            # After the name in parentheses: state is field 3, utime to cstime are fields 14 to 17.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def kind_of(job: AnyJob) -> str:
    name, told = job.step.name, job.parameters
    if isinstance(told, AuditParameters):
        return f"{name} {told.of}"
    if name == "files":
        return f"{name} {type(told).__name__.removesuffix('Parameters').lower()}"
    return name


def measure(recipe: Recipe) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="packhouse-costs-") as folder:
        publish = recipe.publish.model_copy(update={"store": f"{folder}/store"})
        recipe = recipe.model_copy(update={"publish": publish})
        workspace = Workspace(cache=Path(folder) / "cache", check=schemas.check)
        run = MeasuringRunner(recipe, workspace)
        prepared = prepare(recipe, run, workspace.cache)
    tokens = sum(side.num_tokens for side in prepared.published.statistics.values())
    return {
        "raw_mb": run.raw_bytes / 1e6,
        "rows": prepared.ledger[0].rows_in,
        "tokens": tokens,
        "steps": {
            name: {
                "cpu_s": round(run.cpu[name], 3),
                "written_mb": round(run.written[name] / 1e6, 3),
                "peak_mb": run.peak_mb[name],
            }
            for name in run.cpu
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    print(json.dumps(measure(load_recipe(arguments.recipe, arguments.overrides)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Memory and CPU of the steps that look at all records: pack, split, the audit of records.

    python -m bench.plan_memory --records 5_200_000

Writes shards of tokenized records without tokens (these steps read lengths, ids and keys) into
a cache of its own, and runs each step in a process of its own. Prints what each took beyond an
empty run, by record.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.jobs import Job, make_job
from packhouse.recipe import Recipe
from packhouse.step_store import StepStore
from packhouse.steps import execute
from packhouse.tables import TOKENIZED
from packhouse.workspace import Workspace, write_table

SHARD_RECORDS = 200_000
STEPS = ("pack", "split", "audit")


def recipe() -> Recipe:
    return Recipe.model_validate(
        {
            "dataset": "made",
            "sources": [{"path": "made.jsonl", "name": "made"}],
            "tokenizer": "nowhere",
            "split": {"eval_fraction": 0.01},
        }
    )


def shard(number: int, num_records: int) -> pa.Table:
    """Records of Alpaca's lengths, about, with ids and keys of their own, and no tokens."""
    rng = np.random.default_rng(number)
    num_tokens = np.minimum(rng.lognormal(4.5, 0.6, num_records).astype(np.int32) + 8, 2000)
    digits = np.frombuffer(rng.bytes(10 * num_records).hex().encode(), "S20").astype(str)
    ends = pa.StructArray.from_arrays(
        [pa.array(np.full(num_records, 4, np.int32)), pa.array(num_tokens)],
        fields=list(TOKENIZED.field("trained_ranges").type.value_type),
    )
    offsets = pa.array(np.arange(num_records + 1, dtype=np.int32))
    made: dict[str, Any] = {
        "record_id": pa.array(digits),
        "source": pa.DictionaryArray.from_arrays(
            np.zeros(num_records, np.int32), ["made/made.jsonl"]
        ),
        "row": pa.array(np.arange(num_records) + number * num_records),
        "input_ids": pa.array([[]] * num_records, TOKENIZED.field("input_ids").type),
        "trained_ranges": pa.ListArray.from_arrays(offsets, ends),
        "num_tokens": pa.array(num_tokens),
        "num_trained": pa.array(num_tokens - 4),
        "label": pa.nulls(num_records, pa.int64()),
        "group_key": pa.array(digits),
    }
    columns = []
    for field in TOKENIZED:
        column = made.get(field.name, None)
        column = pa.nulls(num_records, field.type) if column is None else column
        columns.append(column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=TOKENIZED)


def jobs(num_shards: int) -> tuple[list[Job], dict[str, Job]]:
    """The jobs that are taken for done, and those to be measured."""
    before = {
        step: [make_job(step, [], {"n": n}) for n in range(num_shards)]
        for step in ("validate", "format", "tokenize")
    }
    tokenize = before["tokenize"]
    reads = [*before["validate"], *before["format"]]
    pack = make_job("pack", tokenize, {}, also_reads=reads)
    split = make_job("split", [pack], {})
    return [*reads, *tokenize], {
        "pack": pack,
        "split": split,
        "audit": make_job("audit", [pack], {"of": "records"}),
    }


def write_shards(cache: Path, done: list[Job]) -> None:
    steps = StepStore(cache / "steps")
    facts = {
        "tokenizer": {"vocab_size": 1000},
        "origin": {"file": "made/made.jsonl"},
        "notes": {},
    }
    for job in done:

        def write(folder: Path, job: Job = job) -> dict[str, Any]:
            if job.step == "tokenize":
                write_table(folder / "tokenized.arrow", shard(job.parts["n"], SHARD_RECORDS))
            return facts

        steps.run(job.step, job.key, write)


def run_step(cache: Path, num_shards: int, step: str) -> dict[str, float]:
    _, planned = jobs(num_shards)
    start = time.process_time()
    execute(planned[step], recipe(), Workspace(cache=cache))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"cpu_s": round(time.process_time() - start, 2), "peak_mb": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=5_200_000)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_shards = max(1, options.records // SHARD_RECORDS)
    if options.step:
        print(json.dumps(run_step(options.cache, num_shards, options.step)))
        return 0
    with tempfile.TemporaryDirectory(prefix="packhouse-plan-") as folder:
        write_shards(Path(folder), jobs(num_shards)[0])
        for step in STEPS:
            command = [sys.executable, "-m", "bench.plan_memory", "--step", step]
            command += ["--records", str(options.records), "--cache", folder]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print(step, done.stdout.strip(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure memory and CPU of the steps that read all records: pack, split, the audit of records.

    python -m bench.plan_memory --records 5_200_000

Writes shards of tokenized records without tokens (these steps read lengths, ids and keys) into a
separate cache, and runs each step in a separate process. Prints the cost of each per record, above
that of an empty run.
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

from packhouse.recipe import Recipe
from packhouse.records.table_schemas import TOKENIZED, write_table
from packhouse.run.step import AnyJob, Job, execute
from packhouse.run.step_cache import StepStore, Workspace
from packhouse.run.steps import audit, check_split, pack
from packhouse.run.steps.format import FORMAT
from packhouse.run.steps.tokenize import TOKENIZE, TokenizeFacts, TokenizerFacts
from packhouse.run.steps.validate import VALIDATE, Origin, ShardCounts, ValidateFacts
from packhouse.system.fingerprint import digest

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
    """Records with lengths like Alpaca's, with unique ids and keys, and no tokens."""
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


def jobs(num_shards: int) -> tuple[list[list[AnyJob]], dict[str, AnyJob]]:
    """The jobs assumed to be done, by step, and those to be measured."""
    before: list[list[AnyJob]] = [
        [
            Job(
                step=step,
                key=digest([step.name, n]),
                parameters=None,
                parts={},
                inputs=(),
                label="",
            )
            for n in range(num_shards)
        ]
        for step in (VALIDATE, FORMAT, TOKENIZE)
    ]
    packed = pack.job(recipe(), *before, {})
    *_, records = audit.jobs([], [], [], packed, recipe())
    return before, {"pack": packed, "split": check_split.job(recipe(), packed), "audit": records}


def write_shards(cache: Path, done: list[list[AnyJob]]) -> None:
    steps = StepStore(cache / "steps")
    origin = Origin(file="made/made.jsonl", row_start=0, sha256="", settings={})
    tokenizer = TokenizerFacts(fingerprint="", class_name="", vocab_size=1000)
    no_rows: dict[str, Any] = {"rows_in": 0, "rows_out": 0, "notes": {}}
    facts = (
        VALIDATE.write_facts(ValidateFacts(**no_rows, extra_fields={}, origin=origin)),
        FORMAT.write_facts(ShardCounts(**no_rows)),
        TOKENIZE.write_facts(
            TokenizeFacts(**no_rows, trained_tokens=0, encoder={}, tokenizer=tokenizer)
        ),
    )
    for made, jobs in zip(facts, done, strict=True):
        for number, job in enumerate(jobs):

            def write(
                folder: Path, job: AnyJob = job, n: int = number, made: dict[str, Any] = made
            ) -> dict[str, Any]:
                if job.step is TOKENIZE:
                    write_table(folder / "tokenized.arrow", shard(n, SHARD_RECORDS))
                return made

            steps.run(*job.ref, write)


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

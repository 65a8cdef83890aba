"""Fuzz everything between a file and its checked rows, guided by coverage (atheris).

    python -m tests.fuzz.files --inputs 100000 --seed 1

The first bytes of an input choose the file's name, the stated format and the shard size; the rest
is the file. Any content must give one of our errors, or put every record in exactly one table,
within 10 s of CPU time. libFuzzer itself stops inputs that hang (60 s of wall time, which also
passes while a busy machine lets the process wait) or use too much memory (2 GB). It starts from
valid files of every shape and from known bad ones, and prints the input that broke the rule.
"""

import argparse
import base64
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import atheris

from tests.fuzz.seeds import SEEDS

NAMES = ("rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.parquet", "rows.arrow", "rows")
FORMATS = ("auto", "alpaca", "chat", "messages", "sharegpt", "oasst", "classification", "text")
SHARD_BYTES = (2**25, 1, 64)
INPUTS_PER_ROUND = 5_000
CPU_SECONDS = 10


def main() -> None:
    """Run rounds of libFuzzer until enough inputs are tried; exit with 1 at the first violation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs to try")
    parser.add_argument("--seed", type=int, default=1, help="seed of libFuzzer's mutations")
    parser.add_argument(
        "--corpus", type=Path, help="folder that keeps what was found worth keeping"
    )
    parser.add_argument("--round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.round:
        fuzz(options.inputs, options.seed, options.corpus)
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as scratch:
        corpus = (options.corpus or Path(scratch, "corpus")).resolve()
        corpus.mkdir(parents=True, exist_ok=True)
        for number, (seed, first) in enumerate((s, f) for s in SEEDS for f in (0, 1, 6)):
            (corpus / f"seed{number}").write_bytes(bytes((first, 0, 0)) + seed)
        # Tracing itself takes another 80 kB of memory per input (without it, memory stays flat), so
        # inputs are tried in rounds, each in a separate process over the same corpus.
        for start in range(0, options.inputs, INPUTS_PER_ROUND):
            size = min(INPUTS_PER_ROUND, options.inputs - start)
            command = [sys.executable, "-m", "tests.fuzz.files", "--round", f"--corpus={corpus}"]
            command += [f"--inputs={size}", f"--seed={options.seed + start}"]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
            tail = done.stderr.splitlines()[-25:]
            if done.returncode:
                last = f"broken after {start:,} to {start + size:,} inputs"
                sys.exit("\n".join([*tail, *_culprits(corpus.parent), last]))
            peak = [line for line in tail if "peak_rss_mb" in line]
            print(f"{start + size:>9,} inputs, {len(list(corpus.iterdir())):,} kept,", *peak)
        print(f"{options.inputs:,} inputs: every record in one table, every refusal one of ours")


def _culprits(folder: Path) -> list[str]:
    """Return the inputs that libFuzzer saved, as base64, before the folder is deleted."""
    paths = [p for kind in ("crash", "timeout", "oom") for p in folder.rglob(f"{kind}-*")]
    return [f"{path.name}: {base64.b64encode(path.read_bytes()).decode()}" for path in paths]


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def fuzz(inputs: int, seed: int, corpus: Path) -> None:
    """Run one round in this process, which libFuzzer ends."""
    with atheris.instrument_imports(
        include=[
            "packhouse.read",
            "packhouse.records.message_rules",
            "packhouse.records.record_ids",
        ]
    ):
        pass
    os.chdir(tempfile.mkdtemp(dir=corpus.parent))  # where it saves the input that broke the rule
    limits = ["-timeout=60", "-rss_limit_mb=2048", "-max_len=2048", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed}", *limits, str(corpus)], one_file)
    atheris.Fuzz()


def one_file(data: bytes) -> None:
    """Write the input as a file, and read it."""
    start = time.process_time()
    _read(data)
    if time.process_time() - start > CPU_SECONDS:
        raise AssertionError(f"more than {CPU_SECONDS} s of CPU time for {len(data):,} bytes")


def _read(data: bytes) -> None:
    from packhouse.errors import PackhouseError
    from packhouse.read import read_shard, scan_source
    from packhouse.recipe import SourceConfig, ValidateConfig

    if len(data) < 3:
        return
    name, row_format, size = data[0] % 7, data[1] % 8, data[2] % 3
    path = Path(NAMES[name])
    path.write_bytes(data[3:])
    config = SourceConfig(path=str(path.resolve()), format=FORMATS[row_format])
    try:
        for shard in scan_source(config, SHARD_BYTES[size]):
            read = read_shard(shard, config, ValidateConfig(), "prompt")
            seen = read.validated.num_rows + read.quarantined.num_rows
            if seen != read.num_records + read.extra_paths:
                raise AssertionError(f"{read.num_records} records in, {seen} rows out")
    except PackhouseError:
        pass


if __name__ == "__main__":
    main()

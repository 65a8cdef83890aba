"""Compare packhouse with its peers: raw JSON to packed files, whole processes, A B C A B C.

`python -m bench.peers [--rows N] [--runs N] [--seq-len N] [--only NAME ...] [--tokenizer NAME]`
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

from bench.inputs import DEMO, ROOT, WORK, find_shared, grown_alpaca, small_alpaca
from bench.measuring import Contender, interleave
from bench.reporting import HEAD, markdown_table, peers_table

PEER_PYTHON = ROOT / ".packhouse" / "bench-env" / "bin" / "python"
RUN_PYTHON = ROOT / ".packhouse" / "bench-run" / "bin" / "python"
OURS = "packhouse"
PEERS = ("trl", "dart_math", "plain_python")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and save every number as JSON."""
    options = _options(arguments)
    shared = None if options.small else find_shared()
    if shared is not None:
        data = grown_alpaca(shared, options.rows)
        tokenizer = shared / "tokenizers" / options.tokenizer
    elif options.small:
        options.rows, options.runs, options.tokenizer = 500, 1, "demo"
        data, tokenizer = small_alpaca(options.rows), DEMO / "tokenizer"
    else:
        print("skipped: PACKHOUSE_SHARED names no folder that holds data/alpaca_data.json")
        return 0
    contenders = _contenders(options, data, tokenizer)
    print(
        f"{options.rows:,} rows, {data.stat().st_size / 1e6:.1f} MB, {options.tokenizer}, seq_len "
        f"{options.seq_len:,}, {options.runs} interleaved runs; {_machine()}"
    )
    samples = interleave(contenders, options.runs, lambda line: print(line, file=sys.stderr))
    print(markdown_table(HEAD, peers_table(samples, OURS)))
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / f"peers-{options.rows}-{options.tokenizer}.json"
    kept = {name: [asdict(run) for run in runs] for name, runs in samples.items()}
    path.write_text(json.dumps({"machine": _machine(), "options": vars(options), "runs": kept}))
    print(f"every run: {path.relative_to(ROOT)}")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--rows", type=int, default=52_002)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokenizer", default="qwen2.5-instruct")
    parser.add_argument("--only", nargs="+", choices=[OURS, "packhouse_hf", *PEERS], default=None)
    parser.add_argument("--small", action="store_true", help="500 rows of the demo, once")
    return parser.parse_args(arguments)


def _contenders(options: argparse.Namespace, data: Path, tokenizer: Path) -> list[Contender]:
    found = []
    for name in options.only or [OURS, *PEERS]:
        python = python_of(name)
        if python is None:
            print(f"skipped {name}: its environment is not there; `make bench` makes it")
            continue
        module = OURS if name.startswith(OURS) else name
        command = (str(python), "bench/contender.py", module, str(data), str(tokenizer))
        settings = {"BENCH_SETTINGS": "tokenize.encoder=hf"} if name == "packhouse_hf" else {}
        found.append(Contender(name=name, command=(*command, str(options.seq_len)), env=settings))
    return found


def python_of(name: str) -> Path | None:
    """Return the contender's environment, or this one if it has everything that it needs."""
    own = RUN_PYTHON if name.startswith(OURS) else PEER_PYTHON
    if own.is_file():
        return own
    has_all = name != "trl" or importlib.util.find_spec("trl")
    return Path(sys.executable) if has_all else None


def _machine() -> str:
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())

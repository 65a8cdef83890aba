"""Measure packing plans: nanoseconds per sequence, and packs above the lower bound, by `seq_len`.

`python -m bench.planning [--sequences N]`: lengths of real Alpaca rows, of a long-tailed
distribution, and spread evenly up to `seq_len` (the worst case, with every possible length).
"""

import argparse
import sys
import time

import numpy as np
import numpy.typing as npt

from bench.reporting import markdown_table
from packhouse.pack.strategies import lower_bound, plan_packs

SIZES = (1024, 2048, 4096, 8192, 32_768, 131_072)
HEAD = (
    "lengths",
    "seq_len",
    "sequences",
    "CPU s",
    "ns/sequence",
    "packs",
    "over the bound",
    "fill",
)


def main(arguments: list[str] | None = None) -> int:
    """Plan every distribution at every size."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning")
    parser.add_argument("--sequences", type=int, default=5_000_000)
    num = parser.parse_args(arguments).sequences
    rows = []
    for seq_len in SIZES:
        for name in ("long-tailed", "even"):
            rows.append(_plan(name, _lengths(name, num, seq_len), seq_len))
    print(markdown_table(HEAD, rows))
    return 0


def _lengths(name: str, num: int, seq_len: int) -> npt.NDArray[np.int32]:
    chance = np.random.default_rng(0)
    if name == "even":
        return chance.integers(1, seq_len + 1, num).astype(np.int32)
    return np.clip(chance.lognormal(5.3, 0.8, num), 1, seq_len).astype(np.int32)


def _plan(name: str, lengths: npt.NDArray[np.int32], seq_len: int) -> list[str]:
    start = time.process_time()
    plan = plan_packs(lengths, seq_len)
    seconds = time.process_time() - start
    over = plan.num_packs - lower_bound(lengths, seq_len)
    return [
        name,
        f"{seq_len:,}",
        f"{len(lengths):,}",
        f"{seconds:.2f}",
        f"{seconds / len(lengths) * 1e9:.0f}",
        f"{plan.num_packs:,}",
        f"+{over:,}",
        f"{plan.fill:.2%}",
    ]


if __name__ == "__main__":
    sys.exit(main())

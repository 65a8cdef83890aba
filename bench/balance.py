"""Measure `pack.balance`: attention of the costliest pack of a step, relative to the step's mean.

`python -m bench.balance`: Stanford Alpaca with Qwen2.5 and the chat template, and 60,000 lengths
drawn from a log-normal distribution with a long tail, like that of chats.
"""

import sys
import tempfile

import numpy as np
import numpy.typing as npt

from bench.inputs import find_shared
from bench.reporting import markdown_table
from packhouse import make_supervised_dataset
from packhouse.pack.strategies import pack_costs, plan_packs, step_imbalance

HEAD = ("lengths", "seq_len", "ranks", "packs", "as planned", "balanced")


def main() -> int:
    """Plan each set of lengths with and without balance."""
    chance = np.random.default_rng(0)
    drawn = np.clip(chance.lognormal(6.9, 1.1, 60_000), 8, 40_000).astype(np.int64)
    inputs = {"log-normal": (drawn, (4096, 16_384, 32_768))}
    shared = find_shared()
    if shared is None:
        print("no Alpaca here: set PACKHOUSE_SHARED", file=sys.stderr)
    else:
        with tempfile.TemporaryDirectory() as cache:
            tokenizer = str(shared / "tokenizers" / "qwen2.5-instruct")
            path = shared / "data" / "alpaca_data.json"
            data = make_supervised_dataset(tokenizer, path, prompt_template="chat", cache=cache)
            inputs = {"alpaca": (data.num_tokens, (2048, 8192))} | inputs
    rows = [
        _row(name, lengths[lengths <= seq_len], seq_len, ranks)
        for name, (lengths, sizes) in inputs.items()
        for seq_len in sizes
        for ranks in (8, 64)
    ]
    print(markdown_table(HEAD, rows))
    return 0


def _row(name: str, lengths: npt.NDArray[np.int64], seq_len: int, ranks: int) -> list[str]:
    plans = [plan_packs(lengths, seq_len, balance=balance) for balance in (1, ranks)]
    waits = [step_imbalance(pack_costs(plan, lengths), ranks) for plan in plans]
    packs = plans[0].num_packs
    return [name, f"{seq_len:,}", str(ranks), f"{packs:,}", *(f"{wait:.2f}" for wait in waits)]


if __name__ == "__main__":
    sys.exit(main())

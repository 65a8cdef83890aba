"""Compare loading packs with `datasets` in torch format: the same packs of the same version.

    python -m bench.loading URI [--ref latest] [--packs 96]

Both alternate. Prints CPU seconds to the first batch, and the ratio of medians by row and in
batches of 8.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np

COLUMNS = ["input_ids", "labels", "position_ids", "seq_lengths"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("uri", help="dataset in a store: a folder or s3://bucket/prefix/dataset")
    parser.add_argument("--ref", default="latest", help="version or ref")
    parser.add_argument("--packs", type=int, default=96, help="packs to load, in a random order")
    parser.add_argument("--runs", type=int, default=7, help="runs of each, by turns")
    options = parser.parse_args()
    from packhouse import PackedCollator, PackedDataset, load_packed

    load_packed(options.uri, options.ref)  # imports, and the local copy of a remote version
    start = time.process_time()
    data = load_packed(options.uri, options.ref)
    packs = PackedDataset(data)
    PackedCollator()(packs.__getitems__([0]))
    print(f"first batch: {time.process_time() - start:.3f} s CPU, {len(data):,} packs")
    theirs = data.select_columns([c for c in COLUMNS if c in data.column_names])
    theirs = theirs.with_format("torch")
    order = np.random.default_rng(0).permutation(len(data))[: options.packs].tolist()
    for size in (1, 8):
        runs = [
            (_seconds(packs, order, size), _seconds(theirs, order, size))
            for _ in range(options.runs)
        ]
        ratios = sorted(other / ours for ours, other in runs)
        print(
            f"{size} at a time: {statistics.median(ratios):.1f} times as fast as datasets "
            f"({ratios[0]:.1f} to {ratios[-1]:.1f})"
        )


def _seconds(rows: Any, order: list[int], size: int) -> float:
    start = time.process_time()
    for at in range(0, len(order), size):
        group = order[at : at + size]
        rows[group[0]] if size == 1 else rows.__getitems__(group)
    return time.process_time() - start


if __name__ == "__main__":
    main()

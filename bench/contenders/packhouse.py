"""packhouse: `packhouse prepare RECIPE` with every contract, audit and digest on.

Nothing is cached: no step, no snapshot of the tokenizer, no result of the encoder check.
`BENCH_SETTINGS` adds settings, separated by spaces. `BENCH_TOKENIZERS` names a folder of snapshots
and encoder checks from earlier runs, `BENCH_CACHE` a whole cache, and `BENCH_KEEP` where to leave
the cache of this run. `BENCH_WORKERS` is the number of workers. `BENCH_FLOW=1` runs the flow
`prepare` on the current server.
"""

import os
import shutil
from pathlib import Path
from typing import Any

_RECIPE = """
dataset: bench
sources:
  - path: {data}
    format: alpaca
tokenizer: {tokenizer}
format:
  template: alpaca
pack:
  seq_len: {seq_len}
publish:
  store: {store}
"""


def run(data: Path, tokenizer: Path, seq_len: int, out: Path) -> dict[str, Any]:
    """Do the command's work in this process."""
    from packhouse.cli import own_process

    own_process()
    from packhouse.system.worker import hide_pandas

    hide_pandas()
    recipe_path = out / "recipe.yaml"
    store = out / "store"
    recipe_path.write_text(
        _RECIPE.format(data=data, tokenizer=tokenizer, seq_len=seq_len, store=store)
    )
    cache = out / "cache"
    kept = os.environ.get("BENCH_TOKENIZERS")
    if kept:
        shutil.copytree(kept, cache / "tokenizers")
    if warm := os.environ.get("BENCH_CACHE"):
        shutil.copytree(warm, cache, copy_function=os.link)
    from packhouse.run.prepare_arguments import read_recipe
    from packhouse.system.disks import CachePlace
    from packhouse.system.progress import show_progress

    recipe = read_recipe(recipe_path, os.environ.get("BENCH_SETTINGS", "").split())
    with show_progress():
        if os.environ.get("BENCH_FLOW"):
            from flows.command import run_flow

            os.environ["PACKHOUSE_CACHE"] = str(cache)
            prepared = run_flow(recipe, cache)
        else:
            from packhouse.run.chain import prepare_recipe

            workers = int(os.environ.get("BENCH_WORKERS", "1"))
            prepared, _ = prepare_recipe(recipe, CachePlace(folder=cache), workers)
    if keep := os.environ.get("BENCH_KEEP"):
        shutil.move(cache, keep)
    statistics = prepared.published.statistics.values()
    return {
        "rows": sum(side.num_sequences for side in statistics),
        "tokens": sum(side.num_tokens for side in statistics),
        "packs": sum(side.num_packs for side in statistics),
        "bytes": sum(file.stat().st_size for file in store.glob("*/v/*/data/*")),
        "version": prepared.version,
    }

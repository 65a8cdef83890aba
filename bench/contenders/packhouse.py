"""packhouse: `python -m flows.prepare RECIPE --local --json`, every contract, audit and digest on.

Nothing is cached before it: no step, no snapshot of the tokenizer, no verdict on the encoder.
`BENCH_SETTINGS` holds more settings, separated by spaces; `BENCH_TOKENIZERS` names a folder of
snapshots and verdicts that earlier runs kept; `BENCH_FLOW=1` runs it on the server at hand.
"""

import json
import os
import shutil
from contextlib import redirect_stdout
from io import StringIO
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
    """Run the flow's command in this process."""
    from flows.command import command, own_process

    own_process()  # as `flows.command.main` does

    recipe = out / "recipe.yaml"
    store = out / "store"
    recipe.write_text(_RECIPE.format(data=data, tokenizer=tokenizer, seq_len=seq_len, store=store))
    cache = out / "cache"
    kept = os.environ.get("BENCH_TOKENIZERS")
    if kept:
        shutil.copytree(kept, cache / "tokenizers")
    settings = [f"--set={text}" for text in os.environ.get("BENCH_SETTINGS", "").split()]
    where = [] if os.environ.get("BENCH_FLOW") else ["--local"]
    said = StringIO()
    with redirect_stdout(said):
        command(
            [str(recipe), *where, "--json", f"--cache={cache}", *settings],
            standalone_mode=False,
        )
    report = json.loads(said.getvalue())
    statistics = report["statistics"].values()
    return {
        "rows": sum(side["num_sequences"] for side in statistics),
        "tokens": sum(side["num_tokens"] for side in statistics),
        "packs": sum(side["num_packs"] for side in statistics),
        "bytes": sum(file.stat().st_size for file in store.glob("*/v/*/data/*")),
        "version": report["version"],
    }

"""Prepare rows as most tests do: with the demo's tokenizer, and a cache and a store in a folder."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import packhouse

DEMO = Path(__file__).resolve().parents[1] / "deployments" / "demo"
TOKENIZER = DEMO / "tokenizer"


def prepare_in(folder: Path, data: Any, **settings: Any) -> packhouse.Version:
    places = {"store": folder / "store", "cache": folder / "cache", "progress": False}
    return packhouse.prepare(data, **{"tokenizer": TOKENIZER, **places, **settings})


def python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process, and keep its output."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)

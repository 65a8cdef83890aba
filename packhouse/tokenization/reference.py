"""HF's ids for a few texts, while this process loads a fast encoder.

Loading Qwen takes HF 0.35 s and 90 MB, gigatoken 0.4 s, and both hold the interpreter's lock. To
compare them on a sample, HF is loaded by a second process meanwhile. Only once: who checks a
second table needs HF again, and loads it here. Where no process can be started, also here.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa

from packhouse.tokenization.encoders import HFEncoder, Ids, load_tokenizer

__all__ = ["reference_ids"]

_PROGRAM = Path(__file__).with_name("reference_child.py")
_TIMEOUT_S = 60
_MIN_BACKEND_BYTES = 2 * 2**20  # below, HF loads in 0.1 s, as fast as a process starts

_asked_for: set[str] = set()
_lock = threading.Lock()


@contextmanager
def reference_ids(backend: str, texts: pa.StringArray) -> Iterator[Callable[[], Ids]]:
    """Start to encode texts with HF; the value waits for the ids and returns them.

    The second process is gone when the block is left, for whatever reason.

    Args:
        backend: the pipeline.
        texts: what to encode; 100 KB take 0.05 s once HF is loaded.
    """

    def here() -> Ids:
        return HFEncoder(load_tokenizer(backend)).encode(texts)

    if not _is_worth_a_process(backend):
        yield here
        return
    with tempfile.TemporaryDirectory(prefix="packhouse-") as name:
        folder = Path(name)
        process = _start(folder, backend, texts)
        try:
            yield lambda: _wait(process, folder) or here()
        finally:
            if process is not None:
                process.kill()
                process.wait()


def _is_worth_a_process(backend: str) -> bool:
    with _lock:
        is_first = backend not in _asked_for
        _asked_for.add(backend)
    is_slow = len(backend) >= _MIN_BACKEND_BYTES and not load_tokenizer.holds(backend)
    return is_first and is_slow and (os.cpu_count() or 1) > 1


def _start(folder: Path, backend: str, texts: pa.StringArray) -> "subprocess.Popen[bytes] | None":
    # -P: no folder of ours on its path, whose modules could be taken for others.
    command = [sys.executable, "-P", str(_PROGRAM), str(folder)]
    nowhere = subprocess.DEVNULL
    try:
        (folder / "tokenizer.json").write_text(backend, encoding="utf-8")
        (folder / "texts.json").write_bytes(orjson.dumps(texts.to_pylist()))
        return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    except OSError:  # no process, no room on the disk: HF is loaded here
        return None


def _wait(process: "subprocess.Popen[bytes] | None", folder: Path) -> Ids | None:
    """Read the ids, or None if the process did not come to write them."""
    try:
        if process is None or process.wait(_TIMEOUT_S) != 0:
            return None
    except subprocess.TimeoutExpired:
        return None
    rows = orjson.loads((folder / "ids.json").read_bytes())
    offsets = np.cumsum([0, *map(len, rows)])
    return np.fromiter(chain.from_iterable(rows), np.int32, offsets[-1]), offsets

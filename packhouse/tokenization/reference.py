"""HF's ids for a few texts at a time, from a second process that keeps HF loaded.

Loading Qwen takes HF 0.35 s and 150 MB, gigatoken 0.4 s, and both hold the interpreter's lock. To
compare them on a sample of every shard, HF is loaded once, by a second process, while this one
loads gigatoken; it answers until this process ends or asks nothing for two minutes. Where no
process can be started, or HF is loaded here already, HF answers here.
"""

import atexit
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from packhouse.tokenization.encoders import HFEncoder, Ids, load_tokenizer

__all__ = ["reference_ids"]

_PROGRAM = Path(__file__).with_name("reference_child.py")
_TIMEOUT_S = 60
_MIN_BACKEND_BYTES = 2 * 2**20  # below, HF loads in 0.1 s, as fast as a process starts
_READ_BYTES = 2**20


@contextmanager
def reference_ids(backend: str, texts: pa.StringArray) -> Iterator[Callable[[], Ids]]:
    """Start to encode texts with HF; the value waits for the ids and returns them.

    A thread that asks while another one's texts are encoded waits for its turn.

    Args:
        backend: the pipeline.
        texts: what to encode; 100 KB take 0.05 s once HF is loaded.
    """

    def here() -> Ids:
        return HFEncoder(load_tokenizer(backend)).encode(texts)

    if not _is_worth_a_process(backend):
        yield here
        return
    with _turn:
        second = _second_process(backend)
        if second is None or not second.ask(texts.to_pylist()):
            yield here
            return
        try:
            yield lambda: second.answer() or here()
        finally:
            second.leave()


def _is_worth_a_process(backend: str) -> bool:
    is_slow = len(backend) >= _MIN_BACKEND_BYTES and not load_tokenizer.holds(backend)
    return is_slow and (os.cpu_count() or 1) > 1


class _SecondProcess:
    """HF in a process of its own, asked one question at a time."""

    def __init__(self, backend: str) -> None:
        # -P: no folder of ours on its path, whose modules could be taken for others.
        self.backend = backend
        self.is_asked = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._send(backend)

    def ask(self, texts: list[str]) -> bool:
        """Send texts; False if the process does not listen any more."""
        self.is_asked = self._send(texts)
        return self.is_asked

    def answer(self) -> Ids | None:
        """Wait for the ids, or None if the process did not come to give them."""
        line = self._read_line()
        if line is None:
            return None
        self.is_asked = False
        rows = orjson.loads(line)
        offsets = np.cumsum([0, *map(len, rows)])
        return np.fromiter(chain.from_iterable(rows), np.int32, offsets[-1]), offsets

    def leave(self) -> None:
        """End the process if it still owes an answer: the next one would be taken for it."""
        if self.is_asked:
            self.end()

    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def end(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _send(self, value: Any) -> bool:
        assert self._process.stdin is not None
        data = memoryview(orjson.dumps(value) + b"\n")
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except OSError:  # it ended
            return False
        return True

    def _read_line(self) -> bytes | None:
        assert self._process.stdout is not None
        parts: list[bytes] = []
        until = time.monotonic() + _TIMEOUT_S
        while not parts or not parts[-1].endswith(b"\n"):
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self._process.stdout], [], [], left)
            part = self._process.stdout.read(_READ_BYTES) if ready else b""
            if not part:  # too slow, or it ended
                return None
            parts.append(part)
        return b"".join(parts)


_turn = threading.Lock()
_kept: list[_SecondProcess] = []


def _second_process(backend: str) -> _SecondProcess | None:
    """The process of a pipeline, started if it is not there; at most one is kept."""
    if _kept and _kept[0].backend == backend and _kept[0].is_alive():
        return _kept[0]
    _end_kept()
    try:
        _kept.append(_SecondProcess(backend))
    except OSError:  # no process: HF is loaded here
        return None
    return _kept[0]


@atexit.register
def _end_kept() -> None:
    while _kept:
        _kept.pop().end()

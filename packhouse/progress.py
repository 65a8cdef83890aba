"""Progress bars for whoever watches a terminal; nothing anywhere else.

A step's total is its number of jobs. Library code calls `advance(0.1)` where it has done a tenth
of a job; it neither knows nor cares who watches. A bar appears only once its step has run for a
second, so quick steps leave the terminal alone.
Bars go to stderr: stdout stays clean for `--json`.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

__all__ = ["advance", "job_done", "show_progress", "step_progress"]

_APPEARS_AFTER_S = 1.0


class _Bar:
    def __init__(self, name: str, total: float) -> None:
        self.name, self.total, self.done = name, total, 0.0
        self.start = time.monotonic()
        self.task: int | None = None


class _Display:
    """The bars of this process: one per running step, drawn by rich."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.bars: list[_Bar] = []
        self.live: Any = None

    def start(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.live = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.live.start()

    def stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def update(self, bar: _Bar, amount: float) -> None:
        with self.lock:
            bar.done += amount
            if self.live is None or time.monotonic() - bar.start < _APPEARS_AFTER_S:
                return
            if bar.task is None:
                bar.task = self.live.add_task(bar.name, total=bar.total)
            self.live.update(bar.task, completed=bar.done)

    def finish(self, bar: _Bar) -> None:
        with self.lock:
            if self.live is not None and bar.task is not None:
                self.live.remove_task(bar.task)
            self.bars.remove(bar)


_display = _Display()


@contextmanager
def show_progress(*, enabled: bool | None = None) -> Iterator[None]:
    """Draw bars while the block runs: by default where stderr is a terminal."""
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield
        return
    _display.start()
    try:
        yield
    finally:
        _display.stop()


@contextmanager
def step_progress(name: str, total: float) -> Iterator[None]:
    """Count a step's units, `total` of them, while the block runs."""
    bar = _Bar(name, total)
    _display.bars.append(bar)
    try:
        yield
    finally:
        _display.finish(bar)


def advance(fraction: float) -> None:
    """Say that `fraction` more of a job of the running step is done."""
    if _display.bars:
        _display.update(_display.bars[-1], fraction)


def job_done(num_done: int) -> None:
    """Say that `num_done` jobs of the running step are done by now, cached ones included."""
    if _display.bars:
        bar = _display.bars[-1]
        _display.update(bar, num_done - bar.done)

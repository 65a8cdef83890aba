"""Progress bars for whoever watches a terminal; nothing anywhere else.

A step's total is its number of jobs. Library code calls `advance(0.1)` where it has done a tenth
of a job; it neither knows nor cares who watches. A bar appears once its step has run for a second
(pulsing until the first job or part of one is done), so quick steps leave the terminal alone.
Bars go to stderr: stdout stays clean for `--json`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import Any

__all__ = ["advance", "job_done", "show_progress", "step_progress"]

_APPEARS_AFTER_S = 1.0


class _Bar:
    """One step's bar: hidden for a second, then drawn by rich until the step ends."""

    def __init__(self, display: Any, name: str, total: float) -> None:
        self.display, self.total, self.done = display, total, 0.0
        self.lock = Lock()
        self.task = display.add_task(name, total=None, visible=False)
        self.timer = Timer(_APPEARS_AFTER_S, self._show)
        self.timer.daemon = True
        self.timer.start()

    def _show(self) -> None:
        self.display.update(self.task, visible=True)

    def move_to(self, done: float) -> None:
        with self.lock:
            self.done = max(self.done, min(done, self.total))
            self.display.update(self.task, completed=self.done, total=self.total)

    def close(self) -> None:
        self.timer.cancel()
        self.display.remove_task(self.task)


_display: Any = None
_bar: _Bar | None = None


@contextmanager
def show_progress(*, enabled: bool | None = None) -> Iterator[None]:
    """Draw bars while the block runs: by default where stderr is a terminal."""
    global _display
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield
        return
    with _rich_progress() as _display:
        try:
            yield
        finally:
            _display = None


@contextmanager
def step_progress(name: str, num_jobs: int) -> Iterator[None]:
    """Count the jobs of a step while the block runs."""
    global _bar
    if _display is None:
        yield
        return
    _bar = _Bar(_display, name, num_jobs)
    try:
        yield
    finally:
        _bar.close()
        _bar = None


def advance(fraction: float) -> None:
    """Say that `fraction` more of a job of the running step is done."""
    if _bar is not None:
        _bar.move_to(_bar.done + fraction)


def job_done(num_done: int) -> None:
    """Say that `num_done` jobs of the running step are done by now, cached ones included."""
    if _bar is not None:
        _bar.move_to(num_done)


def _rich_progress() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description:>9}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )

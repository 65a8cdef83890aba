"""How far a run is: bars for whoever watches a terminal, and a question for whoever shows it.

A step's total is its number of jobs. Library code calls `advance(0.1)` where it has done a tenth
of a job; it neither knows nor cares who watches. A bar appears once its step has run for a second
(pulsing until the first job or part of one is done), so quick steps leave the terminal alone.
Bars go to stderr: stdout stays clean for `--json`. Other displays ask `current_step`.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock, Timer
from typing import Any

__all__ = [
    "CurrentStep",
    "advance",
    "current_step",
    "job_done",
    "own_progress",
    "show_progress",
    "step_progress",
]

_APPEARS_AFTER_S = 1.0


class _Step:
    """The step that runs: how many of its jobs are done, in parts too; and its bar, if one shows.

    A bar is hidden for a second, then drawn by rich until the step ends.
    """

    def __init__(self, name: str, total: float, display: Any) -> None:
        self.name, self.total, self.done = name, total, 0.0
        self.began = time.monotonic()
        self.lock = Lock()
        self.display = display
        if display is not None:
            self.task = display.add_task(name, total=None, visible=False)
            self.timer = Timer(_APPEARS_AFTER_S, self._show)
            self.timer.daemon = True
            self.timer.start()

    def _show(self) -> None:
        self.display.update(self.task, visible=True)

    def move_to(self, done: float) -> None:
        with self.lock:
            self.done = max(self.done, min(done, self.total))
            if self.display is not None:
                self.display.update(self.task, completed=self.done, total=self.total)

    def close(self) -> None:
        if self.display is not None:
            self.timer.cancel()
            self.display.remove_task(self.task)


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentStep:
    """How far the running step is."""

    name: str
    share: float
    """Of its jobs that are done, in [0, 1]."""
    num_jobs: int
    seconds: float
    """Since it began."""


class _Run:
    """What runs at a time is one step of it."""

    step: _Step | None = None


_display: Any = None
_of_process = _Run()
_own: ContextVar[_Run] = ContextVar("own")


def _current() -> _Run:
    return _own.get(_of_process)


def current_step() -> CurrentStep | None:
    """Return how far the running step is; None between steps."""
    step = _current().step
    if step is None:
        return None
    return CurrentStep(
        name=step.name,
        share=step.done / step.total if step.total else 1.0,
        num_jobs=int(step.total),
        seconds=time.monotonic() - step.began,
    )


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
def own_progress() -> Iterator[None]:
    """Keep the steps of this run apart from those of others in the process while the block runs."""
    token = _own.set(_Run())
    try:
        yield
    finally:
        _own.reset(token)


@contextmanager
def step_progress(name: str, num_jobs: int) -> Iterator[None]:
    """Count the jobs of a step while the block runs."""
    run = _current()
    run.step = step = _Step(name, num_jobs, _display)
    try:
        yield
    finally:
        step.close()
        run.step = None


def advance(fraction: float) -> None:
    """Say that `fraction` more of a job of the running step is done."""
    step = _current().step
    if step is not None:
        step.move_to(step.done + fraction)


def job_done(num_done: int) -> None:
    """Say that `num_done` jobs of the running step are done by now, cached ones included."""
    step = _current().step
    if step is not None:
        step.move_to(num_done)


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

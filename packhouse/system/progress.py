"""Show the progress of a run: the current phase or step, and a line for each finished one.

    importing Prefect                     4.1 s
    planning                              0.2 s
    1/8 validate        52,002 rows       1.3 s
     tokenize ---------------                 50% 0:00:03 0:00:03

In a terminal or notebook, the last line is a progress bar. In a log, each phase also prints a line
when it begins, to show what the run waits for. All output goes to stderr, so stdout stays clean for
`--json`. Warnings of packhouse are printed between these lines. Other displays read `current_step`.

The total of a step is its number of jobs. Library code calls `advance(0.1)` after a tenth of a job,
regardless of the display. A bar appears after its step has run for a second; it pulses until some
progress is reported.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from threading import Lock, Timer
from typing import Any

from typing_extensions import override

from packhouse.system.escaping import PAGE_STYLE, html_text
from packhouse.system.terminal import console, echo

# A notebook gets the whole page at each update.
_EVERY_S = 0.1


def is_notebook() -> bool:
    """Return True in a cell of Jupyter, VS Code or Colab."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def notebook_progress() -> Any:
    """Return a rich display that draws HTML into one output of the cell and updates it."""
    from IPython.display import HTML, display
    from rich.progress import Progress

    class Page(Progress):
        def __init__(self) -> None:
            super().__init__(disable=True)  # no drawing by rich itself
            del self.print  # rich sets it to its console's; use the method below
            self.lines: list[str] = []
            self.handle: Any = None
            self.drawn = 0.0

        def print(self, *lines: Any, **_: Any) -> None:
            self.lines += lines
            self.refresh()

        def update(self, task_id: Any, **changes: Any) -> None:
            super().update(task_id, **changes)
            if "visible" in changes or time.monotonic() - self.drawn > _EVERY_S:
                self.refresh()

        def remove_task(self, task_id: Any) -> None:
            super().remove_task(task_id)
            self.refresh()

        def refresh(self) -> None:
            with self._lock:
                self.drawn = time.monotonic()
                bars = "".join(map(_bar, self.tasks))
                lines = f"<pre>{html_text(chr(10).join(self.lines))}</pre>" if self.lines else ""
                page = HTML(f'{PAGE_STYLE}<div class="packhouse">{lines}{bars}</div>')
                if self.handle is None:
                    self.handle = display(page, display_id=True)
                else:
                    self.handle.update(page)

    return Page()


def _bar(task: Any) -> str:
    name = html_text(task.description)
    if not task.visible:
        return ""
    if task.total is None:
        return f"<div>{name} ...</div>"
    share = min(task.completed / task.total, 1.0) if task.total else 1.0
    return f'<div>{name} <progress value="{share:.3f}" max="1"></progress> {share:.0%}</div>'


# Most steps of a small or cached run are done by then: their bars would only flicker.
_APPEARS_AFTER_S = 1.0


class Step:
    """The running step: its finished jobs (fractional) and its bar, if there is a display.

    The bar is hidden for a second, then shown until the step ends.
    """

    def __init__(self, name: str, num_jobs: int) -> None:
        self.name, self.num_jobs, self.done = name, num_jobs, 0.0
        self.began = time.monotonic()
        self.lock = Lock()
        self.display = _display
        if self.display is not None:
            self.task = self.display.add_task(name, total=None, visible=False)
            show = partial(self.display.update, self.task, visible=True)
            self.timer = Timer(_APPEARS_AFTER_S, show)
            self.timer.daemon = True
            self.timer.start()

    @property
    def share(self) -> float:
        """Share of its jobs that are done, in [0, 1]."""
        return self.done / self.num_jobs if self.num_jobs else 1.0

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def move_to(self, done: float) -> None:
        """Set the number of finished jobs; it never decreases."""
        with self.lock:
            self.done = max(self.done, min(done, self.num_jobs))
            if self.display is not None:
                self.display.update(self.task, completed=self.done, total=self.num_jobs)

    def close(self) -> None:
        """Remove its bar."""
        if self.display is not None:
            self.timer.cancel()
            self.display.remove_task(self.task)


class _Run:
    """State of a run, which has one running step at a time."""

    step: Step | None = None


_display: Any = None
"""Display of rich in a terminal or notebook, else None."""
_is_shown = False
_phase: tuple[str, float, Any] | None = None
"""Work outside the steps, such as planning: its name, its start, its task in the display."""
_forward: Callable[[float], None] | None = None
# Flow runs that share a process set one each. Without a flow, all threads of the process must see
# the same running step.
_run: ContextVar[_Run] = ContextVar("run", default=_Run())  # noqa: B039 - shared on purpose


def current_step() -> Step | None:
    """Return the running step; None between steps."""
    return _run.get().step


@contextmanager
def show_progress(*, is_terminal: bool | None = None) -> Iterator[None]:
    """Show progress on stderr while the block runs, with bars in a terminal."""
    global _display, _is_shown, _phase
    _is_shown = True
    warnings, log = _Warnings(logging.WARNING), logging.getLogger("packhouse")
    log.addHandler(warnings)
    try:
        bars: Any = nullcontext()
        if sys.stderr.isatty() if is_terminal is None else is_terminal:
            from rich import progress

            bars = progress.Progress(
                progress.TextColumn("{task.description:>9}"),
                progress.BarColumn(bar_width=24),
                progress.TaskProgressColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=console(stderr=True),
                transient=True,
            )
        elif is_notebook():
            bars = notebook_progress()
        with bars as _display:
            yield
            _end_phase()
    finally:
        log.removeHandler(warnings)
        _display, _is_shown, _phase = None, False, None


class _Warnings(logging.Handler):
    """Prints logged warnings above the bar."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        _print_line(record.getMessage())


def say(text: str, seconds: float) -> None:
    """Print a line with a finished piece of work and its duration."""
    if _is_shown:
        _print_line(f"{text:<34} {seconds:>8.1f} s")


def _print_line(line: str) -> None:
    if _display is not None:
        _display.print(line, markup=False, highlight=False)
    else:
        echo(line, err=True)


def start_phase(text: str) -> None:
    """Show the current phase until the next phase or step begins."""
    global _phase
    _end_phase()
    if not _is_shown:
        return
    task = None if _display is None else _display.add_task(text, total=None)
    if _display is None:
        echo(f"{text} ...", err=True)
    _phase = text, time.monotonic(), task


def _end_phase() -> None:
    global _phase
    if _phase is None:
        return
    text, began, task = _phase
    if _display is not None:
        _display.remove_task(task)
    say(text, time.monotonic() - began)
    _phase = None


@contextmanager
def own_progress() -> Iterator[None]:
    """Track the steps of this run separately from other runs in the process."""
    token = _run.set(_Run())
    try:
        yield
    finally:
        _run.reset(token)


@contextmanager
def step_progress(name: str, num_jobs: int) -> Iterator[None]:
    """Count the jobs of a step while the block runs."""
    _end_phase()
    run = _run.get()
    run.step = step = Step(name, num_jobs)
    try:
        yield
    finally:
        step.close()
        run.step = None


def advance(fraction: float) -> None:
    """Report that another `fraction` of a job of the running step is done."""
    if _forward is not None:
        _forward(fraction)
    step = _run.get().step
    if step is not None:
        step.move_to(step.done + fraction)


def forward(say: Callable[[float], None]) -> None:
    """Pass calls of `advance` to a function; in a worker, it reports to the parent."""
    global _forward
    _forward = say


def job_done(num_done: int) -> None:
    """Report that `num_done` jobs of the running step are done, including cached ones."""
    step = _run.get().step
    if step is not None:
        step.move_to(num_done)

"""Progress in a notebook: lines that stay and a bar below them, one output of the cell.

Rich's own bars need ipywidgets there, and show nothing without it; this needs what a notebook has.
"""

import sys
import time
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

from packhouse.system.escaping import PAGE_STYLE, html_text

_EVERY_S = 0.1


def is_notebook() -> bool:
    """Return True in a cell of Jupyter, VS Code or Colab."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


@dataclass(slots=True)
class _Task:
    name: str
    total: float | None
    done: float = 0.0
    visible: bool = True


class NotebookProgress:
    """What `progress` asks of a display, as `rich.progress.Progress` answers it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._tasks: dict[int, _Task] = {}
        self._lock = Lock()
        self._handle: Any = None
        self._drawn = 0.0

    @property
    def console(self) -> Self:
        """Where lines go."""
        return self

    def print(self, line: str, **_: Any) -> None:
        """Add a line that stays."""
        self._lines.append(line)
        self._draw()

    def add_task(self, name: str, total: float | None = None, visible: bool = True) -> int:
        """Add a bar; without a total it only says what runs."""
        number = len(self._lines) + len(self._tasks) + time.monotonic_ns()
        self._tasks[number] = _Task(name, total, visible=visible)
        self._draw()
        return number

    def update(
        self,
        task: int,
        *,
        completed: float | None = None,
        total: float | None = None,
        visible: bool | None = None,
    ) -> None:
        """Move a bar."""
        if (own := self._tasks.get(task)) is None:
            return
        own.done = own.done if completed is None else completed
        own.total = own.total if total is None else total
        own.visible = own.visible if visible is None else visible
        if visible is not None or time.monotonic() - self._drawn > _EVERY_S:
            self._draw()

    def remove_task(self, task: int) -> None:
        """Take a bar away."""
        self._tasks.pop(task, None)
        self._draw()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tasks.clear()
        self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML, display

        with self._lock:
            self._drawn = time.monotonic()
            bars = "".join(_bar(task) for task in list(self._tasks.values()) if task.visible)
            lines = f"<pre>{html_text(chr(10).join(self._lines))}</pre>" if self._lines else ""
            page = HTML(f'{PAGE_STYLE}<div class="packhouse">{lines}{bars}</div>')
            if self._handle is None:
                self._handle = display(page, display_id=True)
            else:
                self._handle.update(page)


def _bar(task: _Task) -> str:
    name = html_text(task.name)
    if task.total is None:
        return f"<div>{name} ...</div>"
    share = min(task.done / task.total, 1.0) if task.total else 1.0
    return f'<div>{name} <progress value="{share:.3f}" max="1"></progress> {share:.0%}</div>'

"""Print to terminals and logs with control characters escaped, and handle signals.

Commands print only with `echo` and `console` (a test enforces it), so no command can forget to
escape a row, a file name or a string of a manifest.

SIGINT, SIGTERM and SIGHUP end a command even if the exception of the handler is lost:
`check_interrupted`, called between jobs, raises it again.
"""

import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click
from typing_extensions import override

from packhouse.system.escaping import for_terminal

if TYPE_CHECKING:
    from rich.console import Console

# rich folds cells at the width of its console, but a program that reads a pipe needs whole lines.
_PIPE_WIDTH = 2000


def echo(text: str = "", *, err: bool = False) -> None:
    """Print lines of text."""
    click.echo(for_terminal(text, keep_lines=True), err=err)


def echo_data(text: str) -> None:
    """Print data for a program byte for byte; on a terminal, escaped."""
    if sys.stdout.isatty():
        echo(text)
    else:
        click.echo(text.encode())


def console(*, stderr: bool = False, soft_wrap: bool = True) -> "Console":
    """Return a rich console that ignores markup in text and escapes its output."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Escaping(Console):
        @override
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                if not control:
                    text = for_terminal(text, keep_lines=True)
                yield Segment(text, style, control)

    return Escaping(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)


def page(blocks: Iterator[object]) -> None:
    """Print rich renderables block by block; on a terminal, in a pager that reads on demand."""
    out = console()
    if not (out.is_terminal and sys.stdin.isatty()):
        for block in blocks:
            out.print(block, end="")
        return

    def lines() -> Iterator[str]:
        for block in blocks:
            with out.capture() as held:
                out.print(block, end="")
            yield held.get()

    os.environ.setdefault("LESS", "FRX")  # show colors; quit at once if it fits on the screen
    click.echo_via_pager(lines(), color=True)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None
) -> None:
    """Print a table as wide as the terminal, with numbers at the right; a pipe gets full lines."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        # On a narrow terminal text is folded, and a number is cut with an ellipsis, never silently.
        if rows and all(_is_number(row[index]) for row in rows):
            table.add_column(name, justify="right", overflow="ellipsis", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(cell_text, row))
    out = console(soft_wrap=False)
    if out.is_terminal:
        out.print(table)
        return
    out.width = out.width if "COLUMNS" in os.environ else _PIPE_WIDTH
    with out.capture() as held:
        out.print(table)
    echo("\n".join(line.rstrip() for line in held.get().rstrip("\n").split("\n")))


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return value == "-" or value.endswith("%") or value.startswith("about ")
    return value is None or isinstance(value, int | float)


def cell_text(value: object) -> str:
    """Return a cell of a table as text, escaped.

    Example:
        >>> [cell_text(value) for value in (None, True, 12_345, 0.98765, 1234.5, [1, "a"])]
        ['-', 'true', '12,345', '0.9877', '1,234.5', '[1, "a"]']
    """
    if value is None:
        return "-"
    if isinstance(value, bool | list | dict):
        return for_terminal(json.dumps(value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    return for_terminal(str(value))


def print_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns; a value that is too long goes below its name."""
    out = console()
    is_wide = not out.is_terminal and "COLUMNS" not in os.environ
    width = _PIPE_WIDTH if is_wide else out.width
    known = [(for_terminal(name), for_terminal(value)) for name, value in facts]
    column = max((len(name) for name, _ in known if len(name) <= width // 2), default=0) + 2
    if title:
        out.print(title, style="bold")
    for name, value in known:
        if len(name) < column and column + len(value) <= width:
            echo(f"{name:<{column}}{value}")
        else:
            echo(name)
            print_text(value, 4)


def print_text(text: str, indent: int = 0, *, err: bool = False) -> None:
    """Print a paragraph, wrapped on a terminal; a pipe gets one line."""
    out = console(stderr=err)
    text = for_terminal(text)
    if not out.is_terminal and (err or "COLUMNS" not in os.environ):
        echo(" " * indent + text, err=err)
        return
    lines = textwrap.wrap(
        text,
        max(out.width, 40),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    echo("\n".join(lines), err=err)


def print_note(text: str) -> None:
    """Print an error, a warning or a note to stderr, wrapped like `print_text`."""
    for number, line in enumerate(text.split("\n")):
        print_text(line, 2 if number else 0, err=True)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: signal.Signals | None = None


# Not a KeyboardInterrupt, for which click prints "Aborted!" and exits with 1 whatever the signal.
class Interrupted(SystemExit):
    """A signal ended the command. If nothing catches it, Python exits with its code.

    Example:
        >>> error = Interrupted(signal.SIGTERM)
        >>> str(error), error.exit_code
        ('stopped by SIGTERM', 143)
    """

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number
        """128 + signal, as shells expect: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for
        SIGHUP."""
        super().__init__(self.exit_code)

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


def handle_signals() -> None:
    """Make signals raise `Interrupted` in the main thread of a command's own process.

    An ignored SIGHUP, as under `nohup`, stays ignored.
    """
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)


def ignore_signals() -> None:
    """Ignore further signals while the command writes its last lines.

    Does nothing in a process that did not call `handle_signals`.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_IGN)


def interruption() -> Interrupted | None:
    """Return the interruption if a signal was received, even if its exception was lost."""
    return None if _received is None else Interrupted(_received)


def check_interrupted() -> None:
    """Raise the interruption again if a signal was received.

    Raises:
        Interrupted: A signal was received.
    """
    if error := interruption():
        raise error


def _on_signal(number: int, frame: object) -> None:
    global _received
    # Python raises the exception at any point of the main thread, and C or Rust code may swallow
    # it: when a Rust extension imports numpy's C API for the first time, it panics instead, which
    # looks like any failure of an encoder. So remember the signal, too.
    _received = signal.Signals(number)
    raise Interrupted(number)

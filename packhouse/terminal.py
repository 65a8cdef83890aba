"""The way to a terminal and to logs: what they are sent holds nothing that a terminal acts on.

Commands print with `echo` and `console` alone (a test holds them to it), so that no command can
forget to escape a row, a file name or a string of a manifest.
"""

import logging
from collections.abc import Iterator
from typing import Any

import click
from typing_extensions import override

from packhouse.escaping import for_terminal

__all__ = ["EscapedRecord", "console", "echo"]


def echo(text: str = "", *, err: bool = False) -> None:
    """Print lines of text."""
    click.echo(for_terminal(text, keep_lines=True), err=err)


def console(*, stderr: bool = False, soft_wrap: bool = True) -> Any:
    """Return a rich console that takes no markup from text and escapes what it draws."""
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


class EscapedRecord(logging.LogRecord):
    """A log record whose message and traceback hold nothing that a terminal acts on.

    Lines behind the first are indented: no message can pass itself off as another one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0]:
            said = logging.Formatter().formatException(self.exc_info)
            self.exc_text = for_terminal(said, keep_lines=True)

    @override
    def getMessage(self) -> str:
        return for_terminal(super().getMessage(), keep_lines=True).replace("\n", "\n    ")

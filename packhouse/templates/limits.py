"""What a chat template may use up on one conversation: loop turns, characters, seconds.

Every loop iteration and macro call costs a tick; every assigned or multiplied text is measured, and
so is the output. An honest template uses tens of ticks a message. Ticks and sizes are
deterministic, so the same rows are refused everywhere; the clock is only the last resort and ends
the run.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from packhouse.errors import TemplateError
from packhouse.templates.leaves import WholeJson

__all__ = [
    "BUDGET",
    "LimitError",
    "measure_method",
    "measure_product",
    "measured_filter",
    "text_length",
]

MAX_TICKS = 200_000
MAX_SECONDS = 20.0
FREE_CHARS = 2**20  # output that any rendering may have ...
CHARS_PER_CHAR = 16  # ... and this many times its input on top


text_length = str.__len__  # a traced text refuses `len`: a template may decide by it


class LimitError(Exception):
    """A template went over a limit on this row."""


class _Budget(threading.local):
    """What is left to the rendering that runs in this thread."""

    ticks = 0
    inputs: tuple[Any, ...] = ()
    deadline = float("inf")
    generation: tuple[str, str] = ("", "")
    is_traced = False

    def open(self, *inputs: Any, generation: tuple[str, str], is_traced: bool) -> None:
        self.ticks = 0
        self.inputs = inputs
        self.deadline = time.monotonic() + MAX_SECONDS
        self.generation = generation
        self.is_traced = is_traced

    def tick(self) -> str:
        self.ticks += 1
        if self.ticks > MAX_TICKS:
            raise LimitError(f"the template ran over {MAX_TICKS:,} loop iterations")
        if self.ticks % 256 == 0 and time.monotonic() > self.deadline:
            raise TemplateError(
                f"the chat template ran for over {MAX_SECONDS:.0f} s on one conversation"
            )
        return ""

    def measure(self, num_chars: int) -> None:
        if num_chars <= FREE_CHARS:
            return
        limit = FREE_CHARS + CHARS_PER_CHAR * sum(map(_num_chars, self.inputs))
        if num_chars > limit:
            raise LimitError(f"the template makes text of over {limit:,} characters")

    def sized(self, value: Any) -> Any:
        if isinstance(value, str):
            self.measure(text_length(value))
        elif isinstance(value, list | tuple):
            self.measure(len(value))
        elif isinstance(value, dict):
            self.measure(dict.__len__(value))
        return value


BUDGET = _Budget()
"""Of the rendering that runs in this thread."""


def measure_product(left: Any, right: Any) -> None:
    """Measure `left * right` before it is made."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            BUDGET.measure(len(sequence) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() > 4096:
        raise LimitError("the template makes a huge number")


def measure_method(owner: str, method: str, args: tuple[Any, ...]) -> None:
    """Measure what a method of a text is about to make."""
    measure = BUDGET.measure
    if method in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        measure(args[0])
    elif method == "expandtabs":
        measure(text_length(owner) * (args[0] if args and isinstance(args[0], int) else 8))
    elif method == "replace" and len(args) > 1 and all(isinstance(a, str) for a in args[:2]):
        measure(text_length(owner) + str.count(owner, args[0]) * text_length(args[1]))
    elif method == "join" and args and isinstance(args[0], list | tuple):
        measure(sum(len(owner) + len(str(item)) for item in args[0]))


def measured_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter that can make text grow; keeps what Jinja passes it first (context, ...)."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, int) and a > 0]
        texts = [a for a in (*args, *kwargs.values()) if isinstance(a, str)]
        size = sum(map(text_length, texts))
        if name == "replace" and len(texts) > 2:
            size += str.count(texts[0], texts[1]) * text_length(texts[2])
        elif name == "indent":
            size *= 1 + max(numbers, default=4)
        BUDGET.measure(size + max(numbers, default=0))
        return plain(*args, **kwargs)

    pass_arg = getattr(plain, "jinja_pass_arg", None)
    if pass_arg is not None:
        vars(measured)["jinja_pass_arg"] = pass_arg  # by this name Jinja finds it
    return measured


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return text_length(value)
    if isinstance(value, WholeJson):
        return sum(map(_num_chars, dict.values(value)))
    if isinstance(value, dict):
        return sum(map(_num_chars, value)) + sum(map(_num_chars, value.values()))
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return 8

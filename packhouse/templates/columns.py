"""The texts of a part's conversations as flat columns, made when they are asked for.

Contents, thoughts and ids are columns of all messages; names and arguments of tool calls columns of
all calls; tool definitions are parsed once for each text that differs. A leaf of many rows is then
a column and one place in it a row.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.templates.questions import AnyOf, Check, answers

__all__ = ["Column", "filled"]

Bools = npt.NDArray[np.bool_]


class Column:
    """Texts, and what was asked of them."""

    def __init__(self, make: Callable[[], pa.Array]) -> None:
        self._make = make
        self._texts: pa.Array | None = None
        self._answers: dict[Check, Bools] = {}
        self._noisy: Bools | None = None

    @property
    def texts(self) -> pa.Array:
        """The texts, type string; empty in place of null."""
        if self._texts is None:
            self._texts = self._make()
        return self._texts

    def agrees(self, check: Check) -> Bools:
        """Which texts give the answer that the check holds."""
        if check not in self._answers:
            self._answers[check] = answers(check, self.texts) == check.answer
        return self._answers[check]

    def noisy(self, control: AnyOf) -> Bools:
        """Which texts hold a control token."""
        if self._noisy is None:
            self._noisy = control.found_in(self.texts)
        return self._noisy


def filled(column: pa.Array) -> pa.Array:
    """A column with empty texts for null."""
    return pc.fill_null(column, "") if column.null_count else column

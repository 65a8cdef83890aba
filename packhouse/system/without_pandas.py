"""Keep pandas out of processes of our own: nothing here uses it, and it is not small.

pyarrow imports pandas at the first Python list that it is given, to know a Series when it sees one,
and Pandera does for the half of it that checks pandas: 0.3 s of CPU and 40 MB in each process. Both
do without where it is not installed, so for a moment it is not.

Whoever imports it later gets it, but pyarrow, polars and Pandera would go on without: a NaN of a
Series is no null then, and `pandera.pandas` cannot be imported. So it is done only where nobody
else's code runs: our commands and worker say so to their process and to those that it starts.
"""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa
from typing_extensions import override

WITHOUT_PANDAS = "PACKHOUSE_WITHOUT_PANDAS"
"""Set in the environment of processes that are our own."""


class _NoPandas(MetaPathFinder):
    """Says to one thread that pandas is not installed."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("No module named 'pandas'", name=fullname)
        return None


@contextmanager
def without_pandas() -> Iterator[None]:
    """In a process of our own: let imports of this thread find no pandas that is not loaded yet."""
    if not os.environ.get(WITHOUT_PANDAS):
        yield
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def settle_pyarrow() -> None:
    """In a process of our own: let pyarrow look for pandas now, and find none."""
    if os.environ.get(WITHOUT_PANDAS):
        _settle()


@cache
def _settle() -> None:
    with without_pandas():
        pa.array([""])


def recall_pandas() -> None:
    """Let pyarrow find pandas after all: Python has no times of its own in nanoseconds."""
    with suppress(ImportError):  # it is not installed
        pa.array([0]).to_pandas()

"""Load a thing once per process, also when threads ask for it at the same time."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_MAX_KEPT = 4  # a run has one tokenizer; each costs up to 0.4 s and 150 MB


class memo(Generic[T]):
    """Keep what a function made for the last four keys; a second thread waits for the first.

    Example:
        >>> load = memo(str.upper)
        >>> load("a"), load("a")
        ('A', 'A')
    """

    def __init__(self, load: Callable[[str], T]) -> None:
        self.__doc__ = load.__doc__
        self._load = load
        self._lock = threading.Lock()
        self._kept: dict[str, T] = {}

    def __call__(self, key: str) -> T:
        """Return what belongs to a key, made now if it is not kept."""
        with self._lock:
            if key not in self._kept:
                self._keep(key, self._load(key))
            return self._kept[key]

    def keep(self, key: str, value: T) -> None:
        """Take what was made elsewhere, so that nobody loads it again."""
        with self._lock:
            self._keep(key, value)

    def _keep(self, key: str, value: T) -> None:
        if len(self._kept) == _MAX_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[key] = value

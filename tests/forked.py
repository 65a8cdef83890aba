"""Processes that start in 20 ms, because they are forks of one that has imported their modules."""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_imported: tuple[str, ...] = ()


def forks_of(*modules: str) -> ForkServerContext:
    """Return a context whose processes are forks of one that has imported these modules.

    Python keeps one such process, so that of other modules is ended.
    """
    global _imported
    context = multiprocessing.get_context("forkserver")
    if modules != _imported:
        # A running process keeps what it has imported, and no public function ends it.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # typeshed has no `_stop`
        context.set_forkserver_preload(list(modules))
        _imported = modules
    return context

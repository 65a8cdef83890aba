"""Show a progress artifact in the UI for each long step of a run.

A thread checks the progress of the running step every two seconds. A step that takes five seconds
or more gets an artifact, `<dataset>-<step>`; quicker steps get none. If the server does not answer,
the artifact is not updated, but the run continues.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from threading import Event, Thread
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from packhouse.system.progress import current_step, own_progress
from packhouse.system.wording import counted
from tasks.artifacts import artifact_key

log = logging.getLogger("packhouse.flows")

# Most steps of a cached or small run take less; an artifact of each would only hide the others.
APPEARS_AFTER_S = 5.0
# Each update is a request to the server.
EVERY_S = 2.0


@contextmanager
def progress_artifacts(dataset: str) -> Iterator[None]:
    """Show the progress of long steps during the block."""
    with own_progress():  # other runs may be active in this process
        ended = Event()
        watcher = Thread(
            target=copy_context().run,  # artifacts belong to the run that creates them
            args=(_watch, dataset, ended),
            name="packhouse-progress",
            daemon=True,
        )
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join(10 * EVERY_S)


def _watch(dataset: str, ended: Event) -> None:
    shown: tuple[str, Any] | None = None
    try:
        while not ended.wait(EVERY_S):
            step = current_step()
            if shown and (step is None or step.name != shown[0]):
                update_progress_artifact(artifact_id=shown[1], progress=100.0)
                shown = None
            if step is not None and (shown or step.seconds >= APPEARS_AFTER_S):
                percent = round(100.0 * step.share, 1)
                if shown:
                    update_progress_artifact(artifact_id=shown[1], progress=percent)
                    continue
                made = create_progress_artifact(
                    progress=percent,
                    key=artifact_key(dataset, step.name),
                    description=f"{step.name}: {counted(step.num_jobs, 'job')}",
                )
                shown = step.name, made
        if shown:
            step = current_step()
            share = 1.0 if step is None or step.name != shown[0] else step.share
            update_progress_artifact(artifact_id=shown[1], progress=100.0 * share)
    except Exception as error:
        log.warning("progress is no longer reported: %s", error)

"""Heartbeats of a run, by a thread that ends with it.

A run says every three minutes that it lives, as the event `prefect.flow-run.heartbeat`; an
automation may call a silent run crashed. Prefect's own thread sleeps in whole seconds and is waited
for: half a second at the end of every run, and of every subflow. So a command, which calls its flow
in its own process, takes the heartbeats over: same events, by a thread that is woken at the end.
Runs of deployments keep Prefect's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from threading import Event, Thread
from typing import Any

import prefect
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    get_current_settings,
    temporary_settings,
)

__all__ = ["heartbeats", "own_heartbeats"]

FIRST_AFTER_S = 0.5
"""Prefect connects to send the first event, in the thread that asks for the dataset's slot."""

_every_s: ContextVar[int | None] = ContextVar("packhouse_heartbeats_s", default=None)
"""Seconds between heartbeats of the flows called here; None: they are Prefect's."""


@contextmanager
def own_heartbeats() -> Iterator[None]:
    """Take the heartbeats of the flows that are called in the block from Prefect."""
    every_s = get_current_settings().flows.heartbeat_frequency
    if every_s is None:  # somebody wants none
        yield
        return
    token = _every_s.set(every_s)
    try:
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            yield
    finally:
        _every_s.reset(token)


@contextmanager
def heartbeats() -> Iterator[None]:
    """Say soon and then regularly that the run lives, while its flow is in the block."""
    every_s, context = _every_s.get(), FlowRunContext.get()
    if every_s is None or context is None or context.flow_run is None:
        yield
        return
    ended = Event()
    thread = Thread(
        target=copy_context().run,  # where Prefect's events look for the run and its server
        args=(_beat, _event(context.flow_run, context.flow), every_s, ended),
        name="packhouse-heartbeats",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2)


def _beat(event: dict[str, Any], every_s: int, ended: Event) -> None:
    wait_s: float = FIRST_AFTER_S
    while not ended.wait(wait_s):
        emit_event(**event)  # queued for a thread of Prefect's, which logs what goes wrong
        wait_s = every_s


def _event(run: FlowRun, flow: Any) -> dict[str, Any]:
    """As Prefect's own: the run is the resource; its flow and tags are related."""
    related = [
        {
            "prefect.resource.id": f"prefect.flow.{run.flow_id}",
            "prefect.resource.role": "flow",
            "prefect.resource.name": flow.name,
        },
        *(
            {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
            for tag in sorted(run.tags)
        ),
    ]
    resource = {
        "prefect.resource.id": f"prefect.flow-run.{run.id}",
        "prefect.resource.name": run.name,
        "prefect.version": prefect.__version__,
    }
    return {"event": "prefect.flow-run.heartbeat", "resource": resource, "related": related}

"""Prefect's embedded server, started so that Ctrl-C does not end it before the run."""

import atexit
import signal
import subprocess
from concurrent.futures import Future
from contextvars import copy_context
from threading import Thread
from typing import Any


def start_embedded_server() -> None:
    """Start the server that Prefect would start at the flow's first request, if it would.

    A terminal sends Ctrl-C to all processes in the foreground. A server that it ended could not be
    told that the run has ended, and Prefect would ask it again for minutes. A process inherits
    which signals are blocked from the thread that starts it, hence the thread. Prefect ends the
    server by SIGTERM when this process exits; if it is killed, a shell that waits for it does.

    Raises:
        RuntimeError: it does not come up.
    """
    from prefect.client.base import ServerType, determine_server_type

    if determine_server_type() is not ServerType.EPHEMERAL:
        return
    from prefect.server.api.server import SubprocessASGIServer

    class Server(SubprocessASGIServer):
        def _run_uvicorn_command(self) -> "subprocess.Popen[Any]":
            server = super()._run_uvicorn_command()
            _end_with_this_process(server.pid)
            return server

    started: Future[None] = Future()

    def start() -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            Server().start()
            started.set_result(None)
        except BaseException as error:  # whatever it is, the caller's thread has to tell it
            started.set_exception(error)

    Thread(target=copy_context().run, args=(start,), name="embedded-server", daemon=True).start()
    started.result()


def _end_with_this_process(pid: int) -> None:
    """Let a shell end a process when this one was killed, which closes the pipe that it reads."""
    watcher = subprocess.Popen(["/bin/sh", "-c", f"read _; kill {pid}"], stdin=subprocess.PIPE)

    @atexit.register
    def leave() -> None:  # Prefect has ended the server, and its number may be another's
        watcher.kill()
        watcher.communicate()

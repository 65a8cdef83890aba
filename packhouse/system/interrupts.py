"""SIGINT, SIGTERM and SIGHUP end a command, even if the exception that they raise is lost.

A handler's exception is raised at whatever the main thread does just then. Code in C or Rust may
swallow it: numpy's C API, imported by a Rust extension for the first time, panics instead, and a
panic looks like any other failure of an encoder. So the handler also remembers the signal, and
`check_interrupted`, called between jobs, raises it again.
"""

import signal

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: signal.Signals | None = None


class Interrupted(SystemExit):
    """A signal ended the command. Where nobody catches it, Python exits with its code.

    Example:
        >>> error = Interrupted(signal.SIGTERM)
        >>> str(error), error.exit_code
        ('stopped by SIGTERM', 143)
    """

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number
        """What shells expect: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for SIGHUP."""
        super().__init__(self.exit_code)

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


def handle_signals() -> None:
    """Let signals raise `Interrupted` in the main thread of a command's own process.

    A hang-up that is ignored, as under `nohup`, stays so.
    """
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)


def ignore_signals() -> None:
    """Let no further signal stop the command: it is ending, and what it writes last is short.

    Does nothing in a process that is not the command's own (`handle_signals` was not called).
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_IGN)


def interruption() -> Interrupted | None:
    """Return the interruption if a signal came, also one whose exception was lost."""
    return None if _received is None else Interrupted(_received)


def check_interrupted() -> None:
    """Raise the interruption again if a signal came and its exception was lost.

    Raises:
        Interrupted: a signal came.
    """
    error = interruption()
    if error is not None:
        raise error


def _on_signal(number: int, frame: object) -> None:
    global _received
    _received = signal.Signals(number)
    raise Interrupted(number)

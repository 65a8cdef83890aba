"""Fail tests that leave errors in the logs of Prefect's servers and workers.

A server that schedules no runs still answers every request; only its log shows the problem. So a
test that starts a server does so inside `watched(log)`, and after each test a fixture of
tests/conftest.py calls `new_errors()`.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RECORD = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \| (?P<level>[A-Z]+) *\| (?P<logger>.*?) - ")
_RAW_ERROR = re.compile(r"^(Traceback \(most recent call last\)|ERROR:|CRITICAL:|Fatal )")

# Loggers of a run itself, and of the end of its process.
RUNS = (
    "Flow run ",
    "Task run ",
    "packhouse.flows",
    "prefect.engine",
    "prefect.runner.flow_run_executor",
)

# Records that look like errors of the server or the worker but are not.
HARMLESS = (
    # Two runs created the limit of one dataset at the same time; the loser uses the winner's.
    r"(?s)IntegrityError.*INSERT INTO concurrency_limit_v2 ",
    # A wrong password with accents is answered with 500; access is still denied.
    r"(?s)hmac\.compare_digest.*TypeError: comparing strings with non-ASCII characters",
    # A server that is stopped cancels its open queries.
    r"(?s)Exception during reset or similar.*\bCancelledError",
    # A deployment replaced an automation while the server compared an event with it. The server
    # tries the event again.
    r"(?s)Trigger\._automation has been garbage collected",
)

_watched = {}  # number of bytes read of each log
_harmless = {}


def errors_in(text: str, harmless: tuple[str, ...] = HARMLESS) -> list[str]:
    """Return the records of a log that report an error, each with its traceback.

    Messages about a run are left out: the test that started the run checks its state.

    Example:
        >>> errors_in("10:00:00.000 | INFO    | prefect.worker - well\\n  more")
        []
        >>> errors_in("10:00:00.000 | ERROR   | prefect.server - no\\n  more\\nother")
        ['10:00:00.000 | ERROR   | prefect.server - no\\n  more\\nother']
    """
    records = [[]]
    for line in text.splitlines():
        if _RECORD.match(line):
            records.append([])
        records[-1].append(line)
    found = ["\n".join(lines) for lines in records if _is_error(lines)]
    return [one for one in found if not any(re.search(pattern, one) for pattern in harmless)]


def _is_error(lines: list[str]) -> bool:
    head = _RECORD.match(lines[0]) if lines else None
    if head and head["logger"].startswith(RUNS):
        return False
    is_raw = any(_RAW_ERROR.match(line) for line in lines)
    return is_raw or (head is not None and head["level"] in ("ERROR", "CRITICAL"))


def new_errors() -> list[str]:
    """Return the errors since the last call, from all watched logs."""
    return [f"{log}:\n{error}" for log in _watched for error in _unread(log)]


@contextmanager
def watched(log: Path, *harmless: str) -> Iterator[None]:
    """Watch a log while the block runs; any error left in it at the end fails the test.

    Args:
        log: of a server or worker; it may not exist yet.
        harmless: patterns of records that are not errors in this log, besides `HARMLESS`.
    """
    _harmless[log] = HARMLESS + harmless
    _watched[log] = log.stat().st_size if log.exists() else 0
    try:
        yield
        left = _unread(log)
        assert not left, f"{log} has errors:\n" + "\n".join(left)
    finally:
        del _watched[log]


def _unread(log: Path) -> list[str]:
    if not log.exists():
        return []
    before = None
    while True:
        with log.open("rb") as file:
            file.seek(_watched[log])
            content = file.read()
        errors = errors_in(content.decode(errors="replace"), _harmless[log])
        if not errors or content == before:
            break
        before = content
        time.sleep(0.5)  # the last record may be incomplete
    _watched[log] += len(content)
    return errors

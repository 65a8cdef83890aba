"""What runs in a confined child: calls, one after the other, under the limits of each.

`confine.run_confined` starts the child and asks; `serve` answers. Foreign code in a call says what
it works on and bounds its parts:

    for row in rows:
        at(f"row {row.number}")     # a row has 30 times the CPU time of a rendering
        with limited():             # and this rendering has its own
            render(row)

Outside of a child `at` and `limited` do nothing, so that the same code runs in tests.
"""

import io
import mmap
import os
import pickle
import queue
import resource
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow as pa

from packhouse.errors import PackhouseError
from packhouse.system import progress

MARK_BYTES = 512
"""Bytes that parent and child share: what the child works on."""
MARK = "<Qd"
"""How many limits began so far, and the seconds of the one that runs; behind it, the place."""

_BYTES_PER_CPU = 32 * 2**20  # stacks of the threads that Arrow, numpy and tokenizers have per core
_KEPT_BYTES = 2**30  # a child that still holds more than this after a call is not used again
_BYTES_PER_SECOND = 50_000  # of a batch; HF encodes 2 MB/s
_READ_BYTES = 2**20
_IDLE_S = 60.0

_mark: mmap.mmap | None = None
_num_marks = 0
_limits: list[float] = []  # seconds of the row and of what `limited` bounds within it
_seconds = 0
_row_seconds = 0
_more_seconds = 0.0  # for the size of what the call reads
_file_bytes = 0
_calls: "queue.SimpleQueue[bytes]" = queue.SimpleQueue()
_replies: IO[bytes]


def is_confined() -> bool:
    """Return True in a child."""
    return _mark is not None


def at(place: str) -> None:
    """In a child: note what is worked on, for the message if it does not end well.

    Outside of `limited`, another place is another row, with all of a row's CPU time.
    """
    if _mark is None:
        return
    noted = place.encode(errors="replace")[: MARK_BYTES - struct.calcsize(MARK)]
    if len(_limits) == 1 and noted != _place():
        _limits[0] = _row_seconds + _more_seconds
        signal.setitimer(signal.ITIMER_PROF, _limits[0])
    _note(noted)


@contextmanager
def limited(num_bytes: int = 0) -> Iterator[None]:
    """In a child: bound the CPU time of the block, a rendering or a batch of `num_bytes`.

    What the block takes is taken from the row around it, too. After it, `at` is as before.
    """
    if _mark is None:
        yield
        return
    place = _place()
    left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    allowed = _seconds + num_bytes / _BYTES_PER_SECOND
    given = min(allowed, left)
    _limits.append(allowed if given == allowed else _limits[-1])
    _note(place)
    signal.setitimer(signal.ITIMER_PROF, given)
    try:
        yield
    finally:
        unused, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        _limits.pop()
        _note(place)
        signal.setitimer(signal.ITIMER_PROF, max(left - given + unused, 0.001))


def file_of_parent() -> IO[bytes]:
    """In a child: the file that its parent opened for this call."""
    return io.BufferedReader(_FileOfParent(), _READ_BYTES)


def serve(mark: int) -> None:
    """Do calls until the parent closes the pipe, or none came for a minute."""
    global _mark, _seconds, _row_seconds, _more_seconds, _file_bytes, _replies
    from packhouse.system.memory import keep_freed_memory
    from packhouse.system.without_pandas import settle_pyarrow

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # are the parent's to answer
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold rows
    _mark = mmap.mmap(mark, MARK_BYTES)
    _replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no reply
    threading.Thread(target=_read_calls, daemon=True).start()
    keep_freed_memory()
    settle_pyarrow()
    progress.forward(lambda fraction: _reply({"advance": fraction}))
    base = _data_bytes()
    while True:
        try:
            payload = _calls.get(timeout=_IDLE_S)
        except queue.Empty:
            os._exit(0)
        call, num_bytes, memory, _seconds, _row_seconds, _file_bytes = pickle.loads(payload)  # noqa: S301 - of our parent
        _limit_memory(_data_bytes() + _BYTES_PER_CPU * (os.cpu_count() or 1) + memory)
        _more_seconds = num_bytes / _BYTES_PER_SECOND
        _limits[:] = [_seconds + _more_seconds]
        _note(b"")
        signal.setitimer(signal.ITIMER_PROF, _limits[0])
        _reply(_answer(call, num_bytes))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if _data_bytes() > base + _KEPT_BYTES:
            os._exit(0)


def _note(place: bytes) -> None:
    global _num_marks
    assert _mark is not None
    _num_marks += 1
    _mark[:] = (struct.pack(MARK, _num_marks, _limits[-1]) + place)[:MARK_BYTES].ljust(
        MARK_BYTES, b"\0"
    )


def _place() -> bytes:
    assert _mark is not None
    return _mark[struct.calcsize(MARK) :].rstrip(b"\0")


def _read_calls() -> None:
    stdin = os.fdopen(os.dup(0), "rb")  # `sys.stdin` may not be closed at exit while it is read
    while len(size := stdin.read(8)) == 8:
        _calls.put(stdin.read(int.from_bytes(size, "little")))
    os._exit(0)  # the parent is gone, or done


def _reply(reply: dict[str, Any]) -> None:
    _replies.write(orjson.dumps(reply, default=str) + b"\n")
    _replies.flush()


def _answer(call: Callable[[], Any], num_bytes: int) -> dict[str, Any]:
    """Do a call and reply what it yields, or its result; return how it went."""
    try:
        found = call()
        items = found if isinstance(found, Iterator) else iter([found])
        is_over = False
        while not is_over:
            with limited(num_bytes):
                item = next(items, _over)
                place = _place()
            _note(place)
            is_over = item is _over
            if isinstance(item, pa.RecordBatch):
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, item.schema) as writer:
                    writer.write_batch(item)
                data = sink.getvalue()
                _reply({"batch": data.size})
                _replies.write(data)
                _replies.flush()
            elif not is_over:
                _replies.write(orjson.dumps({"item": item}) + b"\n")  # strictly: no `default`
        return {"done": True}
    except PackhouseError as error:
        facts = {k: _clean(v) if isinstance(v, str) else v for k, v in error.facts.items()}
        return {"error": type(error).__name__, "message": _clean(error.message), "facts": facts}
    except MemoryError:
        return {"failed": "MemoryError"}
    except OSError as error:
        if error.errno is None:
            return {"os_error": [_clean(str(error))]}
        name = None if error.filename is None else _clean(str(error.filename))
        return {"os_error": [error.errno, error.strerror, name]}
    except BaseException as error:  # a panic of Rust code is no Exception
        trace = traceback.format_exc()[-4000:]
        return {
            "failed": _clean(f"{type(error).__name__}: {str(error)[:500]}"),
            "trace": _clean(trace),
        }


_over = object()


def _clean(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate becomes its escape."""
    return text.encode(errors="backslashreplace").decode()


class _FileOfParent(io.RawIOBase):
    """A file that the parent reads, some bytes at a time."""

    _at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: _file_bytes}[whence]
        self._at = begin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        _reply({"read": self._at})
        data = _calls.get()[: len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _data_bytes() -> int:
    """Bytes that count for RLIMIT_DATA, stacks included."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
    return 0


def _limit_memory(num_bytes: int) -> None:
    if sys.platform != "linux":  # others do not count what is mapped
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

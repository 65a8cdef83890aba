"""Run code and decode files of strangers in a worker process, under limits that the kernel holds.

Chat templates and tokenizers are programs of strangers, and some kilobytes of Parquet or Arrow may
expand to gigabytes. Whatever runs or decodes them does so in a worker:

    reply = run_in_worker(partial(render, path), what="template 'chat'", blames=TemplateError)

There it says what it works on and limits its parts; in other processes these calls do nothing, so
that the same code runs in tests:

    for row in rows:
        at(f"row {row.number}")     # a row may take 600 s of CPU time
        with limited():             # and a rendering 20 s of these
            render(row)

- Memory: RLIMIT_DATA, which counts what a process may write to, and not the files that it maps.
- CPU time: a timer for each row, rendering, batch of texts or batch of decoded rows. Its signal has
  the default action, so the kernel ends the worker even in the middle of one long C call.
- Wall-clock time: a worker that sleeps or is blocked uses no CPU time. The parent kills one that
  says nothing and begins nothing new for ten minutes longer than the CPU time that it may use.
- A worker has no credentials in its environment and inherits no open files. Where it needs the
  bytes of a file, it asks its parent for them. It ends with its parent, or, in the middle of a long
  C call, when that returns or its CPU time is used up.

Parent and worker talk over a socket: a message is its size in 8 bytes, then its bytes. Calls are
pickles of our own objects. Replies are JSON lists (kind, values) and Arrow streams of one batch: a
worker that a stranger has taken over must not choose what its parent unpickles.

A worker does one call at a time and waits a minute for the next. Starting one takes 0.2 s of CPU,
and importing what renders and tokenizes 0.3 s more. `ProcessPoolExecutor` would not do: it runs the
user's script again, and does not start in daemonic processes. Memory is limited on Linux only, time
on every Unix.
"""

import atexit
import ctypes
import io
import mmap
import os
import pickle
import queue
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from packhouse import errors
from packhouse.errors import ConfigError, PackhouseError, TransientError
from packhouse.system import progress
from packhouse.system.escaping import for_terminal

MEMORY_MB = "PACKHOUSE_CHILD_MEMORY_MB"
"""Environment variable: memory of a worker beyond what its input explains, 1024 by default."""
SECONDS = "PACKHOUSE_CHILD_SECONDS"
"""Environment variable: CPU time of a rendering, and of a batch beyond what its size explains; 20
by default. All renderings of a row together may take `_ROW_TIMES` as much."""

_ROW_TIMES = 30  # a long conversation is rendered once for each of its turns
_BYTES_PER_SECOND = 50_000  # of a batch; HF encodes 2 MB/s
_QUIET_S = 600
_IDLE_S = 60.0
_MAX_REPLY_BYTES = 2**30
_READ_BYTES = 2**20
_BYTES_PER_CPU = 32 * 2**20  # stacks of the threads that Arrow, numpy and tokenizers have per core
_KEPT_BYTES = 2**30  # a worker that still holds more than this after a call is not used again

# All that a worker sees of the environment: no AWS_*, HF_TOKEN, PREFECT_* and no passwords.
_KEPT = {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"}
_KEPT |= {"HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"}  # where tokenizers of the Hub lie
_KEPT |= {"SOURCE_DATE_EPOCH", "TOKENIZERS_PARALLELISM"}
_KEPT_PREFIXES = ("LC_", "OMP_", "OPENBLAS_", "RAYON_", "MALLOC_")
_ADDED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",  # Arrow's own allocator would take 1 GB of the limit
}
_NO_MEMORY = ("MemoryError", "memory allocation", "out of memory", "bad_alloc")

_MARK = struct.Struct("<Qd496s")
"""Memory that worker and parent share: how many limits and places began so far, the CPU seconds of
the limit that runs, and the place."""


class _Task(NamedTuple):
    """A call and its limits, as a worker gets it."""

    call: Callable[[], Any]
    memory: int
    """Bytes that it may take."""
    num_bytes: int
    """Size of what the call reads, which adds to the seconds of each batch."""
    seconds: int
    """CPU time of what `limited` bounds."""
    first_seconds: float
    """CPU time of what comes before the first row."""
    row_seconds: float
    file_bytes: int
    """Size of the file that the parent holds open."""


# What follows, up to `serve`, runs in the parent.


def run_in_worker(
    call: Callable[[], Any],
    *,
    what: str,
    blames: type[PackhouseError],
    num_bytes: int = 0,
    more_memory: int = 0,
) -> Any:
    """Do a call in a worker and return its result; in a worker already, just do it.

    Args:
        call: picklable, with a result that JSON can hold.
        what: the code or file that is not trusted, for messages: "tokenizer 'models/x'".
        blames: raised when that goes over a limit or fails.
        num_bytes: size of what the call reads; more input may take more time.
        more_memory: bytes that it may take beyond `PACKHOUSE_CHILD_MEMORY_MB`.

    Raises:
        PackhouseError: as the call raised it, or `blames`; this process goes on.
        OSError: as the call raised it.
    """
    if is_worker():
        return call()
    stream = stream_from_worker(
        call, what=what, blames=blames, num_bytes=num_bytes, more_memory=more_memory
    )
    results = list(stream)
    if len(results) != 1:
        raise blames(f"{what}: its worker gave {len(results)} results for one call")
    return results[0]


def stream_from_worker(
    call: Callable[[], Any],
    *,
    what: str,
    blames: type[PackhouseError],
    remedy: str = "Repair it",
    num_bytes: int = 0,
    more_memory: int = 0,
    file: IO[bytes] | None = None,
) -> Iterator[Any]:
    """Do a call in a worker; yield what it yields, or else its one result.

    Arguments and errors are those of `run_in_worker`. The call may also return an iterator of
    `pa.RecordBatch` and of what JSON can hold, and read an open `file` as `file_of_parent()`.
    `remedy` is what messages tell the owner of the code or file to do.
    """
    megabytes, seconds = _setting(MEMORY_MB, 1024), _setting(SECONDS, 20)
    memory = megabytes * 2**20 + more_memory
    more_s = num_bytes / _BYTES_PER_SECOND
    times = seconds, seconds + more_s, seconds * _ROW_TIMES + more_s
    size = file.seek(0, os.SEEK_END) if file else 0
    task = pickle.dumps(_Task(call, memory, num_bytes, *times, size))
    while True:
        worker = _take()
        reply: Any = None
        try:
            worker.send(task)
            while (reply := worker.receive()) is not None:
                match reply:
                    case ["item", item]:
                        yield item
                    case ["advance", int() | float() as fraction]:
                        progress.advance(fraction)
                    case ["read", int(start)] if file is not None and 0 <= start < 2**63:
                        file.seek(start)
                        worker.send(file.read(_READ_BYTES))
                    case _:
                        break
        finally:
            match reply:
                case ["done"] | ["error", str(), str(), dict()]:
                    _idle.append(worker)
                case _:  # it ended, is stuck or broken, or nobody wants to hear the rest
                    worker.end()
        if not (worker.was_idle and worker.code == 0 and not worker.has_spoken):
            break  # else it had waited for a task in vain, and ended when this one was sent
    code, failed, trace = 0, f"its answer is no JSON, or over {_MAX_REPLY_BYTES:,} bytes", ""
    match reply:
        case ["done"]:
            return
        case ["error", str(name), str(message), dict(facts)]:
            kind = getattr(errors, name, None)
            if not (isinstance(kind, type) and issubclass(kind, PackhouseError)):
                kind = PackhouseError
            raise kind(message, **facts)
        case ["os_error", *args] if all(isinstance(each, int | str | None) for each in args):
            raise OSError(*args)
        case ["failed", str(failed), str(trace)]:
            pass
        case None:
            code, failed = worker.code, worker.said
    place, allowed_s = worker.works_on()
    if worker.is_stuck:
        limit_s = _QUIET_S + allowed_s
        fault = f"did nothing for {limit_s:,.0f} s, with CPU time left: it sleeps or is blocked"
        limit, setting = {"limit_s": limit_s}, f"{SECONDS} above {seconds}"
    elif any(sign in failed for sign in _NO_MEMORY):
        fault = f"needs more memory than the {memory >> 20:,} MB that it may use"
        limit, setting = {"limit_mb": memory >> 20}, f"{MEMORY_MB} above {megabytes}"
    elif code == -signal.SIGPROF:
        fault = f"takes more CPU time than the {allowed_s:,.0f} s that it may"
        limit, setting = {"limit_s": allowed_s}, f"{SECONDS} above {seconds}"
    elif code == -signal.SIGKILL:
        raise TransientError(
            f"{what}, {place}: killed from outside; was the machine out of memory?"
        )
    else:
        ending = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        error = blames(f"{what}, {place}: {failed or ending}")
        error.add_note(trace)
        raise error
    raise blames(f"{what}, {place}: {fault}. {remedy}, or set {setting}", **limit)


def start_early(imports: str) -> None:
    """Start a worker for a call that is soon to come, with the module that it is in imported."""
    if not _idle and not is_worker():
        _idle.append(_Worker(imports))


class _Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, imports: str = __name__) -> None:
        self.environment = _environment()
        self.was_idle = self.has_spoken = self.is_stuck = self._is_ending = False
        self.code, self.said = -1, ""  # once it ended: as of `Popen`, and the end of its stderr
        self._stderr = tempfile.TemporaryFile()
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(1)
        with theirs, tempfile.TemporaryFile() as mark:
            mark.truncate(_MARK.size)
            self._mark = mmap.mmap(mark.fileno(), _MARK.size)
            shared = theirs.fileno(), mark.fileno()
            code = (  # transformers imports torch wherever it finds it, which takes 2 s or more
                f"import sys; sys.path[:] = {sys.path!r}; sys.modules['torch'] = None; "
                f"from {__name__} import hide_pandas, serve; hide_pandas(); "
                f"import {imports}; serve(*{shared})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,  # what is printed is no reply
                stderr=self._stderr,
                env=self.environment,
                pass_fds=shared,
            )
        _living.append(self)

    def send(self, payload: bytes) -> None:
        """Send a task, or a part of a file."""
        with suppress(EOFError):  # `receive` finds the same
            self._move(self.socket.send, memoryview(len(payload).to_bytes(8, "little") + payload))

    def receive(self) -> Any:
        """Return a reply; None if the process ended or is stuck, [] if it sent garbage."""
        try:
            head = self._move(self.socket.recv_into, memoryview(bytearray(8)))
            self.has_spoken = True
            size = int.from_bytes(head, "little")
            if size > _MAX_REPLY_BYTES:
                return []
            # numpy does not touch memory before it is filled: a size that lies costs nothing.
            data = self._move(self.socket.recv_into, np.empty(size, np.uint8).data)
            if data[:1].tobytes() == b"[":
                return orjson.loads(data)
            batch = pa.ipc.open_stream(data).read_next_batch()
            batch.validate(full=True)  # offsets that lie would be followed here
            return ["item", batch]
        except EOFError:
            return None
        except (ValueError, TypeError, StopIteration, pa.ArrowException):
            return []

    def _move(self, move: Callable[[memoryview], int], data: memoryview) -> memoryview:
        """Send or receive all of `data`.

        A process that is silent for too long is killed. Seconds in which this process itself was
        stopped do not count.

        Raises:
            EOFError: the process ended, or is stuck.
        """
        num_moved, num_quiet, seen = 0, 0, self._mark[:]
        while num_moved < len(data):
            if self.is_stuck:
                raise EOFError
            try:
                num_new = move(data[num_moved:])
            except TimeoutError:  # a second has passed
                num_quiet = num_quiet + 1 if seen == self._mark[:] else 0
                seen = self._mark[:]
                if num_quiet > _QUIET_S + self.works_on()[1]:
                    self.is_stuck = True
                    self._process.kill()
                continue
            except ConnectionError:
                num_new = 0
            if not num_new:
                self._is_ending = True
                raise EOFError
            num_moved, num_quiet = num_moved + num_new, 0
        return data

    def works_on(self) -> tuple[str, float]:
        """Return the place that it works on, and the CPU time that it may take there."""
        _, seconds, place = _MARK.unpack(self._mark)
        text = place.rstrip(b"\0").decode(errors="replace")
        return for_terminal(text) or "before the first row", seconds

    def end(self) -> None:
        """End the process; one that is ending by itself has time to, with its own exit code."""
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10 if self._is_ending else 0)
        self._process.kill()
        self.code = self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 1000))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        self.said = for_terminal(" / ".join(line for line in lines[-5:] if line.strip()))
        self._stderr.close()
        _living.remove(self)


_living: list[_Worker] = []
_idle: list[_Worker] = []


def _leave_workers() -> None:
    """In a fork of this process: the workers are its parent's, and end when that closes sockets."""
    _idle.clear()
    for worker in _living:  # which stay listed: what is listed is not finalized
        worker.socket.close()


os.register_at_fork(after_in_child=_leave_workers)


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().end()


def _take() -> _Worker:
    """Return a worker that waits for a task, or a new one."""
    environment = _environment()
    with suppress(IndexError):
        while (worker := _idle.pop()).environment != environment:
            worker.end()
        worker.was_idle, worker.has_spoken = True, False
        return worker
    return _Worker()


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    with suppress(OSError):  # a folder that is gone
        kept["PWD"] = str(Path.cwd())  # a worker is used again only where its relative paths hold
    return kept | _ADDED


def _setting(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ConfigError(f"{name} is '{text}'; it must be a number from 1 on")
    return int(text)


# What follows runs in the worker.


def hide_pandas() -> None:
    """Let pyarrow find no pandas; otherwise its first list imports it, for 0.2 s and 30 MB."""

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pandas":
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Finder())
    pa.array([0])  # it looks only once
    sys.meta_path.pop(0)


def serve(connection: int, mark: int) -> None:
    """Do tasks until the parent closes the socket, or none came for a minute."""
    global _served
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # are the parent's to answer
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold rows
    _served = served = _Served(connection, mark)
    keep_freed_memory()
    progress.forward(lambda fraction: served.reply("advance", float(fraction)))
    base = _data_bytes()
    with suppress(queue.Empty):
        while _data_bytes() <= base + _KEPT_BYTES:
            task = served.received.get(timeout=_IDLE_S)
            # A pickle that our parent made, and nobody else can write to this socket: calls are
            # functions with arguments, which JSON cannot hold. Replies are never unpickled.
            served.do(pickle.loads(task))  # noqa: S301
    os._exit(0)


class _Served:
    """The task that a worker does, and what of it runs now."""

    task: _Task

    def __init__(self, connection: int, mark: int) -> None:
        self.mark = mmap.mmap(mark, _MARK.size)
        self.num_notes = 0
        self.place = b""
        self.limits: list[float] = []
        """CPU seconds of the row, and of each block in it that is `limited`, innermost last."""
        self.socket = socket.socket(fileno=connection)
        self.received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """Tasks, and parts of the parent's file."""
        threading.Thread(target=self.receive, daemon=True).start()

    def receive(self) -> None:
        """Receive all that the parent sends; end this process when that is gone, or done."""
        incoming = self.socket.makefile("rb")
        while len(size := incoming.read(8)) == 8:
            self.received.put(incoming.read(int.from_bytes(size, "little")))
        os._exit(0)

    def do(self, task: _Task) -> None:
        """Do a task under its limits, and reply how it went."""
        self.task = task
        if sys.platform == "linux":  # others do not count what is mapped
            soft = _data_bytes() + _BYTES_PER_CPU * (os.cpu_count() or 1) + task.memory
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        self.limits[:] = [task.first_seconds]
        self.note(b"")
        signal.setitimer(signal.ITIMER_PROF, task.first_seconds)
        try:
            found = task.call()
            items = found if isinstance(found, Iterator) else iter([found])
            while True:
                with limited(task.num_bytes):
                    item = next(items, _over)
                    place = self.place
                self.note(place)  # it holds for the next item, too
                if item is _over:
                    break
                self.send(_message(item))
            self.reply("done")
        except PackhouseError as error:
            facts = {name: _clean(value) for name, value in error.facts.items()}
            self.reply("error", type(error).__name__, error.message, facts)
        except MemoryError:
            self.reply("failed", "MemoryError", "")
        except OSError as error:
            named = [] if error.filename is None else [str(error.filename)]
            self.reply("os_error", *error.args[:2], *named)
        except BaseException as error:  # a panic of Rust code is no Exception
            said = f"{type(error).__name__}: {str(error)[:500]}"
            self.reply("failed", said, traceback.format_exc()[-4000:])
        signal.setitimer(signal.ITIMER_PROF, 0)

    def note(self, place: bytes) -> None:
        """Show the parent what is worked on, and the limit of it."""
        self.num_notes += 1
        self.place = place
        self.mark[:] = _MARK.pack(self.num_notes, self.limits[-1], place)

    def reply(self, *reply: object) -> None:
        self.send(orjson.dumps([_clean(value) for value in reply], default=str))

    def send(self, payload: Any) -> None:
        self.socket.sendall(b"".join((len(payload).to_bytes(8, "little"), payload)))


_served: _Served | None = None
_over = object()


def is_worker() -> bool:
    """Return True in a worker."""
    return _served is not None


def at(place: str) -> None:
    """In a worker: note what is worked on, for the message if it does not end well.

    Outside of `limited`, another place is another row, with all of a row's CPU time.
    """
    if _served is None:
        return
    noted = place.encode(errors="replace")
    if len(_served.limits) == 1 and noted != _served.place:
        _served.limits[0] = _served.task.row_seconds
        signal.setitimer(signal.ITIMER_PROF, _served.limits[0])
    _served.note(noted)


@contextmanager
def limited(num_bytes: int = 0) -> Iterator[None]:
    """In a worker: bound the CPU time of the block, a rendering or a batch of `num_bytes`.

    What the block takes is taken from the row around it, too. After it, `at` is as before.
    """
    if _served is None:
        yield
        return
    served, place = _served, _served.place
    left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    allowed = served.task.seconds + num_bytes / _BYTES_PER_SECOND
    served.limits.append(allowed if allowed <= left else served.limits[-1])
    served.note(place)
    signal.setitimer(signal.ITIMER_PROF, min(allowed, left))
    try:
        yield
    finally:
        unused, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        served.limits.pop()
        served.note(place)
        rest = left - min(allowed, left) + unused
        signal.setitimer(signal.ITIMER_PROF, max(rest, 0.001))


def file_of_parent() -> IO[bytes]:
    """In a worker: the file that its parent opened for this call."""
    return io.BufferedReader(_FileOfParent(), _READ_BYTES)


class _FileOfParent(io.RawIOBase):
    """A file that the parent reads, some bytes at a time."""

    _at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert _served is not None
        size = _served.task.file_bytes
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        assert _served is not None
        _served.reply("read", self._at)
        data = _served.received.get()[: len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _message(item: object) -> Any:
    if not isinstance(item, pa.RecordBatch):
        return orjson.dumps(["item", item])  # strictly: no `default`
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, item.schema) as writer:
        writer.write_batch(item)
    return sink.getvalue()


def _clean(value: object) -> object:
    """Make text such that UTF-8 can hold it: a lone surrogate becomes its escape."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _data_bytes() -> int:
    """Bytes that count for RLIMIT_DATA, stacks included."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
    return 0


# Of this process, worker or not: numbers of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_FREED_BYTES = 64 * 2**20
_MAPPED_BYTES = 32 * 2**20  # the most that glibc takes; larger arrays go back at once


@cache
def keep_freed_memory() -> bool:
    """Give numpy and Arrow one allocator in this process, which keeps what was freed.

    A step makes and drops hundreds of arrays of some megabytes. By default glibc and Arrow's own
    allocator hand each back to the kernel, which clears its pages and maps them anew for the next:
    the kernel took 23% of a run's CPU time. With one allocator that keeps up to 64 MiB it is 16%,
    and the peak is lower too, since the two no longer each keep their own.

    Returns:
        True if it was done; elsewhere than on glibc nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "system" not in pa.supported_memory_backends():
        return False
    if not (mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _FREED_BYTES)):
        return False
    pa.set_memory_pool(pa.system_memory_pool())
    return True

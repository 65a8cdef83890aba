"""Run untrusted code and decode untrusted files in a worker process with kernel-enforced limits.

Chat templates and tokenizers are untrusted programs, and a few kilobytes of Parquet or Arrow can
expand to gigabytes. All code that runs or decodes them does so in a worker:

    reply = run_in_worker(partial(render, path), what="template 'chat'", blames=TemplateError)

The code reports its position and limits its parts. In other processes these calls do nothing, so
that tests run the same code:

    for row in rows:
        at(f"row {row.number}")     # a row may take 600 s of CPU time
        with limited():             # and a rendering 20 s of these
            render(row)

- Memory: RLIMIT_DATA.
- CPU time: a timer for each row, rendering, batch of texts or batch of decoded rows.
- Wall-clock time: the parent kills a worker that reports nothing for ten minutes plus its allowed
  CPU time.
- A worker has no credentials in its environment and inherits no open files. It asks its parent for
  the bytes of a file. It exits with its parent; during a long C call, when that call returns or its
  CPU time is used up.

Parent and worker communicate over a socket: each message is its size in 8 bytes and then its bytes.
Calls are pickles of our own objects. Replies are JSON lists (kind, values) and Arrow streams of one
batch. A worker runs one call at a time and waits a minute for the next. Starting one takes 0.2 s of
CPU time, and importing the code for rendering and tokenizing another 0.3 s; `WorkerForks` saves the
workers of a pool this time. Memory is limited only on Linux, time on every Unix.
"""

import atexit
import ctypes
import gc
import io
import mmap
import os
import pickle
import queue
import resource
import select
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
from functools import cache, partial
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
"""Environment variable: memory of a worker in MiB, in addition to its input; default 1024."""
SECONDS = "PACKHOUSE_CHILD_SECONDS"
"""Environment variable: CPU seconds of a rendering, and of a batch in addition to the time for its
size; default 20. All renderings of a row together may take `_ROW_TIMES` as much."""

_ROW_TIMES = 30  # a long conversation is rendered once for each of its turns
_BYTES_PER_SECOND = 50_000  # minimum speed of a batch; HF encodes 2 MB/s
# A worker that sleeps or is blocked uses no CPU time, so silence has a separate limit.
_QUIET_S = 600
_END_S = 10  # a process that was killed or is exiting may take this long on a busy machine
_IDLE_S = 60.0  # the steps of a run follow one another within seconds
_MAX_REPLY_BYTES = 2**30
_READ_BYTES = 2**20
_BYTES_PER_CPU = 32 * 2**20  # stacks of the threads that Arrow, numpy and tokenizers have per core
_SPARE_BYTES = 2**26  # allowed after a MemoryError, to report it
_KEPT_BYTES = 2**30  # a worker that still uses more than this after a call is not reused

# Environment variables that a worker gets: no AWS_*, HF_TOKEN, PREFECT_*, and no passwords.
_KEPT = {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"}
_KEPT |= {"HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"}  # location of tokenizers from the Hub
_KEPT |= {"SOURCE_DATE_EPOCH", "TOKENIZERS_PARALLELISM"}
_KEPT_PREFIXES = ("LC_", "OMP_", "RAYON_", "MALLOC_")
_ADDED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would spin for 0.05 s of CPU, for nothing here
    # Otherwise Arrow's own allocator would take 1 GB of the limit.
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
}
_NO_MEMORY = ("MemoryError", "memory allocation", "out of memory", "bad_alloc")

_MARK = struct.Struct("<Qd496s")
"""Shared memory of worker and parent: a counter of reported limits and positions, the CPU seconds
of the current limit, and the current position."""


class _Task(NamedTuple):
    """A call and its limits, as sent to a worker."""

    call: Callable[[], Any]
    memory: int
    """Maximum memory in bytes."""
    num_bytes: int
    """Size of the input, which adds to the seconds of each batch."""
    seconds: int
    """CPU seconds of a `limited` block."""
    first_seconds: float
    """CPU seconds before the first row."""
    row_seconds: float
    file_bytes: int
    """Size of the file that the parent reads for the worker."""


# The functions and classes up to `hide_pandas` run in the parent.


def run_in_worker(
    call: Callable[[], Any],
    *,
    what: str,
    blames: type[PackhouseError],
    num_bytes: int = 0,
    more_memory: int = 0,
) -> Any:
    """Run a call in a worker and return its result; inside a worker, call it directly.

    Args:
        call: Picklable function whose result can be written as JSON.
        what: The untrusted code or file, as named in messages: "tokenizer 'models/x'".
        blames: Error to raise if the call fails or exceeds a limit.
        num_bytes: Size of the input; larger input may take more time.
        more_memory: Bytes allowed in addition to `PACKHOUSE_CHILD_MEMORY_MB`.

    Raises:
        PackhouseError: The call raised it, or `blames`. This process continues.
        OSError: The call raised it.
    """
    if is_worker():
        return call()
    stream = stream_from_worker(
        call, what=what, blames=blames, num_bytes=num_bytes, more_memory=more_memory
    )
    results = list(stream)
    if len(results) != 1:
        raise blames(f"{what}: its worker returned {len(results)} results for one call")
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
    """Run a call in a worker and yield its items, or its single result.

    Arguments and errors are those of `run_in_worker`. The call may also return an iterator of
    `pa.RecordBatch` and JSON values, and read an open `file` with `file_of_parent()`. `remedy` is
    the fix that error messages give.
    """
    size = file.seek(0, os.SEEK_END) if file else 0
    limits = _task(call, num_bytes, more_memory, size)
    memory, seconds, task = limits.memory, limits.seconds, pickle.dumps(limits)
    megabytes = (memory - more_memory) >> 20
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
                case _:  # it ended, is stuck or broken, or the caller stopped reading
                    worker.end()
        is_gone = worker.code is None or (worker.was_idle and worker.code == 0)
        if worker.has_spoken or not is_gone:
            # Otherwise an idle worker timed out just when the task was sent, or `WorkerForks` ended
            # before it forked the worker: take another one.
            break
    failed = f"its reply is not JSON, or is larger than {_MAX_REPLY_BYTES:,} bytes"
    code, trace = 0, ""
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
            code = -signal.SIGKILL if worker.code is None else worker.code
            failed = worker.said
    place, allowed_s = worker.works_on()
    if worker.is_stuck:
        limit_s = _QUIET_S + allowed_s
        fault = f"made no progress for {limit_s:,.0f} s without using CPU time"
        limit, setting = {"limit_s": limit_s}, f"{SECONDS} above {seconds}"
    elif any(sign in failed for sign in _NO_MEMORY):
        fault = f"needs more memory than its limit of {memory >> 20:,} MB"
        limit, setting = {"limit_mb": memory >> 20}, f"{MEMORY_MB} above {megabytes}"
    elif code == -signal.SIGPROF:
        fault = f"takes more CPU time than its limit of {allowed_s:,.0f} s"
        limit, setting = {"limit_s": allowed_s}, f"{SECONDS} above {seconds}"
    elif code == -signal.SIGKILL:
        raise TransientError(
            f"{what}, {place}: its worker was killed. Check whether the machine ran out of memory"
        )
    else:
        ending = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        error = blames(f"{what}, {place}: {failed or ending}")
        error.add_note(trace)
        raise error
    raise blames(f"{what}, {place}: {fault}. {remedy}, or set {setting}", **limit)


def run_if_idle(call: Callable[[], Any]) -> None:
    """Run a call in the idle worker, if any; a new one would have no memory to free."""
    if _idle:
        run_in_worker(call, what="an idle worker", blames=PackhouseError)


def start_early(imports: str) -> None:
    """Start a worker in advance, and import the module of the expected call."""
    if not _idle and not is_worker():
        _idle.append(_Worker(imports))


def _task(call: Callable[[], Any], num_bytes: int, more_memory: int, file_bytes: int = 0) -> _Task:
    seconds, more_s = _setting(SECONDS, 20), num_bytes / _BYTES_PER_SECOND
    memory = _setting(MEMORY_MB, 1024) * 2**20 + more_memory
    times = seconds, seconds + more_s, seconds * _ROW_TIMES + more_s
    return _Task(call, memory, num_bytes, *times, file_bytes)


class WorkerForks:
    """A worker that forks the workers of a pool, which then share its imports and what it loaded.

    It saves each of them 1.6 s of CPU time. If it cannot load, workers are started as usual, so the
    first one reports the fault.

    Args:
        load: picklable function, called before the first fork. If it starts threads, no worker is
            forked.
        num_bytes: size of its input.
        more_memory: see `run_in_worker`.
    """

    def __init__(self, load: Callable[[], Any], num_bytes: int, more_memory: int) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._worker = _Worker(requests=theirs.fileno())
            call = partial(_fork_workers, pickle.dumps(load), theirs.fileno())
            self._worker.send(pickle.dumps(_task(call, num_bytes, more_memory)))

    def close(self) -> None:
        """End the process. Its workers end with those that use them."""
        self.requests.close()
        self._worker.end()


class _Forked:
    """A worker forked by `WorkerForks`, with the methods of `Popen`."""

    def __init__(self, inherits: tuple[int, ...]) -> None:
        assert _forks is not None
        self._life, theirs = socket.socketpair()
        self._code: int | None = None
        with theirs:
            try:
                socket.send_fds(_forks[0], [b"fork"], [*inherits, theirs.fileno()])
            except OSError:
                self._life.close()
                raise

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code; None if the process that forks workers has ended or is stuck."""
        global _forks
        if self._life.fileno() < 0:
            return self._code
        self._life.settimeout(_END_S if timeout is None else max(timeout, 0.001))
        try:
            said = self._life.recv(4)
        except TimeoutError:
            if timeout is not None:
                raise subprocess.TimeoutExpired("worker", timeout) from None
            said = b""
        if said:
            self._code = int.from_bytes(said, "little", signed=True)
        else:
            _forks = None
        self._life.close()
        return self._code

    def kill(self) -> None:
        """Let its parent kill it."""
        with suppress(OSError):  # it has ended
            self._life.shutdown(socket.SHUT_WR)


class _Worker:
    """A worker process, from the parent's side."""

    def __init__(self, imports: str = __name__, requests: int | None = None) -> None:
        self.environment = _environment()
        self.was_idle = self.has_spoken = self.is_stuck = self._is_ending = False
        self.code: int | None = -1  # after it ended: exit code, and the end of its stderr
        self.said = ""
        # A file instead of a pipe, which nobody reads meanwhile: once it is full, the worker would
        # wait.
        self._stderr = tempfile.TemporaryFile()
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(1)
        with theirs, tempfile.TemporaryFile() as mark:
            mark.truncate(_MARK.size)
            self._mark = mmap.mmap(mark.fileno(), _MARK.size)
            shared = theirs.fileno(), mark.fileno()
            # `USE_TORCH=0` does not help: transformers imports torch all the same. By default, each
            # 700 new objects start a collection of garbage: 3% of the CPU of tool chats.
            code = (  # hide torch: transformers would import it, which takes 2 s or more
                "import gc, sys; gc.set_threshold(100_000); "
                f"sys.path[:] = {sys.path!r}; sys.modules['torch'] = None; "
                f"from {__name__} import hide_pandas, serve; hide_pandas(); "
                f"import {imports}; serve(*{shared})"
            )
            forked: _Forked | None = None
            # A fork keeps the environment of the process that it is forked from.
            if _forks is not None and _forks[1] == self.environment:
                with suppress(OSError):  # `WorkerForks` has ended
                    forked = _Forked((*shared, self._stderr.fileno()))
            self._process = forked or subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,  # printed text is not a reply
                stderr=self._stderr,
                env=self.environment,
                pass_fds=shared if requests is None else (*shared, requests),
            )
        _living.append(self)

    def send(self, payload: bytes) -> None:
        """Send a task or part of a file."""
        with suppress(EOFError):  # `receive` will notice too
            self._move(self.socket.send, memoryview(len(payload).to_bytes(8, "little") + payload))

    def receive(self) -> Any:
        """Return a reply; None if the process ended or is stuck, [] for an invalid reply."""
        try:
            head = self._move(self.socket.recv_into, memoryview(bytearray(8)))
            self.has_spoken = True
            size = int.from_bytes(head, "little")
            if size > _MAX_REPLY_BYTES:
                return []
            # numpy does not touch the memory before it is filled, so a false size costs nothing.
            data = self._move(self.socket.recv_into, np.empty(size, np.uint8).data)
            # JSON or Arrow, never a pickle: a compromised worker must not choose what its parent
            # unpickles.
            if data[:1].tobytes() == b"[":
                return orjson.loads(data)
            batch = pa.ipc.open_stream(data).read_next_batch()
            batch.validate(full=True)  # false offsets would make us read outside of the buffers
            return ["item", batch]
        except EOFError:
            return None
        except (ValueError, TypeError, StopIteration, pa.ArrowException):
            return []

    def _move(self, move: Callable[[memoryview], int], data: memoryview) -> memoryview:
        """Send or receive all of `data`.

        Kills a process that is silent for too long. Time in which this process itself was stopped
        does not count.

        Raises:
            EOFError: The process ended or is stuck.
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
        """Return its current position, and the CPU seconds allowed there."""
        _, seconds, place = _MARK.unpack(self._mark)
        text = place.rstrip(b"\0").decode(errors="replace")
        return for_terminal(text) or "before the first row", seconds

    def end(self) -> None:
        """End the process; if it is already exiting, wait up to `_END_S` for its exit code."""
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S if self._is_ending else 0)
        self._process.kill()
        self.code = self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 1000))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        self.said = for_terminal(" / ".join(line for line in lines[-5:] if line.strip()))
        self._stderr.close()
        _living.remove(self)


_living: list[_Worker] = []
_idle: list[_Worker] = []
_forks: tuple[socket.socket, dict[str, str]] | None = None
"""In a process of a pool with `WorkerForks`: socket for requests, and environment of workers."""


def _leave_workers() -> None:
    """Close the sockets in a fork: the workers belong to its parent and end with that."""
    _idle.clear()
    # Workers stay in the list, so that Python does not finalize them.
    for worker in _living:
        worker.socket.close()


os.register_at_fork(after_in_child=_leave_workers)


@atexit.register
def end_idle_workers() -> None:
    """End the workers that wait for a call; the next call starts a new one."""
    while _idle:
        _idle.pop().end()


def _take() -> _Worker:
    """Return an idle worker or a new one."""
    environment = _environment()
    with suppress(IndexError):
        while (worker := _idle.pop()).environment != environment:
            worker.end()
        worker.was_idle, worker.has_spoken = True, False
        return worker
    return _Worker()


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    with suppress(OSError):  # the folder was deleted
        kept["PWD"] = str(Path.cwd())  # reuse a worker only in the same folder: relative paths
    return kept | _ADDED


def _setting(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ConfigError(f"{name} is '{text}'. Set it to a whole number of at least 1")
    return int(text)


# This runs in the processes of a pool (`packhouse prepare --workers`, Prefect's task runner).


def begin_pool_process(requests: socket.socket | None = None) -> None:
    """Hide pandas, and exit when the parent of this process dies, even by SIGKILL.

    Args:
        requests: that of the pool's `WorkerForks`, if it has one.
    """
    global _forks
    import multiprocessing

    hide_pandas()
    if requests is not None:
        _forks = requests, _environment()
    # Pool processes hold open the pipe on which they wait for work, so they never see it close.
    # Orphans would keep their memory, and also the open output by which a Prefect worker sees that
    # a run is alive.
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("begin_pool_process needs a process started by multiprocessing")

    def wait() -> None:
        parent.join()  # waits on a pipe held only by the parent, so it returns however that dies
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


# The rest runs in the worker.


def hide_pandas() -> None:
    """Hide pandas from pyarrow, which would import it for the first list: 0.2 s and 30 MB."""

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pandas":
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Finder())
    pa.array([0])  # it looks only once
    sys.meta_path.pop(0)


def serve(connection: int, mark: int) -> None:
    """Run tasks until the parent closes the socket, or none arrives for a minute."""
    global _served
    # The parent handles these signals.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain rows
    _served = served = _Served(connection, mark)
    keep_freed_memory()
    progress.forward(lambda fraction: served.reply("advance", float(fraction)))
    base = _data_bytes()
    with suppress(queue.Empty):
        while _data_bytes() <= base + _KEPT_BYTES:
            task = served.received.get(timeout=_IDLE_S)
            # Our parent made this pickle, and nobody else can write to this socket. Calls are
            # functions with arguments, which JSON cannot express. Replies are never unpickled.
            served.do(pickle.loads(task))  # noqa: S301
    os._exit(0)


def _fork_workers(load: bytes, requests: int) -> None:
    """Call the pickled `load` at the first request for a worker, and fork one for each request."""
    assert _served is not None
    asked, (woken, wakes) = socket.socket(fileno=requests), os.pipe()
    # Python requires this of the wake-up pipe, and writes to it only for signals with a handler:
    # that of SIGCHLD has nothing else to do.
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    users: dict[int, socket.socket] = {}  # by process
    is_loaded = False
    try:
        while True:
            waiting: list[Any] = [woken, asked, *users.values()]
            ready = select.select(waiting, [], [])[0]
            if woken in ready:
                os.read(woken, 2**10)
            for pid, user in list(users.items()):
                if user in ready:  # it wants to end it, or has ended
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0 if user in ready else os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    with users.pop(pid), suppress(OSError):
                        user.send(code.to_bytes(4, "little", signed=True))
            if asked not in ready:
                continue
            _, (connection, mark, output, user_fd), *_ = socket.recv_fds(asked, 16, 4)
            if not is_loaded:
                threads = Path("/proc/self/task")
                before = threads.stat().st_nlink  # their number + 2
                pickle.loads(load)()  # noqa: S301 - made by our parent
                if threads.stat().st_nlink > before:
                    break  # a fork would lose these threads, and wait for them forever
                signal.setitimer(signal.ITIMER_PROF, 0)  # forking has no limit
                gc.freeze()  # a collection in a worker would copy the memory of all objects
                is_loaded = True
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (1, 2):
                    os.dup2(output, number)
                own = [each.detach() for each in (asked, _served.socket, *users.values())]
                for number in (woken, wakes, output, user_fd, *own):
                    os.close(number)
                serve(connection, mark)
            users[pid] = socket.socket(fileno=user_fd)
            for number in (connection, mark, output):
                os.close(number)
    finally:
        os._exit(1)


class _Served:
    """The current task of a worker, its position and limits."""

    task: _Task

    def __init__(self, connection: int, mark: int) -> None:
        self.mark = mmap.mmap(mark, _MARK.size)
        self.num_notes = 0
        self.place = b""
        self.limits: list[float] = []
        """CPU seconds of the row and of the `limited` blocks in it, innermost last."""
        self.socket = socket.socket(fileno=connection)
        self.received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """Tasks and parts of the parent's file."""
        # In a thread, so that the end of the parent is noticed during a call, which may take
        # minutes.
        threading.Thread(target=self.receive, daemon=True).start()

    def receive(self) -> None:
        """Receive messages of the parent; exit when it closes the socket or ends."""
        incoming = self.socket.makefile("rb")
        while len(size := incoming.read(8)) == 8:
            self.received.put(incoming.read(int.from_bytes(size, "little")))
        os._exit(0)

    def do(self, task: _Task) -> None:
        """Run a task under its limits and send replies."""
        self.task = task
        if sys.platform == "linux":  # elsewhere RLIMIT_DATA does not count mmap
            soft = _data_bytes() + _BYTES_PER_CPU * (os.cpu_count() or 1) + task.memory
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
            # RLIMIT_DATA counts writable memory but not mapped files.
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        self.limits[:] = [task.first_seconds]
        self.note(b"")
        # Its signal has the default action, so the kernel ends us even during a long C call.
        signal.setitimer(signal.ITIMER_PROF, task.first_seconds)
        try:
            found = task.call()
            items = found if isinstance(found, Iterator) else iter([found])
            while True:
                with limited(task.num_bytes):
                    item = next(items, _over)
                    place = self.place
                # It is also the position of the next item, until that reports one.
                self.note(place)
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
        except BaseException as error:  # a Rust panic is not an Exception
            said = f"{type(error).__name__}: {str(error)[:500]}"
            self.reply("failed", said, traceback.format_exc()[-4000:])
        signal.setitimer(signal.ITIMER_PROF, 0)

    def note(self, place: bytes) -> None:
        """Show the parent the current position and limit."""
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
    """In a worker: report the current position, for error messages.

    Outside of `limited`, a new position is a new row with its own CPU time.
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
    """In a worker: limit the CPU time of the block, a rendering or a batch of `num_bytes`.

    The block's time also counts for the row around it. Restores the position afterwards.
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
    except MemoryError:
        # The error keeps its frames' memory, so leaving them needs more. Without it, a template
        # that filled a list ended 11 of 30 workers with a segmentation fault and no reason.
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != resource.RLIM_INFINITY:
            with suppress(ValueError):  # above the hard limit
                resource.setrlimit(resource.RLIMIT_DATA, (soft + _SPARE_BYTES, hard))
        raise
    finally:
        unused, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        served.limits.pop()
        served.note(place)
        rest = left - min(allowed, left) + unused
        signal.setitimer(signal.ITIMER_PROF, max(rest, 0.001))


def file_of_parent() -> IO[bytes]:
    """In a worker: return the file that the parent opened for this call."""
    return io.BufferedReader(_FileOfParent(), _READ_BYTES)


class _FileOfParent(io.RawIOBase):
    """A file that the parent reads in parts on request."""

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
        return orjson.dumps(["item", item])  # without `default`, so that other types raise
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, item.schema) as writer:
        writer.write_batch(item)
    return sink.getvalue()


def _clean(value: object) -> object:
    """Replace lone surrogates, which UTF-8 cannot encode, with their escapes."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _data_bytes() -> int:
    """Return the bytes that count for RLIMIT_DATA, including stacks."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
    return 0


# Constants of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# An allocator that keeps everything saves as much CPU time, but needs 130 MB more.
_FREED_BYTES = 64 * 2**20
_MAPPED_BYTES = 32 * 2**20  # glibc's maximum; larger arrays are returned to the kernel at once


def return_freed_memory() -> None:
    """Return freed memory to the kernel; does nothing without glibc."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@cache
def keep_freed_memory() -> bool:
    """Make numpy and Arrow share one allocator in this process, which keeps freed memory.

    Returns:
        True if done. Only glibc is supported; elsewhere nothing changes.
    """
    # A step allocates and frees hundreds of arrays of some megabytes. By default, glibc and Arrow's
    # own allocator return each one to the kernel, which clears and maps its pages again: 23% of a
    # run's CPU time. With one allocator that keeps up to 64 MiB it is 16%, and the peak is lower.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "system" not in pa.supported_memory_backends():
        return False
    if not (mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _FREED_BYTES)):
        return False
    pa.set_memory_pool(pa.system_memory_pool())
    return True

"""Run what strangers wrote in a child process, under limits that the kernel enforces.

Chat templates and tokenizers are programs of strangers, and a Parquet or Arrow file of some
kilobytes may stand for gigabytes. Whatever runs or decodes them does so in a child:

    done = run_confined(
        partial(render_shard, path, recipe), what="template 'chat'", blames=TemplateError
    )

- Memory: RLIMIT_DATA, which counts what a process may write to, and not the files that it maps.
- CPU time: a timer for each row, rendering, batch of texts or batch of decoded rows. Its signal has
  the default action, so the kernel ends the child even in the middle of one long C call.
- Wall-clock time: a child that sleeps or is blocked uses no CPU time. The parent kills one that
  says nothing and begins nothing new for ten minutes longer than the CPU time that it may use.
- A child has no credentials in its environment and inherits no open files. Where it needs the bytes
  of a file, it asks its parent for them. It ends with its parent, or in the middle of a long C
  call when that returns or its CPU time is used up.

A child does one call at a time and waits a minute for the next. Starting one takes 0.5 s of CPU.
The call is a pickle of our own objects. The answer is JSON and Arrow batches: a child that a
stranger has taken over must not choose what we unpickle. Memory is limited on Linux only, time on
every Unix.
"""

import atexit
import io
import mmap
import os
import pickle
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow as pa

from packhouse import errors
from packhouse.errors import ConfigError, PackhouseError, TransientError
from packhouse.runtime import progress

__all__ = [
    "MEMORY_MB",
    "SECONDS",
    "at",
    "file_of_parent",
    "limited",
    "run_confined",
    "serve",
    "start_early",
    "stream_confined",
]

MEMORY_MB = "PACKHOUSE_CHILD_MEMORY_MB"
"""Environment variable: memory of a child beyond what its input explains, 1024 by default."""
SECONDS = "PACKHOUSE_CHILD_SECONDS"
"""Environment variable: CPU time of a rendering, and of a batch beyond what its size explains; 20
by default. All renderings of a row together may take `_ROW_TIMES` as much."""

_BYTES_PER_CPU = 32 * 2**20  # stacks of the threads that Arrow, numpy and tokenizers have per core
_KEPT_BYTES = 2**30  # a child that still holds more than this after a call is not used again
_BYTES_PER_SECOND = 50_000  # of a batch; HF encodes 2 MB/s
_ROW_TIMES = 30  # a long conversation is rendered once for each of its turns
_QUIET_S = 600
_MARK_BYTES = 512
_MARK = "<Qd"  # how many limits began so far, and the seconds of the one that runs; then the place
_MAX_REPLY_BYTES = 2**30
_READ_BYTES = 2**20
_IDLE_S = 60.0

# All that a child sees of the environment: no AWS_*, HF_TOKEN, PREFECT_* and no passwords.
_KEPT = {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"}
_KEPT |= {"HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"}  # where tokenizers of the Hub lie
_KEPT |= {"SOURCE_DATE_EPOCH", "PACKHOUSE_WITHOUT_PANDAS", "TOKENIZERS_PARALLELISM"}
_KEPT_PREFIXES = ("LC_", "OMP_", "OPENBLAS_", "RAYON_", "MALLOC_")
_NO_MEMORY = ("MemoryError", "memory allocation", "out of memory", "bad_alloc")
_ADDED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",  # Arrow's own allocator would take 1 GB of the limit
}


def run_confined(
    call: Callable[[], Any],
    *,
    what: str,
    blames: type[PackhouseError],
    num_bytes: int = 0,
    more_memory: int = 0,
) -> Any:
    """Do a call in a child and return its result; in a child already, just do it.

    Args:
        call: picklable, with a result that JSON can say.
        what: the foreign code, for messages: "tokenizer 'models/x'".
        blames: raised when that code goes over a limit or fails.
        num_bytes: size of what the call reads; more input may take more time.
        more_memory: bytes that it may take beyond `PACKHOUSE_CHILD_MEMORY_MB`.

    Raises:
        PackhouseError: as the call raised it, or `blames`; this process goes on.
        OSError: as the call raised it.
    """
    if _mark is not None:
        return call()
    (result,) = stream_confined(
        call, what=what, blames=blames, num_bytes=num_bytes, more_memory=more_memory
    )
    return result


def stream_confined(
    call: Callable[[], Any],
    *,
    what: str,
    blames: type[PackhouseError],
    remedy: str = "Repair it",
    num_bytes: int = 0,
    more_memory: int = 0,
    file: IO[bytes] | None = None,
) -> Iterator[Any]:
    """Do a call in a child; yield what it yields, or else its one result.

    Arguments and errors are those of `run_confined`. The call may also return an iterator of
    `pa.RecordBatch` and of what JSON can say, and read an open `file` as `file_of_parent()`.
    `remedy` is what messages tell the owner of the foreign code or file to do.
    """
    megabytes, seconds = _setting(MEMORY_MB, 1024), _setting(SECONDS, 20)
    memory = megabytes * 2**20 + more_memory
    size = file.seek(0, os.SEEK_END) if file else 0
    payload = pickle.dumps((call, num_bytes, memory, seconds, seconds * _ROW_TIMES, size))
    while True:
        child, is_new = _take()
        reply, is_over = None, False
        try:
            reply = yield from child.ask(payload, file)
            is_over = reply is None
        finally:
            if reply is not None and ("done" in reply or "error" in reply):
                _idle.append(child)
            else:  # it ended, is stuck or broken, or nobody wants to hear the rest
                child.end(patience_s=10 if is_over else 0)
        if reply is None and not is_new and child.code == 0 and not child.has_answered:
            continue  # it had waited for work in vain
        if reply is not None and "done" in reply:
            return
        if reply is not None and "error" in reply:
            raise _typed(reply)
        if reply is not None and "os_error" in reply:
            raise OSError(*reply["os_error"])
        break
    where = f"{what}, {child.place or 'before the first row'}"
    failed = str(reply["failed"]) if reply else child.said
    if child.is_stuck:
        raise blames(
            f"{where}: did nothing for {_QUIET_S + child.allowed_s:,.0f} s, with CPU time left: it "
            f"sleeps or is blocked. {remedy}, or set {SECONDS} above {seconds}",
            limit_s=_QUIET_S + child.allowed_s,
        )
    if any(sign in failed for sign in _NO_MEMORY):
        raise blames(
            f"{where}: needs more memory than the {memory >> 20:,} MB that it may use. {remedy}, "
            f"or set {MEMORY_MB} above {megabytes}",
            limit_mb=memory >> 20,
        )
    if reply is None and child.code == -signal.SIGPROF:
        raise blames(
            f"{where}: takes more CPU time than the {child.allowed_s:,.0f} s that it may. "
            f"{remedy}, or set {SECONDS} above {seconds}",
            limit_s=child.allowed_s,
        )
    if reply is None and child.code == -signal.SIGKILL:
        raise TransientError(f"{where}: killed from outside; was the machine out of memory?")
    ending = f"ended by signal {-child.code}" if child.code < 0 else f"exit code {child.code}"
    error = blames(f"{where}: {failed or ending}")
    error.add_note((reply or {}).get("trace", ""))
    raise error


def start_early() -> None:
    """Start a child for a call that is soon to come, so that its imports take no time then."""
    if not _idle and _mark is None:
        _idle.append(_Child(_environment(), imports="packhouse.foreign"))


def at(place: str) -> None:
    """In a child: note what is worked on, for the message if it does not end well.

    Outside of `limited`, another place is another row, with all of a row's CPU time.
    """
    if _mark is None:
        return
    noted = place.encode(errors="replace")[: _MARK_BYTES - struct.calcsize(_MARK)]
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


class _Child:
    """A process that does calls, and the place where it notes what it works on."""

    def __init__(self, environment: dict[str, str], imports: str = __name__) -> None:
        self.environment = environment
        self.is_stuck = False
        self.has_answered = False
        """True once it has replied to the latest call."""
        self.code, self.said = 0, ""  # once it ended: as of `Popen`, and the end of its stderr
        self._num_quiet, self._seen = 0, b""
        self._stderr = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as mark:
            mark.truncate(_MARK_BYTES)
            self._mark = mmap.mmap(mark.fileno(), _MARK_BYTES)
            code = (  # transformers imports torch wherever it finds it, which takes 2 s or more
                f"import sys; sys.path[:] = {sys.path!r}; sys.modules['torch'] = None; "
                f"import {imports}; "
                f"from packhouse.runtime import confine; confine.serve({mark.fileno()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                pass_fds=[mark.fileno()],
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._calls: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout
        self._replies = io.BufferedReader(_Watched(self._answers, self._is_alive))
        _living.append(self)

    def ask(
        self, payload: bytes, file: IO[bytes] | None
    ) -> Generator[Any, None, dict[str, Any] | None]:
        """Yield what a call yields; return how it went, or None if the child ended."""
        self.has_answered = False
        self._send(payload)
        while (reply := self._hear()) is not None:
            self.has_answered = True
            if "advance" in reply:
                progress.advance(reply["advance"])
            elif "read" in reply and file is not None:
                file.seek(reply["read"])
                self._send(file.read(_READ_BYTES))
            elif "item" in reply:
                yield reply["item"]
            else:
                return reply
        return None

    def _send(self, payload: bytes) -> None:
        rest = memoryview(len(payload).to_bytes(8, "little") + payload)
        with suppress(BrokenPipeError):  # it ended, which is heard next
            while rest:
                rest = rest[self._calls.write(rest) :]

    def _hear(self) -> dict[str, Any] | None:
        try:
            line = self._replies.readline(_MAX_REPLY_BYTES)
            if not line:
                return None
            reply = dict(orjson.loads(line))
            if "advance" in reply:
                reply["advance"] = float(reply["advance"])
            if "read" in reply:
                reply["read"] = max(0, int(reply["read"]))
            if "batch" in reply:
                data = self._replies.read(min(int(reply["batch"]), _MAX_REPLY_BYTES))
                reply["item"] = pa.ipc.open_stream(data).read_next_batch()
                reply["item"].validate(full=True)  # offsets that lie would be followed here
            return reply
        except (ValueError, TypeError, OverflowError, StopIteration, pa.ArrowException):
            return {"failed": f"its answer is no JSON, or over {_MAX_REPLY_BYTES:,} bytes"}

    def _is_alive(self, has_spoken: bool) -> bool:
        """Asked when it has spoken, and for each second that it has not; kills it if it is stuck.

        Seconds in which this process itself was stopped do not count.
        """
        mark = self._mark[:]
        if has_spoken or mark != self._seen:
            self._num_quiet, self._seen = 0, mark
        self._num_quiet += 1
        if self._num_quiet > _QUIET_S + self.allowed_s:
            self.is_stuck = True
            self._process.kill()
        return not self.is_stuck

    @property
    def allowed_s(self) -> float:
        """CPU time of what it works on."""
        return float(struct.unpack_from(_MARK, self._mark)[1])

    @property
    def place(self) -> str:
        """What it works on."""
        text = self._mark[struct.calcsize(_MARK) :].rstrip(b"\0").decode(errors="replace")
        return _printable(text)

    def end(self, patience_s: float) -> None:
        """End the process, which may take its time to end by itself: it sees that nobody calls."""
        self.leave()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.kill()
        self.code = self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 1000))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        self.said = _printable(" / ".join(line for line in lines[-5:] if line.strip()))
        self._stderr.close()
        _living.remove(self)

    def leave(self) -> None:
        """Close this process's ends of the pipes.

        Not the buffer around them: in a fork, a thread that is gone may hold its lock for ever.
        """
        self._calls.close()
        self._answers.close()


class _Watched(io.RawIOBase):
    """A pipe that ends when the process at its other end does, or is found to be stuck."""

    def __init__(self, pipe: IO[bytes], is_alive: Callable[[bool], bool]) -> None:
        self._pipe, self._is_alive = pipe, is_alive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while not poll.poll(1000):
            if not self._is_alive(False):
                return 0
        self._is_alive(True)
        return os.readv(self._pipe.fileno(), [buffer])


_living: list[_Child] = []
_idle: list[_Child] = []


def _leave_children() -> None:
    """In a fork of this process: the children are its parent's, and end when that closes pipes."""
    _idle.clear()
    for child in _living:  # which stay listed: what is listed is not finalized
        child.leave()


os.register_at_fork(after_in_child=_leave_children)


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().end(patience_s=10)


def _take() -> tuple[_Child, bool]:
    """Return a child that waits for work, or a new one."""
    environment = _environment()
    with suppress(IndexError):
        while True:
            child = _idle.pop()
            if child.environment == environment:
                return child, False
            child.end(patience_s=10)
    return _Child(environment), True


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    with suppress(OSError):  # a folder that is gone
        kept["PWD"] = str(Path.cwd())  # a child is used again only where its relative paths hold
    return kept | _ADDED


def _setting(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ConfigError(f"{name} is '{text}'; it must be a number from 1 on")
    return int(text)


def _typed(reply: dict[str, Any]) -> PackhouseError:
    kind = getattr(errors, str(reply["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, PackhouseError)):
        kind = PackhouseError
    return kind(reply["message"], **reply["facts"])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


# What follows runs in the child.

_mark: mmap.mmap | None = None
_num_marks = 0
_limits: list[float] = []  # seconds of the row and of what `limited` bounds within it
_seconds = 0
_row_seconds = 0
_more_seconds = 0.0  # for the size of what the call reads
_file_bytes = 0
_calls: "queue.SimpleQueue[bytes]" = queue.SimpleQueue()
_replies: IO[bytes]


def serve(mark: int) -> None:
    """Do calls until the parent closes the pipe, or none came for a minute."""
    global _mark, _seconds, _row_seconds, _more_seconds, _file_bytes, _replies
    from packhouse.runtime.memory import keep_freed_memory
    from packhouse.runtime.without_pandas import settle_pyarrow

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # are the parent's to answer
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold rows
    _mark = mmap.mmap(mark, _MARK_BYTES)
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
    _mark[:] = (struct.pack(_MARK, _num_marks, _limits[-1]) + place)[:_MARK_BYTES].ljust(
        _MARK_BYTES, b"\0"
    )


def _place() -> bytes:
    assert _mark is not None
    return _mark[struct.calcsize(_MARK) :].rstrip(b"\0")


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
        self._at = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: _file_bytes}[whence]
        )
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

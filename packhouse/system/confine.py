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
every Unix. What runs in the child is in `confined`.
"""

import atexit
import io
import mmap
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow as pa

from packhouse import errors
from packhouse.errors import ConfigError, PackhouseError, TransientError
from packhouse.system import progress
from packhouse.system.confined import MARK, MARK_BYTES, is_confined

MEMORY_MB = "PACKHOUSE_CHILD_MEMORY_MB"
"""Environment variable: memory of a child beyond what its input explains, 1024 by default."""
SECONDS = "PACKHOUSE_CHILD_SECONDS"
"""Environment variable: CPU time of a rendering, and of a batch beyond what its size explains; 20
by default. All renderings of a row together may take `_ROW_TIMES` as much."""

_ROW_TIMES = 30  # a long conversation is rendered once for each of its turns
_QUIET_S = 600
_MAX_REPLY_BYTES = 2**30
_READ_BYTES = 2**20

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
    if is_confined():
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
    if not _idle and not is_confined():
        _idle.append(_Child(_environment(), imports="packhouse.run.foreign"))


class _Child:
    """A process that does calls, and the place where it notes what it works on."""

    def __init__(
        self, environment: dict[str, str], imports: str = "packhouse.system.confined"
    ) -> None:
        self.environment = environment
        self.is_stuck = False
        self.has_answered = False
        """True once it has replied to the latest call."""
        self.code, self.said = 0, ""  # once it ended: as of `Popen`, and the end of its stderr
        self._num_quiet, self._seen = 0, b""
        self._stderr = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as mark:
            mark.truncate(MARK_BYTES)
            self._mark = mmap.mmap(mark.fileno(), MARK_BYTES)
            code = (  # transformers imports torch wherever it finds it, which takes 2 s or more
                f"import sys; sys.path[:] = {sys.path!r}; sys.modules['torch'] = None; "
                f"import {imports}; "
                f"from packhouse.system import confined; confined.serve({mark.fileno()})"
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
        return float(struct.unpack_from(MARK, self._mark)[1])

    @property
    def place(self) -> str:
        """What it works on."""
        text = self._mark[struct.calcsize(MARK) :].rstrip(b"\0").decode(errors="replace")
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

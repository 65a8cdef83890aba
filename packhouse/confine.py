"""Run code that came with data in a child process, under limits that the kernel enforces.

Chat templates and tokenizers are programs of strangers. Jinja's sandbox keeps a template away from
the interpreter, but neither it nor `tokenizers` bounds memory or time. So whatever runs such code
runs in a child:

    done = run_confined(
        partial(render_shard, path, recipe), what="template 'chat'", blames=TemplateError
    )

- Memory: RLIMIT_DATA, which counts what a process may write to, and not the files that it maps.
- Time: a timer on the CPU time of one row or batch. Its signal has the default action, so the
  kernel ends the child even in the middle of one long C call.
- The child has no credentials in its environment and no inherited files. It ends with its parent.

A child does one call at a time and waits a minute for the next. Starting one takes 0.5 s of CPU.
The call is a pickle of our own objects. The answer is JSON: a child that a stranger has taken over
must not choose what we unpickle. Memory is limited on Linux only, time on every Unix.
"""

import atexit
import mmap
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from packhouse import errors, progress
from packhouse.errors import ConfigError, PackhouseError, TransientError

__all__ = ["MEMORY_MB", "SECONDS", "at", "limited", "run_confined", "serve", "start_early"]

MEMORY_MB = "PACKHOUSE_CHILD_MEMORY_MB"
"""Environment variable: memory of a child beyond what its input explains, 1024 by default."""
SECONDS = "PACKHOUSE_CHILD_SECONDS"
"""Environment variable: CPU time of a row, and of a batch beyond what its size explains; 20."""

_BYTES_PER_BYTE = 32  # memory for each byte of the shard and of the tokenizer's files
_BYTES_PER_CPU = 32 * 2**20  # stacks of the threads that Arrow, numpy and tokenizers have per core
_BYTES_PER_SECOND = 50_000  # of a batch; HF encodes 2 MB/s
_PLACE_BYTES = 512
_MAX_REPLY_BYTES = 2**30
_IDLE_S = 60.0

# All that a child sees of the environment: no AWS_*, HF_TOKEN, PREFECT_* and no passwords.
_KEPT = {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"}
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
    call: Callable[[], Any], *, what: str, blames: type[PackhouseError], num_bytes: int = 0
) -> Any:
    """Do a call in a child and return its result; in a child already, just do it.

    Args:
        call: picklable, with a result that JSON can say.
        what: the foreign code, for messages: "tokenizer 'models/x'".
        blames: raised when that code goes over a limit or fails.
        num_bytes: size of what the call reads; more input may take more memory.

    Raises:
        PackhouseError: as the call raised it, or `blames`; this process goes on.
        OSError: as the call raised it.
    """
    if _place is not None:
        return call()
    megabytes, seconds = _setting(MEMORY_MB, 1024), _setting(SECONDS, 20)
    memory = megabytes * 2**20 + num_bytes * _BYTES_PER_BYTE
    payload = pickle.dumps((call, num_bytes, memory, seconds))
    reply = None
    while reply is None:
        child, is_new = _take()
        try:
            reply = child.ask(payload)
        except BaseException:
            child.kill()
            raise
        if reply is None and (is_new or child.wait() != 0):
            break
        if reply is None:
            child.close()  # it had waited for work in vain
    if reply is not None and ("result" in reply or "error" in reply):
        _idle.append(child)
        if "result" in reply:
            return reply["result"]
        raise _typed(reply)
    ended_by, said = (0, "") if reply is not None else child.ending()
    where = f"{what}, {child.place() or 'before the first row'}"
    child.kill()
    if reply is not None and "os_error" in reply:
        raise OSError(*reply["os_error"])
    failed = said if reply is None else reply["failed"]
    if any(sign in failed for sign in _NO_MEMORY):
        raise blames(
            f"{where}: needs more memory than the {memory >> 20:,} MB that it may use. Repair it, "
            f"or set {MEMORY_MB} above {megabytes}",
            limit_mb=memory >> 20,
        )
    if ended_by == signal.SIGPROF:
        raise blames(
            f"{where}: takes more CPU time than the {seconds} s that it may. Repair it, or set "
            f"{SECONDS} above {seconds}",
            limit_s=seconds,
        )
    if ended_by == signal.SIGKILL:
        raise TransientError(f"{where}: killed from outside; was the machine out of memory?")
    error = blames(f"{where}: {failed or f'ended by signal {ended_by}'}")
    error.add_note((reply or {}).get("trace", ""))
    raise error


def start_early() -> None:
    """Start a child for a call that is soon to come, so that its imports take no time then."""
    if not _idle and _place is None:
        _idle.append(_Child(_environment()))


def at(place: str) -> None:
    """In a child: note what is worked on, for the message if it does not end well."""
    if _place is not None:
        _place[:] = place.encode()[:_PLACE_BYTES].ljust(_PLACE_BYTES, b"\0")


@contextmanager
def limited(num_bytes: int = 0) -> Iterator[None]:
    """In a child: bound the CPU time of the block, a row or a batch of `num_bytes`."""
    if _place is None:
        yield
        return
    left, _ = signal.setitimer(signal.ITIMER_PROF, _seconds + num_bytes / _BYTES_PER_SECOND)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, left)


class _Child:
    """A process that does calls, and the place where it notes what it works on."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._said = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as place:
            place.truncate(_PLACE_BYTES)
            self._place = mmap.mmap(place.fileno(), _PLACE_BYTES)
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from packhouse import confine, foreign; "
                f"confine.serve({place.fileno()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=environment,
                pass_fds=[place.fileno()],
            )

    def ask(self, payload: bytes) -> dict[str, Any] | None:
        """Return the answer to a call; None if the child ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(len(payload).to_bytes(8, "little") + payload)
            self._process.stdin.flush()
            while line := self._process.stdout.readline(_MAX_REPLY_BYTES):
                reply = orjson.loads(line)
                if "advance" not in reply:
                    return dict(reply)
                progress.advance(reply["advance"])
        except BrokenPipeError:
            pass
        except orjson.JSONDecodeError:  # the child lives, and may wait for us to read on
            return {"failed": f"its answer is no JSON, or over {_MAX_REPLY_BYTES:,} bytes"}
        return None

    def place(self) -> str:
        text = self._place[:].rstrip(b"\0").decode(errors="replace")
        return "".join(c if c.isprintable() else "?" for c in text)

    def ending(self) -> tuple[int, str]:
        """Return the signal that ended the child, if one did, and the end of what it said."""
        code = self.wait()
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 1000))
        lines = self._said.read().decode(errors="replace").splitlines()
        said = " / ".join(line for line in lines[-5:] if line.strip())
        return max(0, -code), "".join(c if c.isprintable() else "?" for c in said)

    def wait(self) -> int:
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End the child: it sees that nobody will call."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        self.wait()
        self._said.close()
        self._place.close()


_idle: list[_Child] = []
os.register_at_fork(after_in_child=_idle.clear)  # they are the parent's


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop().close()


def _take() -> tuple[_Child, bool]:
    """Return a child that waits for work, or a new one."""
    environment = _environment()
    with suppress(IndexError):
        while True:
            child = _idle.pop()
            if child.environment == environment:
                return child, False
            child.close()
    return _Child(environment), True


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    return kept | _ADDED


def _setting(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ConfigError(f"{name} is '{text}'; it must be a number from 1 on")
    return int(text)


def _typed(reply: dict[str, Any]) -> PackhouseError:
    kind = getattr(errors, reply["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, PackhouseError)):
        kind = PackhouseError
    return kind(reply["message"], **reply["facts"])


# What follows runs in the child.

_place: mmap.mmap | None = None
_seconds = 0


def serve(place: int) -> None:
    """Do calls until the parent closes the pipe, or none came for a minute."""
    global _place, _seconds
    from packhouse.memory import keep_freed_memory
    from packhouse.without_pandas import settle_pyarrow

    for number in (signal.SIGINT, signal.SIGTERM):  # are the parent's to answer
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold rows
    _place = mmap.mmap(place, _PLACE_BYTES)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no reply

    def send(reply: bytes) -> None:
        replies.write(reply + b"\n")
        replies.flush()

    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=[calls], daemon=True).start()
    keep_freed_memory()
    settle_pyarrow()
    progress.forward(lambda fraction: send(orjson.dumps({"advance": fraction})))
    base = _data_bytes() + _BYTES_PER_CPU * (os.cpu_count() or 1)
    while True:
        try:
            payload = calls.get(timeout=_IDLE_S)
        except queue.Empty:
            os._exit(0)
        call, num_bytes, memory, _seconds = pickle.loads(payload)  # noqa: S301 - of our parent
        at("")
        _limit_memory(base + memory)
        with limited(num_bytes):  # rows and batches have their own; this is for all else
            send(_answer(call))


def _read_calls(calls: "queue.SimpleQueue[bytes]") -> None:
    stdin = sys.stdin.buffer
    while len(size := stdin.read(8)) == 8:
        calls.put(stdin.read(int.from_bytes(size, "little")))
    os._exit(0)  # the parent is gone, or done


def _answer(call: Callable[[], Any]) -> bytes:
    reply: dict[str, Any]
    try:
        return orjson.dumps({"result": call()})
    except PackhouseError as error:
        reply = {"error": type(error).__name__, "message": error.message, "facts": error.facts}
    except MemoryError:
        reply = {"failed": "MemoryError"}
    except OSError as error:
        reply = {"os_error": [str(error)]}
        if error.errno is not None:
            reply = {"os_error": [error.errno, error.strerror, error.filename]}
    except BaseException as error:  # a panic of Rust code is no Exception
        reply = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        reply["trace"] = traceback.format_exc()[-4000:]
    return orjson.dumps(reply, default=str)


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

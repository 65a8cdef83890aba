"""The worker that runs untrusted code: its input, its allowed output, and how it ends."""

import importlib
import itertools
import operator
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest

from packhouse.errors import (
    ConfigError,
    PackhouseError,
    TemplateError,
    TokenizerError,
    TransientError,
)
from packhouse.system import worker
from packhouse.tokenize import fingerprint_tokenizer
from tests.runtime import calls


@pytest.fixture(scope="module")
def parent():
    """A worker whose forks run the calls of this process, as in the processes of a pool."""
    if sys.platform != "linux":
        yield None
        return
    forks = worker.WorkerForks(partial(importlib.import_module, calls.__name__), 0, 0)
    yield forks
    forks.close()


@pytest.fixture(autouse=True)
def forks(request, parent, monkeypatch):
    """Use forks, which take 0.5 s less than starting a worker, unless a test asks otherwise."""
    worker.end_idle_workers()
    if parent is not None and getattr(request, "param", "forked") == "forked":
        monkeypatch.setattr(worker, "_forks", (parent.requests, worker._environment()))
    yield
    worker.end_idle_workers()


both = pytest.mark.parametrize("forks", ["started", "forked"], indirect=True)


def in_worker(call):
    return worker.run_in_worker(call, what="template 'toy'", blames=TemplateError)


@both
def test_a_worker_is_kept_for_the_next_call():
    assert in_worker(os.getpid) == in_worker(os.getpid) != os.getpid()


@both
def test_a_worker_loads_no_torch():
    assert find_spec("torch") is not None  # takes seconds to import, and no tokenizer needs it
    assert in_worker(partial(find_spec, "torch")) is None


@both
def test_a_worker_sees_no_credentials(monkeypatch):
    secrets = [
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "PREFECT_API_KEY",
        "DB_PASSWORD",
        "WANDB_API_KEY",
    ]
    for name in secrets:
        monkeypatch.setenv(name, "canary")

    assert "canary" not in in_worker(calls.environment).values()


@both
def test_a_worker_inherits_no_files(tmp_path):
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        in_worker(partial(os.getpid))
        assert not any(str(tmp_path) in name for name in in_worker(calls.open_files))


def test_errors_come_back_as_they_were(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer folder at") as caught:
        in_worker(partial(fingerprint_tokenizer, tmp_path / "gone"))
    assert caught.value.folder == str(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="gone"):
        in_worker(partial((tmp_path / "gone").read_bytes))
    with pytest.raises(TemplateError, match=r"template 'toy'.*ZeroDivisionError"):
        in_worker(partial(operator.truediv, 1, 0))


def test_a_result_that_is_not_json_is_refused():
    with pytest.raises(TemplateError, match="TypeError"):
        in_worker(partial(partial, print))


@pytest.mark.parametrize(
    ("forks", "number", "error", "said"),
    [
        ("forked", signal.SIGABRT, TemplateError, "signal 6"),
        ("forked", signal.SIGSEGV, TemplateError, "signal 11"),
        ("started", signal.SIGPROF, TemplateError, "CPU time"),
        ("forked", signal.SIGKILL, TransientError, "worker was killed"),
        ("started", signal.SIGKILL, TransientError, "worker was killed"),
    ],
    indirect=["forks"],
)
def test_a_worker_that_dies_is_an_error_and_the_next_call_gets_another(number, error, said):
    with pytest.raises(error, match=said):
        in_worker(partial(calls.kill_itself, number))

    assert in_worker(partial(operator.add, 1, 2)) == 3


def test_a_worker_ends_with_its_parent():
    code = (
        "import os; from packhouse.errors import TemplateError; "
        "from packhouse.system import worker; "
        "print(worker.run_in_worker(os.getpid, what='', blames=TemplateError), flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    pid = int(done.stdout)

    assert done.returncode == -signal.SIGKILL
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # already gone
    assert select.select([watched], [], [], 60)[0], "the worker outlives its parent"
    os.close(watched)


def test_a_limit_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv(worker.MEMORY_MB, "much")

    with pytest.raises(ConfigError, match="PACKHOUSE_CHILD_MEMORY_MB is 'much'"):
        in_worker(os.getpid)


def test_an_answer_that_is_too_long_is_an_error_and_no_wait(monkeypatch):
    monkeypatch.setattr(worker, "_MAX_REPLY_BYTES", 1000)
    with pytest.raises(TemplateError, match="not JSON, or is larger than 1,000 bytes"):
        in_worker(partial(operator.mul, "a", 500_000))  # more than the pipe holds


def framed(payload):
    return len(payload).to_bytes(8, "little") + payload


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"garbage",
        b"[1]",
        b'["item"]',
        b'["done", 1]',
        b'["advance", "much"]',
        b'["read", 0]',  # it was given no file
        b'["error", "TemplateError", "a", []]',
        b'["os_error", []]',
        b"\xff\xff\xff\xff\x10\0\0\0garbage",
        pa.schema([("n", pa.int64())]).serialize().to_pybytes(),  # without a batch
    ],
)
def test_an_invalid_reply_is_an_error_and_ends_the_worker(payload):
    pid = in_worker(os.getpid)
    with pytest.raises(TemplateError, match="its reply is not JSON"):
        in_worker(partial(calls.lie, framed(payload)))
    assert in_worker(os.getpid) != pid


@pytest.mark.parametrize("named", ["Exception", "HELD_BACK", "Any", "for_terminal"])
def test_an_error_of_a_worker_is_one_of_ours(named):
    said = orjson.dumps(["error", named, "said", {"message": 1, "self": 2}])
    with pytest.raises(PackhouseError, match="said"):
        in_worker(partial(calls.lie, framed(said)))
    worker.end_idle_workers()  # later answers do not belong to the next call


def test_one_call_has_one_result():
    with pytest.raises(TemplateError, match="its worker returned 2 results for one call"):
        in_worker(partial(calls.lie, framed(b'["item", 1]')))
    with pytest.raises(TemplateError, match="its worker returned 0 results for one call"):
        in_worker(partial(calls.lie, framed(b'["done"]')))
    worker.end_idle_workers()


def test_lists_that_lie_about_their_values_are_not_followed():
    offsets = pa.py_buffer(np.array([0, 10**9, 1], np.int32))
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a")])
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([column], names=["text"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(TemplateError, match="its reply is not JSON"):
        list(stream(partial(calls.lie, framed(sink.getvalue().to_pybytes()))))


@pytest.mark.parametrize(
    "piece",
    [
        b"",
        (1000).to_bytes(8, "little") + b'["item", 1',  # the rest does not come
        framed(b'["read", 0]'),  # and the answer, of a megabyte, is not read
    ],
)
def test_a_worker_that_stops_in_the_middle_of_a_message_is_ended(piece, tmp_path, monkeypatch):
    monkeypatch.setenv(worker.SECONDS, "1")
    monkeypatch.setattr(worker, "_QUIET_S", 0.1)
    (tmp_path / "file").write_bytes(b"x" * 3_000_000)
    with (
        (tmp_path / "file").open("rb") as file,
        pytest.raises(TemplateError, match="without using CPU time"),
    ):
        list(stream(partial(calls.lie_and_stop, piece), file=file))


@both
def test_a_worker_that_sleeps_is_ended_by_its_parent(monkeypatch):
    in_worker(os.getpid)  # starting may take longer on a busy machine
    monkeypatch.setenv(worker.SECONDS, "1")
    monkeypatch.setattr(worker, "_QUIET_S", 0.1)
    with pytest.raises(TemplateError, match=r"made no progress for 1 s without using CPU time"):
        in_worker(partial(time.sleep, 3600))


def test_many_short_renderings_do_not_add_up_to_a_limit(monkeypatch):
    monkeypatch.setenv(worker.SECONDS, "1")
    assert in_worker(partial(calls.spin_often, 15, 0.1, "row {}")) == "done"


def test_renderings_of_one_row_count_for_it(monkeypatch):
    monkeypatch.setenv(worker.SECONDS, "1")
    monkeypatch.setattr(worker, "_ROW_TIMES", 2)
    with pytest.raises(TemplateError, match="row 3: takes more CPU time than its limit of 2 s"):
        in_worker(partial(calls.spin_often, 40, 0.1, "row 3"))


def test_text_that_is_no_unicode_does_not_break_the_answer():
    with pytest.raises(TemplateError, match=r"ValueError: \\ud800"):
        in_worker(partial(calls.raise_, ValueError("\ud800")))
    with pytest.raises(TokenizerError, match="ud800"):
        in_worker(partial(calls.raise_, TokenizerError("\ud800", name="\ud800")))
    with pytest.raises(FileNotFoundError, match=r"gone-.*udcff"):
        in_worker(Path("gone-\udcff").read_bytes)
    assert in_worker(partial(operator.add, 1, 2)) == 3


def stream(call, **limits):
    return worker.stream_from_worker(call, what="file 'toy'", blames=TemplateError, **limits)


def test_batches_come_one_by_one_and_who_stops_listening_ends_the_worker():
    found = stream(partial(calls.batches, 3))
    assert [batch["n"].to_pylist() for batch in found] == [[0], [1], [2]]

    pid = in_worker(os.getpid)
    endless = stream(partial(calls.batches, 10**9))
    assert [batch["n"][0].as_py() for batch in itertools.islice(endless, 2)] == [0, 1]
    endless.close()
    assert in_worker(os.getpid) != pid


@both
def test_a_kept_worker_that_ends_in_the_middle_of_a_call_is_an_error_and_no_item_comes_twice():
    in_worker(os.getpid)
    items = stream(calls.end_after_an_item)
    assert next(items) == "item"
    with pytest.raises(TemplateError, match="exit code 0"):
        next(items)


@both
def test_a_worker_reads_the_open_file_of_its_parent(tmp_path):
    (tmp_path / "file").write_bytes(b"first" + b"x" * 3_000_000 + b"last")
    with (tmp_path / "file").open("rb") as file:
        (tmp_path / "file").unlink()
        assert list(stream(calls.read_twice, file=file)) == ["first", "last"]


def test_a_fork_leaves_its_parents_workers_alone():
    """Torch's DataLoader forks: a worker must not wait for the fork, nor may the fork use it."""
    code = """
import os, sys
from packhouse.system import worker
from packhouse.errors import TemplateError

def ask():
    return worker.run_in_worker(os.getpid, what="", blames=TemplateError)

pid = ask()
files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
sockets = [file for file in files if os.path.lexists(file) and "socket:" in os.readlink(file)]
assert len(sockets) == 1
fork = os.fork()
if not fork:
    assert not os.path.lexists(sockets[0])
    assert ask() != pid
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
assert ask() == pid
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""

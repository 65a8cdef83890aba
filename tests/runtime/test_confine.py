"""The child that runs foreign code: what it gets, what it may send, how it ends."""

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

import pyarrow as pa
import pytest

from packhouse.errors import ConfigError, TemplateError, TokenizerError, TransientError
from packhouse.system import confine, confined
from packhouse.tokenize import fingerprint_tokenizer


def in_child(call):
    return confine.run_confined(call, what="template 'toy'", blames=TemplateError)


def kill_itself(number):
    os.kill(os.getpid(), number)


def environment():
    return dict(os.environ)


def open_files():
    return [str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir()]


def test_a_child_is_kept_for_the_next_call():
    assert in_child(os.getpid) == in_child(os.getpid) != os.getpid()


def test_a_child_works_where_its_parent_does(tmp_path, monkeypatch):
    in_child(os.getpid)
    monkeypatch.chdir(tmp_path)
    assert in_child(os.getcwd) == str(tmp_path)


def test_a_child_loads_no_torch():
    assert find_spec("torch") is not None  # which takes it seconds, and no tokenizer needs it
    assert in_child(partial(find_spec, "torch")) is None


def test_a_child_sees_no_credentials(monkeypatch):
    secrets = [
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "PREFECT_API_KEY",
        "DB_PASSWORD",
        "WANDB_API_KEY",
    ]
    for name in secrets:
        monkeypatch.setenv(name, "canary")

    assert "canary" not in in_child(environment).values()


def test_a_child_inherits_no_files(tmp_path):
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        in_child(partial(os.getpid))
        assert not any(str(tmp_path) in name for name in in_child(open_files))


def test_errors_come_back_as_they_were(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer folder at") as caught:
        in_child(partial(fingerprint_tokenizer, tmp_path / "gone"))
    assert caught.value.folder == str(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="gone"):
        in_child(partial((tmp_path / "gone").read_bytes))
    with pytest.raises(TemplateError, match=r"template 'toy'.*ZeroDivisionError"):
        in_child(partial(operator.truediv, 1, 0))


def test_what_is_no_json_does_not_come_back():
    with pytest.raises(TemplateError, match="TypeError"):
        in_child(partial(partial, print))


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [
        (signal.SIGABRT, TemplateError, "signal 6"),
        (signal.SIGSEGV, TemplateError, "signal 11"),
        (signal.SIGPROF, TemplateError, "CPU time"),
        (signal.SIGKILL, TransientError, "killed from outside"),
    ],
)
def test_a_child_that_dies_is_an_error_and_the_next_call_gets_another(number, error, said):
    with pytest.raises(error, match=said):
        in_child(partial(kill_itself, number))

    assert in_child(partial(operator.add, 1, 2)) == 3


def test_a_child_ends_with_its_parent():
    code = (
        "import os; from packhouse.errors import TemplateError; "
        "from packhouse.system import confine; "
        "print(confine.run_confined(os.getpid, what='', blames=TemplateError), flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    child = int(done.stdout)

    assert done.returncode == -signal.SIGKILL
    try:
        watched = os.pidfd_open(child)
    except ProcessLookupError:
        return  # it is gone already
    assert select.select([watched], [], [], 60)[0], "the child outlives its parent"
    os.close(watched)


def test_a_limit_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv(confine.MEMORY_MB, "much")

    with pytest.raises(ConfigError, match="PACKHOUSE_CHILD_MEMORY_MB is 'much'"):
        in_child(os.getpid)


def test_an_answer_that_is_too_long_is_an_error_and_no_wait(monkeypatch):
    monkeypatch.setattr(confine, "_MAX_REPLY_BYTES", 1000)
    with pytest.raises(TemplateError, match="no JSON, or over 1,000 bytes"):
        in_child(partial(operator.mul, "a", 500_000))  # more than the pipe holds


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def spin_often(times, each, row=None):
    for number in range(times):
        if row is not None:
            confined.at(row.format(number))
        with confined.limited():
            spin(each)
    return "done"


def spin_nested(times, each):
    confined.at("row 7")
    with confined.limited():
        spin_often(times, each)


def test_a_child_that_sleeps_is_ended_by_its_parent(monkeypatch):
    monkeypatch.setenv(confine.SECONDS, "1")
    monkeypatch.setattr(confine, "_QUIET_S", 1)
    with pytest.raises(TemplateError, match=r"did nothing for 2 s.*sleeps or is blocked"):
        in_child(partial(time.sleep, 3600))


def test_a_child_that_is_stopped_is_ended_by_its_parent(monkeypatch):
    monkeypatch.setenv(confine.SECONDS, "1")
    monkeypatch.setattr(confine, "_QUIET_S", 1)
    with pytest.raises(TemplateError, match="sleeps or is blocked"):
        in_child(partial(kill_itself, signal.SIGSTOP))


def test_many_short_renderings_do_not_add_up_to_a_limit(monkeypatch):
    monkeypatch.setenv(confine.SECONDS, "1")
    assert in_child(partial(spin_often, 15, 0.1, "row {}")) == "done"


def test_what_runs_inside_of_a_limit_counts_for_it(monkeypatch):
    monkeypatch.setenv(confine.SECONDS, "1")
    with pytest.raises(TemplateError, match="row 7: takes more CPU time than the 1 s that it may"):
        in_child(partial(spin_nested, 40, 0.1))


def test_renderings_of_one_row_count_for_it(monkeypatch):
    monkeypatch.setenv(confine.SECONDS, "1")
    monkeypatch.setattr(confine, "_ROW_TIMES", 2)
    with pytest.raises(TemplateError, match="row 3: takes more CPU time than the 2 s that it may"):
        in_child(partial(spin_often, 40, 0.1, "row 3"))


def place_after_a_limit():
    with confined.limited():
        confined.at("while it is compiled")
    kill_itself(signal.SIGABRT)


def test_a_place_is_left_with_its_limit():
    with pytest.raises(TemplateError, match="before the first row: ended by signal 6"):
        in_child(place_after_a_limit)


def test_text_that_is_no_unicode_does_not_break_the_answer():
    with pytest.raises(TemplateError, match=r"ValueError: \\ud800"):
        in_child(partial(raise_, ValueError("\ud800")))
    with pytest.raises(TokenizerError, match="ud800"):
        in_child(partial(raise_, TokenizerError("\ud800", name="\ud800")))
    with pytest.raises(FileNotFoundError, match=r"gone-.*udcff"):
        in_child(Path("gone-\udcff").read_bytes)
    assert in_child(partial(operator.add, 1, 2)) == 3


def raise_(error):
    raise error


def batches(count):
    for number in range(count):
        yield pa.record_batch({"n": [number]})


def end_after_an_item():
    yield "item"
    confined._replies.flush()
    os._exit(0)


def read_twice():
    with confined.file_of_parent() as file:
        yield file.read(5).decode()
        file.seek(-4, os.SEEK_END)
        yield file.read().decode()


def stream(call, **limits):
    return confine.stream_confined(call, what="file 'toy'", blames=TemplateError, **limits)


def test_batches_come_one_by_one_and_who_stops_listening_ends_the_child():
    found = stream(partial(batches, 3))
    assert [batch["n"].to_pylist() for batch in found] == [[0], [1], [2]]

    child = in_child(os.getpid)
    endless = stream(partial(batches, 10**9))
    assert [batch["n"][0].as_py() for batch in itertools.islice(endless, 2)] == [0, 1]
    endless.close()
    assert in_child(os.getpid) != child


def test_a_kept_child_that_ends_in_the_middle_of_a_call_is_an_error_and_no_item_comes_twice():
    in_child(os.getpid)
    items = stream(end_after_an_item)
    assert next(items) == "item"
    with pytest.raises(TemplateError, match="exit code 0"):
        next(items)


def test_a_child_that_fails_to_read_its_call_says_why():
    with pytest.raises(TemplateError, match="ZeroDivisionError"):
        in_child(NotReadable())


class NotReadable:
    """A call whose pickle cannot be read."""

    def __reduce__(self):
        return operator.truediv, (1, 0)


def test_a_child_reads_the_open_file_of_its_parent(tmp_path):
    (tmp_path / "file").write_bytes(b"first" + b"x" * 3_000_000 + b"last")
    with (tmp_path / "file").open("rb") as file:
        (tmp_path / "file").unlink()
        assert list(stream(read_twice, file=file)) == ["first", "last"]


def test_a_fork_leaves_its_parents_children_alone():
    """Torch's DataLoader forks: a child must not wait for the fork to end, nor the fork use it."""
    code = """
import os, sys
from packhouse.system import confine
from packhouse.errors import TemplateError

def ask():
    return confine.run_confined(os.getpid, what="", blames=TemplateError)

child, parent = ask(), os.getpid()
theirs = {os.readlink(f"/proc/{child}/fd/{number}") for number in os.listdir(f"/proc/{child}/fd")}
theirs = {name for name in theirs if name.startswith("pipe:")}
assert len(theirs) == 2
fork = os.fork()
if not fork:
    for number in os.listdir(f"/proc/{parent}/fd"):
        if int(number) > 2 and os.readlink(f"/proc/{parent}/fd/{number}") in theirs:
            assert not os.path.exists(f"/proc/self/fd/{number}"), number
    assert ask() != child
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
assert ask() == child
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""


def test_a_fork_while_a_child_works_goes_on():
    """A thread waits for its child; the fork has no such thread, and must not wait for it."""
    code = """
import os, threading, time
from functools import partial
from packhouse.system import confine
from packhouse.errors import TemplateError

def ask(call):
    return confine.run_confined(call, what="", blames=TemplateError)

thread = threading.Thread(target=ask, args=[partial(time.sleep, 3)])
thread.start()
while not confine._living:
    time.sleep(0.01)
time.sleep(1)
fork = os.fork()
if not fork:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()

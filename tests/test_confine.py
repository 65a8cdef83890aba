"""The child that runs foreign code: what it gets, what it may send, how it ends."""

import operator
import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from packhouse import confine
from packhouse.errors import ConfigError, TemplateError, TokenizerError, TransientError
from packhouse.tokenization import fingerprint_tokenizer


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
        "import os; from packhouse import confine; from packhouse.errors import TemplateError; "
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

"""Workers of a pool are forked from one that has loaded the tokenizer, or else started as usual."""

import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial

import psutil
import pytest

from packhouse.errors import TemplateError
from packhouse.recipe import Recipe
from packhouse.render.renderer import load_encoders
from packhouse.system import worker
from tests.prepared import TOKENIZER
from tests.runtime import calls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are not safe elsewhere")


@pytest.fixture
def fork_after(monkeypatch):
    """Return a function that makes workers of this process forks of one that called a function."""
    made = []

    def start(load):
        made.append(worker.WorkerForks(load, 0, 0))
        monkeypatch.setattr(worker, "_forks", (made[0].requests, worker._environment()))
        return made[0]._worker._process.pid

    worker.end_idle_workers()
    yield start
    worker.end_idle_workers()
    made[0].close()


def in_worker(call):
    return worker.run_in_worker(call, what="template 'toy'", blames=TemplateError)


def test_they_share_what_was_loaded_once(fork_after):
    parent = fork_after(calls.load)
    both = [worker._Worker(), worker._Worker()]
    worker._idle.extend(both)
    assert [in_worker(calls.origin), in_worker(calls.own)[1]] == [[parent, parent], parent]
    both[1].end()
    worker._idle.remove(both[1])
    assert in_worker(calls.origin) == [parent, parent]


def test_a_recipe_s_tokenizer_is_loaded_before_the_fork(fork_after, tmp_path):
    recipe = Recipe(dataset="toy", sources=[{"path": "a.jsonl"}], tokenizer=str(TOKENIZER))
    parent = fork_after(partial(load_encoders, recipe, tmp_path))
    assert in_worker(calls.encoders_of_parent) == [parent, 1, 1]


def test_one_whose_user_is_gone_is_killed(fork_after):
    fork_after(calls.load)
    pid, _ = in_worker(calls.own)
    idle = worker._idle.pop()
    idle._process._life.close()  # as the kernel does when a process of the pool is killed
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(30)
    idle.end()


@pytest.mark.parametrize(
    "fault",
    [
        partial(os.kill, 0, 99),  # raises
        partial(signal.raise_signal, signal.SIGSEGV),
        calls.leave_a_thread,
    ],
)
def test_they_are_started_if_the_tokenizer_cannot_be_loaded(fork_after, fault):
    fork_after(fault)
    assert in_worker(calls.own)[1] == os.getpid()
    assert in_worker(calls.own)[1] == os.getpid()


class OnlyForks(int):
    """A second; 600 for a worker that is started, which may take long on a busy machine."""

    def __add__(self, seconds):
        return (1 if worker._forks else 600) + seconds


def test_they_are_started_if_loading_never_ends(fork_after, monkeypatch):
    monkeypatch.setenv(worker.SECONDS, "1")  # which the first row may take on top
    monkeypatch.setattr(worker, "_QUIET_S", OnlyForks())
    monkeypatch.setattr(worker, "_END_S", 0.5)
    fork_after(partial(time.sleep, 3600))
    assert in_worker(calls.own)[1] == os.getpid()


def test_they_are_started_in_another_folder_or_environment(fork_after, monkeypatch, tmp_path):
    fork_after(calls.load)
    monkeypatch.chdir(tmp_path)
    assert in_worker(calls.own)[1] == os.getpid()

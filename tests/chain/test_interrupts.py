"""A signal ends a command even if the exception that it raises is lost."""

import os
import signal
from pathlib import Path

import pytest

from packhouse.recipe import Recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from packhouse.system import terminal
from packhouse.system.terminal import Interrupted
from tests.prepared import TOKENIZER, python


@pytest.fixture
def handled(monkeypatch):
    """Handle signals as a command does, and restore the previous handlers afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(terminal, "_received", None)
    terminal.handle_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("only", ["packhouse.run.chain", "packhouse.run.step"])
def test_a_signal_that_was_lost_ends_the_run(only, handled, project, monkeypatch):
    """Stop before the next step, whatever runs it; in this process, before the next job."""
    for place in {"packhouse.run.chain", "packhouse.run.step"} - {only}:
        monkeypatch.setattr(f"{place}.check_interrupted", lambda: None)
    done = []
    execute = LocalRunner.__call__

    def loses(runner, jobs):
        done.append(jobs[0].step.name)
        if jobs[0].step.name == "format":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                signal.sigpending()
            except Interrupted:
                pass  # as Python itself does in __del__
        return execute(runner, jobs)

    monkeypatch.setattr(LocalRunner, "__call__", loses)
    with pytest.raises(Interrupted):
        project.prepare()
    assert done == ["validate", "format"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted])
def test_processes_of_a_run_do_not_see_ctrl_c_and_end_with_it(kind, tmp_path):
    """A terminal sends the signal to all processes, and each would print a traceback."""
    recipe = Recipe(dataset="a", sources=[{"path": "a.jsonl"}], tokenizer=str(TOKENIZER))
    pool = LocalRunner(recipe=recipe, workspace=Workspace(cache=tmp_path), workers=2)
    with pytest.raises(AttributeError):  # no such job exists; the processes are running now
        pool._run_in_pool([Group(), Group()])
    children = list(pool._pool._processes.values())
    assert len(children) == 2
    for child in children:
        status = Path(f"/proc/{child.pid}/status").read_text()
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        assert blocked & 1 << (signal.SIGINT - 1)
    pool.__exit__(kind)
    assert [child.exitcode for child in children] == [-signal.SIGTERM] * 2


def test_a_run_of_one_shard_starts_no_processes(project, monkeypatch):
    def fail(*_):
        raise AssertionError("a pool was started")

    monkeypatch.setattr("packhouse.run.step._LEAST_BYTES", 0)  # later steps have several groups
    monkeypatch.setattr(LocalRunner, "_run_in_pool", fail)
    recipe = project.recipe("split.eval_fraction=0.2")
    runner = LocalRunner(recipe=recipe, workspace=Workspace(cache=project.cache), workers=2)

    prepare(recipe, runner, project.cache)

    assert runner.workers == 1


class Group:
    """Jobs that always fail."""

    jobs = (None,)


def test_a_command_stopped_by_ctrl_c_shows_how_to_continue():
    program = (
        "import os, signal, sys; from packhouse import cli; from packhouse.addons import doctor\n"
        "import click\n"
        "@click.command('doctor')\n"
        "def waits(): os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "doctor.doctor = waits\n"
        "sys.argv = ['packhouse', 'doctor', 'a b']\n"
        "waits.params.append(click.Argument(['x'], expose_value=False))\n"
        "cli.main()"
    )
    done = python("-c", program, timeout=100)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "stopped by SIGINT. To continue, run:\n  packhouse doctor 'a b'\n"

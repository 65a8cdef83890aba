import io
import re
import threading

import pytest

from packhouse.system import progress


@pytest.fixture
def terminal(monkeypatch):
    """A terminal that rich draws on, with bars that appear immediately."""
    import rich.console

    screen = io.StringIO()

    class Terminal(rich.console.Console):
        def __init__(self, **_):
            super().__init__(file=screen, force_terminal=True, width=100)

    monkeypatch.setattr(rich.console, "Console", Terminal)
    monkeypatch.setattr(progress, "_APPEARS_AFTER_S", 0.0)
    return screen


def test_a_step_that_takes_long_shows_its_name_and_share(terminal):
    with progress.show_progress(is_terminal=True), progress.step_progress("tokenize", 4):
        progress.current_step().timer.join()
        progress.advance(0.5)
        progress.job_done(2)
        progress._display.refresh()
    assert "tokenize" in terminal.getvalue()
    assert "50%" in terminal.getvalue()


def test_a_log_shows_what_a_run_waits_for_and_what_is_done(capfd):
    with progress.show_progress(is_terminal=False):
        progress.start_phase("importing Prefect")
        begun = capfd.readouterr().err
        progress.start_phase("planning")
        with progress.step_progress("pack", 1):
            progress.job_done(1)
        progress.say("4/8 pack              1,000 rows", 2.14)
    assert begun == "importing Prefect ...\n"
    lines = [re.sub(" +[0-9.]+ s$", "", line) for line in capfd.readouterr().err.splitlines()]
    assert lines == [
        "importing Prefect",
        "planning ...",
        "planning",
        "4/8 pack              1,000 rows",
    ]


def test_a_terminal_keeps_the_lines_of_finished_steps(terminal):
    with progress.show_progress(is_terminal=True):
        progress.start_phase("importing Prefect")
        progress._display.refresh()
        assert "importing Prefect" in terminal.getvalue()
        with progress.step_progress("pack", 1):
            progress.say("4/8 pack              1,000 rows", 2.14)
    kept = [line.rpartition("\x1b[2K")[2] for line in terminal.getvalue().split("\n")]
    kept = [re.sub(" +[0-9.]+ s$", "", line) for line in kept]  # erased text comes before it
    assert kept[:2] == ["importing Prefect", "4/8 pack              1,000 rows"]


def test_runs_in_threads_of_one_process_do_not_meet():
    """Steps of parallel runs begin and end in any order; each run sees only its own."""
    begun, ended = threading.Barrier(2), threading.Barrier(2)
    seen = {}

    def run(name):
        with progress.own_progress(), progress.step_progress(name, 4):
            begun.wait(300)
            progress.job_done(1 if name == "pack" else 3)
            ended.wait(300)
            seen[name] = progress.current_step().name, progress.current_step().share

    threads = [threading.Thread(target=run, args=(name,)) for name in ("pack", "format")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"pack": ("pack", 0.25), "format": ("format", 0.75)}
    assert progress.current_step() is None

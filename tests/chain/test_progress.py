import io
import threading

import pytest

from packhouse import progress


@pytest.fixture
def terminal(monkeypatch):
    """A terminal that rich draws on, and bars that appear at once."""
    import rich.console

    screen = io.StringIO()

    class Terminal(rich.console.Console):
        def __init__(self, **_):
            super().__init__(file=screen, force_terminal=True, width=100)

    monkeypatch.setattr(rich.console, "Console", Terminal)
    monkeypatch.setattr(progress, "_APPEARS_AFTER_S", 0.0)
    return screen


def test_a_step_that_takes_long_shows_its_name_and_share(terminal):
    with progress.show_progress(enabled=True), progress.step_progress("tokenize", 4):
        progress._current().step.timer.join()
        progress.advance(0.5)
        progress.job_done(2)
        progress._display.refresh()
    assert "tokenize" in terminal.getvalue()
    assert "50%" in terminal.getvalue()


def test_a_quick_step_leaves_the_terminal_alone(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_APPEARS_AFTER_S", 60.0)
    with progress.show_progress(enabled=True), progress.step_progress("pack", 1):
        progress.job_done(1)
        progress._display.refresh()
    assert "pack" not in terminal.getvalue()


def test_nobody_watches_and_nothing_happens():
    with progress.show_progress(enabled=False), progress.step_progress("pack", 1):
        progress.advance(0.5)
        progress.job_done(1)


def test_runs_in_threads_of_one_process_do_not_meet():
    """Their steps begin and end in any order; each sees its own."""
    begun, ended = threading.Barrier(2), threading.Barrier(2)
    seen = {}

    def run(name):
        with progress.own_progress(), progress.step_progress(name, 4):
            begun.wait(10)
            progress.job_done(1 if name == "pack" else 3)
            ended.wait(10)
            seen[name] = progress.current_step().name, progress.current_step().share

    threads = [threading.Thread(target=run, args=(name,)) for name in ("pack", "format")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {"pack": ("pack", 0.25), "format": ("format", 0.75)}
    assert progress.current_step() is None

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows.command import command
from packhouse.cli import cli
from tests.prepared import python

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deployments" / "demo" / "recipe.yaml"


@pytest.mark.parametrize(
    ("arguments", "cache"),
    [
        ((cli, "prepare"), "{file}/below"),
        ((cli, "prepare"), "/proc/x"),
        ((cli, "explain"), "{file}/below"),  # it makes no folder
        ((command,), "{file}/below"),
        ((command,), "/proc/x"),
    ],
)
def test_a_cache_that_is_no_folder_is_refused_before_any_work(
    cache, arguments, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    place = cache.format(file=tmp_path / "file")
    monkeypatch.setenv("PACKHOUSE_CACHE", place)
    done = CliRunner().invoke(arguments[0], [*arguments[1:], str(DEMO)])
    assert done.exit_code == 2
    assert done.output.splitlines()[-1].startswith(f"ConfigError: cache '{place}'")
    assert "Choose a folder with --cache or PACKHOUSE_CACHE" in done.output


def prepare_demo(folder, *program, **settings):
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PREFECT_")}
    settings |= {"PYTHONPATH": str(ROOT), "PACKHOUSE_CACHE": str(folder / "cache")}
    return python(*(program or ("-m", "flows.prepare")), DEMO, cwd=folder, env=kept | settings)


def test_an_embedded_server_that_does_not_start_says_why(tmp_path):
    """Print what Prefect's server prints, after 15 s, if its database is another kind of file."""
    server = tmp_path / "python"
    said = ["Traceback:", "sqlalchemy.exc.DatabaseError: (x) file is not a database", "[SQL: x]"]
    server.write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in said) + "exit 3")
    server.chmod(0o755)
    run = f"import sys; sys.executable = {str(server)!r}; from flows.command import main; main()"
    done = prepare_demo(tmp_path, "-c", run, PREFECT_HOME=str(tmp_path))
    assert done.returncode == 6
    told = done.stderr.splitlines()[-1]
    assert told.startswith(f"TransientError: Prefect's embedded server did not start: {said[1]} (")
    assert told.endswith("`packhouse prepare` needs no server")


def test_a_dead_server_is_one_sentence_with_its_address(tmp_path):
    home = tmp_path / "not" / "there"  # Prefect would not create it, nor start
    done = prepare_demo(tmp_path, PREFECT_API_URL="http://127.0.0.1:9/api", PREFECT_HOME=str(home))
    assert home.is_dir()
    assert done.returncode == 6
    *phases, said = done.stderr.splitlines()
    assert said.startswith("TransientError: cannot reach a Prefect server (Failed to reach API")
    assert "http://127.0.0.1:9/api" in said
    assert "Start one, unset PREFECT_API_URL, or run `packhouse prepare`" in said
    assert phases[0] == "importing Prefect ..."
    assert phases[-1] == "creating the run ..."
    assert not (tmp_path / ".packhouse").exists()


DIES = """
import os, signal, subprocess
from flows.command import _end_with_this_process
server = subprocess.Popen(["sleep", "600"])
print(server.pid, flush=True)
_end_with_this_process(server.pid)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_embedded_server_of_a_run_that_was_killed_ends():
    """`sleep` stands for the server, which takes 20 s to start."""
    pid = int(python("-c", DIES, cwd=ROOT).stdout)
    status = Path(f"/proc/{pid}/status")
    for _ in range(600):
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("the server goes on")

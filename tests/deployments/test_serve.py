"""`make serve` says why it does not start."""

import subprocess
import sys
from pathlib import Path

from deployments import deploy
from tests.store.ceph import free_port

ROOT = Path(__file__).resolve().parents[2]


def test_a_server_that_does_not_start_says_why(tmp_path):
    """Print what Prefect's server prints if its database is of an unknown kind."""
    server = tmp_path / "python"
    said = ["Traceback:", "ValueError: dialect name mysql", "", "Application startup failed."]
    server.write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in said) + "exit 3")
    server.chmod(0o755)
    log = tmp_path / "home" / "server.log"
    log.parent.mkdir()
    log.write_text("OSError: of an earlier start\n")
    run = f"import sys; sys.executable = {str(server)!r}; from deployments import serve; "
    where = ["--port", str(free_port()), "--home", str(log.parent)]
    done = subprocess.run(
        [sys.executable, "-c", run + "sys.exit(serve.main())", *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    told = f"the server did not start: {said[1]} (log: {log})"
    assert done.stdout.splitlines()[-1] == told


def test_a_recipe_that_the_names_lack_is_one_line_with_both_files(tmp_path, monkeypatch, capsys):
    sources = tmp_path / "sources.yaml"
    sources.write_text("recipes: {dmo: demo/recipe.yaml, other: other.yaml}\n")
    monkeypatch.setenv("PACKHOUSE_SOURCES", str(sources))
    assert deploy.main(["packhouse"]) == 2  # before it asks a server
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        f"{deploy.HERE / 'prefect.yaml'}: the recipe 'demo' of nightly-refresh is not listed under "
        f"`recipes` in {sources} (known: dmo, other). Choose a known one, or add it there"
    )

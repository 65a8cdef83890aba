import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows.command import command

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "recipe.yaml"


@pytest.mark.parametrize("cache", ["{file}", "{file}/below", "/proc/x"])
@pytest.mark.parametrize("options", [["--local"], []])
def test_a_cache_that_is_no_folder_is_refused_before_any_work(cache, options, tmp_path):
    (tmp_path / "file").touch()
    place = cache.format(file=tmp_path / "file")
    done = CliRunner().invoke(command, [str(DEMO), "--cache", place, *options])
    assert done.exit_code == 2
    assert done.output.startswith(f"ConfigError: cache '{place}'")
    assert "give a folder with --cache" in done.output


def test_a_dead_server_is_one_sentence_with_its_address(tmp_path):
    settings = {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_HOME": str(tmp_path / "home")}
    arguments = ["--cache", tmp_path / "cache", "--set", f"publish.store={tmp_path / 'store'}"]
    done = subprocess.run(
        [sys.executable, "-m", "flows.prepare", DEMO, *arguments],
        cwd=DEMO.parents[2],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 6
    assert done.stderr.startswith("TransientError: no Prefect server answers (Failed to reach API")
    assert "http://127.0.0.1:9/api" in done.stderr
    assert "unset PREFECT_API_URL, or run with --local" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "store").exists()

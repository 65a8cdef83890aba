"""The file fuzzer runs, finds nothing, and would find a defect."""

import subprocess
import sys
from pathlib import Path

import pytest

from packhouse import read as sources

ROOT = Path(__file__).resolve().parents[2]
NO_ATHERIS = "no atheris: requirements/test.txt has it, and `make fuzz` and CI install that"


@pytest.fixture
def one_file(tmp_path, monkeypatch):
    pytest.importorskip("atheris", reason=NO_ATHERIS)
    from tests.fuzz.files import one_file

    monkeypatch.chdir(tmp_path)
    return one_file


@pytest.mark.slow
def test_a_short_run_finds_nothing(tmp_path):
    pytest.importorskip("atheris", reason=NO_ATHERIS)
    command = [sys.executable, "-m", "tests.fuzz.files", "--inputs", "600", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "600 inputs: every record in one table" in done.stdout


def test_a_slow_input_would_be_found(one_file, monkeypatch):
    monkeypatch.setattr("tests.fuzz.files.CPU_SECONDS", 0)

    with pytest.raises(AssertionError, match="more than 0 s of CPU time for 36 bytes"):
        one_file(b"\0\1\0" + b'{"instruction": "a", "output": "b"}'[:33])


def test_a_lost_row_would_be_found(one_file, monkeypatch):
    read = sources.read_shard

    def lose_a_row(*args):
        rows = read(*args)
        object.__setattr__(rows, "validated", rows.validated.slice(1))
        return rows

    monkeypatch.setattr(sources, "read_shard", lose_a_row)

    with pytest.raises(AssertionError, match="1 records in, 0 rows out"):
        one_file(b'\0\0\0{"text": "x", "label": 1}')

"""HF's ids come from a second process the first time, and are the same from anywhere."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from packhouse.tokenization import reference
from packhouse.tokenization.encoders import hf_encoder
from packhouse.tokenization.reference import reference_ids

TEXTS = pa.array(["the cat", "", "na\u00efve <|end|> \U0001f600", " the hat\n" * 50])


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Processes that are started; any tokenizer is worth one."""
    processes = []
    start = reference.subprocess.Popen

    def counted(*args, **options):
        processes.append(start(*args, **options))
        return processes[-1]

    monkeypatch.setattr(reference.subprocess, "Popen", counted)
    monkeypatch.setattr(reference, "_MIN_BACKEND_BYTES", 0)
    monkeypatch.setattr(reference, "_asked_for", set())
    monkeypatch.setattr(reference.load_tokenizer, "holds", lambda key: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(reference.tempfile, "tempdir", str(tmp_path))
    return processes


def assert_true_ids(given, snapshot):
    ids, offsets = hf_encoder(snapshot).encode(TEXTS)
    assert given[0].dtype == np.int32
    assert given[0].tolist() == ids.tolist()
    assert given[1].tolist() == offsets.tolist()


def test_the_first_time_a_second_process_encodes(byte_level, started, tmp_path):
    with reference_ids(byte_level.backend, TEXTS) as ids:
        assert_true_ids(ids(), byte_level)
    assert len(started) == 1

    with reference_ids(byte_level.backend, TEXTS) as ids:
        assert_true_ids(ids(), byte_level)
    assert len(started) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", ["gone.py", "broken.py"])
def test_a_process_that_fails_is_made_up_for(
    program, byte_level, started, tmp_path_factory, monkeypatch
):
    folder = tmp_path_factory.mktemp("program")
    Path(folder / "broken.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(reference, "_PROGRAM", folder / program)

    with reference_ids(byte_level.backend, TEXTS) as ids:
        assert_true_ids(ids(), byte_level)
    assert len(started) == 1


def test_no_process_outlives_its_block(byte_level, started, tmp_path_factory, monkeypatch):
    program = tmp_path_factory.mktemp("program") / "slow.py"
    program.write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(reference, "_PROGRAM", program)
    monkeypatch.setattr(reference, "_TIMEOUT_S", 0.1)

    with reference_ids(byte_level.backend, TEXTS) as ids:
        assert_true_ids(ids(), byte_level)
    assert started[0].poll() is not None


def test_a_machine_that_starts_no_process_is_no_obstacle(byte_level, started, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError("no processes here")

    monkeypatch.setattr(reference.subprocess, "Popen", refuse)

    with reference_ids(byte_level.backend, TEXTS) as ids:
        assert_true_ids(ids(), byte_level)

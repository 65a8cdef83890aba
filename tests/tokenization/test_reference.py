"""HF's ids come from a second process, and are the same from anywhere."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from packhouse.tokenization import reference
from packhouse.tokenization.encoders import hf_encoder
from packhouse.tokenization.reference import reference_ids

TEXTS = pa.array(["the cat", "", "na\u00efve <|end|> \U0001f600", " the hat\n" * 50])


@pytest.fixture
def started(monkeypatch):
    """Processes that are started; any tokenizer is worth one."""
    processes = []
    start = reference.subprocess.Popen

    def counted(*args, **options):
        processes.append(start(*args, **options))
        return processes[-1]

    monkeypatch.setattr(reference.subprocess, "Popen", counted)
    monkeypatch.setattr(reference, "_MIN_BACKEND_BYTES", 0)
    monkeypatch.setattr(reference.load_tokenizer, "holds", lambda key: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    yield processes
    reference._end_kept()


def assert_true_ids(given, snapshot):
    ids, offsets = hf_encoder(snapshot).encode(TEXTS)
    assert given[0].dtype == np.int32
    assert given[0].tolist() == ids.tolist()
    assert given[1].tolist() == offsets.tolist()


def test_one_process_answers_every_question(byte_level, started):
    for _ in range(3):
        with reference_ids(byte_level.backend, TEXTS) as ids:
            assert_true_ids(ids(), byte_level)

    assert len(started) == 1


def test_a_process_that_was_ended_is_started_again(byte_level, started):
    with reference_ids(byte_level.backend, TEXTS) as ids:
        assert_true_ids(ids(), byte_level)
    started[0].kill()
    started[0].wait()

    with reference_ids(byte_level.backend, TEXTS) as ids:
        assert_true_ids(ids(), byte_level)
    assert len(started) == 2


def test_an_answer_that_nobody_took_is_not_given_to_the_next(byte_level, started):
    with reference_ids(byte_level.backend, pa.array(["other texts"])):
        pass

    with reference_ids(byte_level.backend, TEXTS) as ids:
        assert_true_ids(ids(), byte_level)
    assert len(started) == 2
    assert started[0].poll() is not None


def test_threads_take_turns(byte_level, started):
    def ask(number: int) -> list[int]:
        with reference_ids(byte_level.backend, pa.array(["the cat"] * number)) as ids:
            return ids()[1].tolist()

    with ThreadPoolExecutor(4) as pool:
        given = list(pool.map(ask, range(1, 13)))

    assert [len(offsets) - 1 for offsets in given] == list(range(1, 13))
    assert len(started) == 1


def test_more_text_than_a_pipe_holds(byte_level, started):
    texts = pa.array(["the cat " * 20_000])
    with reference_ids(byte_level.backend, texts) as ids:
        assert ids()[0].tolist() == hf_encoder(byte_level).encode(texts)[0].tolist()


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


def test_a_process_that_does_not_answer_is_ended(
    byte_level, started, tmp_path_factory, monkeypatch
):
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

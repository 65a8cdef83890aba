import json
import multiprocessing
import os
from pathlib import Path

import pytest

from packhouse.run.step_cache import StepStore


def write_hello(folder: Path) -> dict[str, int]:
    (folder / "a.txt").write_text("hello")
    return {"rows": 1}


def never(folder: Path) -> dict[str, int]:
    raise AssertionError("computed again")


def test_a_done_step_is_found_and_not_computed_again(tmp_path):
    steps = StepStore(tmp_path)
    assert not steps.run("s", "k", write_hello).cached

    again = StepStore(tmp_path).run("s", "k", never)

    assert again.cached
    assert again.facts == {"rows": 1}
    assert again.path("a.txt").read_text() == "hello"


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text("hellO"),
        lambda path: path.write_text("hell"),
        lambda path: (path.parent / "receipt.json").unlink(),
        lambda path: (path.parent / "receipt.json").write_text("{"),
        lambda path: (path.parent / "receipt.json").write_text("[]"),
    ],
    ids=["deleted", "altered", "shortened", "no receipt", "torn receipt", "other receipt"],
)
def test_a_damaged_step_is_computed_again(tmp_path, damage):
    steps = StepStore(tmp_path)
    path = steps.run("s", "k", write_hello).path("a.txt")
    damage(path)

    receipt = steps.run("s", "k", write_hello)

    assert not receipt.cached
    assert receipt.path("a.txt").read_text() == "hello"
    assert steps.find("s", "k") is not None


def test_a_receipt_under_another_key_is_not_believed(tmp_path):
    steps = StepStore(tmp_path)
    steps.run("s", "k1", write_hello)
    (tmp_path / "s" / "k1").rename(tmp_path / "s" / "k2")

    assert steps.find("s", "k2") is None


def test_a_failed_step_leaves_nothing(tmp_path):
    steps = StepStore(tmp_path)

    def fail(folder: Path) -> dict[str, int]:
        write_hello(folder)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        steps.run("s", "k", fail)

    assert steps.find("s", "k") is None
    assert list((tmp_path / "tmp").iterdir()) == []


def race(root: Path, barrier) -> None:
    barrier.wait()
    receipt = StepStore(root).run("s", "k", write_hello)
    assert receipt.path("a.txt").read_text() == "hello"


def test_two_processes_may_do_the_same_step_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    for number in range(3):
        root = tmp_path / str(number)
        barrier = context.Barrier(2)
        workers = [context.Process(target=race, args=(root, barrier)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0]
        assert StepStore(root).find("s", "k") is not None


def die(root: Path) -> None:
    def compute(folder: Path) -> dict[str, int]:
        write_hello(folder)
        os._exit(9)

    StepStore(root).run("s", "k", compute)


def test_a_killed_step_is_not_there_and_is_done_by_the_next_run(tmp_path):
    worker = multiprocessing.get_context("fork").Process(target=die, args=(tmp_path,))
    worker.start()
    worker.join()
    assert worker.exitcode == 9
    assert StepStore(tmp_path).find("s", "k") is None
    assert len(list((tmp_path / "tmp").iterdir())) == 1

    assert not StepStore(tmp_path).run("s", "k", write_hello).cached
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "alter",
    [
        lambda raw: raw["facts"].update(rows=2),
        lambda raw: raw.update(facts=None),
        lambda raw: raw.update(files={}),
        lambda raw: raw.pop("files"),
        lambda raw: raw.pop("digest"),
    ],
    ids=["other count", "no facts", "no files listed", "no files", "no digest"],
)
def test_an_altered_receipt_is_not_believed(tmp_path, alter):
    steps = StepStore(tmp_path)
    path = steps.run("s", "k", write_hello).path("receipt.json")
    raw = json.loads(path.read_bytes())
    alter(raw)
    path.write_text(json.dumps(raw, sort_keys=True, separators=(",", ":")))

    assert steps.find("s", "k") is None
    assert steps.run("s", "k", write_hello).facts == {"rows": 1}


def test_a_step_at_work_is_swept_by_nobody_however_old_it_looks(tmp_path, monkeypatch):
    """A worker whose clock was days ahead treated every running step as abandoned."""
    steps = StepStore(tmp_path)

    def compute(work: Path) -> dict[str, int]:
        os.utime(work, (0, 0))
        monkeypatch.setattr("time.time", lambda: 4e9)
        assert StepStore(tmp_path).sweep() == 0
        assert StepStore(tmp_path).run("s", "other", write_hello).facts == {"rows": 1}
        return write_hello(work)

    assert steps.run("s", "k", compute).facts == {"rows": 1}
    assert sorted(path.name for path in (tmp_path / "s" / "k").iterdir()) == [
        "a.txt",
        "receipt.json",
    ]

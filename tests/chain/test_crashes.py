"""kill -9 anywhere, concurrent runs, and data of every size and shape give the same version."""

import json
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from packhouse.store import open_version
from packhouse.tokenize import load_snapshot
from tests.chain.conftest import Project
from tests.chain.killed_run import SMALL, Run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small(monkeypatch):
    for (module, name), value in SMALL.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def recipe(project):
    """A recipe file for other processes, with the tokenizer files that they would read."""
    project.recipe()
    path = project.root / "recipe.yaml"
    path.write_text(path.read_text() + f"publish: {{store: {project.root / 'store'}}}\n")
    load_snapshot(project.recipe().tokenizer, project.cache / "tokenizers")
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Files of a run that was not killed."""
    project = Project(tmp_path_factory.mktemp("undisturbed"))
    project.write_rows(range(60))
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in SMALL.items():
            patch.setattr(module, name, value)
        return published(project, project.prepare())


def published(project, prepared):
    folder = project.folder(prepared)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def receipts_in(cache):
    return {
        (path.parent.parent.name, path.parent.name): path.stat().st_ino
        for path in (cache / "steps").glob("*/*/receipt.json")
    }


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("step", "nth", "when"),
    [("files", 2, "before"), ("publish", 1, "written")],
)
def test_a_run_that_was_killed_goes_on_without_doing_finished_jobs_again(
    project, recipe, small, undisturbed, step, nth, when
):
    code, said = Run(recipe, project.cache, step, nth, when).wait()
    assert code == -signal.SIGKILL, said
    done = receipts_in(project.cache)
    assert not list((project.root / "store").rglob("manifest.json"))

    resumed = project.prepare()

    assert {(r.step, r.key) for r in resumed.receipts if r.cached} == set(done)
    assert sum(receipt.step == step for receipt in resumed.receipts) >= nth
    after = receipts_in(project.cache)
    assert {name: after[name] for name in done} == done
    assert published(project, resumed) == undisturbed
    assert not list((project.root / "cache" / "steps" / "tmp").glob("*"))


def test_many_files_hold_the_rows_of_one(project, monkeypatch):
    one = project.prepare()
    for (module, name), value in SMALL.items():
        monkeypatch.setattr(module, name, value)
    project.cache = project.root / "another"
    many = project.prepare(f"publish.store={project.root / 'other'}")

    files = [receipt for receipt in many.receipts if receipt.step == "files"]
    assert len(files) > 6
    for split in ("train", "eval"):
        tables = []
        for prepared, root in ((one, "store"), (many, "other")):
            folder = project.root / root / "sums" / "v" / prepared.version
            opened = open_version(str(project.root / root), "sums", prepared.version)
            entries = opened.files("data", split)
            tables.append(
                [row for e in entries for row in pq.read_table(folder / e.key).to_pylist()]
            )
        assert tables[0] == tables[1]
    assert one.published.statistics == many.published.statistics


def test_one_row_is_a_version(project):
    project.write_rows(range(1))
    prepared = project.prepare("split.eval_fraction=0")
    assert prepared.published.statistics["train"].num_packs == 1
    assert prepared.published.statistics["eval"].num_packs == 0
    assert [e.split for e in open_version(prepared.store, "sums").files("data")] == ["train"]


@pytest.mark.parametrize(("count", "empty"), [(0, "eval"), (1000, "train")])
def test_one_side_may_be_empty(project, count, empty):
    prepared = project.prepare("split.eval_fraction=0", f"split.eval_count={count}")
    assert prepared.published.statistics[empty].num_packs == 0
    assert prepared.published.statistics[empty].fill == 1.0
    assert {e.split for e in open_version(prepared.store, "sums").files("data")} == {
        "train" if empty == "eval" else "eval"
    }


def test_many_tiny_files_need_no_file_descriptor_each(project, recipe):
    folder = project.root / "many"
    folder.mkdir()
    for number in range(90):
        row = {"instruction": f"Say {number}.", "output": f"{number}, as you wish."}
        (folder / f"{number:05d}.jsonl").write_text(json.dumps(row) + "\n")
    project.edit(sources=[{"path": str(folder), "format": "alpaca"}])
    run = Run(recipe, project.cache, "publish", 1, "never", num_files=75)
    assert run.wait() == (0, "")
    assert len(list((project.cache / "steps" / "tokenize").iterdir())) == 90

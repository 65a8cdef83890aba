"""Any number of worker processes publishes the same bytes."""

from hashlib import sha256
from types import SimpleNamespace

import pytest

from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace


def test_one_two_and_three_workers_publish_the_same_bytes(project, monkeypatch, real_reports):
    monkeypatch.setattr("packhouse.run.step._LEAST_BYTES", 0)  # each shard may have a process
    for number in range(5):
        numbers = range(100 * number, 100 * number + 40)
        project.write_rows(numbers, project.root / f"part-{number}.jsonl")
    source = {"path": "part-*.jsonl", "format": "alpaca"}
    project.write_recipe(sources=[source], split={"eval_fraction": 0.2})
    published = []
    for workers in (1, 2, 3):
        recipe, cache = project.recipe(), project.root / f"cache-{workers}"
        with LocalRunner(recipe=recipe, workspace=Workspace(cache=cache), workers=workers) as run:
            prepared = prepare(recipe, run, cache)
            assert (run.workers, run._pool is None) == (workers, workers == 1)
        version = project.folder(prepared)
        published.append(
            {
                str(path.relative_to(version)): sha256(path.read_bytes()).hexdigest()
                for path in version.rglob("*")
                if path.is_file()
            }
        )
        # Their recipes are equal, so each takes the same place.
        (project.root / "store").rename(project.root / f"store-{workers}")
    assert len(published[0]) > 5
    assert published[0] == published[1] == published[2]


@pytest.mark.parametrize(("num_bytes", "workers"), [(99_000_000, 1), (214_081_889, 2), (10**10, 4)])
def test_a_large_input_gets_a_worker_for_each_100_mb_up_to_one_per_core(
    num_bytes, workers, project, monkeypatch
):
    def stop(*_):
        raise InterruptedError

    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("packhouse.run.step.group_jobs", stop)  # the number is known by then
    run = LocalRunner(
        recipe=project.recipe(), workspace=Workspace(cache=project.cache), workers=None
    )
    with pytest.raises(InterruptedError):
        run([SimpleNamespace(size=num_bytes, step=SimpleNamespace(name="validate"))])
    assert run.workers == workers

"""Any number of worker processes publishes the same bytes."""

from hashlib import sha256

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

"""Guarantees of a step object, whatever the step does."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from packhouse.errors import ContractError
from packhouse.recipe import Recipe
from packhouse.records.table_schemas import write_table
from packhouse.run.chain import plan_jobs
from packhouse.run.step import JobContext, Step, execute
from packhouse.run.step_cache import Workspace


@dataclass(frozen=True)
class Told:
    limit: int
    place: str = "here"

    def to_json(self) -> dict[str, Any]:
        return {"limit": self.limit}


@dataclass(frozen=True)
class Part:
    first: int


@dataclass(frozen=True)
class Facts:
    rows: int
    reasons: Mapping[str, int]
    parts: tuple[Part, ...] = ()


def count(work: JobContext[Told], folder: Path) -> Facts:
    write_table(folder / "rows.arrow", pa.table({"n": range(work.parameters.limit)}))
    return Facts(rows=work.parameters.limit, reasons={"json": 1}, parts=(Part(2),))


COUNT = Step(
    name="count",
    title="Numbers in, rows out.",
    version="1",
    libraries=("pyarrow",),
    facts=Facts,
    compute=count,
    contracts={"rows.arrow": "rows"},
)


def workspace_at(folder: Path) -> Workspace:
    """A workspace without a contract for `rows`."""
    return Workspace(cache=folder, check=lambda contract, table: None)


RECIPE = Recipe(dataset="d", sources=[{"path": "a.jsonl"}], tokenizer="t")


def test_facts_come_back_from_the_receipt_as_they_were(tmp_path):
    job = COUNT.job(Told(3), inputs=[])
    done = execute(job, RECIPE, workspace_at(tmp_path))
    found = execute(job, RECIPE, workspace_at(tmp_path))

    assert found.cached
    assert found.facts == done.facts == Facts(rows=3, reasons={"json": 1}, parts=(Part(2),))
    assert COUNT.peek(job.key, workspace_at(tmp_path)).facts == done.facts


@pytest.mark.parametrize(
    "facts",
    [
        {"rows": 3},
        {"rows": "3", "reasons": {}},
        {"rows": 3, "reasons": {"json": None}},
        {"rows": 3, "reasons": {}, "parts": [{"last": 2}]},
        {},
    ],
    ids=["a field less", "text for a number", "no count", "another part", "none"],
)
def test_a_receipt_of_another_release_is_a_miss(tmp_path, facts):
    workspace = workspace_at(tmp_path)
    job = COUNT.job(Told(3), inputs=[])
    workspace.steps.run(*job.ref, lambda folder: facts)
    assert COUNT.peek(job.key, workspace) is None

    assert not execute(job, RECIPE, workspace).cached
    assert execute(job, RECIPE, workspace).facts.rows == 3


def test_a_key_depends_on_the_inputs_of_the_bytes_and_nothing_else():
    job = COUNT.job(Told(3), inputs=[("s", "a")])

    assert COUNT.job(Told(3, place="there"), inputs=[("s", "a")], label="x", size=9).key == job.key
    assert COUNT.job(Told(3), inputs=[("s", "a")], also_reads=[("s", "b")]).key == job.key
    others = [
        COUNT.job(Told(4), inputs=[("s", "a")]),
        COUNT.job(Told(3), inputs=[("s", "b")]),
        replace(COUNT, version="2").job(Told(3), inputs=[("s", "a")]),
        replace(COUNT, libraries=("numpy",)).job(Told(3), inputs=[("s", "a")]),
        replace(COUNT, name="recount").job(Told(3), inputs=[("s", "a")]),
    ]
    assert len({job.key, *(other.key for other in others)}) == 6


def test_a_file_that_breaks_its_contract_leaves_no_step(tmp_path):
    def refuse(contract: str, table: pa.Table) -> None:
        raise ContractError(f"{contract}: {table.num_rows} rows")

    job = COUNT.job(Told(3), inputs=[])
    with pytest.raises(ContractError, match="rows: 3 rows"):
        execute(job, RECIPE, Workspace(cache=tmp_path, check=refuse))
    assert COUNT.peek(job.key, workspace_at(tmp_path)) is None


def test_work_after_a_step_happens_in_every_run(tmp_path):
    seen = []

    def note(work, receipt):
        seen.append(receipt.cached)
        return replace(receipt, seconds=7.0)

    job = replace(COUNT, after_each_run=note).job(Told(1), inputs=[])
    done = [execute(job, RECIPE, workspace_at(tmp_path)) for _ in range(2)]
    assert seen == [False, True]
    assert [receipt.seconds for receipt in done] == [7.0, 7.0]


def test_jobs_travel_to_other_processes(project):
    plan = plan_jobs(project.recipe("dedup.exact=drop"))
    for job in (*plan, *plan.side_jobs):
        there = pickle.loads(pickle.dumps(job))  # noqa: S301 - made here
        assert (there.key, there.parameters, there.inputs) == (job.key, job.parameters, job.inputs)
        assert there.step.compute is job.step.compute

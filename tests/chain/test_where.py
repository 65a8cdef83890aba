"""A whole run with `where` and trees: ledger, lineage, the list of dropped rows, `verify`."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from packhouse.addons.plan import estimate
from packhouse.cli import cli
from packhouse.errors import ConfigError, EmptyDatasetError, QuarantineLimitError
from packhouse.recipe import Recipe
from packhouse.records.ledger import Filter, filters_of
from packhouse.run.chain import plan_jobs
from packhouse.run.step_cache import Workspace

WHERE = "length(output) > 16"


def with_where(project, **settings: object) -> Recipe:
    recipe = project.recipe()
    source = recipe.sources[0].model_copy(update={"where": WHERE, **settings})
    return recipe.model_copy(update={"sources": [source]})


def test_rows_dropped_by_each_expression_are_counted_wherever_rows_are_and_listed(project):
    outputs = [json.loads(line)["output"] for line in project.rows.read_text().splitlines()]
    short = sum(len(text) <= 16 for text in outputs)
    even = sum(len(text) > 16 and len(text) % 2 == 0 for text in outputs)
    assert min(short, even) > 0
    where = [WHERE, "length(output) % 2 = 1"]
    recipe = with_where(project, where=where)
    planned = estimate(recipe, plan_jobs(recipe), Workspace(cache=project.cache))

    prepared = project.prepare(recipe=recipe)

    again = estimate(recipe, plan_jobs(recipe), Workspace(cache=project.cache))
    counts = [Filter("rows", where[0], short, 60), Filter("rows", where[1], even, 60)]
    assert list(planned.filters) == list(again.filters) == counts
    assert prepared.ledger[0].dropped == {"filtered": short + even}
    folder = project.folder(prepared)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "duckdb" in manifest["libraries"]
    (source,) = manifest["lineage"]["sources"]
    assert source["dropped"] == {"filtered": short + even}
    assert source["filtered"] == {where[0]: short, where[1]: even}
    assert source["settings"]["where"] == where
    assert filters_of([source]) == counts
    (listed,) = (folder / "dropped").iterdir()
    rows = pq.read_table(listed).to_pylist()
    assert Counter(row["detail"] for row in rows) == {where[0]: short, where[1]: even}
    first = {"source": "rows/rows.jsonl", "row": 0, "reason": "filtered", "detail": where[0]}
    assert rows[0] == first
    for name, *options in (["verify"], ["pull", str(project.root / "pulled")]):
        done = CliRunner().invoke(cli, [name, str(project.root / "store" / "sums"), *options])
        assert done.exit_code == 0, done.output
    assert len(list((project.root / "pulled" / "dropped").iterdir())) == 1
    place, report = str(project.root / "store" / "sums"), project.root / "report.html"
    shown = " ".join(CliRunner().invoke(cli, ["show", place]).output.split())
    assert f"source 'rows': `where: {where[0]}` dropped {short} of 60 rows" in shown
    assert f"source 'rows': `where: {where[1]}` dropped {even} of 60 rows" in shown
    CliRunner().invoke(cli, ["report", place, "-o", str(report)])
    assert f">{even}</td>" in report.read_text().partition("Rows dropped by `where`")[2]


def test_two_sources_over_one_file_have_names_and_numbers_of_their_own(project):
    whole = project.recipe()
    (source,) = whole.sources
    where = {"short": "length(output) <= 16", "long": WHERE}

    def recipe(**names: str | None) -> Recipe:
        return whole.model_copy(
            update={
                "sources": [
                    source.model_copy(update={"where": where[side], "name": name})
                    for side, name in names.items()
                ]
            }
        )

    with pytest.raises(ConfigError, match="in two sources, so its rows would be counted twice"):
        plan_jobs(recipe(short=None, long=None))
    named = recipe(short="short", long="long")
    planned = estimate(named, plan_jobs(named), Workspace(cache=project.cache))
    prepared = project.prepare(recipe=named)
    again = estimate(named, plan_jobs(named), Workspace(cache=project.cache))
    assert list(planned.filters) == list(again.filters)
    assert sum(each.filtered for each in planned.filters) == planned.rows == 60
    assert prepared.ledger[0].rows_out == 60


def test_plan_foresees_the_refusal_that_a_run_meets(project):
    """3 of 60 rows are bad, with a limit of 2%: of all rows read, not of those that remain."""
    lines = project.rows.read_text().splitlines()
    rows = [{**json.loads(line), "n": "x" if i < 3 else str(i)} for i, line in enumerate(lines)]
    project.write(rows)
    few = with_where(project, where="cast(n as int) >= 40")  # 20 rows are left, and 37 are not

    def refusals(recipe: Recipe) -> tuple[str, ...]:
        return estimate(recipe, plan_jobs(recipe), Workspace(cache=project.cache)).refusals

    def limited(recipe: Recipe, share: float) -> Recipe:
        rules = recipe.validate_.model_copy(update={"max_quarantined": share})
        return recipe.model_copy(update={"validate_": rules})

    (refusal,) = refusals(limited(few, 0.02))
    assert refusal.startswith("3 of 60 rows (5.00%) are bad")
    with pytest.raises(QuarantineLimitError, match=r"3 of 60 rows \(5.00%\) are bad"):
        project.prepare(recipe=limited(few, 0.02))
    assert refusals(limited(few, 0.02)) == (refusal,)  # validate is done by now
    assert refusals(limited(few, 0.05)) == ()
    project.prepare(recipe=limited(few, 0.05))
    none = with_where(project, where="cast('x' || n as int) > 0")
    with pytest.raises(EmptyDatasetError):
        project.prepare(recipe=none)
    assert refusals(none)[0].startswith("60 of 60 rows (100.00%) are bad")


def test_a_filter_that_leaves_no_row_is_reported(project):
    with pytest.raises(
        EmptyDatasetError,
        match="no row is left of 60: `where` leaves out 60; `false` of rows 60; 0 are bad",
    ):
        project.prepare(recipe=with_where(project, where="false"))


@pytest.mark.parametrize("where", [5, [None], [5], {"a": 1}, ["n > 1", {"b": 1}]])
def test_filters_of_a_forged_manifest_are_left_out(where):
    found = filters_of([{"file": "a/a.jsonl", "rows": 9, "settings": {"where": where}}])

    assert {each.where for each in found} <= {"n > 1"}

"""`where` and trees in a whole run: ledger, lineage, the list of dropped rows, `verify`."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.recipe import Recipe
from packhouse.store import open_store, open_version
from packhouse.store.accounts import manifest_problems

pytest.importorskip("duckdb")

WHERE = "length(output) > 16"


def with_where(project, **settings: object) -> Recipe:
    recipe = project.recipe()
    source = recipe.sources[0].model_copy(update={"where": WHERE, **settings})
    return recipe.model_copy(update={"sources": [source]})


def test_what_where_drops_is_counted_and_listed_in_the_version(project):
    short = sum(
        len(json.loads(line)["output"]) <= 16 for line in project.rows.read_text().splitlines()
    )
    assert 5 < short < 50

    prepared = project.prepare(recipe=with_where(project))

    assert prepared.ledger[0].dropped == {"filtered": short}
    folder = project.folder(prepared)
    manifest = json.loads((folder / "manifest.json").read_text())
    (source,) = manifest["lineage"]["sources"]
    assert source["dropped"] == {"filtered": short}
    assert source["settings"]["where"] == WHERE
    assert "duckdb" in manifest["libraries"]
    (listed,) = (folder / "dropped").iterdir()
    rows = pq.read_table(listed).to_pylist()
    assert len(rows) == short
    assert {row["detail"] for row in rows} == {WHERE}
    assert rows[0] == {"source": "rows/rows.jsonl", "row": 0, "reason": "filtered", "detail": WHERE}
    for command in (["verify"], ["pull", str(project.root / "pulled")], ["show"]):
        name, *options = command
        done = CliRunner().invoke(cli, [name, str(project.root / "store" / "sums"), *options])
        assert done.exit_code == 0, done.output
    assert len(list((project.root / "pulled" / "dropped").iterdir())) == 1


def test_a_version_whose_filter_drops_nothing_has_no_list(project):
    prepared = project.prepare(recipe=with_where(project, where="true"))
    plain = project.prepare()

    assert not (project.folder(prepared) / "dropped").exists()
    assert prepared.version != plain.version
    assert prepared.published.content_id == plain.published.content_id


def test_another_expression_is_another_version_and_the_same_one_is_found(project):
    first = project.prepare(recipe=with_where(project))
    again = project.prepare(recipe=with_where(project))
    other = project.prepare(recipe=with_where(project, where="length(output) > 17"))

    assert not again.created
    assert again.version == first.version
    assert other.version != first.version


def test_appended_rows_leave_the_work_of_earlier_files_in_the_cache(project):
    project.write_rows(range(60, 90), project.root / "more.jsonl")
    recipe = with_where(project)
    more = recipe.sources[0].model_copy(update={"path": str(project.root / "more.jsonl")})
    recipe = recipe.model_copy(update={"sources": [*recipe.sources, more]})
    project.prepare(recipe=recipe)
    with (project.root / "more.jsonl").open("a") as file:
        file.write(
            json.dumps({"instruction": "q", "output": "a longer answer", "input": ""}) + "\n"
        )

    again = project.prepare(recipe=recipe)

    cached = {r.facts.origin.file: r.cached for r in again.receipts if r.step == "validate"}
    assert cached == {"rows/rows.jsonl": True, "more/more.jsonl": False}


def test_verify_sees_a_list_of_dropped_rows_that_is_gone(project):
    prepared = project.prepare(recipe=with_where(project))
    opened = open_version(open_store(str(project.root / "store")), "sums", prepared.version)
    (entry,) = opened.files("dropped")
    files = tuple(each for each in opened.manifest.files if each is not entry)
    short = prepared.ledger[0].dropped["filtered"]

    assert manifest_problems(opened.manifest) == []
    assert manifest_problems(replace(opened.manifest, files=files)) == [
        f"manifest.json: rows dropped: {short}; in dropped files: 0"
    ]


def test_rows_of_trees_are_listed_as_dropped(project, shared):
    flat = project.root / "flat.jsonl"
    with flat.open("w") as file:
        for line in (shared / "data/oasst_en_100_message.jsonl").read_bytes().splitlines():
            stack = [json.loads(line)]
            while stack:
                message = stack.pop()
                stack += message.pop("replies")
                file.write(json.dumps(message) + "\n")
    recipe = project.recipe()
    source = recipe.sources[0].model_copy(update={"path": str(flat), "format": "auto"})

    prepared = project.prepare(recipe=recipe.model_copy(update={"sources": [source]}))

    dropped = prepared.ledger[0].dropped
    assert prepared.ledger[0].rows_in == 1167
    assert prepared.ledger[0].rows_out == 100
    assert sum(dropped.values()) == 1067
    done = CliRunner().invoke(cli, ["verify", str(project.root / "store" / "sums")])
    assert done.exit_code == 0, done.output

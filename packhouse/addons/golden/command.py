"""`packhouse golden check | write`: pin the output of a recipe for chosen conversations."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from packhouse.addons.golden.pinning import check_pinned, pin, read_golden, write_golden
from packhouse.cli.options import recipe_options
from packhouse.errors import ConfigError
from packhouse.recipe import Recipe
from packhouse.records.tables import read_table
from packhouse.run.cache import Workspace
from packhouse.run.given import read_recipe
from packhouse.run.step import execute
from packhouse.run.steps.plan import plan_jobs
from packhouse.system.terminal import echo

_LOOK_AT = 1000  # rows per shard searched for different shapes


@click.group()
def golden() -> None:
    """Pin the text, ids and trained tokens that a recipe must produce for chosen conversations.

    \b
    packhouse golden write RECIPE --count 5      # then review the file, and add to the recipe:
                                                 # golden: golden.yaml
    packhouse golden check RECIPE
    """


@golden.command()
@recipe_options
def check(recipe_path: str, overrides: tuple[str, ...], cache: Path, as_json: bool) -> None:
    """Check the golden conversations of RECIPE, as every build does."""
    recipe = read_recipe(recipe_path, overrides)
    if recipe.golden is None:
        raise ConfigError(f"recipe '{recipe_path}' has no `golden: FILE`")
    result = check_pinned(recipe, Workspace(cache=cache).tokenizers)
    if as_json:
        echo(json.dumps({"golden": result.total}))
    else:
        echo(f"golden: {result.detail}")


@golden.command()
@recipe_options
@click.option(
    "--row",
    "rows",
    multiple=True,
    metavar="SOURCE/FILE:ROW",
    help="Pin this row, as lineage names it. May be repeated.",
)
@click.option("--count", type=int, help="Pin so many rows, of different shapes first.")
@click.option("--out", type=click.Path(path_type=Path), help="File. [default: the recipe's]")
def write(
    recipe_path: str,
    overrides: tuple[str, ...],
    cache: Path,
    as_json: bool,
    rows: tuple[str, ...],
    count: int | None,
    out: Path | None,
) -> None:
    """Pin the output of RECIPE for the selected rows and for rows already in the file.

    Review the file before you rely on it: it pins the current output, right or wrong.
    """
    recipe = read_recipe(recipe_path, overrides)
    path = out or (Path(recipe.golden) if recipe.golden else None)
    if path is None:
        path = Path(recipe_path).parent / "golden.yaml"
    items = read_golden(path) if path.exists() else []
    workspace = Workspace(cache=cache)
    if rows or count or not items:
        chosen = _chosen(recipe, workspace, rows, count if count or rows else 5)
        names = {item.get("name") for item in items}
        items += [item for item in chosen if item["name"] not in names]
    pinned = pin(items, recipe, workspace.tokenizers)
    write_golden(path, pinned)
    if as_json:
        echo(json.dumps({"golden": len(pinned), "file": str(path)}))
        return
    echo(f"{len(pinned)} golden conversations in {path}; look at what is trained:")
    for item in pinned:
        for example in item.get("examples", [item]):
            shown = example.get("trained_text") or example.get("refused")
            echo(f"  {item.get('name', '')}: {shown}")


def _chosen(
    recipe: Recipe, workspace: Workspace, rows: Sequence[str], count: int | None
) -> list[dict[str, Any]]:
    """Return the named rows, then `count` more: first one row per shape (its roles in order).

    With 900 rows (user, assistant), 90 rows (system, user, assistant) and `count` 3: one row of
    each shape, then the first of the others.
    """
    wanted = set(rows)
    found: dict[str, dict[str, Any]] = {}
    shapes: dict[tuple[str, ...], dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    for item in _rows(recipe, workspace, everything=bool(wanted)):
        if item["name"] in wanted:
            found[item["name"]] = item
        shape = tuple(message["role"] for message in item["messages"])
        if shape not in shapes:
            shapes[shape] = item
        elif len(others) < (count or 0):
            others.append(item)
    missing = wanted - found.keys()
    if missing:
        raise ConfigError(f"no row '{sorted(missing)[0]}' passed validation; names look like a/b:0")
    more = [item for item in (*shapes.values(), *others) if item["name"] not in wanted]
    return [*(found[row] for row in dict.fromkeys(rows)), *more[: count or 0]]


def _rows(recipe: Recipe, workspace: Workspace, *, everything: bool) -> Iterator[dict[str, Any]]:
    """Yield the conversations of every shard, named by source, file and row."""
    for job in plan_jobs(recipe).validate:
        table = read_table(execute(job, recipe, workspace).path("validated.arrow"))
        asides = ["tools", "arguments", "weight", "label"]
        table = table.select(["source", "row", "messages", *asides])
        for row in (table if everything else table.slice(0, _LOOK_AT)).to_pylist():
            messages = [
                {key: value for key, value in message.items() if value is not None}
                for message in row["messages"]
            ]
            item = {"name": f"{row['source']}:{row['row']}", "source": row["source"].split("/")[0]}
            extra = {key: row[key] for key in asides if row[key] is not None}
            yield {**item, "messages": messages, **extra}

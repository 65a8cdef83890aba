"""`packhouse explain RECIPE`: which steps would run, and which part of their key changed."""

import json
from pathlib import Path
from typing import Any

import click

from packhouse.cli.options import recipe_options
from packhouse.recipe import Recipe
from packhouse.records.ledger import ROW_STEPS
from packhouse.run.cache import Workspace
from packhouse.run.cache_room import LastJob, load_last_run
from packhouse.run.given import read_recipe
from packhouse.run.step import AnyJob
from packhouse.run.steps import STEPS
from packhouse.run.steps.pack import PACK
from packhouse.run.steps.plan import Plan, output_jobs, plan_jobs
from packhouse.system.terminal import console, echo
from packhouse.system.wording import cut_pair


@click.command()
@recipe_options
def explain(recipe_path: str, overrides: tuple[str, ...], cache: Path, as_json: bool) -> None:
    """Say which steps of RECIPE would run now, which are cached, and what changed since last time.

    Nothing is computed: sources and tokenizer are hashed, cached files are checked.
    """
    recipe = read_recipe(recipe_path, overrides)
    plan = plan_jobs(recipe)
    rows = explain_plan(plan, Workspace(cache=cache), recipe)
    if as_json:
        echo(json.dumps({"version_id": plan.version_id, "jobs": rows}))
    else:
        _print(rows, plan.version_id)


def explain_plan(plan: Plan, workspace: Workspace, recipe: Recipe) -> list[dict[str, Any]]:
    """Return a row per job: step, shard, whether it is cached, and if not, why not.

    The jobs behind pack follow from its result: where it is not done, a row says so for each step.
    """
    last = load_last_run(workspace.cache, recipe.dataset)
    packed = PACK.peek(plan.pack.key, workspace)
    if packed is None:
        rows = [_explain_job(job, workspace, last) for job in plan]
        why = ["how many jobs there are is known when pack is done"]
        unknown = {"label": "output", "key": None, "cached": False, "why": why}
        rows += [{"step": step, **unknown} for step in ("gather", "audit", "files")]
    else:
        jobs = (*tuple(plan)[:-1], *output_jobs(plan, recipe, packed.facts))
        rows = [_explain_job(job, workspace, last) for job in jobs]
    order = [step.name for step in STEPS]
    rows.sort(key=lambda row: order.index(row["step"]))
    gone = {label for step, label in last if step == "validate"} - {j.label for j in plan.validate}
    if gone:
        (pack,) = [row for row in rows if row["step"] == "pack"]
        pack["why"] = [f"no longer there: {', '.join(sorted(gone)[:3])}", *pack["why"]]
    return rows


def _explain_job(
    job: AnyJob, workspace: Workspace, last: dict[tuple[str, str], LastJob]
) -> dict[str, Any]:
    step = job.step.name
    row = {"step": step, "label": job.label, "key": job.key, "cached": True, "why": []}
    if workspace.steps.find(step, job.key, job.step.read_facts) is not None:
        return row
    before = last.get((step, job.label))
    if before is None:
        why = ["new shard" if last and step in ROW_STEPS else "never done"]
    elif before.key == job.key:
        why = ["its files are gone or were altered"]
    else:
        why = changed_parts(before.parts, dict(job.parts))
        own = [change for change in why if not change.startswith("inputs:")]
        why = own or ["an earlier step changed"]
    return {**row, "cached": False, "why": why}


def changed_parts(before: object, after: object, name: str = "") -> list[str]:
    """List the differences between two keys' parts, each as `name: before -> after`.

    Example:
        >>> changed_parts({"pack": {"seq_len": 2048}}, {"pack": {"seq_len": 4096}})
        ['pack.seq_len: 2048 -> 4096']
    """
    if isinstance(before, dict) and isinstance(after, dict):
        changes = []
        for key in sorted({*before, *after}):
            path = f"{name}.{key}" if name else key
            changes += changed_parts(before.get(key), after.get(key), path)
        return changes
    if before == after:
        return []
    old, new = cut_pair(json.dumps(before), json.dumps(after), 24)
    return [f"{name}: {old} -> {new}"]


def _print(rows: list[dict[str, Any]], version_id: str) -> None:
    from rich.text import Text

    out = console()
    for step in (step.name for step in STEPS):
        jobs = [row for row in rows if row["step"] == step]
        runs = [row for row in jobs if not row["cached"]]
        if not runs:
            count = f" ({len(jobs)} of {len(jobs)} jobs)"
            out.print(Text.assemble((f"{step:>9}  cached", "green"), count))
            continue
        count = f" ({len(runs)} of {len(jobs)} jobs)"
        out.print(Text.assemble((f"{step:>9}  runs", "yellow"), count))
        for row in runs[:5]:
            label = f"{row['label']}: " if len(jobs) > 1 else ""
            out.print(f"{'':>11}{label}{'; '.join(row['why'])}")
        if len(runs) > 5:
            out.print(f"{'':>11}... and {len(runs) - 5} more")
    out.print(f"  version  {version_id}")

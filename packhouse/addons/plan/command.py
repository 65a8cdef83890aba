"""`packhouse plan` and `packhouse explain`: show the expected result of a run, and its steps."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from packhouse.addons.plan.estimate import estimate
from packhouse.cli.options import recipe_options
from packhouse.read.files import source_name
from packhouse.recipe import Recipe
from packhouse.records.reasons import ROW_STEPS
from packhouse.run.cache import Workspace
from packhouse.run.cache_room import LastJob, cache_room, in_mb, load_last_run
from packhouse.run.chain import Plan, bytes_needed, output_jobs, plan_jobs
from packhouse.run.inputs import read_recipe
from packhouse.run.step import AnyJob
from packhouse.run.steps import STEPS
from packhouse.run.steps.pack import PACK
from packhouse.store.evolution import changed_keys
from packhouse.system.terminal import console, echo, print_table, print_text
from packhouse.system.wording import counted, cut_pair


@click.command()
@recipe_options
def plan(recipe_path: str, overrides: tuple[str, ...], cache: Path, as_json: bool) -> None:
    """Estimate the rows, records, tokens, packs and bytes that RECIPE would produce.

    Also show which rows would be quarantined, which steps are cached, and how much cache space a
    run needs. Only a sample of each source is read; counts of tokenized shards are exact.

    \b
    Example:
      $ packhouse plan recipe.yaml
      demo 0bc8b616aa87002e
        294 rows, 29,487 tokens, 58 packs, 0.1 MiB
      pack.seq_len  packs   fill  padding  records too long
               512     58  99.3%      209                 1
      ...
    """
    recipe = read_recipe(recipe_path, overrides)
    workspace = Workspace(cache=cache)
    jobs = plan_jobs(recipe)
    rows = explain_plan(jobs, workspace, recipe)
    hits = Counter(row.step for row in rows if row.cached)
    totals = Counter(row.step for row in rows if row.key)
    estimated = estimate(recipe, jobs, workspace)
    room, needed = cache_room(cache), bytes_needed(jobs, workspace)
    names = [step.name for step in STEPS]
    if as_json:
        cached = {step: {"cached": hits[step], "jobs": totals[step]} for step in names}
        facts = {"version_id": jobs.version_id, **asdict(estimated), "steps": cached}
        for line, other in zip(facts["seq_lens"], estimated.seq_lens, strict=True):
            line |= {"fill": other.fill, "num_padding": other.num_padding}
        facts["cache"] = {"needed_bytes": needed, **asdict(room)}
        echo(json.dumps(facts))
        return
    about = "" if estimated.is_exact else "about "
    console().print(f"{recipe.dataset} {jobs.version_id}", style="bold")
    console().print(f"  {estimated.totals}")
    for note in estimated.lines():
        print_text(f"note: {note}", 2)
    for refusal in estimated.refusals:
        print_text(f"the run would fail: {refusal}", 2)
    columns, lines = estimated.by_source()
    # An exact count stays a number, which is aligned to the right.
    cells = [[source, f"{about}{n:,}" if about else n, *others] for source, n, *others in lines]
    print_table(columns, cells)
    if estimated.seq_lens:
        trials = [
            (t.seq_len, t.num_packs, f"{t.fill:.1%}", t.num_padding, t.records_too_long)
            for t in estimated.seq_lens
        ]
        print_table(("pack.seq_len", "packs", "fill", "padding", "records too long"), trials)
    found = [f"{name} {hits[name]}/{totals[name] or '?'}" for name in names]
    print_text(f"cached: {', '.join(found)}")
    for each in estimated.filters:
        left_out = f"{each.filtered:,} of {counted(each.rows, 'row')}"
        print_text(f"source '{each.source}': `where: {each.where}` drops {about}{left_out}")
    for source in recipe.sources:
        for name, expression in source.select.items():
            print_text(f"source '{source_name(source)}': `select` {name} = {expression}")
    print_text(f"cache: this run adds about {in_mb(needed)}; {room}")
    if needed > room.free_bytes:
        echo("note: the run needs more space than is free. Free some with `packhouse cache gc`.")


@click.command()
@recipe_options
def explain(recipe_path: str, overrides: tuple[str, ...], cache: Path, as_json: bool) -> None:
    """Show which steps of RECIPE would run, which are cached, and what changed since the last run.

    No steps are run: the sources and the tokenizer are hashed and looked up in the cache.

    \b
    Example:
      $ packhouse explain recipe.yaml
       validate  cached (2 of 2 jobs)
           pack  runs (1 of 1 jobs)
                 pack.seq_len: 512 -> 1024
      ...
    """
    from rich.text import Text

    recipe = read_recipe(recipe_path, overrides)
    plan = plan_jobs(recipe)
    rows = explain_plan(plan, Workspace(cache=cache), recipe)
    if as_json:
        echo(json.dumps({"version_id": plan.version_id, "jobs": [asdict(row) for row in rows]}))
        return
    for step in (step.name for step in STEPS):
        jobs = [row for row in rows if row.step == step]
        runs = [row for row in jobs if not row.cached]
        what, style = ("runs", "yellow") if runs else ("cached", "green")
        count = f" ({len(runs or jobs)} of {len(jobs)} jobs)"
        console().print(Text.assemble((f"{step:>9}  {what}", style), count))
        for row in runs[:5]:
            label = f"{row.label}: " if len(jobs) > 1 else ""
            console().print(f"{'':>11}{label}{'; '.join(row.why)}")
        if len(runs) > 5:
            console().print(f"{'':>11}... and {len(runs) - 5} more")
    console().print(f"  version  {plan.version_id}")


@dataclass(slots=True)
class ExplainedJob:
    """Result of looking up one job in the cache."""

    step: str
    label: str
    key: str | None
    """None if it depends on a job that is not done."""
    cached: bool = True
    why: list[str] = field(default_factory=list)
    """Why the job runs; empty if it is cached."""


def explain_plan(plan: Plan, workspace: Workspace, recipe: Recipe) -> list[ExplainedJob]:
    """Return the jobs of a run in the order of the steps.

    Jobs after pack depend on its result. If pack is not done, each of these steps has a single row.
    """
    last = load_last_run(workspace.cache, recipe.dataset)
    packed = PACK.peek(plan.pack.key, workspace)
    if packed is None:
        rows = [_explain_job(job, workspace, last) for job in plan]
        why = ["the number of jobs is not known until pack is done"]
        rows.append(ExplainedJob("files", "output", None, False, why))
    else:
        written, last_job = output_jobs(plan, recipe, packed.facts)
        jobs = (*tuple(plan)[:-1], *written, last_job)
        rows = [_explain_job(job, workspace, last) for job in jobs]
    order = [step.name for step in STEPS]
    rows.sort(key=lambda row: order.index(row.step))
    # A removed shard has no job to explain, but it changes the input of pack.
    gone = {label for step, label in last if step == "validate"} - {j.label for j in plan.validate}
    if gone:
        (pack,) = [row for row in rows if row.step == "pack"]
        pack.why.insert(0, f"missing: {', '.join(sorted(gone)[:3])}")
    return rows


def _explain_job(
    job: AnyJob, workspace: Workspace, last: dict[tuple[str, str], LastJob]
) -> ExplainedJob:
    step = job.step.name
    if workspace.steps.find(step, job.key, job.step.read_facts) is not None:
        return ExplainedJob(step, job.label, job.key)
    before = last.get((step, job.label))
    if before is None:
        why = ["new shard" if last and step in ROW_STEPS else "never run"]
    elif before.key == job.key:
        why = ["its files are missing or changed"]
    else:
        changed = changed_keys(before.parts, dict(job.parts))
        # Changed inputs come from an earlier step, which has its own row with the reason.
        why = [
            f"{name}: {' -> '.join(cut_pair(json.dumps(old), json.dumps(new), 24))}"
            for name, (old, new) in sorted(changed.items())
            if name.partition(".")[0] != "inputs"
        ] or ["an earlier step changed"]
    return ExplainedJob(step, job.label, job.key, False, why)

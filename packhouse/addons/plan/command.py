"""`packhouse plan RECIPE`: a dry run, with rows, records, tokens, packs, bytes and cache hits."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from packhouse.addons.plan.estimate import Estimate, estimate
from packhouse.addons.plan.explain import explain_plan
from packhouse.cli.options import recipe_options
from packhouse.read.files import source_name
from packhouse.run.cache import Workspace
from packhouse.run.cache_room import cache_room, in_mb
from packhouse.run.given import read_recipe
from packhouse.run.steps import STEPS
from packhouse.run.steps.plan import bytes_needed, plan_jobs
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import console, echo, print_table, print_text
from packhouse.system.wording import counted


@click.command()
@recipe_options
def plan(recipe_path: str, overrides: tuple[str, ...], cache: Path, as_json: bool) -> None:
    """Estimate what RECIPE would give, before any work: rows, records, tokens, packs, bytes.

    Says how rows become records, which would be quarantined, which steps are cached, how much room
    the run will take in the cache, and how much there is. Reads a sample of each source; counts
    exactly what is tokenized already.
    """
    recipe = read_recipe(recipe_path, overrides)
    workspace = Workspace(cache=cache)
    jobs = plan_jobs(recipe)
    rows = explain_plan(jobs, workspace, recipe)
    hits = Counter(row["step"] for row in rows if row["cached"])
    totals = Counter(row["step"] for row in rows if row["key"])
    estimated = estimate(recipe, jobs, workspace)
    room, needed = cache_room(cache), bytes_needed(jobs, workspace)
    names = [step.name for step in STEPS]
    cached = {step: {"cached": hits[step], "jobs": totals[step]} for step in names}
    if as_json:
        facts = {"version_id": jobs.version_id, **asdict(estimated), "steps": cached}
        for line, other in zip(facts["seq_lens"], estimated.seq_lens, strict=True):
            line |= {"fill": other.fill, "num_padding": other.num_padding}
        facts["cache"] = {"needed_bytes": needed, **asdict(room)}
        echo(json.dumps(facts))
    else:
        _print(recipe.dataset, jobs.version_id, estimated, cached)
        for each in estimated.filters:
            left_out = f"{each.filtered:,} of {counted(each.rows, 'row')}"
            about = "" if estimated.is_exact else "about "
            print_text(f"where of {each.source} leaves out {about}{left_out}: {each.where}")
        for source in recipe.sources:
            for field, expression in source.select.items():
                print_text(f"select of {source_name(source)}: {field} = {expression}")
        print_text(f"cache:  this run adds about {in_mb(needed)}; {room}")
        if needed > room.free_bytes:
            echo("note: the run needs more room than is free; see `packhouse cache gc`")


def _print(
    dataset: str, version_id: str, facts: Estimate, cached: dict[str, dict[str, int]]
) -> None:
    from rich.table import Table

    out = console()
    about = "" if facts.is_exact else "about "
    out.print(f"{dataset} {version_id}", style="bold")
    out.print(
        f"  {about}{facts.num_rows}, {counted(facts.tokens, 'token')}, "
        f"{counted(facts.packs, 'pack')}, {facts.bytes / 2**20:,.1f} MiB"
    )
    for note in facts.lines():
        print_text(f"note: {note}", 2)
    for refusal in facts.refusals:
        print_text(f"the run would be refused: {refusal}", 2)
    table = Table(box=None, pad_edge=False)
    columns, lines = facts.by_source()
    for name in columns:
        is_name = name == "source"
        table.add_column(name, justify="left" if is_name else "right", overflow="fold")
    for source, rows, *others in lines:
        table.add_row(for_terminal(source), f"{about}{rows:,}", *(f"{n:,}" for n in others))
    print_table(table)
    if facts.seq_lens:
        table = Table(box=None, pad_edge=False)
        for name in ("pack.seq_len", "packs", "fill", "padding", "records too long"):
            table.add_column(name, justify="right")
        for each in facts.seq_lens:
            counts = (each.seq_len, each.num_packs, each.fill, each.num_padding)
            table.add_row(
                *(
                    f"{n:.1%}" if isinstance(n, float) else f"{n:,}"
                    for n in (*counts, each.records_too_long)
                )
            )
        print_table(table)
    hits = [f"{step} {line['cached']}/{line['jobs'] or '?'}" for step, line in cached.items()]
    print_text(f"cached: {', '.join(hits)}")

"""`packhouse ci RECIPE`: a data refresh as a job of a pipeline, with exit codes it understands."""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from packhouse.chain import prepare as prepare_chain
from packhouse.ci import (
    HELD_BACK,
    PlanFacts,
    all_gates,
    failed_gate,
    outcome_markdown,
    plan_facts,
    plan_markdown,
    summary_json,
    to_junit,
)
from packhouse.cli import exit_interrupted
from packhouse.contracts import installed_contracts
from packhouse.errors import ConfigError, PackhouseError, VersionNotFoundError
from packhouse.estimate import estimate
from packhouse.gates import GateLog, GateResult
from packhouse.interrupts import Interrupted, ignore_signals
from packhouse.jobs import Plan, plan_jobs
from packhouse.last_run import touch_last_run
from packhouse.local_pool import local_runner
from packhouse.progress import show_progress, start_phase
from packhouse.recipe import Recipe, load_recipe
from packhouse.refresh import Look, Planned, Refreshed, candidate_of, look, outcome_of, unchanged
from packhouse.step_mirror import StepMirror, open_mirror
from packhouse.store import OpenVersion, open_version
from packhouse.terminal import echo
from packhouse.workspace import Workspace, check_cache, find_cache

__all__ = ["ci"]

BUG = 1
"""Exit code: an error that is not packhouse's own."""

_NO_CONTRACTS = (
    "the contracts of tables between steps are not checked: `schemas` is not installed; install "
    'packhouse from its checkout (`pip install -e ".[flows]"`) to have them'
)


@dataclass(kw_only=True)
class _Job:
    """What became of a job so far."""

    recipe: Recipe | None = None
    facts: PlanFacts | None = None
    refreshed: Refreshed | None = None
    error: BaseException | None = None
    gates: GateLog = field(default_factory=GateLog)
    notes: list[str] = field(default_factory=list)
    only_plan: bool = False

    @property
    def outcome(self) -> str:
        if isinstance(self.error, Interrupted):
            return "interrupted"
        if self.error is not None:
            return "refused" if self.exit_code == 4 else "failed"
        return self.refreshed.outcome if self.refreshed else "planned"

    @property
    def exit_code(self) -> int:
        if isinstance(self.error, PackhouseError | Interrupted):
            return self.error.exit_code
        if self.error is not None:
            return BUG
        return HELD_BACK if self.outcome == "held" else 0

    def all_gates(self) -> list[GateResult]:
        """Return a result for every gate, reached or not."""
        if self.error is not None:
            self.gates.add(failed_gate(self.error, is_planned=self.facts is not None))
        failed = [gate.gate for gate in self.gates.results if gate.outcome == "failed"]
        why_not = f"the run ended at {failed[0]}" if failed else "only a plan was asked for"
        if isinstance(self.error, Interrupted):
            why_not = str(self.error)
        return all_gates(self.gates.results, why_not)


@click.command()
@click.argument("recipe_path", metavar="RECIPE", type=click.Path())
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Put a value over the recipe's."
)
@click.option(
    "--cache",
    default=None,
    metavar="PLACE",
    help="Folder of finished steps, or s3://bucket/prefix to share them between jobs.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes of this machine that do the work; the bytes are the same.",
)
@click.option("--plan-only", is_flag=True, help="Say what would come; run and publish nothing.")
@click.option("--approval", is_flag=True, help="Publish, and leave it to someone to move the ref.")
@click.option("--summary", type=click.Path(path_type=Path), help="Write markdown for a comment.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write the gates as JUnit XML.")
@click.option("--json-file", type=click.Path(path_type=Path), help="Write the summary as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def ci(
    recipe_path: str,
    overrides: tuple[str, ...],
    cache: str | None,
    workers: int,
    plan_only: bool,
    approval: bool,
    summary: Path | None,
    junit: Path | None,
    json_file: Path | None,
    as_json: bool,
) -> None:
    """Refresh the dataset of RECIPE as a job of a pipeline: plan, run, gates, summaries.

    If nothing changed, only the gates are checked. Needs no server. Summaries are written however
    the job ends, by SIGTERM and Ctrl-C too.

    \b
    Exit codes: 0 published or unchanged (or planned),
    2, 3  bad input: the recipe; a source or the tokenizer,
    4, 7  refused by a gate: nothing published; published, and the ref held back by drift,
    5, 6  infrastructure: the store; network or storage hiccups,
    130, 143  stopped by Ctrl-C (SIGINT); by SIGTERM,
    1     a bug.

    \b
    packhouse ci recipe.yaml --plan-only --summary plan.md
    packhouse ci recipe.yaml --cache s3://ci/cache --summary done.md --junit gates.xml
    """
    job = _Job(only_plan=plan_only)
    try:
        for path in (summary, junit, json_file):
            _check_folder(path)
        recipe = job.recipe = load_recipe(recipe_path, overrides)
        with show_progress():
            _do(job, recipe, cache, workers, approval)
    except (Exception, Interrupted) as error:
        job.error = error  # a bug or a signal, too, must not leave a pipeline without summaries
    if isinstance(job.error, Interrupted):
        ignore_signals()
    gates = job.all_gates()
    code = job.exit_code
    facts = summary_json(job.outcome, code, job.facts, gates, job.refreshed, job.error)
    facts["notes"] = job.notes
    _write(summary, _markdown(job, gates))
    _write(junit, to_junit(_name(job, recipe_path), gates))
    _write(json_file, json.dumps(facts, sort_keys=True, indent=2))
    if code == BUG and job.error is not None:
        raise job.error  # with its traceback, and exit code 1
    _say(job, facts, as_json)
    sys.exit(code)


def _do(job: _Job, recipe: Recipe, cache: str | None, workers: int, approval: bool) -> None:
    place = find_cache(cache)
    folder = check_cache(place.folder)
    workspace = Workspace(cache=folder)
    check = installed_contracts()
    if check is None:
        job.notes.append(_NO_CONTRACTS)
    else:
        workspace = Workspace(cache=folder, check=check)
    start_phase("planning")
    touch_last_run(folder, recipe.dataset)
    plan = plan_jobs(recipe)
    found = look(recipe, Planned(plan.version_id, plan))
    mirror = open_mirror(place)
    if mirror is not None:
        mirror.notes.extend(job.notes)
        job.notes = mirror.notes
    job.facts = _planned(recipe, plan, found, workspace, mirror)
    job.gates.add([GateResult(name="plan", outcome="passed")])
    if job.only_plan:
        return
    if found.is_unchanged or (approval and found.is_waiting):
        job.refreshed = unchanged(recipe, found, folder)
        job.gates.add(job.refreshed.gates)
        return
    update = {"ref": candidate_of(found.ref)} if approval else {}
    publish = recipe.publish.model_copy(update=update)
    published = recipe.model_copy(update={"publish": publish})
    with local_runner(published, workspace, workers) as local:
        prepared = prepare_chain(published, local, folder, plan, job.gates, mirror)
        job.refreshed = outcome_of(recipe, found, prepared)
    job.gates.add([gate for gate in job.refreshed.gates if gate.name == "publish"])


def _planned(
    recipe: Recipe, plan: Plan, found: Look, workspace: Workspace, mirror: StepMirror | None
) -> PlanFacts:
    steps = [(job.step, job.key) for job in plan]
    done = {step for step in steps if workspace.steps.peek(*step) is not None}
    if mirror is not None:
        done |= mirror.holding(step for step in steps if step not in done)
    jobs = Counter(step for step, _ in steps)
    ready = Counter(step for step, key in steps if (step, key) in done)
    cached = {step: (ready[step], jobs[step]) for step in jobs}
    estimated = estimate(recipe, plan, workspace)
    return plan_facts(recipe, plan, found, _current(recipe, found), estimated, cached)


def _current(recipe: Recipe, found: Look) -> OpenVersion | None:
    if found.current is None:
        return None
    try:
        return open_version(recipe.publish.store, recipe.dataset, found.current)
    except VersionNotFoundError:
        return None


def _markdown(job: _Job, gates: Any) -> str:
    parts = [plan_markdown(job.facts)] if job.facts else []
    if not job.only_plan or job.error is not None:
        parts.append(outcome_markdown(gates, job.refreshed))
    return "\n".join(parts)


def _name(job: _Job, recipe_path: str) -> str:
    return job.recipe.dataset if job.recipe else Path(recipe_path).stem


def _check_folder(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(
            f"'{path}' cannot be written: '{path.parent}' is no folder; make it first"
        )
    if path is not None and path.is_dir():
        raise ConfigError(f"'{path}' cannot be written: it is a folder; name a file in it")


def _write(path: Path | None, text: str) -> None:
    if path is not None and path.absolute().parent.is_dir() and not path.is_dir():
        path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _say(job: _Job, facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        echo(json.dumps(facts, sort_keys=True))
    if isinstance(job.error, Interrupted):
        exit_interrupted(job.error, keeps_steps=True)
    if as_json:
        return
    for note in job.notes:
        echo(f"note: {note}", err=True)
    if job.error is not None:
        echo(f"{type(job.error).__name__}: {job.error}", err=True)
    elif job.refreshed is not None:
        echo(f"{job.refreshed.dataset}: {job.refreshed.outcome}: {job.refreshed.message}")
    elif job.facts is not None:
        echo(plan_markdown(job.facts))

"""Refresh a dataset in a CI job: show the plan, run it, check gates, write summaries.

    plan         what a run would give, as markdown for a comment
    golden       pinned conversations give the pinned output
    quarantine   not more bad rows than the recipe allows
    audit        what the tokens teach is within the limits
    schema       readers of the ref can read the new version
    drift        the version differs from the ref's version by no more than the limits
    publish      the version is committed

A gate is passed, failed or not reached (`packhouse.records.gate_results`). This module holds the
state of a job and formats its summaries; `refresh` does the work.
"""

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from packhouse.cli import exit_interrupted, json_option, run_options, set_option
from packhouse.errors import HELD_BACK, ConfigError, ContractError, PackhouseError
from packhouse.records.gate_results import GateLog, GateResult, gates_table
from packhouse.records.ledger import filters_of
from packhouse.system.disks import disk_error
from packhouse.system.escaping import for_markdown, for_terminal, markdown_code, markdown_table
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.terminal import Interrupted, echo, ignore_signals, interruption, print_note

if TYPE_CHECKING:
    from packhouse.addons.ci.refresh import Refreshed
    from packhouse.addons.plan import Estimate

GATES = ("plan", "golden", "quarantine", "audit", "schema", "drift", "publish")

BUG = 1
"""Exit code of an error that packhouse did not raise itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """Expected outcome of a run, known before it starts."""

    dataset: str
    version_id: str
    current: str | None
    """Version that the ref points to."""
    estimate: "Estimate"
    cached: Mapping[str, Sequence[int]]
    """Step -> (finished jobs, jobs)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ: key -> (value in the ref's version, value in this plan)."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """File -> `added`, `changed` or `removed` since the ref's version."""


@dataclass(kw_only=True)
class CiJob:
    """State of a CI job, updated by `packhouse.addons.ci.refresh.run_job` as it runs."""

    dataset: str
    """Name in the recipe; the name of the recipe file until it has been read."""
    only_plan: bool = False
    facts: PlanFacts | None = None
    """The plan, as soon as it exists."""
    refreshed: "Refreshed | None" = None
    gates: GateLog = field(default_factory=GateLog)
    notes: list[str] = field(default_factory=list)
    error: BaseException | None = None
    """Error that ended the job early."""
    unwritten: list[PackhouseError] = field(default_factory=list)
    """Errors of summaries that could not be written."""

    @property
    def outcome(self) -> str:
        """Outcome of the refresh; or `planned`, `refused`, `failed`, `interrupted` (signal)."""
        if isinstance(self.error, Interrupted):
            return "interrupted"
        if self.error is not None:
            return "refused" if self.exit_code == 4 else "failed"
        return self.refreshed.outcome if self.refreshed else "planned"

    @property
    def exit_code(self) -> int:
        """Exit code of the process."""
        if isinstance(self.error, PackhouseError | Interrupted):
            return self.error.exit_code
        if self.error is not None:
            return BUG
        if self.outcome == "held":
            return HELD_BACK
        # A missing summary only counts if nothing worse happened.
        return self.unwritten[0].exit_code if self.unwritten else 0

    def all_gates(self) -> list[GateResult]:
        """Return a result for every gate, reached or not. Call it once, after the job has ended."""
        why_not = "skipped because of --plan-only"
        if isinstance(self.error, Interrupted):
            why_not = str(self.error)
        elif self.error is not None:
            self.gates.add(failed_gate(self.error, is_planned=self.facts is not None))
        failed = [gate.gate for gate in self.gates.results if gate.outcome == "failed"]
        return all_gates(self.gates.results, f"the run ended at {failed[0]}" if failed else why_not)

    def markdown(self, gates: Sequence[GateResult]) -> str:
        """Return the plan and the outcome as markdown for a comment on a pull request."""
        parts = [plan_markdown(self.facts)] if self.facts else []
        if not self.only_plan or self.error is not None:
            parts.append(outcome_markdown(gates, self.refreshed, self.error))
        return "\n".join(parts)


def plan_markdown(facts: PlanFacts) -> str:
    """Return the plan as markdown for a comment on a pull request."""
    ref = f"points to `{facts.current}`" if facts.current else "does not exist yet"
    lines = [
        f"### packhouse plan: {facts.dataset}",
        f"`{facts.version_id}`; the ref {ref}. Size: {facts.estimate.totals}.",
    ]
    # A version is `<id>.g<N>`: it gets a new N if garbage collection deleted the one before.
    if facts.current and facts.current.startswith(f"{facts.version_id}."):
        return "\n".join([*lines, "", "**Nothing changed**: only the gates are checked.", ""])
    lines += ["", *markdown_table(*facts.estimate.by_source())]
    ready = [(step, f"{done:,} of {jobs:,}") for step, (done, jobs) in facts.cached.items()]
    lines += ["", *markdown_table(("step", "already done"), ready)]
    if facts.sources:
        lines += ["", "Sources since the ref's version:", ""]
        lines += [f"- {what}: {markdown_code(name)}" for name, what in facts.sources.items()]
    if facts.settings:
        changed = [(key, _short(old), _short(new)) for key, (old, new) in facts.settings.items()]
        lines += ["", *markdown_table(("setting", "before", "now"), changed)]
    return "\n".join([*lines, ""])


def failed_gate(error: BaseException, is_planned: bool) -> list[GateResult]:
    """Return the gate results of an error, with at least one that failed.

    Args:
        error: error that ended the run.
        is_planned: False if it happened before the plan was made.

    Example:
        >>> failed_gate(PackhouseError("no such key"), is_planned=False)[0].name
        'plan'
    """
    results = list(error.facts.get("gates", ())) if isinstance(error, PackhouseError) else []
    if any(result.outcome == "failed" for result in results):
        return results
    name = "publish" if is_planned else "plan"
    if is_planned and isinstance(error, ContractError):
        name = "schema"
    is_bug = not isinstance(error, PackhouseError)
    detail = f"a bug: {type(error).__name__}: {error}" if is_bug else str(error)
    return [*results, GateResult(name=name, outcome="failed", detail=detail)]


def all_gates(results: Sequence[GateResult], why_not: str) -> list[GateResult]:
    """Return the results in the order of the gates, adding one for each gate without a result.

    Args:
        results: results of a run so far.
        why_not: why the other gates were not reached.

    Example:
        >>> gates = all_gates([GateResult(name="plan", outcome="failed")], "there is no plan")
        >>> [(gate.name, gate.outcome) for gate in gates][:3]
        [('plan', 'failed'), ('golden', 'not reached'), ('quarantine', 'not reached')]
    """
    found: list[GateResult] = []
    for gate in GATES:
        missing = GateResult(name=gate, outcome="not reached", detail=why_not)
        found += [each for each in results if each.gate == gate] or [missing]
    return found


def outcome_markdown(
    gates: Sequence[GateResult], refreshed: "Refreshed | None", error: BaseException | None = None
) -> str:
    """Return the outcome of a run as markdown, to follow its plan."""
    message = refreshed.message if refreshed else "nothing was published"
    if isinstance(error, Interrupted):  # the version may just have been published
        message = f"{error} before the run ended"
    lines = [f"### packhouse: {for_markdown(message)}", "", *gates_table(gates)]
    prepared = refreshed.prepared if refreshed else None
    if prepared is not None:
        from packhouse.cli.result_summary import block_markdown, ledger_block, splits_of

        filters = filters_of(prepared.published.sources)
        lines += ["", *block_markdown(ledger_block(prepared.ledger, filters), 4)]
        lines += block_markdown(splits_of(prepared.published), 4)
    return "\n".join([*lines, ""])


def to_junit(dataset: str, gates: Sequence[GateResult], error: BaseException | None = None) -> str:
    """Return the gates as a JUnit document: one test case per gate, with its time, value and limit.

    A signal fails no gate, but a document without failures would show as passed. Therefore it
    becomes an error of a test case `run`.

    Example:
        >>> gate = GateResult(name="audit", outcome="failed", detail="2 < 3", seconds=1.5)
        >>> to_junit("demo", [gate]).partition(' name="audit" ')[2].partition("</testcase>")[0]
        'time="1.500"><failure message="2 &lt; 3">2 &lt; 3</failure>'
    """
    is_interrupted = isinstance(error, Interrupted)
    outcomes = Counter(gate.outcome for gate in gates)
    counts = {
        "tests": str(len(gates) + is_interrupted),
        "failures": str(outcomes["failed"]),
        "skipped": str(outcomes["not reached"]),
        "errors": str(int(is_interrupted)),
        "time": f"{sum(gate.seconds for gate in gates):.3f}",
    }
    root = ET.Element("testsuites", counts)
    dataset = for_terminal(dataset)
    suite = ET.SubElement(root, "testsuite", {"name": f"packhouse {dataset}", **counts})
    for gate in gates:
        facts = {"classname": f"packhouse.{dataset}", "name": gate.name}
        case = ET.SubElement(suite, "testcase", {**facts, "time": f"{gate.seconds:.3f}"})
        # XML 1.0 has no control characters, but ElementTree writes them: no parser takes that.
        detail = for_terminal(gate.detail)
        if gate.outcome == "failed":
            ET.SubElement(case, "failure", {"message": detail}).text = detail
        elif gate.outcome == "not reached":
            ET.SubElement(case, "skipped", {"message": f"not reached: {detail}"})
        if gate.value is not None:
            limit = gate.shown_limit or "no limit"
            ET.SubElement(case, "system-out").text = f"{gate.shown_value} ({limit})"
    if is_interrupted:
        facts = {"classname": f"packhouse.{dataset}", "name": "run", "time": "0.000"}
        ET.SubElement(ET.SubElement(suite, "testcase", facts), "error", {"message": str(error)})
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


def summary_json(job: CiJob, gates: Sequence[GateResult]) -> dict[str, object]:
    """Return the whole outcome as plain JSON, for programs."""
    refreshed, result = job.refreshed, None
    if refreshed and refreshed.prepared:
        from packhouse.cli.result_summary import report_json

        result = report_json(refreshed.prepared)
    return {
        "outcome": job.outcome,
        "exit_code": job.exit_code,
        "version": refreshed.version if refreshed else None,
        "message": refreshed.message if refreshed else str(job.error) if job.error else "",
        "error": type(job.error).__name__ if job.error else None,
        "gates": [asdict(gate) for gate in gates],
        "plan": asdict(job.facts) if job.facts else None,
        "drift": asdict(refreshed.change.drift) if refreshed and refreshed.change else None,
        "result": result,
        "notes": [*job.notes, *map(str, job.unwritten)],
    }


def _short(value: object) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@click.command()
@click.argument("recipe_path", metavar="RECIPE", type=click.Path())
@set_option()
@run_options
@click.option(
    "--plan-only", is_flag=True, help="Show what would change, without running or publishing."
)
@click.option(
    "--approval",
    is_flag=True,
    help="Publish without moving the ref; the version waits for approval.",
)
@click.option(
    "--summary", type=click.Path(path_type=Path), help="Write Markdown for a pull request comment."
)
@click.option("--junit", type=click.Path(path_type=Path), help="Write the gates as JUnit XML.")
@click.option("--json-file", type=click.Path(path_type=Path), help="Write the summary as JSON.")
@json_option("Print the summary as JSON.")
def ci(
    recipe_path: str,
    overrides: tuple[str, ...],
    cache: str | None,
    workers: int | None,
    plan_only: bool,
    approval: bool,
    summary: Path | None,
    junit: Path | None,
    json_file: Path | None,
    as_json: bool,
) -> None:
    """Refresh a dataset in a CI job: check its gates and write summaries.

    If nothing changed, only the gates are checked. Summaries are written even if the job fails or
    is stopped. If one cannot be written, the others still are, and an exit code of 0 becomes 5.

    \b
    Example:
      $ packhouse ci recipe.yaml --plan-only --summary plan.md
      ### packhouse plan: demo
      294 rows, 29,487 tokens, 58 packs, 0.1 MiB
      ...

    \b
    Exit codes:
      0     published, unchanged or planned
      1     an internal error: a bug in packhouse
      2, 3  bad input: the recipe (2), or a source or the tokenizer (3)
      4     rejected by a gate: nothing was published
      5, 6  a store or disk error (5); a temporary network or storage error (6)
      7     published, but the ref did not move: the version drifted too far
      130   stopped by Ctrl-C (143: by SIGTERM, 129: by SIGHUP)
    """
    job = CiJob(dataset=Path(recipe_path).stem, only_plan=plan_only)
    try:
        for path in filter(None, (summary, junit, json_file)):
            if problem := _problem_of(path):
                raise ConfigError(f"cannot write '{path}': {problem}")
        with show_progress():
            start_phase("starting")
            # Imported late, because it takes over a second: a signal in the meantime must find code
            # that can write summaries.
            from packhouse.addons.ci.refresh import run_job

            run_job(job, recipe_path, overrides, cache=cache, workers=workers, approval=approval)
    except BaseException as error:  # a pipeline needs its summaries after any error
        job.error = interruption() or error  # C code may turn a signal into another error
    # A second signal must not interrupt the summaries.
    ignore_signals()
    gates = job.all_gates()
    _write(job, summary, job.markdown(gates))
    _write(job, junit, to_junit(job.dataset, gates, job.error))
    _write(job, json_file, json.dumps(summary_json(job, gates), sort_keys=True, indent=2))
    if job.error is not None and job.exit_code == BUG:
        raise job.error  # with its traceback, and exit code 1
    _print_outcome(job, summary_json(job, gates), as_json)
    sys.exit(job.exit_code)


def _problem_of(path: Path) -> str:
    """Return why a summary cannot be written, as far as its folder shows."""
    if not path.absolute().parent.is_dir():
        return f"'{path.parent}' is not a folder. Create it first."
    return "it is a folder. Pass a file name." if path.is_dir() else ""


def _write(job: CiJob, path: Path | None, text: str) -> None:
    """Write a summary; a failure does not prevent the other summaries."""
    if path is None or _problem_of(path):
        return  # already reported before the run
    try:
        # Python reads file names that are not UTF-8 as surrogates, which UTF-8 cannot encode.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        job.unwritten.append(disk_error(error, path, "the summary", "Choose another file."))


def _print_outcome(job: CiJob, facts: dict[str, object], as_json: bool) -> None:
    if as_json:
        echo(json.dumps(facts, sort_keys=True))
    else:
        for note in job.notes:
            print_note(f"note: {note}")
        for error in job.unwritten:
            print_note(f"{type(error).__name__}: {error}")
    if isinstance(job.error, Interrupted):
        exit_interrupted(job.error, keeps_steps=True)
    if as_json:
        return
    if job.error is not None:
        print_note(f"{type(job.error).__name__}: {job.error}")
    elif job.refreshed is not None:
        echo(f"{job.refreshed.dataset}: {job.refreshed.outcome}: {job.refreshed.message}")
    elif job.facts is not None:
        echo(plan_markdown(job.facts))

"""A data refresh as a CI job: the plan in words, the run, its gates, and summaries for machines.

    plan         what would come, before any work, as markdown for a comment
    golden       pinned conversations came out as pinned
    quarantine   not more bad rows than the recipe allows
    audit        what the tokens teach is within the limits
    schema       readers of the ref miss and misread nothing
    drift        the version is not further from the ref's than the limits
    publish      the version is committed

A gate is passed, failed, or was not reached (`packhouse.gates`). Nothing here prints or exits:
`packhouse ci` does.
"""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from packhouse.errors import ContractError, PackhouseError
from packhouse.escaping import for_markdown, for_terminal, markdown_code
from packhouse.estimate import Estimate
from packhouse.gates import GateResult
from packhouse.interrupts import Interrupted
from packhouse.jobs import Plan
from packhouse.recipe import Recipe
from packhouse.refresh import Look, Refreshed
from packhouse.report import report_json
from packhouse.steps.publish import configuration_of
from packhouse.store import OpenVersion
from packhouse.store.diff import changed_keys

__all__ = [
    "GATES",
    "HELD_BACK",
    "PlanFacts",
    "all_gates",
    "failed_gate",
    "outcome_markdown",
    "plan_facts",
    "plan_markdown",
    "summary_json",
    "to_junit",
]

GATES = ("plan", "golden", "quarantine", "audit", "schema", "drift", "publish")

HELD_BACK = 7
"""Exit code: the version is published, and its ref stays because it drifted too far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """What a run would do, known before any work."""

    dataset: str
    version_id: str
    current: str | None
    """Version that the ref points to."""
    estimate: Estimate
    cached: Mapping[str, Sequence[int]]
    """Step -> jobs done already, jobs."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Key -> value in the ref's version and in this plan, where they differ."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """File -> `added`, `changed` or `removed` since the ref's version."""


def plan_facts(
    recipe: Recipe,
    plan: Plan,
    found: Look,
    current: OpenVersion | None,
    estimate: Estimate,
    cached: Mapping[str, Sequence[int]],
) -> PlanFacts:
    """Put together what is known before any work."""
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if current is not None:
        settings = changed_keys(dict(current.manifest.configuration), _plain(recipe))
        sources = _changed_sources(plan, current)
    return PlanFacts(
        dataset=recipe.dataset,
        version_id=found.version_id,
        current=found.current,
        estimate=estimate,
        cached=cached,
        settings=settings,
        sources=sources,
    )


def plan_markdown(facts: PlanFacts) -> str:
    """Return the plan as markdown, ready for a comment on a pull request."""
    about = "" if facts.estimate.is_exact else "about "
    now = f"`{facts.current}`" if facts.current else "nothing yet"
    lines = [
        f"### packhouse plan: {facts.dataset}",
        f"`{facts.version_id}`; the ref is at {now}. {about}{facts.estimate.rows:,} rows, "
        f"{facts.estimate.tokens:,} tokens, {facts.estimate.packs:,} packs, "
        f"{facts.estimate.bytes / 2**20:,.1f} MiB.",
    ]
    if facts.current and facts.current.startswith(f"{facts.version_id}."):
        return "\n".join([*lines, "", "**Nothing changed**: there is nothing to do.", ""])
    lines += ["", "| source | rows | tokens |", "|---|---:|---:|"]
    for name, line in facts.estimate.sources.items():
        lines.append(f"| {for_markdown(name)} | {line['rows']:,} | {line['tokens']:,} |")
    lines += ["", "| step | done already |", "|---|---:|"]
    lines += [f"| {step} | {done} of {jobs} |" for step, (done, jobs) in facts.cached.items()]
    if facts.sources:
        lines += ["", "Sources since the ref's version:", ""]
        lines += [f"- {what}: {markdown_code(name)}" for name, what in facts.sources.items()]
    if facts.settings:
        lines += ["", "| setting | before | now |", "|---|---|---|"]
        for key, (old, new) in facts.settings.items():
            cells = (key, _short(old), _short(new))
            lines.append(f"| {' | '.join(map(for_markdown, cells))} |")
    return "\n".join([*lines, ""])


def failed_gate(error: BaseException, is_planned: bool) -> list[GateResult]:
    """Return the results that come with an error, with at least one that failed.

    Args:
        error: what ended the run.
        is_planned: False if it came before the plan was made.

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
    is_bug = not isinstance(error, PackhouseError | Interrupted)
    detail = f"a bug: {type(error).__name__}: {error}" if is_bug else str(error)
    return [*results, GateResult(name=name, outcome="failed", detail=detail)]


def all_gates(results: Sequence[GateResult], why_not: str) -> list[GateResult]:
    """Return the results in the order of the gates, with one for each gate that has none.

    Args:
        results: of a run, as far as it came.
        why_not: why the other gates were not reached.

    Example:
        >>> gates = all_gates([GateResult(name="plan", outcome="failed")], "there is no plan")
        >>> [(gate.name, gate.outcome) for gate in gates][:3]
        [('plan', 'failed'), ('golden', 'not reached'), ('quarantine', 'not reached')]
    """
    return [
        result
        for gate in GATES
        for result in [each for each in results if each.gate == gate]
        or [GateResult(name=gate, outcome="not reached", detail=why_not)]
    ]


def outcome_markdown(gates: Sequence[GateResult], refreshed: Refreshed | None) -> str:
    """Return what came of a run as markdown, to stand under its plan."""
    marks = {"passed": "passed", "failed": "**FAILED**", "not reached": "not reached"}
    message = refreshed.message if refreshed else "nothing was published"
    lines = [f"### packhouse: {for_markdown(message)}", ""]
    lines += ["| gate | outcome | value | limit | |", "|---|---|---:|---:|---|"]
    lines += [
        f"| {g.name} | {marks[g.outcome]} | {g.shown_value} | {g.shown_limit} "
        f"| {for_markdown(g.detail)} |"
        for g in gates
    ]
    prepared = refreshed.prepared if refreshed else None
    if prepared is not None:
        lines += ["", "| step | rows in | rows out | bad | dropped |", "|---|---:|---:|---:|---:|"]
        for line in prepared.ledger:
            bad, dropped = sum(line.quarantined.values()), sum(line.dropped.values())
            lines.append(
                f"| {line.step} | {line.rows_in:,} | {line.rows_out:,} | {bad:,} | {dropped:,} |"
            )
        lines += ["", "| split | packs | records | tokens | fill |", "|---|---:|---:|---:|---:|"]
        for split, facts in sorted(prepared.facts["statistics"].items(), reverse=True):
            lines.append(
                f"| {split} | {facts['num_packs']:,} | {facts['num_sequences']:,} "
                f"| {facts['num_tokens']:,} | {facts['fill']:.2%} |"
            )
    return "\n".join([*lines, ""])


def to_junit(dataset: str, gates: Sequence[GateResult]) -> str:
    """Return the gates as a JUnit document: a test case each, with its time, value and limit.

    Example:
        >>> gate = GateResult(name="audit", outcome="failed", detail="2 < 3", seconds=1.5)
        >>> to_junit("demo", [gate]).partition(' name="audit" ')[2].partition("</testcase>")[0]
        'time="1.500"><failure message="2 &lt; 3">2 &lt; 3</failure>'
    """
    seconds = sum(gate.seconds for gate in gates)
    counts = {
        "tests": str(len(gates)),
        "failures": str(sum(gate.outcome == "failed" for gate in gates)),
        "skipped": str(sum(gate.outcome == "not reached" for gate in gates)),
        "errors": "0",
        "time": f"{seconds:.3f}",
    }
    root = ET.Element("testsuites", counts)
    dataset = for_terminal(dataset)
    suite = ET.SubElement(root, "testsuite", {"name": f"packhouse {dataset}", **counts})
    for gate in gates:
        case = ET.SubElement(suite, "testcase", {"classname": f"packhouse.{dataset}"})
        case.set("name", gate.name)
        case.set("time", f"{gate.seconds:.3f}")
        detail = for_terminal(gate.detail)
        if gate.outcome == "failed":
            ET.SubElement(case, "failure", {"message": detail}).text = detail
        elif gate.outcome == "not reached":
            ET.SubElement(case, "skipped", {"message": f"not reached: {detail}"})
        if gate.value is not None:
            limit = gate.shown_limit or "no limit"
            ET.SubElement(case, "system-out").text = f"{gate.shown_value} ({limit})"
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


def summary_json(
    outcome: str,
    exit_code: int,
    facts: PlanFacts | None,
    gates: Sequence[GateResult],
    refreshed: Refreshed | None,
    error: BaseException | None,
) -> dict[str, Any]:
    """Return everything that a program may want to know, as plain JSON."""
    prepared = refreshed.prepared if refreshed else None
    return {
        "outcome": outcome,
        "exit_code": exit_code,
        "version": refreshed.version if refreshed else None,
        "message": refreshed.message if refreshed else str(error) if error else "",
        "error": type(error).__name__ if error else None,
        "gates": [asdict(gate) for gate in gates],
        "plan": asdict(facts) if facts else None,
        "drift": asdict(refreshed.drift) if refreshed and refreshed.drift else None,
        "result": report_json(prepared) if prepared else None,
    }


def _plain(recipe: Recipe) -> dict[str, Any]:
    return configuration_of(recipe)


def _changed_sources(plan: Plan, current: OpenVersion) -> dict[str, str]:
    before = _shards(
        (s.get("file"), s.get("sha256")) for s in current.manifest.lineage.get("sources", ())
    )
    now = _shards((j.shard.file, j.shard.sha256) for j in plan.validate if j.shard is not None)
    changes = {}
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            changes[name] = (
                "added" if name not in before else "removed" if name not in now else "changed"
            )
    return changes


def _shards(pairs: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, digest in pairs:
        found.setdefault(name, []).append(digest)
    return {name: sorted(digests) for name, digests in found.items()}


def _short(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

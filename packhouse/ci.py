"""A data refresh as a CI job: the plan in words, the run, its gates, and summaries for machines.

    plan         what would come, before any work, as markdown for a comment
    quarantine   not more bad rows than the recipe allows
    golden       pinned conversations came out as pinned
    audit        what the tokens teach is within the limits
    schema       readers of the ref miss and misread nothing
    drift        the version is not further from the ref's than the limits
    publish      the version is committed

A gate is passed, failed, or was not reached. Nothing here prints or exits: `packhouse ci` does.
"""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from packhouse.errors import (
    AuditError,
    ConfigError,
    ContractError,
    EmptyDatasetError,
    PackhouseError,
    QuarantineLimitError,
    SequenceTooLongError,
    SourceError,
    TemplateError,
    TokenizerError,
)
from packhouse.estimate import Estimate
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
    "Gate",
    "PlanFacts",
    "gates_of",
    "outcome_markdown",
    "plan_facts",
    "plan_markdown",
    "summary_json",
    "to_junit",
]

GATES = ("plan", "quarantine", "golden", "audit", "schema", "drift", "publish")

HELD_BACK = 7
"""Exit code: the version is published, and its ref stays because it drifted too far."""

State = Literal["passed", "failed", "not reached"]

_GATE_OF: dict[type[PackhouseError], str] = {
    ConfigError: "plan",
    SourceError: "plan",
    TokenizerError: "plan",
    EmptyDatasetError: "quarantine",
    QuarantineLimitError: "quarantine",
    TemplateError: "quarantine",
    SequenceTooLongError: "quarantine",
    AuditError: "audit",
    ContractError: "schema",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One gate of a run."""

    name: str
    state: State
    detail: str = ""


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
        lines.append(f"| {_cell(name)} | {line['rows']:,} | {line['tokens']:,} |")
    lines += ["", "| step | done already |", "|---|---:|"]
    lines += [f"| {step} | {done} of {jobs} |" for step, (done, jobs) in facts.cached.items()]
    if facts.sources:
        lines += ["", "Sources since the ref's version:", ""]
        lines += [f"- {what}: `{_cell(name)}`" for name, what in facts.sources.items()]
    if facts.settings:
        lines += ["", "| setting | before | now |", "|---|---|---|"]
        for key, (old, new) in facts.settings.items():
            lines.append(f"| {key} | {_cell(_short(old))} | {_cell(_short(new))} |")
    return "\n".join([*lines, ""])


def gates_of(
    recipe: Recipe | None, refreshed: Refreshed | None, error: Exception | None
) -> list[Gate]:
    """Say of each gate whether it was passed, as a run ended with a result or an error."""
    if error is not None:
        detail = str(error)
        if not isinstance(error, PackhouseError):
            detail = f"a bug: {type(error).__name__}: {error}"
        return _gates_until(_failed_gate(error), detail)
    gates = []
    for name in GATES:
        state: State = "passed"
        detail = ""
        if refreshed is None and name != "plan":
            state = "not reached"
        elif refreshed is not None and refreshed.outcome == "unchanged" and name != "plan":
            state, detail = "not reached", "nothing changed"
        elif name == "golden" and (recipe is None or recipe.golden is None):
            state, detail = "not reached", "the recipe pins no conversations"
        elif name == "drift" and refreshed is not None and refreshed.outcome == "held":
            state, detail = "failed", refreshed.message
        gates.append(Gate(name=name, state=state, detail=detail))
    return gates


def outcome_markdown(gates: Sequence[Gate], refreshed: Refreshed | None) -> str:
    """Return what came of a run as markdown, to stand under its plan."""
    marks = {"passed": "passed", "failed": "**FAILED**", "not reached": "-"}
    message = refreshed.message if refreshed else "nothing was published"
    lines = [f"### packhouse: {_cell(message)}", "", "| gate | | |", "|---|---|---|"]
    lines += [f"| {g.name} | {marks[g.state]} | {_cell(g.detail)} |" for g in gates]
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


def to_junit(dataset: str, gates: Sequence[Gate], seconds: float) -> str:
    """Return the gates as a JUnit document: a test case each.

    Example:
        >>> to_junit("demo", [Gate(name="audit", state="failed", detail="2 < 3")], 1.5)[-81:]
        'failure message="2 &lt; 3">2 &lt; 3</failure></testcase></testsuite></testsuites>'
    """
    counts = {
        "tests": str(len(gates)),
        "failures": str(sum(gate.state == "failed" for gate in gates)),
        "skipped": str(sum(gate.state == "not reached" for gate in gates)),
        "errors": "0",
        "time": f"{seconds:.3f}",
    }
    root = ET.Element("testsuites", counts)
    dataset = _xml(dataset)
    suite = ET.SubElement(root, "testsuite", {"name": f"packhouse {dataset}", **counts})
    for gate in gates:
        case = ET.SubElement(suite, "testcase", {"classname": f"packhouse.{dataset}"})
        case.set("name", gate.name)
        if gate.state == "failed":
            ET.SubElement(case, "failure", {"message": _xml(gate.detail)}).text = _xml(gate.detail)
        elif gate.state == "not reached":
            ET.SubElement(case, "skipped", {"message": _xml(gate.detail)})
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


def summary_json(
    outcome: str,
    exit_code: int,
    facts: PlanFacts | None,
    gates: Sequence[Gate],
    refreshed: Refreshed | None,
    error: Exception | None,
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


def _failed_gate(error: Exception) -> str:
    for kind, gate in _GATE_OF.items():
        if type(error) is kind:
            return "golden" if gate == "audit" and "golden" in str(error)[:40].lower() else gate
    return "publish"


def _gates_until(failed: str, detail: str) -> list[Gate]:
    place = GATES.index(failed)
    gates = []
    for number, name in enumerate(GATES):
        state: State = "passed" if number < place else "not reached"
        gates.append(
            Gate(name=name, state="failed", detail=detail)
            if name == failed
            else Gate(name=name, state=state)
        )
    return gates


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


def _cell(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return " ".join(text.replace("@", "@\u200b").split())  # mentions nobody


def _xml(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return "".join(
        c
        for c in text
        if c in "\t\n" or " " <= c < "\ud800" or "\udfff" < c < "\ufffe" or c > "\uffff"
    )

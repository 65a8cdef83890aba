"""Sections of a report: what was left out, quality, leakage, audit."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from packhouse.addons.report.figures import reasons_figure
from packhouse.addons.report.html import details, figure, section, table
from packhouse.auditing.gate import check_audit
from packhouse.auditing.inference import inference_line
from packhouse.errors import AuditError
from packhouse.recipe import AuditConfig
from packhouse.recipe.audit import QUALITY_COUNTERS
from packhouse.records.gates import GateResult
from packhouse.records.ledger import Filter, LedgerLine, sum_by_reason, units_of
from packhouse.records.reasons import DROP_REASONS, QUARANTINE_REASONS
from packhouse.store.manifest import Manifest, RowPlace
from packhouse.system.escaping import html_text
from packhouse.system.wording import counted

Measured = Mapping[str, Any]


def left_out_section(manifest: Manifest, measured: Measured) -> str:
    """Rows and records that are not in the version, with reasons, examples and remedies."""
    ledger = manifest.facts.counts.ledger
    counts = [
        (reason, kind, number)
        for kind in ("quarantined", "dropped")
        for reason, number in sum_by_reason(ledger, kind).most_common()
    ]
    if not counts:
        nothing = "<p>Every row that was read is in this version.</p>" if ledger else ""
        return section("left-out", "Left out", nothing)
    drawn = reasons_figure(
        "reasons",
        "Rows and records left out, by reason",
        "What is quarantined is bad; what is dropped is left out by a rule of the recipe.",
        counts,
    )
    inner = "".join([*_quarantined(ledger, measured), *_dropped(manifest, measured)])
    return section("left-out", "Left out", figure(drawn), inner)


def _quarantined(ledger: Sequence[LedgerLine], measured: Measured) -> Iterator[str]:
    examples = {(e["step"], e["reason"]): e["examples"] for e in measured["quarantine"]}
    units = units_of(ledger)
    for line in ledger:
        for reason, number in line.quarantined.items():
            many = counted(number, units[line.step][1])
            known = QUARANTINE_REASONS.get(line.step, {}).get(reason)
            yield _reason(reason, f"{many} quarantined by {line.step}", known)
            rows = examples.get((line.step, reason), [])
            shown = "".join(
                f"<p class=quiet>{html_text(row['source'])}, row {row['row']:,}: "
                f"{html_text(row['detail'])}</p><p class=raw dir=auto>{html_text(row['raw'])}"
                f"{_rest(row)}</p>"
                for row in rows
            )
            yield details(counted(len(rows), "example"), shown)


def _rest(row: Mapping[str, Any]) -> str:
    more = row["raw_size"] - len(row["raw"].encode("utf-8", "replace"))
    return (
        f" <i class=quiet>... {counted(more, 'more byte')}</i>"
        if more > 0 and len(row["raw"]) > 390
        else ""
    )


def _dropped(manifest: Manifest, measured: Measured) -> Iterator[str]:
    ledger = manifest.facts.counts.ledger
    units = {
        reason: unit
        for line, (unit, _) in zip(ledger, units_of(ledger).values(), strict=False)
        for reason in line.dropped
    }
    for reason, number in sum_by_reason(ledger, "dropped").most_common():
        said = f"{counted(number, units[reason])} dropped"
        yield _reason(reason, said, DROP_REASONS.get(reason))
        if reason == "filtered":
            yield filters_table(manifest.filters())
        rows = measured["dropped"].get(reason, [])
        cells = [[row["source"], row["row"], row["detail"]] for row in rows]
        shown = table(("source", "row", "what"), cells, f"Examples of {reason}")
        yield details(counted(len(rows), "example"), shown if rows else "")


def filters_table(filters: Iterable[Filter]) -> str:
    """What each expression of `where` left out."""
    counts = [[each.source, each.where, each.filtered, each.rows] for each in filters]
    names = ("source", "where", "rows left out", "rows read")
    return table(names, counts, "What `where` left out")


def _reason(reason: str, said: str, known: Any) -> str:
    text = f"{known.meaning}. What helps: {known.remedy}." if known else ""
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", html_text(text[:1].upper() + text[1:]))
    head = f"<h3>{html_text(reason)} <span class=quiet>{html_text(said)}</span></h3>"
    return f"{head}<p>{marked}</p>"


def quality_section(manifest: Manifest) -> str:
    """Counters of quality by source, with the first rows of each."""
    found = manifest.facts.audit.quality
    if found is None:
        return ""
    scopes = {"rows": found.dataset}
    if len(found.sources) > 1:
        scopes = {**found.sources, "all": found.dataset}
    rows = []
    for counter, says in QUALITY_COUNTERS.items():
        counts = [scope.get(counter, 0) for scope in scopes.values()]
        if any(counts):
            named = _rows_by_file(found.worst.get(counter, ())[:3])
            rows.append([counter.replace("_", " "), *counts, says, named])
    columns = ("counter", *scopes, "they", "such as")
    none = [name.replace("_", " ") for name in QUALITY_COUNTERS if not found.dataset.get(name)]
    said = f"<p class=quiet>Of {counted(found.dataset.get('rows', 0), 'row')}."
    said += f" Found in no row: {html_text(', '.join(none))}." if none else ""
    said += "</p>"
    spoken = [[name, number] for name, number in found.languages.items()]
    inner = table(columns, rows, "Counters of quality") if rows else ""
    inner += table(("language of answers", "rows"), spoken, "Languages") if spoken else ""
    return section("quality", "Quality", said, inner)


def _rows_by_file(rows: Sequence[RowPlace]) -> str:
    """Places of rows, each file once: `a/a.jsonl rows 3, 17; b/b.jsonl rows 4`."""
    files: dict[str, list[str]] = {}
    for row in rows:
        files.setdefault(row.source, []).append(f"{row.row:,}")
    return "; ".join(
        f"{name} row{'s' * (len(its) > 1)} {', '.join(its)}" for name, its in files.items()
    )


def duplicates_section(manifest: Manifest) -> str:
    """Duplicates, near duplicates, and what train and eval share."""
    counts, audit = manifest.facts.counts, manifest.facts.audit.dataset
    if not audit:
        return ""
    rows: list[list[Any]] = [
        ["records that repeat an earlier one", audit.get("duplicates", 0)],
        ["prompts that several records share", audit.get("prompt_groups", 0)],
        ["records with such a prompt", audit.get("prompt_group_records", 0)],
        ["records in train and in eval", audit.get("both_sides", 0)],
    ]
    for name, side in sorted(counts.sides.items(), reverse=True):
        if side.records:
            rows.append([f"groups in {name}", side.groups])
    found = manifest.facts.audit.contamination
    if found:
        rows.append(["rows that share words with a benchmark", found.contaminated])
    for name, value in counts.dedup.items():
        if isinstance(value, int):
            rows.append([f"dedup: {name.replace('_', ' ')}", value])
    inner = table(("what", "number"), rows, "Duplicates and leakage")
    return section("duplicates", "Duplicates and leakage", inner)


def audit_section(manifest: Manifest, limits: AuditConfig) -> str:
    """Each limit with what was found."""
    if not manifest.facts.audit.packs:
        return ""
    try:
        results = check_audit(manifest.audit, limits)
    except AuditError as error:
        results = error.gates
    except (KeyError, TypeError, ValueError):  # the facts of another program
        return ""
    body = "".join(_gate_row(each) for each in results)
    head = "<th scope=col>".join(["", "check", "result", "found", "limit", "what was counted"])
    inner = (
        '<div class=scroll role=group tabindex=0 aria-label="Audit"><table><caption class=hidden>'
        f"Audit</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    line = inference_line(manifest.audit)
    said = f"<p class=quiet>{html_text(line[:1].upper() + line[1:])}.</p>" if line else ""
    return section("audit", "Audit", said, inner)


def _gate_row(gate: GateResult) -> str:
    name = gate.name.removeprefix("audit.").removeprefix("max_").removeprefix("min_")
    good = gate.outcome == "passed"
    names = "quiet wide" if len(gate.detail) > 60 else "quiet"
    return (
        f"<tr><td>{html_text(name.replace('_', ' '))}</td>"
        f"<td class={'good' if good else 'bad'}>{'&#10003; ' if good else '&#10007; '}"
        f"{gate.outcome}</td><td class=number>{gate.shown_value}</td>"
        f'<td>{gate.shown_limit}</td><td class="{names}">{html_text(gate.detail)}</td></tr>'
    )

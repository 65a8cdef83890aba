"""The gate: an audit against the recipe's limits; a breach names the worst rows and stops."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packhouse.auditing.inference import THOUGHT_LOST
from packhouse.errors import AuditError
from packhouse.recipe import AuditConfig
from packhouse.recipe.audit import QUALITY_COUNTERS
from packhouse.records.gates import GateResult
from packhouse.system.wording import counted

# limit of AuditConfig -> finding, what it is a share of, what it says of a source
_SHARES = {
    "max_unterminated_turns": (
        "unterminated_turns",
        "turns",
        "trained turns have no trained end token: the model would learn not to stop",
    ),
    "max_leaked_headers": (
        "leaked_headers",
        "turns",
        "trained turns begin with their header or BOS",
    ),
    "max_missing_headers": (
        "missing_headers",
        "rows",
        "rows lack a header before their answer, or the begin of a conversation: prompts were cut",
    ),
    "max_untrained_starts": (
        "untrained_starts",
        "rows",
        "rows have an answer whose first tokens are not trained: the mask begins late",
    ),
    "max_leaks": (
        "leaks",
        "rows",
        "rows hold several records and do not say where they begin: each would see those before it",
    ),
    "max_untrained_rows": ("untrained_rows", "rows", "rows have no trained token"),
    "max_double_bos": ("double_bos", "rows", "rows have a BOS token right behind another"),
    "max_missing_bos": ("missing_bos", "rows", "rows lack the BOS that the tokenizer puts"),
    "max_double_ends": ("double_ends", "rows", "rows have an end token right behind another"),
    "max_unknown_tokens": ("unknown_tokens", "tokens", "tokens are unknown to the tokenizer"),
    "max_duplicates": ("duplicates", "rows", "rows repeat an earlier row"),
}
_OF_PACKS = {
    "max_untrained_packs": ("untrained_packs", "packs", "packs have no trained token"),
    "max_cut_sequences": (
        "cut_sequences",
        "sequences",
        "sequences end on a trained token that ends no turn: the model would learn not to stop",
    ),
}


def check_audit(audit: Mapping[str, object], config: AuditConfig) -> tuple[GateResult, ...]:
    """Hold an audit against the limits, for each source and the whole.

    Returns:
        A result for each limit, of the source that is nearest to it.

    Raises:
        AuditError: a limit is passed; says which, by how much, and names the worst rows.
    """
    findings = list(_findings(audit, config))
    results = _results(findings)
    breaches = [_breach(audit, finding) for finding in findings if finding.is_breach]
    if not breaches:
        return results
    text = "; ".join(breach["text"] for breach in breaches[:3])
    more = f"; and {len(breaches) - 3} more" if len(breaches) > 3 else ""
    limits = dict.fromkeys(f"audit.{breach['limit']}" for breach in breaches if breach["limit"])
    if "audit.max_contaminated" in limits:
        limits["audit.on_match"] = None  # `drop` leaves the rows out
    if "audit.max_untrained_packs" in limits:  # `concat` cuts a long prompt into packs of its own
        limits |= {"pack.strategy (best_fit cuts no record)": None, "pack.seq_len": None}
    limits |= dict.fromkeys(_remedies(breaches))
    change = f", or change {', '.join(limits)}" if limits else ""
    raise AuditError(
        f"the audit stops publication: {text}{more}. Mend the rows or the template{change}",
        breaches=breaches,
        gates=results,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finding:
    """What was found of one limit in one source, in the packs or in the whole."""

    limit: str
    """Field of AuditConfig; empty where nothing is allowed, whatever the recipe says."""
    kind: str
    """Finding, as the audit names it in its counts and in its worst rows."""
    source: str = ""
    number: int
    total: int
    value: float
    allowed: float
    is_breach: bool
    text: str
    """The breach for people, without source and worst rows."""
    rows: Sequence[Mapping[str, object]] | None = None
    """The worst rows, where the audit does not list them under `kind`."""


def _results(findings: Sequence[_Finding]) -> tuple[GateResult, ...]:
    """The finding of each limit that is a breach or nearest to one."""
    worst: dict[str, _Finding] = {}
    for finding in findings:
        name = finding.limit or finding.kind
        is_minimum = name.startswith("min_")
        # Of a maximum, 0.03 is nearer to a breach than 0.01; of a minimum, 0.9 than 0.99.
        rank = (finding.is_breach, -finding.value if is_minimum else finding.value)
        seen = worst.get(name)
        if seen is None or rank > (seen.is_breach, -seen.value if is_minimum else seen.value):
            worst[name] = finding
    return tuple(_result(name, finding) for name, finding in worst.items())


def _result(name: str, finding: _Finding) -> GateResult:
    is_minimum = name.startswith("min_")
    # Of a minimum the number is what is missing: 3 of 100 are untrained, so 97 of 100 are trained.
    number = finding.total - finding.number if is_minimum else finding.number
    detail = finding.text if finding.is_breach else f"{number:,} of {finding.total:,}"
    return GateResult(
        name=f"audit.{name}",
        outcome="failed" if finding.is_breach else "passed",
        value=finding.value,
        limit=finding.allowed,
        total=finding.total,
        is_minimum=is_minimum,
        detail=f"source '{finding.source}': {detail}" if finding.source else detail,
    )


def _findings(audit: Mapping[str, Any], config: AuditConfig) -> Iterator[_Finding]:
    scopes = {"": audit["dataset"], **audit["sources"]}
    if len(audit["sources"]) == 1:
        del scopes[""]
    for source, counts in scopes.items():
        due, missing = counts["answer_bytes"], counts["untrained_answer_bytes"]
        trained_share = 1 - missing / due if due else 1.0
        yield _Finding(
            limit="min_answer_coverage",
            kind="untrained_answer_bytes",
            source=source,
            number=missing,
            total=due,
            value=trained_share,
            allowed=config.min_answer_coverage,
            is_breach=trained_share < config.min_answer_coverage,
            text=f"{trained_share:.2%} of the answers' bytes are trained, under "
            f"{config.min_answer_coverage:.2%}",
        )
        prompt = counts["trained_prompt_bytes"]
        trained = due - missing + prompt
        share = prompt / trained if trained else 0.0
        text = f"{counted(prompt, 'byte')} of prompts trained ({share:.2%} of the rest)"
        limit, kind = "max_trained_prompts", "trained_prompt_bytes"
        yield _share(limit, kind, prompt, trained, config.max_trained_prompts, text, source)
        if "misplaced_rows" in counts:
            number = counts["misplaced_rows"]
            rows = counted(number, "row trains", "rows train")
            text = f"{rows} other tokens than those of their trained text"
            yield _never("misplaced_rows", source, number, counts.get("rows", 0), text)
        yield from _shares(config, source, counts, _SHARES)
    yield from _shares(config, "", audit["packs"], _OF_PACKS)
    if "contamination" in audit:
        yield _contamination(audit["contamination"], config)
    if "inference" in audit:
        yield from _inference(audit["inference"])
    if "quality" in audit:
        yield from _quality(audit["quality"], config)
    for found in audit.get("checks", {}).values():
        yield _of_check(found, config)
    number = audit["dataset"]["both_sides"]
    text = f"{counted(number, 'record is', 'records are')} in train and eval"
    yield _never("both_sides", "", number, audit["dataset"].get("rows", 0), text)


def _share(
    limit: str,
    kind: str,
    number: int,
    total: int,
    allowed: float,
    text: str,
    source: str = "",
    rows: Sequence[Mapping[str, object]] | None = None,
) -> _Finding:
    """What may be a share of all, at most `allowed`: 3 of 100 rows are a breach of 0.02."""
    return _Finding(
        limit=limit,
        kind=kind,
        source=source,
        number=number,
        total=total,
        value=number / max(total, 1),
        allowed=allowed,
        is_breach=number > allowed * total,
        text=text,
        rows=rows,
    )


def _never(kind: str, source: str, number: int, total: int, text: str) -> _Finding:
    """What no recipe can allow."""
    return _Finding(
        limit="",
        kind=kind,
        source=source,
        number=number,
        total=total,
        value=number,
        allowed=0,
        is_breach=number > 0,
        text=text,
    )


def _contamination(found: Mapping[str, Any], config: AuditConfig) -> _Finding:
    number, total, rows = found["contaminated"], found["rows"], found["worst"]
    if found.get("on_match", "stop") != "stop":
        number = 0  # pack has left them out of train
    named = ", ".join(
        f"{row['source']} row {row['row']:,} with {row['benchmark']} ('{row['words']}')"
        for row in rows[:2]
    )
    text = (
        f"{number:,} of {counted(total, 'row')} ({number / max(total, 1):.2%}) share "
        f"{found['ngram']} words in a row with a benchmark: {named}"
    )
    limit, kind = "max_contaminated", "contaminated"
    return _share(limit, kind, number, total, config.max_contaminated, text, rows=rows)


def _inference(found: Mapping[str, Any]) -> Iterator[_Finding]:
    """What no model would generate; `turns: whole` trains it on purpose, and is told so."""
    for source, counts in found["sources"].items() if found["turns"] != "whole" else ():
        total = counts["answers_checked"]
        for kind, right, says in (
            ("other_prompts", "answers_after_prompt", "do not follow the prompt of inference"),
            ("other_stops", "completions_stopped", "do not end where generation stops"),
        ):
            number = total - counts[right]
            rows = [
                row
                for row in found["worst"]
                if row["finding"] == kind and row["source"].split("/")[0] == source
            ]
            named = "; ".join(
                f"{row['source']} row {row['row']:,}, message {row['value']:,}: {row['what']}, "
                f"{row['text']!r} and not {row['expected']!r}"
                for row in rows[:2]
            )
            text = f"{number:,} of {counted(total, 'trained answer')} {says}: {named}"
            yield replace(_never(kind, source, number, total, text), rows=rows)


def _quality(found: Mapping[str, Any], config: AuditConfig) -> Iterator[_Finding]:
    """The counters that the recipe limits."""
    scopes = found["sources"] if len(found["sources"]) == 1 else {"": found["dataset"]}
    scopes = {**scopes, **found["sources"]}
    limits: dict[str, Any] = config.quality.model_dump() if config.quality else {}
    for counter, says in QUALITY_COUNTERS.items():
        allowed = limits.get(f"max_{counter}")
        if allowed is None:
            continue
        for source, counts in scopes.items():
            number, total = counts.get(counter, 0), counts["rows"]
            rows = [
                row
                for row in found["worst"].get(counter, [])
                if not source or row["source"].split("/")[0] == source
            ]
            named = ", ".join(f"{row['source']} row {row['row']:,}" for row in rows[:3])
            text = (
                f"{number:,} of {counted(total, 'row')} ({number / max(total, 1):.2%}, over "
                f"{allowed:.2%}) {says}{': ' * bool(named)}{named}"
            )
            limit = f"quality.max_{counter}"
            yield _share(limit, counter, number, total, allowed, text, source, rows)


def _of_check(found: Mapping[str, Any], config: AuditConfig) -> _Finding:
    number, total, rows = found["failed"], found["rows"], found["worst"]
    named = ", ".join(f"{row['source']} row {row['row']:,} ({row['detail']})" for row in rows[:2])
    text = (
        f"{found['plugin']} finds fault with {number:,} of {counted(total, 'row')} "
        f"({number / max(total, 1):.2%}): {named}"
    )
    limit, kind = "max_failed_checks", "failed_checks"
    return _share(limit, kind, number, total, config.max_failed_checks, text, rows=rows)


def _shares(
    config: AuditConfig,
    source: str,
    counts: Mapping[str, int],
    limits: Mapping[str, tuple[str, str, str]],
) -> Iterator[_Finding]:
    for limit, (kind, of, says) in limits.items():
        number, total = counts.get(kind, 0), counts.get(of, 0)
        allowed = getattr(config, limit)
        share = number / max(total, 1)
        text = f"{number:,} of {total:,} ({share:.2%}, over {allowed:.2%}) {says}"
        yield _share(limit, kind, number, total, allowed, text, source)


def _remedies(breaches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Settings that help against answers that no model would generate."""
    kinds = {breach["kind"] for breach in breaches} & {"other_prompts", "other_stops"}
    if "other_stops" in kinds:
        yield "format.stop_tokens"
    if any(row.get("what") == THOUGHT_LOST for breach in breaches for row in breach["rows"]):
        yield "format.reasoning, format.thought_end"
    if kinds:
        yield "format.turns (whole publishes all the same)"


def _breach(audit: Mapping[str, Any], finding: _Finding) -> dict[str, Any]:
    """The finding as a fact of the error, with its worst rows."""
    source, rows, named = finding.source, finding.rows, ""
    if rows is None:
        rows = [
            row
            for row in audit["worst"].get(finding.kind, [])
            if not source or row["source"].split("/")[0] == source
        ]
        named = ", ".join(
            f"{row['source']} row {row['row']:,} ({row['value']:,})" for row in rows[:3]
        )
    return {
        "limit": finding.limit,
        "kind": finding.kind,
        "source": source,
        "number": finding.number,
        "text": (f"source '{source}': " if source else "")
        + finding.text
        + (f", worst: {named}" if named else ""),
        "rows": rows,
    }


def audit_rows(audit: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The audit as a table for people: a row for each source and one for the whole.

    Columns: `answers`, share of the answers' bytes that are trained; `ended`, share of trained
    turns with a trained end token; then numbers of leaked headers, trained prompt bytes, misplaced
    BOS and end tokens, unknown tokens, duplicates, and control texts in contents.

    Example:
        >>> counts = {"rows": 4, "turns": 4, "answer_bytes": 50, "untrained_answer_bytes": 5}
        >>> (row,) = audit_rows({"dataset": counts, "sources": {"a": counts}})
        >>> row["source"], row["answers"], row["ended"]
        ('a', '90.00%', '100.00%')
    """
    scopes = dict(audit["sources"])
    if len(scopes) != 1:
        scopes["all"] = audit["dataset"]
    return [{"source": name, **_row(counts)} for name, counts in scopes.items()]


def _row(counts: Mapping[str, int]) -> dict[str, object]:
    def number(name: str) -> int:
        return counts.get(name, 0)

    def share_without(finding: str, of: str) -> str:
        return f"{1 - number(finding) / number(of):.2%}" if number(of) else "-"

    return {
        "records": number("rows"),
        "answers": share_without("untrained_answer_bytes", "answer_bytes"),
        "ended": share_without("unterminated_turns", "turns"),
        "leaks": number("leaked_headers"),
        "prompts": number("trained_prompt_bytes"),
        "BOS/end": number("double_bos") + number("missing_bos") + number("double_ends"),
        "unknown": number("unknown_tokens"),
        "dups": number("duplicates"),
        "forged": number("control_text"),
    }

"""Check an audit against the recipe's limits, and stop publication if one is exceeded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from packhouse.auditing.inference_prompts import THOUGHT_LOST
from packhouse.errors import AuditError
from packhouse.recipe import AuditConfig
from packhouse.recipe.audit_section import QUALITY_COUNTERS
from packhouse.records.gate_results import GateResult
from packhouse.store.manifest import Audit, AuditedRow, Counters, Inference, Quality
from packhouse.system.wording import counted

# limit of AuditConfig -> finding, what it is a share of, text for a message
_SHARES = {
    "max_unterminated_turns": (
        "unterminated_turns",
        "turns",
        "trained turns have no trained end token, so the model would not learn to stop",
    ),
    "max_leaked_headers": (
        "leaked_headers",
        "turns",
        "trained turns begin with their header or BOS",
    ),
    "max_missing_headers": (
        "missing_headers",
        "rows",
        "rows have a truncated prompt: the header of an answer or the start of the conversation "
        "is missing",
    ),
    "max_untrained_starts": (
        "untrained_starts",
        "rows",
        "rows have an answer whose first tokens are not trained, because the mask starts too late",
    ),
    "max_leaks": (
        "leaks",
        "rows",
        "rows contain several records without boundaries, so each would attend to earlier ones",
    ),
    "max_untrained_rows": ("untrained_rows", "rows", "rows have no trained token"),
    "max_double_bos": ("double_bos", "rows", "rows have two consecutive BOS tokens"),
    "max_missing_bos": ("missing_bos", "rows", "rows lack the BOS token that the tokenizer adds"),
    "max_double_ends": ("double_ends", "rows", "rows have two consecutive end tokens"),
    "max_unknown_tokens": ("unknown_tokens", "tokens", "tokens are unknown to the tokenizer"),
    "max_duplicates": ("duplicates", "rows", "rows repeat an earlier row"),
}
_OF_PACKS = {
    "max_untrained_packs": ("untrained_packs", "packs", "packs have no trained token"),
    "max_cut_sequences": (
        "cut_sequences",
        "sequences",
        "sequences end with a trained token that is not an end token, so the model would not "
        "learn to stop",
    ),
}


Rows = Sequence[AuditedRow]


@dataclass(frozen=True, slots=True)
class _Finding:
    """Result for one limit in one source, in the packs, or overall."""

    kind: str
    """Name of the finding in the audit's counts and worst rows."""
    source: str
    """Empty for the packs and overall."""
    number: int
    total: int
    text: str
    """Message text, without the source and worst rows."""
    limit: str = ""
    """Field of AuditConfig; empty if any finding at all is a breach."""
    allowed: float = 0
    """Maximum share of `total`, or the minimum share for a `min_` limit."""
    rows: Rows | None = None
    """Worst rows, if the audit does not list them under `kind`."""

    @property
    def name(self) -> str:
        return self.limit or self.kind

    @property
    def is_minimum(self) -> bool:
        return self.limit.startswith("min_")

    @property
    def value(self) -> float:
        if not self.limit:
            return self.number
        share = self.number / max(self.total, 1)
        return 1 - share if self.is_minimum else share

    @property
    def is_breach(self) -> bool:
        """True if the limit is exceeded: 3 of 100 rows with a limit of 0.02."""
        if self.is_minimum:
            return self.value < self.allowed
        # Not as a share, which a total of 0 does not have: then any number is a breach.
        return self.number > self.allowed * self.total

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key that is largest for the finding closest to a breach: 0.03 rather than 0.01."""
        return self.is_breach, -self.value if self.is_minimum else self.value

    def result(self) -> GateResult:
        # For a minimum, `number` counts what is missing: 3 of 100 untrained is 97 of 100 trained.
        number = self.total - self.number if self.is_minimum else self.number
        detail = self.text if self.is_breach else f"{number:,} of {self.total:,}"
        return GateResult(
            name=f"audit.{self.name}",
            outcome="failed" if self.is_breach else "passed",
            value=self.value,
            limit=self.allowed,
            total=self.total,
            is_minimum=self.is_minimum,
            detail=f"source '{self.source}': {detail}" if self.source else detail,
        )

    def breach(self, audit: Audit) -> "_Breach":
        """Describe the finding for the error, with its worst rows."""
        rows, named = self.rows, ""
        if rows is None:
            rows = _rows_of(self.source, audit.worst.get(self.kind, ()))
            places = (f"{row.source} row {row.row:,} ({row.value:,})" for row in rows[:3])
            named = f", worst: {', '.join(places)}" if rows else ""
        where = f"source '{self.source}': " if self.source else ""
        text = f"{where}{self.text}{named}"
        return _Breach(self.limit, self.kind, self.source, self.number, text, rows)


@dataclass(frozen=True, slots=True)
class _Breach:
    """A finding that stops publication."""

    limit: str
    kind: str
    source: str
    number: int
    text: str
    rows: Rows


_BREACHES = TypeAdapter(list[_Breach])


def _rows_of(source: str, rows: Rows) -> Rows:
    """Return the rows of a source, or all rows if the source is empty."""
    return [row for row in rows if not source or row.source.split("/")[0] == source]


def check_audit(audit: Audit, config: AuditConfig) -> tuple[GateResult, ...]:
    """Compare an audit with the limits, for each source and overall.

    Returns:
        One result per limit, from the source that is closest to it.

    Raises:
        AuditError: a limit is exceeded; names the limit, the value and the worst rows.
    """
    findings = list(_findings(audit, config))
    nearest: dict[str, _Finding] = {}
    for finding in findings:
        if finding.name not in nearest or finding.rank > nearest[finding.name].rank:
            nearest[finding.name] = finding
    results = tuple(finding.result() for finding in nearest.values())
    breaches = [finding.breach(audit) for finding in findings if finding.is_breach]
    if not breaches:
        return results
    text = "; ".join(breach.text for breach in breaches[:3])
    more = f"; and {len(breaches) - 3} more" if len(breaches) > 3 else ""
    limits = dict.fromkeys(f"audit.{breach.limit}" for breach in breaches if breach.limit)
    if "audit.max_duplicates" in limits:
        limits["dedup.exact (drop keeps one copy of each row)"] = None
    if "audit.max_contaminated" in limits:
        limits["audit.on_match"] = None  # `drop` drops the rows
    if "audit.max_untrained_packs" in limits:  # `concat` may fill whole packs with a long prompt
        limits |= {"pack.strategy (best_fit cuts no record)": None, "pack.seq_len": None}
    # Settings that help with answers that a model would not generate.
    kinds = {breach.kind for breach in breaches} & {"other_prompts", "other_stops"}
    if "other_stops" in kinds:
        limits["format.stop_tokens"] = None
    if any(row.what == THOUGHT_LOST for breach in breaches for row in breach.rows):
        limits |= {"format.reasoning": None, "format.thought_end": None}
    if kinds:
        limits["format.turns (whole publishes anyway)"] = None
    if any(each.rows for each in breaches):
        more += "; rows are numbered from 0"
    change = f", or change {' or '.join(limits)}" if limits else ""
    raise AuditError(
        f"the audit stopped publication: {text}{more}. Fix the rows or the template{change}",
        breaches=_BREACHES.dump_python(breaches, exclude_defaults=True),
        gates=results,
    )


def _findings(audit: Audit, config: AuditConfig) -> Iterator[_Finding]:
    for source, counts in scopes(audit).items():
        due, missing = counts["answer_bytes"], counts["untrained_answer_bytes"]
        limit, allowed = "min_answer_coverage", config.min_answer_coverage
        share = 1 - missing / due if due else 1.0
        text = f"{share:.2%} of the answer bytes are trained, below {allowed:.2%}"
        yield _Finding("untrained_answer_bytes", source, missing, due, text, limit, allowed)
        prompt = counts["trained_prompt_bytes"]
        trained = due - missing + prompt
        limit, allowed = "max_trained_prompts", config.max_trained_prompts
        share = prompt / trained if trained else 0.0
        text = f"{counted(prompt, 'byte')} of prompts are trained ({share:.2%} of trained bytes)"
        yield _Finding("trained_prompt_bytes", source, prompt, trained, text, limit, allowed)
        if "misplaced_rows" in counts:
            number = counts["misplaced_rows"]
            rows = counted(number, "row trains", "rows train")
            # Without its own limit: here text and tokens of packhouse itself disagree.
            text = f"{rows} tokens other than those of the text to train"
            yield _Finding("misplaced_rows", source, number, counts.get("rows", 0), text)
        yield from _shares(config, source, counts, _SHARES)
    yield from _shares(config, "", audit.packs, _OF_PACKS)
    if shared := audit.contamination:
        # With `drop`, pack has already kept the rows out of train.
        number = shared.contaminated if shared.on_match == "stop" else 0
        named = (
            f"{row.source} row {row.row:,} matches {row.benchmark} ('{row.words}')"
            for row in shared.worst[:2]
        )
        text = f"{_share(number, shared.rows)} share {shared.ngram} consecutive words with a "
        text += f"benchmark: {', '.join(named)}"
        limit, allowed = "max_contaminated", config.max_contaminated
        yield _Finding("contaminated", "", number, shared.rows, text, limit, allowed, shared.worst)
    if audit.inference and audit.inference.turns != "whole":  # `whole` trains others on purpose
        yield from _inference(audit.inference)
    if audit.quality:
        yield from _quality(audit.quality, config)
    for found in audit.checks.values():
        number, total = found.failed, found.rows
        named = (f"{row.source} row {row.row:,} ({row.detail})" for row in found.worst[:2])
        text = f"{found.plugin} rejects {_share(number, total)}: {', '.join(named)}"
        limit, allowed = "max_failed_checks", config.max_failed_checks
        yield _Finding("failed_checks", "", number, total, text, limit, allowed, found.worst)
    # Without a limit: the split keeps equal groups together, so any record here is a fault of ours.
    number = audit.dataset["both_sides"]
    text = f"{counted(number, 'record is', 'records are')} in train and eval"
    yield _Finding("both_sides", "", number, audit.dataset.get("rows", 0), text)


def _share(number: int, rows: int, limit: str = "") -> str:
    return f"{number:,} of {counted(rows, 'row')} ({number / max(rows, 1):.2%}{limit})"


def _shares(
    config: AuditConfig, source: str, counts: Counters, limits: Mapping[str, tuple[str, str, str]]
) -> Iterator[_Finding]:
    for limit, (kind, of, says) in limits.items():
        number, total = counts.get(kind, 0), counts.get(of, 0)
        allowed = getattr(config, limit)
        share = number / max(total, 1)
        unit, what = says.split(" ", 1)
        text = f"{number:,} of {total:,} {unit} ({share:.2%}, limit {allowed:.2%}) {what}"
        yield _Finding(kind, source, number, total, text, limit, allowed)


def _inference(found: Inference) -> Iterator[_Finding]:
    """Yield answers that a model would not generate."""
    for source, counts in found.sources.items():
        total = counts["answers_checked"]
        for kind, right, says in (
            ("other_prompts", "answers_after_prompt", "do not follow the prompt at inference"),
            ("other_stops", "completions_stopped", "do not end where generation stops"),
        ):
            number = total - counts[right]
            rows = _rows_of(source, [row for row in found.worst if row.finding == kind])
            named = "; ".join(
                f"{row.source} row {row.row:,}, message {row.value:,}: {row.what}, "
                f"{row.text!r} instead of {row.expected!r}"
                for row in rows[:2]
            )
            text = f"{number:,} of {counted(total, 'trained answer')} {says}: {named}"
            yield _Finding(kind, source, number, total, text, rows=rows)


def _quality(found: Quality, config: AuditConfig) -> Iterator[_Finding]:
    """Yield the quality counters that the recipe limits."""
    limits: dict[str, Any] = config.quality.model_dump() if config.quality else {}
    for counter, says in QUALITY_COUNTERS.items():
        allowed: float | None = limits.get(f"max_{counter}")
        if allowed is None:
            continue
        for source, counts in scopes(found).items():
            number, total = counts.get(counter, 0), counts["rows"]
            rows = _rows_of(source, found.worst.get(counter, ()))
            named = ", ".join(f"{row.source} row {row.row:,}" for row in rows[:3])
            share = _share(number, total, f", limit {allowed:.2%}")
            text = f"{share} {says}{': ' * bool(named)}{named}"
            limit = f"quality.max_{counter}"
            yield _Finding(counter, source, number, total, text, limit, allowed, rows)


def scopes(found: Audit | Quality) -> dict[str, Counters]:
    """Return the counts of each source; with several sources, also of all under an empty name."""
    return {**({"": found.dataset} if len(found.sources) != 1 else {}), **found.sources}

"""The gate: an audit against the recipe's limits; a breach names the worst rows and stops."""

from collections.abc import Iterator, Mapping
from typing import Any

from packhouse.errors import AuditError
from packhouse.recipe import AuditConfig

__all__ = ["audit_rows", "check_audit"]

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


def check_audit(audit: Mapping[str, Any], config: AuditConfig) -> None:
    """Hold an audit against the limits, for each source and the whole.

    Raises:
        AuditError: a limit is passed; says which, by how much, and names the worst rows.
    """
    breaches = list(_breaches(audit, config))
    if not breaches:
        return
    text = "; ".join(breach["text"] for breach in breaches[:3])
    more = f"; and {len(breaches) - 3} more" if len(breaches) > 3 else ""
    limits = dict.fromkeys(f"audit.{breach['limit']}" for breach in breaches if breach["limit"])
    change = f", or change {', '.join(limits)}" if limits else ""
    raise AuditError(
        f"the audit stops publication: {text}{more}. Mend the rows or the template{change}",
        breaches=breaches,
    )


def _breaches(audit: Mapping[str, Any], config: AuditConfig) -> Iterator[dict[str, Any]]:
    scopes = {"": audit["dataset"], **audit["sources"]}
    if len(audit["sources"]) == 1:
        del scopes[""]
    for source, counts in scopes.items():
        due, missing = counts["answer_bytes"], counts["untrained_answer_bytes"]
        if due and 1 - missing / due < config.min_answer_coverage:
            what = (
                f"{1 - missing / due:.2%} of the answers' bytes are trained, under "
                f"{config.min_answer_coverage:.2%}"
            )
            yield _breach(
                audit, "min_answer_coverage", source, what, missing, "untrained_answer_bytes"
            )
        prompt = counts["trained_prompt_bytes"]
        trained = due - missing + prompt
        if prompt > config.max_trained_prompts * trained:
            what = f"{prompt:,} bytes of prompts are trained ({prompt / trained:.2%} of the rest)"
            yield _breach(
                audit, "max_trained_prompts", source, what, prompt, "trained_prompt_bytes"
            )
        if counts.get("misplaced_rows"):
            number = counts["misplaced_rows"]
            what = f"{number:,} rows train other tokens than those of their trained text"
            yield _breach(audit, "", source, what, number, "misplaced_rows")
        yield from _over(audit, config, source, counts, _SHARES)
    yield from _over(audit, config, "", audit["packs"], _OF_PACKS)
    yield from _contaminated(audit.get("contamination", {}), config)
    if audit["dataset"]["both_sides"]:
        number = audit["dataset"]["both_sides"]
        yield _breach(audit, "", "", f"{number:,} records are in train and eval", number, "")


def _contaminated(found: Mapping[str, Any], config: AuditConfig) -> Iterator[dict[str, Any]]:
    number, total = found.get("contaminated", 0), found.get("rows", 0)
    if number <= config.max_contaminated * total:
        return
    named = ", ".join(
        f"{row['source']} row {row['row']:,} with {row['benchmark']} ('{row['words']}')"
        for row in found["worst"][:2]
    )
    text = (
        f"{number:,} of {total:,} rows ({number / total:.2%}) share {found['ngram']} words in a "
        f"row with a benchmark: {named}"
    )
    rows = found["worst"]
    yield {
        "limit": "max_contaminated",
        "source": "",
        "number": number,
        "text": text,
        "rows": rows,
    }


def _over(
    audit: Mapping[str, Any],
    config: AuditConfig,
    source: str,
    counts: Mapping[str, int],
    shares: Mapping[str, tuple[str, str, str]],
) -> Iterator[dict[str, Any]]:
    for limit, (finding, of, says) in shares.items():
        number, total = counts.get(finding, 0), counts.get(of, 0)
        allowed = getattr(config, limit)
        if number > allowed * total:
            share = f"{number:,} of {total:,} ({number / max(total, 1):.2%}, over {allowed:.2%})"
            yield _breach(audit, limit, source, f"{share} {says}", number, finding)


def _breach(
    audit: Mapping[str, Any], limit: str, source: str, what: str, number: int, finding: str
) -> dict[str, Any]:
    rows = audit["worst"].get(finding, [])
    own = [row for row in rows if not source or row["source"].split("/")[0] == source]
    named = ", ".join(f"{row['source']} row {row['row']:,} ({row['value']:,})" for row in own[:3])
    text = (
        (f"source '{source}': " if source else "") + what + (f", worst: {named}" if named else "")
    )
    return {"limit": limit, "source": source, "number": number, "text": text, "rows": own}


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


def _row(counts: Mapping[str, int]) -> dict[str, Any]:
    def number(name: str) -> int:
        return counts.get(name, 0)

    def share_without(finding: str, of: str) -> str:
        return f"{1 - number(finding) / number(of):.2%}" if number(of) else "-"

    return {
        "rows": number("rows"),
        "answers": share_without("untrained_answer_bytes", "answer_bytes"),
        "ended": share_without("unterminated_turns", "turns"),
        "leaks": number("leaked_headers"),
        "prompts": number("trained_prompt_bytes"),
        "BOS/end": number("double_bos") + number("missing_bos") + number("double_ends"),
        "unknown": number("unknown_tokens"),
        "dups": number("duplicates"),
        "forged": number("control_text"),
    }

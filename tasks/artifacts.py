"""What a run leaves in the Prefect UI: ledger and splits as markdown, bad rows as a table."""

import re
from collections.abc import Mapping
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from packhouse.audit import audit_rows
from packhouse.chain import Prepared

__all__ = ["publish_artifacts"]


def publish_artifacts(prepared: Prepared) -> None:
    """Create the artifacts of a finished run, under keys made from the dataset's name."""
    key = re.sub(r"[^a-z0-9]+", "-", prepared.dataset)
    create_markdown_artifact(
        key=f"{key}-version", markdown=_markdown(prepared), description="What was published"
    )
    create_table_artifact(
        key=f"{key}-audit",
        table=audit_rows(prepared.facts["audit"]),
        description="What the tokens teach, by source",
    )
    bad = _quarantined(prepared)
    if bad:
        create_table_artifact(
            key=f"{key}-quarantine", table=bad, description="Quarantined rows by step and reason"
        )


def _markdown(prepared: Prepared) -> str:
    lines = [
        f"# {prepared.dataset} {prepared.version}",
        f"{'Published' if prepared.created else 'Unchanged, already published'} in "
        f"`{prepared.store}`, ref `{prepared.facts['ref']}`.",
        "",
        "| step | rows in | rows out | quarantined | dropped | tokens out |",
        "|---|---|---|---|---|---|",
    ]
    for line in prepared.ledger:
        lines.append(
            f"| {line.step} | {line.rows_in:,} | {line.rows_out:,} | {_counts(line.quarantined)} "
            f"| {_counts(line.dropped)} "
            f"| {'-' if line.tokens_out is None else format(line.tokens_out, ',')} |"
        )
    lines.append(
        "\n| split | packs | records | tokens | trained | fill |\n|---|---|---|---|---|---|"
    )
    for split, facts in prepared.facts["statistics"].items():
        if not facts["num_packs"]:
            continue
        lines.append(
            f"| {split} | {facts['num_packs']:,} | {facts['num_sequences']:,} "
            f"| {facts['num_tokens']:,} | {facts['num_trained']:,} | {facts['fill']:.2%} |"
        )
    return "\n".join(lines)


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {n:,}" for reason, n in sorted(reasons.items())) or "-"


def _quarantined(prepared: Prepared) -> list[dict[str, Any]]:
    return [
        {"step": line.step, "reason": reason, "rows": rows}
        for line in prepared.ledger
        for reason, rows in sorted(line.quarantined.items())
    ]

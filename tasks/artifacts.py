"""Create the artifacts of a run in the Prefect UI: Markdown pages, tables and a picture.

Keys start with the dataset's name, so that the UI shows a history of each: `demo-version`,
`demo-refused`, `demo-refresh`, `demo-sources`, `demo-audit`, `demo-quarantine`. Texts from rows
(file names, details, the first bad rows of a refusal) are truncated and escaped. No page links to a
file in the cache, since the reader may have no access to it; `packhouse quarantine` finds it by the
recipe.
"""

import re
import shlex
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from packhouse.addons.ci.refresh import Refreshed
from packhouse.addons.gc import GcReport
from packhouse.addons.quarantine import count_reasons, read_bad_rows
from packhouse.cli.result_summary import (
    audit_blocks,
    audit_rows,
    block_markdown,
    ledger_block,
    loading_lines,
    splits_of,
)
from packhouse.errors import PackhouseError
from packhouse.read.compression import lines_of_rows, place_of
from packhouse.recipe import Recipe
from packhouse.records.gate_results import gates_table
from packhouse.records.ledger import filters_of
from packhouse.registry import function_of_addon
from packhouse.run.chain import Prepared
from packhouse.run.steps.publish import Published
from packhouse.run.steps.validate import QUARANTINE, ValidateFacts
from packhouse.store import Ref, VerifyReport
from packhouse.store.manifest import read_audit
from packhouse.system.escaping import (
    for_markdown,
    for_terminal,
    markdown_code,
    markdown_table,
)
from packhouse.system.wording import counted
from tasks.events import gate_of
from tasks.outcomes import Runs

# A page shows what is wrong with the rows; `packhouse quarantine` shows all of them.
_MOST_DETAIL = 400
_MOST_SHOWN = 10
_MOST_RAW = 160
"""Maximum bytes of a bad row shown on a page."""


def artifact_key(*parts: str) -> str:
    """Return a valid artifact key for Prefect: lower-case letters, digits and dashes.

    Example:
        >>> artifact_key("my_data.v2", "version")
        'my-data-v2-version'
    """
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def publish_artifacts(recipe: Recipe, prepared: Prepared) -> None:
    """Create the artifacts of a finished run."""
    name = prepared.dataset
    create_markdown_artifact(
        key=artifact_key(name, "version"),
        markdown=_version_page(prepared),
        description="What was published",
    )
    _create_table(
        key=artifact_key(name, "sources"),
        rows=_sources(prepared),
        description="Rows and tokens by source",
    )
    _create_table(
        key=artifact_key(name, "audit"),
        rows=audit_rows(read_audit(prepared.published.audit)),
        description="What the tokens teach, by source",
    )
    bad = read_bad_rows(r.path(QUARANTINE) for r in prepared.receipts if QUARANTINE in r.files)
    counts = [
        (line.step, reason, rows)
        for line in prepared.ledger
        for reason, rows in sorted(line.quarantined.items())
    ]
    _quarantine_table(recipe, counts, bad)


def refusal_artifacts(recipe: Recipe, error: PackhouseError) -> None:
    """Create the page with the reason why nothing was published, and a table of bad rows."""
    gate = gate_of(error)
    what = f"refused by its {gate} gate" if gate else "failed"
    bad = read_bad_rows(Path(place) for place in error.facts.get("places", ()))
    lines = [f"# {recipe.dataset} {what}", for_markdown(str(error)), "", "Nothing was published."]
    if error.facts.get("gates"):
        lines += ["", "## Gates", *gates_table(error.facts["gates"])]
    if bad is not None:
        lines += _refused_rows(recipe, bad)
    create_markdown_artifact(
        key=artifact_key(recipe.dataset, "refused"),
        markdown="\n".join(lines),
        description=f"Why nothing was published: {type(error).__name__}",
    )
    if bad is not None:
        counts = [(each.step, each.reason, each.records) for each in count_reasons(bad)]
        _quarantine_table(recipe, counts, bad)


def _refused_rows(recipe: Recipe, bad: pa.Table) -> list[str]:
    """Return the lines that show the first bad rows and the next command to run."""
    first = bad.slice(0, _MOST_SHOWN).to_pylist()
    reason = count_reasons(bad)[0].reason  # the most frequent
    lines = lines_of_rows(first, recipe.sources)
    rows = [
        f"| {for_markdown(place_of(row, lines))} | {for_markdown(row['reason'])} "
        f"| {for_markdown(_detail(row))} "
        f"| {markdown_code(row['raw'][:_MOST_RAW].decode('utf-8', 'replace'))} |"
        for row in first
    ]
    settings = yaml.safe_dump(
        recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True), sort_keys=False
    )
    fence = "`" * (1 + max(map(len, re.findall("`+", settings)), default=2))
    return [
        "",
        f"## The first {counted(len(rows), 'bad row')}",
        *markdown_table(("row", "reason", "problem", "start of the row"), ()),
        *rows,
        "",
        "## How to see and fix them",
        f"On the worker's machine, save these settings as `{recipe.dataset}.yaml` and run:",
        "",
        "```console",
        f"$ packhouse quarantine show {recipe.dataset}.yaml --reason {reason}",
        f"$ packhouse quarantine retry {recipe.dataset}.yaml --edit bad.jsonl",
        "```",
        "",
        # The fence is longer than any in the text.
        f"{fence}yaml",
        settings.rstrip("\n"),
        fence,
    ]


def refresh_artifacts(recipe: Recipe, refreshed: Refreshed) -> None:
    """Create the page with the outcome of a refresh, and how to promote a held version."""
    create_markdown_artifact(
        key=artifact_key(recipe.dataset, "refresh"),
        markdown="\n".join(_refresh_page(recipe, refreshed)),
        description=f"Refresh: {refreshed.outcome}",
    )


def verify_artifacts(store: str, reports: Sequence[tuple[str, VerifyReport]]) -> None:
    """Create the table of verified versions."""
    rows = [
        {
            "dataset": name,
            "version": report.version,
            "intact": "yes" if report.is_intact else "NO",
            "files": report.num_files,
            "bytes": report.num_bytes,
            "packs": report.num_rows,
            "tokens": report.num_tokens,
            "problems": "; ".join(report.problems),
        }
        for name, report in reports
    ]
    _create_table(key="verify", rows=rows, description=f"Versions in {store}")


def move_artifacts(store: str, dataset: str, ref: Ref) -> None:
    """Create the page about a moved ref."""
    moves = [(move.seq, move.version, *astuple(move.note)) for move in ref.moves[:10]]
    lines = [
        f"# {for_markdown(dataset)}: {markdown_code(ref.name)} -> {markdown_code(ref.version)}",
        f"in {markdown_code(store)}; move {ref.seq}, previous version: "
        f"{markdown_code(ref.parent or 'none')}.",
        "",
        *markdown_table(("move", "version", "time", "by", "reason"), moves),
    ]
    create_markdown_artifact(
        key=artifact_key(dataset, "ref", ref.name),
        markdown="\n".join(lines),
        description=f"Where '{ref.name}' points",
    )


def garbage_artifacts(store: str, reports: Sequence[tuple[str, GcReport]]) -> None:
    """Create the table of files left by interrupted publishes."""
    rows = [
        {
            "dataset": name,
            "version": garbage.version,
            "why": garbage.reason,
            "objects": len(garbage.objects),
            "bytes": garbage.num_bytes,
            "deleted": "no" if report.dry_run else "yes",
        }
        for name, report in reports
        for garbage in report.garbage
    ]
    _create_table(
        key="garbage", rows=rows, description=f"Files left by interrupted publishes in {store}"
    )


def backfill_artifacts(runs: Runs) -> None:
    """Create the table of a backfill's recipes."""
    rows = [
        {"recipe": name, "state": state.name, "message": (state.message or "")[:1000]}
        for name, state in runs
    ]
    _create_table(key="backfill", rows=rows, description="Recipes of the backfill")


def _create_table(key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
    """Create a table artifact; the UI shows its cells as plain text."""
    cells = [
        {name: for_terminal(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
        for row in rows
    ]
    create_table_artifact(key=key, table=cells, description=for_markdown(description))


def _version_page(prepared: Prepared) -> str:
    published = prepared.published
    verb = "Published" if prepared.created else "Already published"
    lines = [
        f"# {prepared.dataset} {prepared.version}",
        f"{verb} in {markdown_code(prepared.store)}.",
        *_held(prepared),
        "",
        *block_markdown(ledger_block(prepared.ledger, filters_of(published.sources))),
        *block_markdown(splits_of(published)),
        *_lengths_picture(published),
        "",
        *(line for block in audit_blocks(published.audit) for line in block_markdown(block)),
        "## Location",
        *_links(prepared),
        "",
        "Open a page with charts and samples in any browser (it is also published with the "
        "version as `report.html`):",
        "",
        "```sh",
        f"packhouse report {shlex.quote(for_terminal(prepared.address))} --open",
        "```",
        "",
        "```python",
        *loading_lines(prepared, for_terminal(prepared.address)),
        "```",
    ]
    return "\n".join(lines)


def _lengths_picture(published: Published) -> list[str]:
    """Return the lines of a Markdown image: lengths of records and fill of packs.

    The image is an SVG inside the page, with its numbers as alt text.
    """
    splits = {name: side for name, side in published.statistics.items() if side.num_packs}
    if not splits:
        return []
    image = b64encode(
        function_of_addon("lengths_svg")({str(k): side for k, side in splits.items()}).encode()
    ).decode()
    said = "; ".join(
        f"{name}: {counted(published.sides[name].records, 'record')} in "
        f"{counted(side.num_packs, 'pack')}, {side.fill:.2%} full"
        for name, side in sorted(splits.items(), reverse=True)
    )
    return ["## Lengths and fill", f"![{said}](data:image/svg+xml;base64,{image})"]


def _held(prepared: Prepared) -> list[str]:
    at, ref = prepared.published.ref_version, prepared.published.ref
    if prepared.published.held_back:
        return [
            "",
            f"## Held: {markdown_code(ref)} stays where it is",
            *(f"- {for_markdown(reason)}" for reason in prepared.published.held_back),
            "",
            # This page stays when a person promotes the version later.
            f"The artifact '{artifact_key(prepared.dataset, 'ref', ref)}' shows later moves of it.",
            "",
            "## How to promote it",
            *_how_to_promote(prepared.store, prepared.dataset, ref, prepared.pinned, at),
        ]
    if at is not None and at != prepared.version:
        return [f"The ref {markdown_code(ref)} stays at {markdown_code(at)}, published after it."]
    if prepared.published.is_ref_moved and prepared.published.ref_before:
        before = markdown_code(prepared.published.ref_before)
        return [f"The ref {markdown_code(ref)} moved to it from {before}."]
    return [f"The ref {markdown_code(ref)} points to it."]


def _links(prepared: Prepared) -> list[str]:
    place = f"{prepared.uri}/v/{prepared.version}/manifest.json"
    lines = [f"- version: {markdown_code(place)}"]
    if bad := prepared.published.quarantine:
        lines.append(f"- quarantine: {markdown_code(bad)}")
    for uri, name in prepared.published.mirrors.items():
        where = markdown_code(uri)
        if re.fullmatch(r"hf://[\w./-]+", uri):
            where = f"[{uri}](https://huggingface.co/{uri.removeprefix('hf://')})"
        lines.append(f"- also in {where} ({for_markdown(name)})")
    lines.append(f"- inspect it: {markdown_code(f'packhouse inspect {prepared.address}')}")
    return lines


def _sources(prepared: Prepared) -> list[dict[str, Any]]:
    """Return rows read, rows quarantined, records and tokens of each source."""
    read: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for facts in (receipt.facts for receipt in prepared.receipts):
        if isinstance(facts, ValidateFacts):
            read[facts.origin.source] += facts.rows_in
            bad[facts.origin.source] += facts.num_bad_rows
    audited = read_audit(prepared.published.audit).sources
    return [
        {
            "source": source,
            "rows read": read[source],
            "bad rows (validate)": bad[source],
            "records tokenized": audited.get(source, {}).get("rows", 0),
            "trained turns": audited.get(source, {}).get("turns", 0),
            "tokens": audited.get(source, {}).get("tokens", 0),
            "trained tokens": audited.get(source, {}).get("trained_tokens", 0),
        }
        for source in sorted(read)
    ]


def _quarantine_table(
    recipe: Recipe, counts: Sequence[tuple[str, str, int]], bad: pa.Table | None
) -> None:
    """Create the table of (step, reason, records), with examples if this machine has the rows."""
    found = [] if bad is None else count_reasons(bad)
    known = {(each.step, each.reason): each.samples for each in found}
    samples = [row for each in found for row in each.samples]
    lines = lines_of_rows(samples, recipe.sources)
    rows = [
        {
            "step": step,
            "reason": reason,
            "records": number,
            "samples": "; ".join(
                f"{place_of(row, lines)}: {_detail(row)}" for row in known.get((step, reason), ())
            ),
        }
        for step, reason, number in counts
    ]
    if rows:
        said = (
            "Bad records by step and reason (rows, before they become records), with the first "
            "of each"
        )
        key = artifact_key(recipe.dataset, "quarantine")
        _create_table(key=key, rows=rows, description=said)


def _refresh_page(recipe: Recipe, refreshed: Refreshed) -> list[str]:
    lines = [f"# {refreshed.dataset}: {refreshed.outcome}", for_markdown(refreshed.message)]
    if refreshed.outcome in ("waiting", "held"):
        current = refreshed.change.diff.old if refreshed.change else None
        what = refreshed.dataset, refreshed.ref, refreshed.version, current
        lines += ["", "## How to promote it", *_how_to_promote(recipe.publish.store, *what)]
    if refreshed.gates:
        lines += ["", "## Gates", *gates_table(refreshed.gates)]
    if refreshed.change:
        changes: dict[str, list[tuple[object, ...]]] = defaultdict(list)
        for name in ("totals", "configuration", "lineage", "engines", "libraries"):
            for key, (old, new) in getattr(refreshed.change.diff, name).items():
                changes[name].append((key, _short(old), _short(new)))
        for name, rows in changes.items():
            lines += ["", f"## Changed: {name}"]
            lines += markdown_table(("", "before", "now"), rows[:30])
    return lines


def _how_to_promote(
    store: str, dataset: str, ref: str, version: str, current: str | None
) -> list[str]:
    place = f"{store.rstrip('/')}/{dataset}"
    compare = f"- compare first: {markdown_code(f'packhouse diff {place}@{ref} {version}')}"
    return [
        *([compare] if current else []),
        "- in Prefect: resume this run if it is paused, or run `promote/promote-version` with "
        f"store {markdown_code(store)}, dataset {markdown_code(dataset)}, version "
        f"{markdown_code(version)}, ref {markdown_code(ref)}",
        f"- in a shell: {markdown_code(f'packhouse ref set {place} {ref} {version}')}",
    ]


def _detail(row: Mapping[str, Any]) -> str:
    """Return what is wrong with a row, possibly with a setting to copy."""
    detail = row["detail"]
    return detail if len(detail) <= _MOST_DETAIL else f"{detail[:_MOST_DETAIL]} ..."


def _short(value: object) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

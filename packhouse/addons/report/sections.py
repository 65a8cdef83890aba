"""Render the sections of a version's report, from its manifest and from counts over its files."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packhouse.addons.ask.inspect import is_of_classes
from packhouse.addons.report.charts_and_tables import (
    FAILED,
    PASSED,
    class_counts,
    details,
    flow_figure,
    header,
    length_figures,
    length_histogram,
    preformatted,
    reasons_figure,
    section,
    seq_len_figure,
    share_figure,
    table,
    tiles,
    turns_figure,
)
from packhouse.auditing.audit_limits import check_audit
from packhouse.auditing.inference_prompts import inference_line
from packhouse.errors import AuditError
from packhouse.pack.strategies import try_seq_lens
from packhouse.recipe import AuditConfig
from packhouse.recipe.audit_section import QUALITY_COUNTERS
from packhouse.records.ledger import Filter, LedgerLine, sum_by_reason, units_of
from packhouse.records.reasons import DROP_REASONS, QUARANTINE_REASONS
from packhouse.store.manifest import PULLED_NAMES, AuditedRow, Manifest
from packhouse.system.escaping import html_text
from packhouse.system.wording import counted

Samples = list[dict[str, Any]]
"""Rows, or packs as the page's script reads them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSplit:
    """Counts over the packs of a split that were read, and samples of them.

    For preference pairs, `shares` and `trained` count each side separately.
    """

    fill: list[int]
    """Packs by share of tokens that are not padding, in equal bins."""
    per_pack: list[tuple[int, int]]
    """Records per pack, and packs."""
    shares: list[int]
    """Records by share of tokens that are trained, in equal bins."""
    trained: list[tuple[int, int]]
    """Trained tokens, and records."""
    turns: list[tuple[int, int]]
    """Trained tokens, and number of answers, by the place of the answer in its record."""
    labels: dict[str, int]
    weights: list[tuple[float, int]]
    """Loss weights and trained tokens; empty if all weights are 1."""
    read_packs: int
    samples: Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Counts over the files of a version."""

    trained: list[tuple[str | None, float, int, int]]
    """Source, records, tokens and trained tokens in the packs that were read, with copies."""
    lengths: list[tuple[str, str, int, int]]
    """Source, split, tokens and records for each length that occurs, with copies."""
    too_long: list[tuple[str, int, int]]
    """Split, tokens and records that were left out as too long."""
    dropped: dict[str, Samples]
    """First rows of each reason."""
    quarantine: dict[str, Samples]
    """First rows of each `<step>/<reason>`."""
    splits: dict[str, MeasuredSplit]


_MOST_SOURCES = 8  # number of colors that are easy to distinguish
_OTHERS = "other sources"


def heading(manifest: Manifest) -> str:
    """Return the title and a one-sentence description."""
    form, seq_len = manifest.facts.configuration.format, manifest.facts.configuration.pack.seq_len
    caption = f"Packed token data: packs of {seq_len:,} tokens" if seq_len else "Packed token data"
    caption += f", template '{form.template}'" if form.template else ""
    trained = "labels" if is_of_classes(manifest) else form.train_on
    caption += f", preferences as {manifest.preferences}" if manifest.preferences else ""
    caption += f", trained on: {trained}." if trained else "."
    version = f"<code class=quiet>{html_text(manifest.version)}</code>"
    return header(manifest.dataset, f"{version}<p>{html_text(caption)}</p>")


def totals_of(manifest: Manifest) -> dict[str, int]:
    """Return counts of the ledger, and packs, records and tokens of all splits, by name."""
    counts = manifest.facts.counts
    splits = counts.splits().values()
    return {
        "rows read": counts.ledger[0].rows_in if counts.ledger else 0,
        "bad rows": sum(line.num_bad_rows for line in counts.ledger),
        "dropped": sum_by_reason(counts.ledger, "dropped").total(),
        "records packed": sum(each.num_sequences for each in splits),
        "packs": sum(each.num_packs for each in splits),
        "tokens": sum(each.num_tokens for each in splits),
        "trained tokens": sum(each.num_trained for each in splits),
        "padding": sum(each.num_padding for each in splits),
    }


def overview(manifest: Manifest) -> str:
    """Return the main counts of the version as tiles."""
    rows, bad, dropped, records, packs, tokens, trained, padding = totals_of(manifest).values()
    counts = manifest.facts.counts
    splits = counts.splits()
    made = sum(line.num_added_records for line in counts.ledger)
    lost = _share(dropped, rows + made)  # relative to records, if rows became several
    if made:
        lost += f" of {counted(rows + made, 'record')}"

    by_split = ", ".join(f"{name} {each.num_packs:,}" for name, each in splits.items())
    return tiles(
        [
            ("Rows read", f"{rows:,}", counted(len(counts.sources), "source")),
            ("Records packed", f"{records:,}", ""),
            ("Bad rows", f"{bad:,}", _share(bad, rows)),
            ("Dropped", f"{dropped:,}", lost),
            ("Packs", f"{packs:,}", by_split if len(splits) > 1 else ""),
            ("Tokens", short_number(tokens), f"{tokens:,}"),
            ("Trained", "labels", "no token is in the loss")
            if is_of_classes(manifest)
            else ("Trained", _share(trained, tokens), counted(trained, "token")),
            (
                "Fill",
                _share(tokens, tokens + padding, 2),
                f"{counted(padding, 'token')} of padding",
            ),
        ]
    )


def _share(part: int, whole: int, digits: int = 1) -> str:
    share = part / whole if whole else 0.0
    # A few rows in a million would show as 0.0%, which reads as none.
    return f"{share:.{digits}%}" if not part or share >= 0.001 else "under 0.1%"


def short_number(number: int) -> str:
    """Format a number in a few characters.

    Example:
        >>> short_number(9_999), short_number(5_021_910)
        ('9,999', '5.02M')
    """
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 10 * size or (unit != "k" and number >= size):
            return f"{number / size:.{2 if number < 10 * size else 1}f}{unit}"
    return f"{number:,}"


def load_section(manifest: Manifest, uri: str | None) -> str:
    """Return code that loads the version, for Python and the shell."""
    where = uri or f"STORE/{manifest.dataset}@{manifest.version}"
    split = next(iter(manifest.facts.counts.splits()), "train")
    trainer = "transformers' Trainer" if is_of_classes(manifest) else "TRL's SFTTrainer and others"
    python = (
        f"import packhouse\n\nrows = packhouse.load_preferences({where!r}, split={split!r})  # "
        "the columns that TRL's trainers expect"
        if manifest.preferences
        else "import packhouse\n\n"
        f"version = packhouse.open_version({where!r})\n"
        f"version.{split if split in ('train', 'eval') else 'train'}"
        f"  # a datasets.Dataset, for {trainer}"
    )
    shell = f"packhouse inspect '{where}'\npackhouse verify '{where}'"
    caption = (
        "" if uri else "<p class=quiet>STORE is the folder or bucket that this file came from.</p>"
    )
    return section(
        "load", "Load it", caption, preformatted(python, "Python"), preformatted(shell, "Shell")
    )


def flow_section(manifest: Manifest) -> str:
    """Return the ledger chart, and how rows became records."""
    ledger, rendering = manifest.facts.counts.ledger, manifest.facts.counts.rendering
    lines = [*rendering.record_lines(), *rendering.lines()]
    notes = "".join(f"<li>{html_text(line)}</li>" for line in lines)
    drawn = flow_figure(ledger) if ledger else ""
    return section(
        "flow", "From rows to tokens", drawn, f"<ul class=quiet>{notes}</ul>" if notes else ""
    )


def lengths_section(manifest: Manifest, measured: Measured) -> str:
    """Return lengths by source, and the effect of other pack sizes."""
    by_source: dict[str, Counter[int]] = {}
    by_split: dict[str, Counter[int]] = {}
    totals: Counter[str] = Counter()
    eval_by_source = manifest.facts.configuration.split.eval_by_source
    for source, split, length, count in measured.lengths:
        totals[source] += count
        # Each of these sets is packed separately, so other pack sizes are tried on each.
        packed_as = f"{split} {source}" if split == "eval" and eval_by_source else split
        by_split.setdefault(packed_as, Counter())[length] += count
    is_many = len(totals) > _MOST_SOURCES
    named = {source for source, _ in totals.most_common(_MOST_SOURCES - 1 if is_many else None)}
    for source, _, length, count in measured.lengths:
        by_source.setdefault(source if source in named else _OTHERS, Counter())[length] += count
    if not by_source:
        return ""
    pack, splits = manifest.facts.configuration.pack, manifest.facts.counts.splits()
    seq_len = pack.seq_len or max(each.seq_len for each in splits.values())
    figures = length_figures(by_source, seq_len)
    for split, length, count in measured.too_long:
        by_split.setdefault(split, Counter())[length] += count
    choices = []
    if pack.over_length != "window":  # windows depend on seq_len
        strategy, multiple = pack.strategy or "best_fit", pack.pad_record_to_multiple_of
        lengths = list(by_split.values())
        choices = try_seq_lens(lengths, seq_len, strategy, pack.seed, multiple)
    other = seq_len_figure(choices, seq_len) if choices else ""
    if other and measured.too_long:
        over = counted(sum(count for *_, count in measured.too_long), "record")
        other += f"<p class=quiet>Includes the {over} that this version dropped as too long.</p>"
    return section("lengths", "Lengths", f"<div class=grid>{figures}</div><br>", other)


def packs_section(manifest: Manifest, measured: Measured) -> str:
    """Return fill and records per pack."""
    splits = measured.splits
    if not splits:
        return ""
    rows = []
    for name, side in manifest.facts.counts.splits().items():
        row = [name, side.num_packs, side.lower_bound, side.num_sequences, side.num_tokens]
        row += [side.num_padding, f"{side.fill:.2%}", ""]
        if name in splits:
            records, packs = zip(*splits[name].per_pack, strict=True)
            half = np.searchsorted(np.cumsum(packs), sum(packs) / 2)
            row[-1] = f"{records[0]} / {records[half]} / {records[-1]}"
        rows.append(row)
    columns = ("split", "packs", "lower bound", "records", "tokens", "padding", "fill",
               "records per pack (min / median / max)")  # fmt: skip
    fill = {name: each.fill for name, each in splits.items()}
    drawn = share_figure("fill", "Packs by fill", "The rest of a pack is padding.", fill, "packs")
    inner = table(columns, rows, "Packs by split")
    return section("packs", "Packs", inner, drawn, _part(manifest, measured))


def _part(manifest: Manifest, measured: Measured) -> str:
    """Return a note if masks of only some packs were read."""
    num_packs = Counter[str]()
    for entry in manifest.files:
        num_packs[entry.split] += entry.rows if entry.kind == "data" else 0
    parts = [
        f"{name}: the first {each.read_packs:,} of {num_packs[name]:,} packs"
        for name, each in measured.splits.items()
        if each.read_packs < num_packs[name]
    ]
    return f"<p class=quiet>Counted in {html_text('; '.join(parts))}.</p>" if parts else ""


def trained_section(manifest: Manifest, measured: Measured) -> str:
    """Return the trained share by source, record and answer, with labels and loss weights."""
    splits = measured.splits
    labels, weights = Counter[str](), Counter[float]()
    for each in splits.values():
        labels.update(each.labels)
        weights.update(dict(each.weights))
    tables = [table(("label", "records"), sorted(labels.items()), "Labels")] if labels else []
    if weights:
        total, columns = weights.total(), ("loss weight", "trained tokens", "share")
        rows = [[f"{w:g}", n, _share(n, total)] for w, n in sorted(weights.items())[:20]]
        tables.append(table(columns, rows, "Loss weights"))
    caption = (
        "<p class=quiet>Classification: the label of each record is trained; its tokens are "
        "not.</p>"
    )
    figures: list[str] = []
    if not is_of_classes(manifest):
        caption = _trained_by_source(manifest, measured)
        # Sum over the splits: answers 1, 2, ... of each are added up.
        by_answer = zip(*(split.turns for split in splits.values()), strict=True)
        turns = [(sum(t for t, _ in own), sum(n for _, n in own)) for own in by_answer]
        if any(sum(each.shares) for each in splits.values()):
            shares = {name: each.shares for name, each in splits.items()}
            says = "In records on the left, few of the tokens are trained."
            title = "Records by trained share"
            figures.append(share_figure("trained-share", title, says, shares, "records"))
            bins = {name: class_counts(dict(each.trained)) for name, each in splits.items()}
            says = "How many tokens of each record count in the loss."
            title, measure = "Records by trained tokens", "trained tokens in a record"
            figures.append(length_histogram("trained-lengths", title, says, bins, measure, "split"))
        if sum(1 for _, n in turns if n) > 1:
            figures.append(turns_figure(turns))
    grid = f"<div class=grid>{''.join(figures)}</div>" if figures else ""
    part = _part(manifest, measured) if grid or tables else ""
    return section("trained", "What is trained", caption, *tables, grid, part)


def _trained_by_source(manifest: Manifest, measured: Measured) -> str:
    """Return a table of trained tokens by source."""
    rows = [
        [name, round(n), tokens, trained, _share(trained, tokens), round(trained / n, 1)]
        for name, n, tokens, trained in measured.trained
    ]
    columns = ("source", "records", "tokens", "trained", "share", "trained tokens per record")
    caption = ""
    if manifest.preferences == "pairs":
        caption = "Charts count the chosen and the rejected answer of a pair separately."
    if manifest.facts.configuration.pack.strategy == "concat":
        caption = "If a record is cut at the end of a pack, charts count each part separately."
    note = f"<p class=quiet>{caption}</p>" if caption else ""
    return (table(columns, rows, "Trained tokens by source") if rows else "") + note


def samples_section(
    num_packs: int, num_tokens: int, has_text: bool, note: str = "", has_weights: bool = False
) -> str:
    """Return the sample browser, which the page's script fills."""
    if not num_packs:
        return ""
    packs = f"{counted(num_packs, 'pack')} with {counted(num_tokens, 'token')}"
    note = note or f"{packs}, taken from all splits."
    if not has_text:
        note += " The tokenizer is not available, so token IDs are shown."
    return section(
        "samples",
        "Samples",
        f"<p class=quiet>{note} Hover over a token, click it, or use the arrow keys to see its "
        "ID.</p><div class=legend><i class=t>trained</i><i class=quiet>not trained</i><i "
        'class=s>special</i><i class="t s">special, trained</i>'
        + '<i class="t w">trained, loss weight other than 1</i>'
        * has_weights
        + "</div>"
        "<div class=bar><label for=find class=hidden>Search text, record id or file:row</label>"
        '<input id=find type=search placeholder="Search text, record id or file:row" '
        "autocomplete=off spellcheck=false>"
        "<button id=before type=button>&#8592; Previous pack</button>"
        "<button id=after type=button>Next pack &#8594;</button></div>"
        "<p id=where class=quiet role=status></p><p id=token class=mono role=status></p>"
        '<div id=tokens tabindex=0 role=group aria-label="Tokens; arrow keys name each one"></div>'
        "<noscript><p>Samples need JavaScript.</p></noscript>",
    )


def recipe_section(manifest: Manifest) -> str:
    """Return settings, sources, tokenizer and digests."""
    lineage = manifest.facts.lineage
    facts = [
        ("dataset", manifest.dataset),
        ("version ID", manifest.vid),
        ("content ID", manifest.content_id),
        ("tokenizer", manifest.facts.provenance.tokenizer or lineage.tokenizer.class_name),
        ("tokenizer fingerprint", lineage.tokenizer.fingerprint),
    ]
    sources = [[shard.file, shard.rows, shard.sha256] for shard in lineage.sources[:200]]
    files = [
        [entry.key, entry.kind, entry.rows, entry.size, entry.sha256]
        for entry in manifest.files[:200]
        if entry.kind not in PULLED_NAMES  # the manifest cannot contain the report's digest
    ]
    settings = json.dumps(manifest.configuration, indent=2, ensure_ascii=False, sort_keys=True)
    versions = {"engines": manifest.engines, "libraries": manifest.libraries}
    versions_json = json.dumps(versions, indent=2, sort_keys=True)
    return section(
        "recipe",
        "Recipe and digests",
        table(("what", "value"), facts, "Identifiers of the version"),
        table(("source file", "rows", "sha256"), sources, "Sources"),
        details("Settings", preformatted(settings, "Settings"), is_open=True),
        details("Files", table(("file", "kind", "rows", "bytes", "sha256"), files, "Files")),
        details("Versions of steps and libraries", preformatted(versions_json, "Versions")),
    )


def left_out_section(manifest: Manifest, measured: Measured) -> str:
    """Return the rows and records that were left out, with reasons, examples and remedies."""
    ledger = manifest.facts.counts.ledger
    counts = [
        (reason, kind, number)
        for kind in ("quarantined", "dropped")
        for reason, number in sum_by_reason(ledger, kind).most_common()
    ]
    if not counts:
        nothing = "<p>Every row that was read is in this version.</p>" if ledger else ""
        return section("left-out", "Left out", nothing)
    drawn = reasons_figure(counts)
    inner = "".join([*_quarantined(ledger, measured), *_dropped(manifest, measured)])
    return section("left-out", "Left out", drawn, inner)


def _quarantined(ledger: Sequence[LedgerLine], measured: Measured) -> Iterator[str]:
    units = units_of(ledger)
    for line in ledger:
        for reason, number in line.quarantined.items():
            many = counted(number, units[line.step][1])
            known = QUARANTINE_REASONS.get(line.step, {}).get(reason)
            yield _reason(reason, f"{many} quarantined by {line.step}", known)
            rows = measured.quarantine.get(f"{line.step}/{reason}", [])
            shown = ""
            for row in rows:
                raw = row["raw"]
                more = row["raw_size"] - len(raw.encode("utf-8", "replace"))
                rest = f" <i class=quiet>... {counted(more, 'more byte')}</i>"
                # Replaced bytes change the size too, so only texts near the limit of 400
                # characters were cut.
                is_cut = more > 0 and len(raw) > 390
                shown += (
                    f"<p class=quiet>{html_text(row['source'])}, row {row['row']:,}: "
                    f"{html_text(row['detail'])}</p>"
                    f"<p class=raw dir=auto>{html_text(raw)}{rest * is_cut}</p>"
                )
            yield details(counted(len(rows), "example"), shown)


def _dropped(manifest: Manifest, measured: Measured) -> Iterator[str]:
    ledger = manifest.facts.counts.ledger
    units = {
        reason: unit
        for line, (unit, _) in zip(ledger, units_of(ledger).values(), strict=False)
        for reason in line.dropped
    }
    for reason, number in sum_by_reason(ledger, "dropped").most_common():
        caption = f"{counted(number, units[reason])} dropped"
        yield _reason(reason, caption, DROP_REASONS.get(reason))
        if reason == "filtered":
            yield filters_table(manifest.filters())
        rows = measured.dropped.get(reason, [])
        cells = [[row["source"], row["row"], row["detail"]] for row in rows]
        shown = table(("source", "row", "what"), cells, f"Examples of {reason}")
        yield details(counted(len(rows), "example"), shown if rows else "")


def filters_table(filters: Iterable[Filter]) -> str:
    """Return the number of rows that each `where` expression left out."""
    counts = [[each.source, each.where, each.filtered, each.rows] for each in filters]
    names = ("source", "where", "rows left out", "rows read")
    return table(names, counts, "Rows dropped by `where`")


def _reason(reason: str, caption: str, known: Any) -> str:
    text = f"{known.meaning}. Remedy: {known.remedy}." if known else ""
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", html_text(text[:1].upper() + text[1:]))
    head = f"<h3>{html_text(reason)} <span class=quiet>{html_text(caption)}</span></h3>"
    return f"{head}<p>{marked}</p>"


def quality_section(manifest: Manifest) -> str:
    """Return the quality counters by source, with the first rows of each."""
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
    caption = f"<p class=quiet>{counted(found.dataset.get('rows', 0), 'row')} checked."
    caption += f" Not found in any row: {html_text(', '.join(none))}." if none else ""
    caption += "</p>"
    spoken = [[name, number] for name, number in found.languages.items()]
    inner = table(columns, rows, "Text quality") if rows else ""
    inner += table(("language of answers", "rows"), spoken, "Languages") if spoken else ""
    return section("quality", "Quality", caption, inner)


def _rows_by_file(rows: Sequence[AuditedRow]) -> str:
    """Format row places, each file once: `a/a.jsonl rows 3, 17; b/b.jsonl rows 4`."""
    files: dict[str, list[str]] = {}
    for row in rows:
        files.setdefault(row.source, []).append(f"{row.row:,}")
    named = (f"{name} row{'s' * (len(its) > 1)} {', '.join(its)}" for name, its in files.items())
    return "; ".join(named)


def duplicates_section(manifest: Manifest) -> str:
    """Return duplicates, near duplicates, and overlap of train and eval."""
    counts, audit = manifest.facts.counts, manifest.facts.audit.dataset
    if not audit:
        return ""
    found = manifest.facts.audit.contamination
    rows = [
        ("records that repeat an earlier one", audit.get("duplicates", 0)),
        ("prompts shared by several records", audit.get("prompt_groups", 0)),
        ("records with such a prompt", audit.get("prompt_group_records", 0)),
        ("records in train and in eval", audit.get("both_sides", 0)),
        *(
            (f"groups in {name}", side.groups)
            for name, side in sorted(counts.sides.items(), reverse=True)
            if side.records
        ),
        *([("rows that share words with a benchmark", found.contaminated)] if found else []),
        *(
            (f"dedup: {name.replace('_', ' ')}", value)
            for name, value in counts.dedup.items()
            if isinstance(value, int)
        ),
    ]
    inner = table(("what", "number"), rows, "Duplicates and leakage")
    return section("duplicates", "Duplicates and leakage", inner)


def audit_section(manifest: Manifest) -> str:
    """Return each audit limit with the value found."""
    if not manifest.facts.audit.packs:
        return ""
    limits = AuditConfig.model_validate(manifest.facts.provenance.limits)
    try:
        results = check_audit(manifest.facts.audit, limits)
    except AuditError as error:
        # A failed limit raises, but the error has the results of all limits.
        results = error.gates
    rows = []
    for gate in results:
        name = gate.name.removeprefix("audit.").removeprefix("max_").removeprefix("min_")
        outcome = f"{PASSED if gate.outcome == 'passed' else FAILED} {gate.outcome}"
        found = gate.shown_value, gate.shown_limit, gate.detail
        rows.append((name.replace("_", " "), outcome, *found))
    inner = table(("check", "result", "found", "limit", "count"), rows, "Audit")
    line = inference_line(manifest.audit)
    caption = f"<p class=quiet>{html_text(line[:1].upper() + line[1:])}.</p>" if line else ""
    return section("audit", "Audit", caption, inner)

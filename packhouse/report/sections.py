"""The sections of a version's report, each from the manifest and from what its files say."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packhouse.auditing.gate import check_audit
from packhouse.errors import AuditError
from packhouse.gates import GateResult
from packhouse.pages import html_text
from packhouse.reasons import DROP_REASONS, QUARANTINE_REASONS
from packhouse.recipe import AuditConfig
from packhouse.report.figures import (
    fill_figure,
    flow_figure,
    length_figures,
    reasons_figure,
    seq_len_figure,
    share_figure,
    trained_figure,
    turns_figure,
)
from packhouse.report.html import details, figure, numbers, preformatted, section, table, tiles
from packhouse.report.other_seq_lens import alternatives
from packhouse.store.manifest import PULLED_NAMES, Manifest

__all__ = [
    "audit_section",
    "duplicates_section",
    "flow_section",
    "heading",
    "left_out_section",
    "lengths_section",
    "load_section",
    "overview",
    "packs_section",
    "quality_section",
    "recipe_section",
    "samples_section",
    "trained_section",
]

Measured = Mapping[str, Any]
_MOST_SOURCES = 8  # colours that can be told apart
_OTHERS = "other sources"


def heading(manifest: Manifest) -> str:
    """What it is, in two lines."""
    pack, form = (manifest.configuration.get(name, {}) for name in ("pack", "format"))
    seq_len, template = pack.get("seq_len", 0), form.get("template", "")
    said = f"Packed token data: packs of {seq_len:,} tokens" if seq_len else "Packed token data"
    said += f", template '{template}'" if template else ""
    trained = form.get("train_on")
    said += f", trained on: {trained}." if trained else "."
    return (
        f"<header><div><h1>{html_text(manifest.dataset)}</h1>"
        f"<code class=quiet>{html_text(manifest.version)}</code><p>{html_text(said)}</p></div>"
        '<button id=theme type=button aria-label="Light or dark colours">Dark</button></header>'
    )


def overview(manifest: Manifest) -> str:
    """Numbers of the whole."""
    ledger = manifest.counts.get("ledger", [])
    sides = _sides(manifest)
    rows = ledger[0]["rows_in"] if ledger else 0
    total = Counter[str]()
    for side in sides.values():
        total.update({k: v for k, v in side.items() if isinstance(v, int)})
    room = total["num_packs"] * max((s["seq_len"] for s in sides.values()), default=1)
    lost = {kind: sum(sum_by_reason(ledger, kind).values()) for kind in ("quarantined", "dropped")}
    by_side = ", ".join(f"{name} {side['num_packs']:,}" for name, side in sides.items())
    return tiles(
        [
            ("Rows read", f"{rows:,}", numbers(len(manifest.counts.get("sources", {})), "source")),
            ("Records packed", f"{total['num_sequences']:,}", ""),
            ("Quarantined", f"{lost['quarantined']:,}", _share(lost["quarantined"], rows)),
            ("Dropped", f"{lost['dropped']:,}", _share(lost["dropped"], rows)),
            ("Packs", f"{total['num_packs']:,}", by_side if len(sides) > 1 else ""),
            ("Tokens", _short(total["num_tokens"]), f"{total['num_tokens']:,}"),
            ("Trained", _share(total["num_trained"], total["num_tokens"]),
             f"{total['num_trained']:,} tokens"),
            ("Fill", f"{total['num_tokens'] / max(room, 1):.2%}",
             f"{room - total['num_tokens']:,} tokens of padding"),
        ]
    )  # fmt: skip


def sum_by_reason(ledger: Sequence[Mapping[str, Any]], kind: str) -> Counter[str]:
    """Rows of a kind (`quarantined`, `dropped`) by reason, over all steps."""
    sums: Counter[str] = Counter()
    for line in ledger:
        sums.update(line.get(kind, {}))
    return sums


def _share(part: int, whole: int) -> str:
    share = part / whole if whole else 0.0
    return f"{share:.1%}" if not part or share >= 0.001 else "under 0.1%"


def _short(number: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 10 * size or (unit != "k" and number >= size):
            return f"{number / size:.{2 if number < 10 * size else 1}f}{unit}"
    return f"{number:,}"


def _sides(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    """Statistics of the splits that have packs, train first."""
    found = manifest.counts.get("statistics", {})
    return {
        name: {"seq_len": 1, "num_sequences": 0, "num_tokens": 0, "num_trained": 0, **found[name]}
        for name in sorted(found, reverse=True)
        if found[name].get("num_packs")
    }


def load_section(manifest: Manifest, uri: str | None) -> str:
    """How a trainer and a shell read the version."""
    where = uri or f"STORE/{manifest.dataset}@{manifest.version}"
    split = next(iter(_sides(manifest)), "train")
    python = (
        "import packhouse\n\n"
        f"version = packhouse.open_version({where!r})\n"
        f"version.{split if split in ('train', 'eval') else 'train'}"
        "  # a datasets.Dataset, for TRL's SFTTrainer and others"
    )
    shell = f"packhouse inspect '{where}'\npackhouse verify '{where}'"
    said = (
        "" if uri else "<p class=quiet>STORE is the folder or bucket that this file came from.</p>"
    )
    return section(
        "load", "Load it", said, preformatted(python, "Python"), preformatted(shell, "Shell")
    )


def flow_section(manifest: Manifest) -> str:
    """The ledger."""
    ledger = manifest.counts.get("ledger", [])
    return section("flow", "From rows to tokens", figure(flow_figure(ledger)) if ledger else "")


def lengths_section(manifest: Manifest, measured: Measured) -> str:
    """Lengths by source, and other sizes of packs."""
    by_source: dict[str, Counter[int]] = {}
    by_split: dict[str, Counter[int]] = {}
    totals: Counter[str] = Counter()
    for source, split, length, count in measured["lengths"]:
        totals[source] += count
        by_split.setdefault(split, Counter())[length] += count
    named = {source for source, _ in totals.most_common(_MOST_SOURCES - 1)}
    if len(totals) <= _MOST_SOURCES:
        named = set(totals)
    for source, _, length, count in measured["lengths"]:
        by_source.setdefault(source if source in named else _OTHERS, Counter())[length] += count
    if not by_source:
        return ""
    pack = manifest.configuration.get("pack", {})
    seq_len = int(pack.get("seq_len") or max(s["seq_len"] for s in _sides(manifest).values()))
    figures = "".join(figure(each) for each in length_figures(by_source, seq_len))
    choices = alternatives(
        list(by_split.values()),
        seq_len,
        str(pack.get("strategy", "best_fit")),
        int(pack.get("seed", 0)),
    )
    over = sum_by_reason(manifest.counts.get("ledger", []), "dropped")["over_seq_len"]
    note = (
        f"<p class=quiet>{numbers(over, 'row')} over seq_len {seq_len:,} left the data "
        "before this: a larger seq_len would take them in, and they are not counted here.</p>"
        if over
        else ""
    )
    other = figure(seq_len_figure(choices, seq_len)) + note if choices else ""
    return section("lengths", "Lengths", f"<div class=grid>{figures}</div><br>", other)


def packs_section(manifest: Manifest, measured: Measured) -> str:
    """Fill and records per pack."""
    splits = measured["splits"]
    sides = _sides(manifest)
    if not splits:
        return ""
    rows = []
    for name, side in sides.items():
        counts = Counter(dict(map(tuple, splits.get(name, {}).get("per_pack", []))))
        rows.append(
            [
                name,
                side["num_packs"],
                side.get("lower_bound", ""),
                side["num_sequences"],
                side["num_tokens"],
                side["num_packs"] * side["seq_len"] - side["num_tokens"],
                f"{side['num_tokens'] / (side['num_packs'] * side['seq_len']):.2%}",
                f"{min(counts)} / {_median(counts)} / {max(counts)}" if counts else "",
            ]
        )
    columns = ("split", "packs", "lower bound", "records", "tokens", "padding", "fill",
               "records in a pack (least / median / most)")  # fmt: skip
    drawn = fill_figure({name: each["fill"] for name, each in splits.items()})
    return section(
        "packs", "Packs", table(columns, rows, "Packs by split"), figure(drawn), _part(measured)
    )


def _part(measured: Measured) -> str:
    """Say if masks of some packs only were read."""
    parts = [
        f"{name}: the first {each['read_packs']:,} of {each['all_packs']:,} packs"
        for name, each in measured["splits"].items()
        if each["read_packs"] < each.get("all_packs", 0)
    ]
    return f"<p class=quiet>Counted in {html_text('; '.join(parts))}.</p>" if parts else ""


def _median(counts: Mapping[int, int]) -> int:
    half, seen = sum(counts.values()) / 2, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= half:
            return value
    return 0


def trained_section(manifest: Manifest, measured: Measured) -> str:
    """Trained share by source, by record and by answer."""
    rows = []
    for name, counts in manifest.audit.get("sources", {}).items():
        tokens, trained = counts.get("tokens", 0), counts.get("trained_tokens", 0)
        num_turns, records = counts.get("turns", 0), counts.get("rows", 0)
        each = round(trained / records, 1) if records else 0
        rows.append([name, records, tokens, trained, _share(trained, tokens), num_turns, each])
    columns = ("source", "records", "tokens", "trained", "share", "trained turns",
               "trained tokens a record")  # fmt: skip
    splits = measured["splits"]
    turns: list[tuple[int, int]] = [(0, 0)] * 12
    for split in splits.values():
        for i, (tokens, n) in enumerate(split["turns"]):
            turns[i] = turns[i][0] + tokens, turns[i][1] + n
    figures = []
    if any(sum(each["shares"]) for each in splits.values()):
        figures.append(figure(share_figure({n: e["shares"] for n, e in splits.items()})))
        figures.append(figure(trained_figure({n: e["trained"] for n, e in splits.items()})))
    if sum(1 for _, n in turns if n) > 1:
        figures.append(figure(turns_figure(turns)))
    grid = f"<div class=grid>{''.join(figures)}</div>" if figures else ""
    inner = table(columns, rows, "Trained tokens by source") if rows else ""
    if sum_by_reason(manifest.counts.get("ledger", []), "dropped"):
        inner += "<p class=quiet>Counted before rows were dropped and copied.</p>"
    return section("trained", "What is trained", inner, grid, _part(measured) if grid else "")


def left_out_section(manifest: Manifest, measured: Measured) -> str:
    """Rows that are not in the version, with reasons, examples and remedies."""
    ledger = manifest.counts.get("ledger", [])
    counts = [
        (reason, kind, number)
        for kind in ("quarantined", "dropped")
        for reason, number in sum_by_reason(ledger, kind).most_common()
    ]
    if not counts:
        nothing = "<p>Every row that was read is in this version.</p>" if ledger else ""
        return section("left-out", "Rows left out", nothing)
    drawn = reasons_figure(
        "reasons",
        "Rows left out, by reason",
        "Quarantined rows are bad; dropped ones are left out by a rule of the recipe.",
        counts,
    )
    inner = "".join([*_quarantined(ledger, measured), *_dropped(ledger, measured)])
    return section("left-out", "Rows left out", figure(drawn), inner)


def _quarantined(ledger: Sequence[Mapping[str, Any]], measured: Measured) -> Iterator[str]:
    examples = {(e["step"], e["reason"]): e["examples"] for e in measured["quarantine"]}
    for line in ledger:
        for reason, number in line.get("quarantined", {}).items():
            known = QUARANTINE_REASONS.get(line["step"], {}).get(reason)
            yield _reason(reason, f"{number:,} quarantined by {line['step']}", known)
            rows = examples.get((line["step"], reason), [])
            shown = "".join(
                f"<p class=quiet>{html_text(row['source'])}, row {row['row']:,}: "
                f"{html_text(row['detail'])}</p><p class=raw dir=auto>{html_text(row['raw'])}"
                f"{_rest(row)}</p>"
                for row in rows
            )
            yield details(numbers(len(rows), "example"), shown)


def _rest(row: Mapping[str, Any]) -> str:
    more = row["raw_size"] - len(row["raw"].encode("utf-8", "replace"))
    return (
        f" <i class=quiet>... {more:,} more bytes</i>" if more > 0 and len(row["raw"]) > 390 else ""
    )


def _dropped(ledger: Sequence[Mapping[str, Any]], measured: Measured) -> Iterator[str]:
    for reason, number in sum_by_reason(ledger, "dropped").most_common():
        yield _reason(reason, f"{number:,} dropped", DROP_REASONS.get(reason))
        rows = measured["dropped"].get(reason, [])
        cells = [
            [row["source"], row["row"], row["record_id"], row["repeats"] or ""] for row in rows
        ]
        shown = table(("source", "row", "record", "repeats"), cells, f"Examples of {reason}")
        yield details(numbers(len(rows), "example"), shown if rows else "")


def _reason(reason: str, said: str, known: Any) -> str:
    text = f"{known.meaning}. What helps: {known.remedy}." if known else ""
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", html_text(text[:1].upper() + text[1:]))
    head = f"<h3>{html_text(reason)} <span class=quiet>{html_text(said)}</span></h3>"
    return f"{head}<p>{marked}</p>"


def quality_section(manifest: Manifest) -> str:
    """Counters of quality, where the audit has them."""
    found = manifest.audit.get("quality")
    if not isinstance(found, Mapping) or not found:
        return ""
    return section("quality", "Quality", _tree(found))


def _tree(value: Any) -> str:
    """Facts of a form that is not known here: numbers as a table, the rest as JSON."""
    flat = sorted((k, v) for k, v in value.items() if isinstance(v, int | float))
    rest = {k: v for k, v in value.items() if not isinstance(v, int | float)}
    parts = [table(("counter", "number"), flat, "Counters of quality")] if flat else []
    for name, inner in sorted(rest.items()):
        text = json.dumps(inner, indent=1, ensure_ascii=False, sort_keys=True)[:8000]
        parts.append(details(str(name), preformatted(text, str(name))))
    return "".join(parts)


def duplicates_section(manifest: Manifest) -> str:
    """Duplicates, near duplicates, and what train and eval share."""
    audit, counts = manifest.audit.get("dataset", {}), manifest.counts
    if not audit:
        return ""
    rows: list[list[Any]] = [
        ["records that repeat an earlier one", audit.get("duplicates", 0)],
        ["prompts that several records share", audit.get("prompt_groups", 0)],
        ["records with such a prompt", audit.get("prompt_group_records", 0)],
        ["records in train and in eval", audit.get("both_sides", 0)],
    ]
    for name, side in sorted(counts.get("sides", {}).items(), reverse=True):
        if side.get("records"):
            rows.append([f"groups in {name}", side.get("groups", 0)])
    found = manifest.audit.get("contamination")
    if found:
        rows.append(["rows that share words with a benchmark", found.get("contaminated", 0)])
    for name, value in counts.get("dedup", {}).items():
        if isinstance(value, int):
            rows.append([f"dedup: {name.replace('_', ' ')}", value])
    inner = table(("what", "number"), rows, "Duplicates and leakage")
    return section("duplicates", "Duplicates and leakage", inner)


def audit_section(manifest: Manifest, limits: AuditConfig) -> str:
    """Each limit with what was found."""
    if not manifest.audit.get("packs"):
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
    return section("audit", "Audit", inner)


def _gate_row(gate: GateResult) -> str:
    name = gate.name.removeprefix("audit.").removeprefix("max_").removeprefix("min_")
    good = gate.outcome == "passed"
    return (
        f"<tr><td>{html_text(name.replace('_', ' '))}</td>"
        f"<td class={'good' if good else 'bad'}>{'&#10003; ' if good else '&#10007; '}"
        f"{gate.outcome}</td><td class=number>{gate.shown_value}</td>"
        f"<td>{gate.shown_limit}</td><td class=quiet>{html_text(gate.detail)}</td></tr>"
    )


def samples_section(num_packs: int, num_tokens: int, has_text: bool) -> str:
    """The browser of samples; the page's script fills it."""
    if not num_packs:
        return ""
    said = f"{numbers(num_packs, 'pack')} with {num_tokens:,} tokens, spread over the splits."
    if not has_text:
        said += " The tokenizer is not at hand, or its tokens are no bytes: ids are shown."
    return section(
        "samples",
        "Samples",
        f"<p class=quiet>{said} Hover over a token, click it, or use the arrow keys for its id.</p>"
        "<div class=legend><i class=t>trained</i><i class=quiet>not trained</i>"
        '<i class=s>special</i><i class="t s">special, trained</i></div>'
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
    """Settings, sources, tokenizer and digests."""
    tokenizer = manifest.lineage.get("tokenizer", {})
    facts = [
        ("dataset", manifest.dataset),
        ("version id", manifest.vid),
        ("content id", manifest.content_id),
        ("tokenizer", str(manifest.provenance.get("tokenizer", tokenizer.get("class", "")))),
        ("tokenizer fingerprint", str(tokenizer.get("fingerprint", ""))),
    ]
    sources = [
        [str(each.get("file", "")), each.get("rows", 0), str(each.get("sha256", ""))]
        for each in manifest.lineage.get("sources", [])[:200]
    ]
    files = [
        [entry.key, entry.kind, entry.rows, entry.size, entry.sha256]
        for entry in manifest.files[:200]
        if entry.kind not in PULLED_NAMES  # its own digest cannot stand in it
    ]
    settings = json.dumps(manifest.configuration, indent=2, ensure_ascii=False, sort_keys=True)
    versions = json.dumps(
        {"engines": manifest.engines, "libraries": manifest.libraries}, indent=2, sort_keys=True
    )
    return section(
        "recipe",
        "Recipe and digests",
        table(("what", "value"), facts, "What identifies the version"),
        table(("source file", "rows", "sha256"), sources, "Sources"),
        details("Settings", preformatted(settings, "Settings"), is_open=True),
        details("Files", table(("file", "kind", "rows", "bytes", "sha256"), files, "Files")),
        details("Versions of steps and libraries", preformatted(versions, "Versions")),
    )

"""What a run prints when it ends: what was published, the ledger, and how to load it."""

from collections import Counter
from typing import Any

from packhouse.audit import audit_rows
from packhouse.chain import Prepared
from packhouse.jobs import STEPS
from packhouse.sources.extra_fields import CONVERSATIONAL, IN_MESSAGES, TRAIN_FLAGS
from packhouse.terminal import console

__all__ = ["audit_table", "ledger_table", "print_report", "report_json"]


def report_json(prepared: Prepared) -> dict[str, Any]:
    """Return the result of a run as plain JSON."""
    return {
        "dataset": prepared.dataset,
        "version": prepared.version,
        "store": prepared.store,
        "created": prepared.created,
        "ledger": [line.to_json() for line in prepared.ledger],
        "steps": _steps(prepared),
        "quarantine": prepared.facts.get("quarantine"),
        "statistics": prepared.facts.get("statistics"),
        "ref": prepared.facts.get("ref"),
        "ref_version": prepared.facts.get("ref_version"),
        "held_back": prepared.facts.get("held_back"),
        "mirrors": prepared.facts.get("mirrors"),
        "golden": prepared.facts.get("golden"),
        "audit": prepared.facts.get("audit"),
        "unused_fields": _unused_fields(prepared),
        "sources": _pack_facts(prepared).get("sources"),
        "dedup": _pack_facts(prepared).get("dedup"),
        "split": _pack_facts(prepared).get("split"),
    }


def print_report(prepared: Prepared) -> None:
    """Print the result of a run for people."""
    from rich.text import Text

    out = console()
    verb = "published" if prepared.created else "unchanged, already published:"
    dataset = f" {prepared.dataset} "
    out.print(Text.assemble("\n", (verb, "bold green"), (dataset, "bold"), prepared.version))
    uri = f"{prepared.store.rstrip('/')}/{prepared.dataset}"
    out.print(f"  in {uri}, {_ref(prepared, uri)}\n")
    lines = [line.to_json() for line in prepared.ledger]
    out.print(ledger_table(lines))
    for line in lines:
        _print_reasons(out, line)
    _print_notes(out, prepared)
    _print_unused_fields(out, prepared)
    _print_mixing(out, prepared)
    _print_repeats(out, prepared)
    _print_uneven_split(out, _pack_facts(prepared).get("split"))
    out.print(_splits_table(prepared.facts["statistics"]))
    out.print(audit_table(prepared.facts["audit"]))
    if "contamination" in prepared.facts["audit"]:
        found = prepared.facts["audit"]["contamination"]
        out.print(
            f"contamination: {found['contaminated']:,} of {found['rows']:,} rows share "
            f"{found['ngram']} words in a row with a benchmark"
        )
    if prepared.facts.get("golden"):
        out.print(f"golden: {prepared.facts['golden']:,} conversations came out as pinned")
    for target, name in prepared.facts["mirrors"].items():
        out.print(f"also in {target} ({name})")
    out.print("steps: " + _steps_line(prepared))
    if prepared.facts.get("quarantine"):
        rows = sum(sum(line.quarantined.values()) for line in prepared.ledger)
        out.print(f"quarantine: {rows:,} rows in {prepared.facts['quarantine']}")
    out.print("\nload it:")
    out.print("  from packhouse.loaders import load_packed")
    out.print(f'  train = load_packed("{uri}", split="train")')


def _ref(prepared: Prepared, uri: str) -> str:
    ref, at = prepared.facts["ref"], prepared.facts["ref_version"]
    if at == prepared.version:
        return f"ref '{ref}'"
    if prepared.facts["held_back"]:
        reasons = "; ".join(prepared.facts["held_back"])
        return (
            f"but ref '{ref}' was held back: {reasons}; to move it all the same: "
            f"packhouse ref set {uri} {ref} {prepared.version}"
        )
    return (
        f"but ref '{ref}', which pointed to it before, points to {at} now and stays there; "
        "to move it: "
        f"packhouse ref set {uri} {ref} {prepared.version}"
    )


def ledger_table(lines: list[dict[str, Any]]) -> Any:
    """Return the ledger as a rich table: rows and tokens into and out of each step."""
    from rich.table import Table

    table = Table(title="ledger", title_justify="left", box=None, pad_edge=False)
    table.add_column("step")
    for name in ("rows in", "rows out", "quarantined", "dropped", "tokens in", "tokens out"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line["step"],
            f"{line['rows_in']:,}",
            f"{line['rows_out']:,}",
            _count(sum(line["quarantined"].values()) or None),
            _count(sum(line["dropped"].values()) or None),
            _count(line["tokens_in"]),
            _count(line["tokens_out"]),
        )
    return table


def audit_table(audit: dict[str, Any]) -> Any:
    """Return the audit as a rich table: a row for each source."""
    from rich.table import Table

    table = Table(title="\naudit", title_justify="left", box=None, pad_edge=False)
    rows = audit_rows(audit)
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "source" else "right")
    for row in rows:
        table.add_row(*(f"{v:,}" if isinstance(v, int) else v for v in row.values()))
    return table


def _print_reasons(out: Any, line: dict[str, Any]) -> None:
    for what, unit in (
        ("added", " rows"),
        ("quarantined", ""),
        ("dropped", " rows"),
        ("tokens_dropped", " tokens"),
        ("tokens_added", " tokens"),
    ):
        if line[what]:
            reasons = ", ".join(f"{reason} {n:,}{unit}" for reason, n in line[what].items())
            out.print(f"  {line['step']} {what.removeprefix('tokens_')}: {reasons}")


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


# What a reader should know although no row was lost by it.
_NOTES = {
    "straddles_start": "answers begin inside a token of the prompt, which is not trained: "
    "end the template's prompt with a line break to avoid it",
    "straddles_end": "trained turns end inside a token that reaches beyond them",
    "control_text_rows": "rows hold control-token text in their contents",
    "inexact_round_trip": "rows do not decode to their very text (the tokenizer normalises)",
    "unk_tokens": "unknown tokens",
    "reasoning_not_rendered": "thoughts are left out by the template",
    "bom": "files began with a byte order mark",
    "blank_lines": "blank lines were passed over",
    "truncated_files": "files end in the middle of a row",
}


def _print_notes(out: Any, prepared: Prepared) -> None:
    counts: Counter[str] = Counter()
    for receipt in prepared.receipts:
        counts.update(receipt.facts.get("notes", {}))
    for note, meaning in _NOTES.items():
        if counts[note]:
            out.print(f"  note: {counts[note]:,} {meaning}")


def _unused_fields(prepared: Prepared) -> dict[str, dict[str, int]]:
    """Rows of each source by name of a field that no format reads."""
    found: dict[str, Counter[str]] = {}
    for receipt in prepared.receipts:
        if receipt.facts.get("extra_fields"):
            source = receipt.facts["origin"]["file"].split("/")[0]
            found.setdefault(source, Counter()).update(receipt.facts["extra_fields"])
    return {source: dict(sorted(counts.items())) for source, counts in sorted(found.items())}


def _print_unused_fields(out: Any, prepared: Prepared) -> None:
    """Fields of rows that no format reads, by source, those that look like conversation first."""
    for source, counts in _unused_fields(prepared).items():
        talk = [name for name in counts if _bare(name) in CONVERSATIONAL]
        flags = [name for name in counts if name != _bare(name) and _bare(name) in TRAIN_FLAGS]
        named = list(dict.fromkeys([*flags, *talk, *counts]))
        shown = ", ".join(f"{name} {counts[name]:,}" for name in named[:8])
        more = f", and {len(named) - 8} more" if len(named) > 8 else ""
        out.print(f"  note: fields of '{source}' that are not used (rows): {shown}{more}")
        if talk:
            out.print(
                f"    {', '.join(talk)} may belong to the conversation: look at `format` and "
                "`fields` of the source",
                markup=False,
            )
        if flags:
            out.print(
                f"    {', '.join(flags)} may say what is trained: a message's `train` and "
                "`weight` are read",
                markup=False,
            )


def _bare(name: str) -> str:
    return name.removeprefix(IN_MESSAGES)


def _print_mixing(out: Any, prepared: Prepared) -> None:
    """What was taken of each source, where a source's settings took more or less than all."""
    lines = _pack_facts(prepared).get("sources", {})
    if not any(line.get("sampled_out") or line["repeated"] for line in lines.values()):
        return
    for name, line in lines.items():
        out.print(
            f"  mix: '{name}' {line['packed']:,} of {line['records']:,} records, "
            f"{line['repeated']:,} repeats of them, {line['tokens']:,} tokens"
        )


def _print_repeats(out: Any, prepared: Prepared) -> None:
    """How many rows repeat another, and one of each kind."""
    found = _pack_facts(prepared).get("dedup", {})
    for kind in ("equal", "near"):
        facts = found.get(kind, {})
        if not facts.get("rows"):
            continue
        row = facts["samples"][0]
        first = row["repeats"]
        apart = facts.get("on_both_sides", 0)
        split = f"{apart:,} pairs are in train and eval; " if apart else ""
        out.print(
            f"  {kind}: {facts['rows']:,} rows repeat another, {facts['dropped']:,} dropped; "
            f"{split}such as {row['source']} row {row['row']:,} of {first['source']} row "
            f"{first['row']:,} ({row['similarity']:.0%})",
            markup=False,
        )


def _print_uneven_split(out: Any, facts: dict[str, int] | None) -> None:
    """Say so where eval has far more or fewer records than were asked for."""
    if facts is None or not is_uneven(**facts):
        return
    joined = f"; {facts['joined']:,} records were joined to others' groups" * bool(facts["joined"])
    out.print(
        f"  note: eval has {facts['eval']:,} of {facts['records']:,} records, {facts['asked']:,} "
        f"were asked for: groups are taken whole{joined}; see split and dedup in the recipe"
    )


def is_uneven(*, records: int, eval: int, asked: int, joined: int) -> bool:
    """Whether eval is so far from what was asked for that neither chance nor one group explains it.

    Example:
        >>> is_uneven(records=1000, eval=40, asked=50, joined=0)
        False
        >>> is_uneven(records=1000, eval=10, asked=50, joined=700)
        True
    """
    by_chance = 3 * (asked * (1 - min(1.0, asked / max(records, 1)))) ** 0.5
    return abs(eval - asked) > max(asked / 5, by_chance) or (eval == 0) != (asked == 0)


def _pack_facts(prepared: Prepared) -> dict[str, Any]:
    found = [receipt.facts for receipt in prepared.receipts if receipt.step == "pack"]
    return dict(found[0]) if found else {}


def _splits_table(statistics: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title="\nsplits", title_justify="left", box=None, pad_edge=False)
    table.add_column("split")
    for name in ("packs", "records", "tokens", "trained", "fill", "lower bound"):
        table.add_column(name, justify="right")
    for split in sorted(statistics, reverse=True):  # train before eval
        facts = statistics[split]
        if not facts["num_packs"]:
            continue
        table.add_row(
            split,
            f"{facts['num_packs']:,}",
            f"{facts['num_sequences']:,}",
            f"{facts['num_tokens']:,}",
            f"{facts['num_trained']:,}",
            f"{facts['fill']:.2%}",
            f"{facts['lower_bound']:,}",
        )
    return table


def _steps(prepared: Prepared) -> list[dict[str, Any]]:
    rows = []
    for step in STEPS:
        receipts = [receipt for receipt in prepared.receipts if receipt.step == step]
        rows.append(
            {
                "step": step,
                "jobs": len(receipts),
                "cached": sum(receipt.cached for receipt in receipts),
                "seconds": round(prepared.seconds.get(step, 0.0), 3),
            }
        )
    return rows


def _steps_line(prepared: Prepared) -> str:
    parts = []
    for row in _steps(prepared):
        if row["cached"] == row["jobs"]:
            parts.append(f"{row['step']} cached")
        elif row["cached"]:
            parts.append(
                f"{row['step']} {row['cached']} of {row['jobs']} cached, {row['seconds']:.1f} s"
            )
        else:
            parts.append(f"{row['step']} {row['seconds']:.1f} s")
    return ", ".join(parts)

"""What a run prints when it ends: what was published, the ledger, and how to load it."""

from typing import Any

from packhouse.chain import Prepared
from packhouse.jobs import STEPS

__all__ = ["ledger_table", "print_report", "report_json"]


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
    }


def print_report(prepared: Prepared) -> None:
    """Print the result of a run for people."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    verb = "published" if prepared.created else "unchanged, already published:"
    console.print(f"\n[bold green]{verb}[/] [bold]{prepared.dataset}[/] {prepared.version}")
    uri = f"{prepared.store.rstrip('/')}/{prepared.dataset}"
    console.print(f"  in {uri}, {_ref(prepared, uri)}\n")
    lines = [line.to_json() for line in prepared.ledger]
    console.print(ledger_table(lines))
    for line in lines:
        _print_reasons(console, line)
    console.print(_splits_table(prepared.facts["statistics"]))
    console.print("steps: " + _steps_line(prepared))
    if prepared.facts.get("quarantine"):
        rows = sum(sum(line.quarantined.values()) for line in prepared.ledger)
        console.print(f"quarantine: {rows:,} rows in {prepared.facts['quarantine']}")
    console.print("\nload it:")
    console.print("  from packhouse.loaders import load_packed", markup=False)
    console.print(f'  train = load_packed("{uri}", split="train")', markup=False)


def _ref(prepared: Prepared, uri: str) -> str:
    ref, at = prepared.facts["ref"], prepared.facts["ref_version"]
    if at == prepared.version:
        return f"ref '{ref}'"
    return (
        f"but ref '{ref}' stays at {at}, published after it; to go back: "
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


def _print_reasons(console: Any, line: dict[str, Any]) -> None:
    for what, unit in (("quarantined", ""), ("dropped", " rows"), ("tokens_dropped", " tokens")):
        if line[what]:
            reasons = ", ".join(f"{reason} {n:,}{unit}" for reason, n in line[what].items())
            console.print(f"  {line['step']} {what.removeprefix('tokens_')}: {reasons}")


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _splits_table(statistics: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title="\nsplits", title_justify="left", box=None, pad_edge=False)
    table.add_column("split")
    for name in ("packs", "records", "tokens", "trained", "fill", "lower bound"):
        table.add_column(name, justify="right")
    for split in sorted(statistics, reverse=True):  # train before eval
        facts = statistics[split]
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
                "seconds": round(sum(r.seconds for r in receipts if not r.cached), 3),
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

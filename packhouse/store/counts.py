"""What a manifest counts, as numbers that pages show."""

from packhouse.records.ledger import sum_by_reason
from packhouse.store.manifest import Manifest
from packhouse.system.wording import by_name, counted, rows_and_records

_OF_SPLITS = {
    "records packed": "num_sequences",
    "packs": "num_packs",
    "tokens": "num_tokens",
    "trained tokens": "num_trained",
    "padding": "num_padding",
}


def totals_of(manifest: Manifest) -> dict[str, int]:
    """Return counts of the ledger, and packs, records and tokens of all splits, by name."""
    counts = manifest.facts.counts
    totals = {"rows read": counts.ledger[0].rows_in if counts.ledger else 0}
    totals["bad rows"] = sum(line.num_bad_rows for line in counts.ledger)
    totals["dropped"] = sum_by_reason(counts.ledger, "dropped").total()
    for name, attribute in _OF_SPLITS.items():
        totals[name] = sum(getattr(each, attribute) for each in counts.splits().values())
    return totals


def numbers_of(manifest: Manifest) -> list[tuple[str, str]]:
    """Return what a manifest says of rows and splits: names and values."""
    ledger = manifest.facts.counts.ledger
    lines = [("rows read", f"{ledger[0].rows_in:,}" if ledger else "0")]
    bad, dropped = (sum_by_reason(ledger, kind) for kind in ("quarantined", "dropped"))
    rows = rows_and_records(sum(line.num_bad_rows for line in ledger), bad.total())
    lines.append(("quarantined", f"{rows}: {by_name(bad)}" if bad else "0"))
    lines.append(("dropped", f"{dropped.total():,} ({by_name(dropped)})" if dropped else "0"))
    for name, side in manifest.facts.counts.splits().items():
        share = side.num_trained / max(side.num_tokens, 1)
        said = (
            f"{counted(side.num_packs, 'pack')} of {side.seq_len:,} tokens, {side.fill:.2%} full; "
            f"{counted(side.num_sequences, 'record')}, {counted(side.num_tokens, 'token')}, "
            f"{share:.1%} trained"
        )
        lines.append((name, said))
    return lines

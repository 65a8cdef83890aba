"""What a manifest counts, as numbers that pages show."""

from dataclasses import fields

from packhouse.packing import PackStatistics
from packhouse.records.ledger import num_bad_rows, sum_by_reason
from packhouse.records.render_counts import RenderCounts
from packhouse.store.manifest import Manifest
from packhouse.wording import by_name, counted, rows_and_records


def totals_of(manifest: Manifest) -> dict[str, int]:
    """Return counts of the ledger, and packs, records and tokens of all splits, by name."""
    ledger = manifest.counts.get("ledger", [])
    totals = {"rows read": ledger[0].get("rows_in", 0) if ledger else 0}
    totals["bad rows"] = num_bad_rows(ledger)
    totals["dropped"] = sum_by_reason(ledger, "dropped").total()
    splits = splits_of(manifest).values()
    for name, attribute in _OF_SPLITS.items():
        totals[name] = sum(getattr(each, attribute) for each in splits)
    return totals


def render_counts_of(manifest: Manifest) -> RenderCounts:
    """Return how rows became records; all 0 where another program's manifest does not say."""
    said = manifest.counts.get("rendering", {})
    return RenderCounts(**{f.name: said[f.name] for f in fields(RenderCounts) if f.name in said})


_OF_SPLITS = {
    "records packed": "num_sequences",
    "packs": "num_packs",
    "tokens": "num_tokens",
    "trained tokens": "num_trained",
    "padding": "num_padding",
}


def numbers_of(manifest: Manifest) -> list[tuple[str, str]]:
    """Return what a manifest says of rows and splits: names and values."""
    ledger = manifest.counts.get("ledger", [])
    lines = [("rows read", f"{ledger[0].get('rows_in', 0):,}" if ledger else "0")]
    bad, dropped = (sum_by_reason(ledger, kind) for kind in ("quarantined", "dropped"))
    rows = rows_and_records(num_bad_rows(ledger), bad.total())
    lines.append(("quarantined", f"{rows}: {by_name(bad)}" if bad else "0"))
    lines.append(("dropped", f"{dropped.total():,} ({by_name(dropped)})" if dropped else "0"))
    for name, side in splits_of(manifest).items():
        share = side.num_trained / max(side.num_tokens, 1)
        said = (
            f"{counted(side.num_packs, 'pack')} of {side.seq_len:,} tokens, {side.fill:.2%} full; "
            f"{counted(side.num_sequences, 'record')}, {counted(side.num_tokens, 'token')}, "
            f"{share:.1%} trained"
        )
        lines.append((name, said))
    return lines


def splits_of(manifest: Manifest) -> dict[str, PackStatistics]:
    """Return the statistics of the splits that have packs, train before eval.

    What another program's manifest does not say is 0. `num_sequences` counts a record that `concat`
    cuts once.
    """
    splits = {}
    sides = manifest.counts.get("sides", {})
    for name, said in sorted(manifest.counts.get("statistics", {}).items(), reverse=True):
        records = sides.get(name, {}).get("records", said.get("num_sequences"))
        said = {**said, "num_sequences": records}
        known = {key: said[key] for key in _NUMBERS if type(said.get(key)) is int}
        bars = [(length, count) for length, count in said.get("length_histogram", [])]
        side = PackStatistics(
            **{"seq_len": 1, "lower_bound": 0, **known},
            strategy=str(said.get("strategy", "")),
            length_histogram=bars,
        )
        if side.num_packs:
            splits[name] = side
    return splits


_NUMBERS = ("seq_len", "num_sequences", "num_packs", "num_tokens", "num_trained", "lower_bound")

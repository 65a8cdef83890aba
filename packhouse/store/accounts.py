"""Check that a version agrees with itself: each number in its manifest with the others.

A run writes its numbers in several places: rows in the ledger, the lineage and the audit; packs and
tokens in the statistics and the files; bad and dropped rows in the ledger and in files of their
own. So a file that was dropped or a count that was set to zero is found even if every digest was
computed again; that needs no ref and no secret. Someone who changes all these places consistently
is found only by a ref, which recorded the manifest's id.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pyarrow as pa

from packhouse.errors import ContractError
from packhouse.escaping import for_terminal
from packhouse.recipe.publish import shard_names
from packhouse.records.ledger import LedgerLine, check_ledger, filters_of
from packhouse.store.contracts import read_batches
from packhouse.store.manifest import FileEntry, Manifest

Tally = Counter[tuple[str, str]]
"""Rows of records, quarantine and dropped files by place and outcome:
`("source 'chats'", "records")`, `("source 'chats'", "over_seq_len")`, `("step 'validate'",
"json")`."""

_STEPS = ["validate", "format", "tokenize", "pack", "split"]
_LINE_FIELDS = [each.name for each in fields(LedgerLine)]
_NO_REASONS = {"records", "packed", "repeated", "tokens"}


def manifest_problems(manifest: Manifest) -> list[str]:
    """Compare the numbers of a manifest with each other; one sentence for each difference."""
    found = []
    if not any(entry.kind == "card" for entry in manifest.files):
        found.append("the card (README.md), which every version has, is missing")
    if _is_of_run(manifest):
        missing = [name for name, is_there in _needed(manifest).items() if not is_there]
        if missing:
            found.append(f"a run wrote this version, and this is missing: {', '.join(missing)}")
        else:
            found += _differences(manifest)
    return [f"manifest.json: {for_terminal(problem)}" for problem in found]


def tally_file(path: Path, entry: FileEntry) -> Tally:
    """Count the rows of a records, quarantine or dropped file; none of other files.

    Raises:
        ContractError: a column is missing, or the manifest says another number of rows.
        IntegrityError: the file cannot be read.
    """
    tally: Tally = Counter()
    names = {
        "records": ["source", "outcome"],
        "quarantine": ["source", "step", "reason"],
        "dropped": ["source", "reason", "detail"],
    }
    if entry.kind not in names or path.suffix != ".parquet":
        return tally
    rows = 0
    for batch in read_batches(path, names[entry.kind]):
        if batch.schema.names != names[entry.kind]:
            raise ContractError(f"it needs columns {', '.join(names[entry.kind])}")
        rows += batch.num_rows
        counts = pa.table(batch).group_by(batch.schema.names).aggregate([([], "count_all")])
        for row in counts.to_pylist():
            number = row["count_all"]
            source = f"source '{str(row['source']).partition('/')[0]}'"
            if entry.kind == "records":
                tally[source, "records"] += number
                tally[source, str(row["outcome"])] += number
            elif entry.kind == "dropped":
                tally[source, f"dropped as {row['reason']}"] += number
                if row["reason"] == "filtered":
                    tally[source, f"left out by `{row['detail']}`"] += number
            else:
                tally[source, "quarantined"] += number
                tally[f"step '{row['step']}'", str(row["reason"])] += number
    if rows != entry.rows:
        raise ContractError(f"{rows:,} rows, and the manifest says {entry.rows:,}")
    return tally


def tally_problems(manifest: Manifest, tally: Tally) -> list[str]:
    """Compare the rows of records, quarantine and dropped files with what the manifest says.

    For each source: rows read = quarantined + dropped before they were records + records, and
    records = packed + dropped.
    """
    if not _is_of_run(manifest) or not all(_needed(manifest).values()):
        return []  # `manifest_problems` says so
    # What the counts state under a key, the files must hold under it: 100 rows of chats, of which 3
    # are no JSON, `where: n > 1` left out 7 and the rest were packed, are
    #   source 'chats': records 90, kept 90, quarantined 3, dropped as filtered 7, left out by
    #   `n > 1` 7    step 'validate': json 3
    lines = {line["step"]: line for line in manifest.counts["ledger"]}
    stated = {
        (f"step '{step}'", reason): number
        for step, line in lines.items()
        for reason, number in line.get("quarantined", {}).items()
    }
    is_one_to_one = not any(lines[step].get("added") for step in ("validate", "format"))
    left_out = _dropped_before(manifest)
    for name, rows in _rows_read(manifest).items():
        source, counts = f"source '{name}'", manifest.counts["sources"].get(name, {})
        records = counts.get("records", 0)
        stated |= {(source, reason): counts[reason] for reason in set(counts) - _NO_REASONS}
        stated |= {(source, "kept"): counts.get("packed", 0), (source, "records"): records}
        dropped = left_out[name]
        stated |= {(source, f"dropped as {why}"): number for why, number in dropped.items()}
        bad = source, "quarantined"  # where rows made several records, the ledger alone says it
        stated[bad] = rows - records - sum(dropped.values()) if is_one_to_one else tally[bad]
    for each in filters_of(manifest.lineage["sources"]):
        stated[f"source '{each.source}'", f"left out by `{each.where}`"] = each.filtered
    found = []
    for key in sorted(stated.keys() | tally.keys()):
        first, second = stated.get(key, 0), tally[key]
        if first != second:
            found.append(
                f"manifest.json: {for_terminal(', '.join(key))}: {first:,} rows by its counts; "
                f"its records, quarantine and dropped files hold {second:,}"
            )
    return found


def _is_of_run(manifest: Manifest) -> bool:
    """Return True if there is any trace of a run; others may publish with facts of their own.

    The mark in the schema is in the data files too, so it cannot be removed from here alone.
    """
    is_marked = "packhouse.contract" in manifest.schema.get("metadata", {})
    ledger = manifest.counts.get("ledger")
    return bool(is_marked or manifest.engines or manifest.audit or ledger)


def _needed(manifest: Manifest) -> dict[str, object]:
    """What every run writes; an item is falsy where it is missing."""
    counts, audit, lineage = manifest.counts, manifest.audit, manifest.lineage
    return {
        "the ledger of all steps": [x.get("step") for x in counts.get("ledger", ())] == _STEPS,
        "statistics": counts.get("statistics"),
        "counts of sides": counts.get("sides"),
        "counts of sources": counts.get("sources"),
        "the audit": audit.get("dataset") and audit.get("sources") and audit.get("packs"),
        "sources in the lineage": lineage.get("sources"),
        "the tokenizer in the lineage": manifest.tokenizer_fingerprint,
        "the configuration": manifest.configuration.get("pack", {}).get("seq_len"),
        "versions of the engines": manifest.engines.get("publish"),
        "versions of the libraries": manifest.libraries,
        "the content id": manifest.content_id,
        "the records file": any(entry.kind == "records" for entry in manifest.files),
    }


def _differences(manifest: Manifest) -> Iterator[str]:
    try:
        ledger = [
            LedgerLine(**{name: line[name] for name in _LINE_FIELDS if name in line})
            for line in manifest.counts["ledger"]
        ]
        check_ledger(ledger)
    except TypeError:
        yield "a line of the ledger lacks its rows"
        return
    except ContractError as error:
        yield f"the ledger does not add up: {error}"
        return
    for one, first, other, second in _pairs(manifest, {line.step: line for line in ledger}):
        if first != second:
            numbers = ["missing" if each is None else f"{each:,}" for each in (first, second)]
            yield f"{one}: {numbers[0]}; {other}: {numbers[1]}"
    splits, counted = manifest.splits(), manifest.counts["statistics"]
    if unknown := sorted(set(splits) - set(counted)):
        yield f"splits that the run did not count: {', '.join(unknown)}"
    names = [_rows_read(manifest), manifest.audit["sources"], manifest.counts["sources"]]
    if len({frozenset(each) for each in names}) > 1:
        yield "lineage, audit and counts name different sources"
    for export in manifest.configuration.get("publish", {}).get("exports", ()):
        name, shards = (
            (export, 1) if isinstance(export, str) else (export["format"], export["shards"])
        )
        shard = re.compile("" if shards == 1 else rf"-\d{{5}}-of-{shards:05d}")
        own = [entry for entry in manifest.files if entry.key.startswith(f"exports/{name}/")]
        there = {(entry.split, found) for entry in own for found in shard.findall(entry.key)}
        for part in shard_names("", shards):
            if missing := [split for split in splits if (split, part) not in there]:
                yield f"export '{name}{part}' of {', '.join(missing)} is missing"


_Pair = tuple[str, int | None, str, int | None]


def _pairs(manifest: Manifest, lines: Mapping[str, LedgerLine]) -> Iterator[_Pair]:
    """Numbers that must be equal, each with its place."""
    counts, audit = manifest.counts, manifest.audit
    rows: Counter[str] = Counter()
    for entry in manifest.files:
        rows[entry.kind] += entry.rows
    bad = sum(sum(line.quarantined.values()) for line in lines.values())
    packed, before = lines["pack"], lines["validate"].dropped
    by_reason = sum(_dropped_before(manifest).values(), Counter[str]())
    yield "rows read", lines["validate"].rows_in, "in lineage", _rows_read(manifest).total()
    yield "rows quarantined", bad, "in quarantine files", rows["quarantine"]
    yield "rows dropped", sum(before.values()), "in dropped files", rows["dropped"]
    for reason in sorted(before.keys() | by_reason.keys()):
        yield f"rows dropped ({reason})", before.get(reason), "by source", by_reason[reason]
    yield "records before packing", packed.rows_in, "in records files", rows["records"]
    yield "records before packing", packed.rows_in, "in the audit", audit["dataset"].get("rows")
    yield "tokens encoded", packed.tokens_in, "in the audit", audit["dataset"].get("tokens")
    yield "packs in data files", rows["data"], "in the audit", audit["packs"].get("packs")
    yield "records packed", packed.rows_out, "by side", _total(counts["sides"], "records")
    by_source = sum(_total(counts["sources"], name) for name in ("packed", "repeated"))
    yield "records packed", packed.rows_out, "by source", by_source
    yield "tokens packed", packed.tokens_out, "by source", _total(counts["sources"], "tokens")
    for split in sorted({*counts["statistics"], *counts["sides"]}):
        of, stated = f"of split '{split}'", counts["statistics"].get(split, {})
        files = [e for e in manifest.files if e.kind == "data" and e.split == split]
        tokens = sum(entry.tokens for entry in files)
        in_files = sum(entry.rows for entry in files)
        side = counts["sides"].get(split, {})
        length = manifest.configuration["pack"]["seq_len"]
        yield f"num_packs {of}", stated.get("num_packs"), "in its files", in_files
        yield f"num_tokens {of}", stated.get("num_tokens"), "in its files", tokens
        yield f"tokens of records {of}", side.get("tokens"), "in its files", tokens
        yield f"seq_len {of}", stated.get("seq_len"), "in the configuration", length
    for source, own in counts["sources"].items():
        of, records = f"of source '{source}'", own.get("records")
        audited = audit["sources"].get(source, {}).get("rows")
        outcomes = sum(own[name] for name in own if name == "packed" or name not in _NO_REASONS)
        yield f"records {of}", records, "in the audit", audited
        yield f"records {of}", records, "packed or dropped", outcomes
    reasons = {name for own in counts["sources"].values() for name in own} - _NO_REASONS
    for reason in sorted(reasons | set(packed.dropped)):
        dropped, by_source = packed.dropped.get(reason, 0), _total(counts["sources"], reason)
        yield f"records dropped ({reason})", dropped, "by source", by_source
    # Duplicates are counted within each source, and in all: two sources may share a record.
    found = {name for own in audit["sources"].values() for name in own} - {"duplicates"}
    for name in sorted(found):
        in_all = audit["dataset"].get(name)
        yield f"{name} in the audit", in_all, "by source", _total(audit["sources"], name)


def _rows_read(manifest: Manifest) -> Counter[str]:
    """Rows of each source; its files are called `<source>/<file>`."""
    rows: Counter[str] = Counter()
    for file, number in manifest.rows_by_file().items():
        rows[file.partition("/")[0]] += number
    return rows


def _dropped_before(manifest: Manifest) -> dict[str, Counter[str]]:
    """Rows of each source, by reason, that were dropped before they were records."""
    found: dict[str, Counter[str]] = {}
    for source in manifest.lineage["sources"]:
        of_source = found.setdefault(source.get("file", "").partition("/")[0], Counter())
        of_source.update(source.get("dropped", {}))
    return found


def _total(counts: Mapping[str, Mapping[str, int]], name: str) -> int:
    return sum(own.get(name, 0) for own in counts.values())

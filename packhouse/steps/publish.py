"""publish: packs -> data files -> an immutable version in the store.

Files are written once, into the step store; committing them is a step of its own, repeated at every
run, so that a version deleted from the store or published to another one is published again
without work.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.audit import check_audit
from packhouse.data_files import ContentHash, DataFile, write_data_files
from packhouse.errors import EmptyDatasetError
from packhouse.fingerprint import library_versions
from packhouse.jobs import ALL_LIBRARIES, ENGINE_VERSIONS, FILE_SETTINGS, Job
from packhouse.ledger import ledger_of
from packhouse.recipe import PublishConfig, Recipe
from packhouse.step_store import Receipt
from packhouse.steps.audit import audit_run
from packhouse.steps.exporting import write_exports
from packhouse.steps.mirror import mirror
from packhouse.steps.shard_io import inputs_of
from packhouse.store import LocalFile, open_store, open_version, publish_version
from packhouse.store.evolution import Gate
from packhouse.workspace import Workspace, read_table

__all__ = ["commit", "compute"]

_SHARD_STEPS = ("validate", "format", "tokenize")


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Write the files of the version and say what they hold; nothing is visible yet.

    Raises:
        ContractError: the ledger of the steps before does not add up.
        EmptyDatasetError: no record was packed.
    """
    (packed,) = inputs_of(job, workspace, "pack")
    (split,) = inputs_of(job, workspace, "split")
    shards = {step: inputs_of(job, workspace, step) for step in _SHARD_STEPS}
    ledger = ledger_of([*(r for rs in shards.values() for r in rs), packed, split])
    content = ContentHash()
    files: list[DataFile] = []
    for side in ("train", "eval"):
        packs = read_table(packed.path(f"{side}.arrow"))
        files += write_data_files(packs, side, folder, recipe.publish, content)
    if not files:
        raise EmptyDatasetError(
            f"no record fits into seq_len {recipe.pack.seq_len:,}: nothing to publish. "
            "Raise pack.seq_len, or set pack.over_length to truncate_turns"
        )
    entries = [_data_entry(file) for file in files]
    entries += write_exports(files, recipe.publish.exports, folder)
    entries.append(_write_records(packed, folder))
    entries += _write_quarantine([r for rs in shards.values() for r in rs], folder)
    return {
        "files": entries,
        "content_id": content.hexdigest(),
        "counts": {
            "ledger": [line.to_json() for line in ledger],
            "statistics": packed.facts["statistics"],
            "sides": split.facts["sides"],
        },
        "lineage": {
            "sources": [
                {**r.facts["origin"], "rows": r.facts["rows_in"]} for r in shards["validate"]
            ],
            "tokenizer": shards["tokenize"][0].facts["tokenizer"],
        },
        "encoders": _encoders(shards["tokenize"]),
        "audit": audit_run(job, recipe, workspace),
    }


def commit(job: Job, recipe: Recipe, receipt: Receipt) -> Receipt:
    """Publish the written files, or find that they are; then move the ref.

    The audit is held against the recipe's limits here, so at every run, whatever is cached.

    Raises:
        AuditError: a limit is passed; nothing was written to the store.
        ConflictError: the store holds other bytes under the same inputs.
        StoreRefusedError: the store cannot guard a publication.
    """
    check_audit(receipt.facts["audit"], recipe.audit)
    files = [
        LocalFile(
            path=receipt.path(entry["name"]),
            split=entry["split"],
            rows=entry["rows"],
            tokens=entry["tokens"],
            sha256=receipt.files[entry["name"]].sha256,
            kind=entry["kind"],
            name=entry.get("path"),
        )
        for entry in receipt.facts["files"]
    ]
    facts = {
        "content_id": receipt.facts["content_id"],
        "counts": receipt.facts["counts"],
        "audit": receipt.facts["audit"],
        "lineage": receipt.facts["lineage"],
        "configuration": configuration_of(recipe),
        "engines": dict(ENGINE_VERSIONS),
        "libraries": library_versions(ALL_LIBRARIES),
        "provenance": {"encoders": receipt.facts["encoders"]},
    }
    store = open_store(recipe.publish.store)
    published = publish_version(
        store,
        recipe.dataset,
        job.key[:16],
        files,
        facts,
        ref=recipe.publish.ref,
        gate=_gate(recipe.publish),
    )
    opened = open_version(store, recipe.dataset, published.version)
    mirrors = {uri: mirror(opened, uri, recipe.tokenizer) for uri in recipe.publish.also}
    bad = [e.key for e in published.manifest.files if e.kind == "quarantine"]
    root = f"{recipe.publish.store.rstrip('/')}/{recipe.dataset}/v/{published.version}"
    return replace(
        receipt,
        cached=receipt.cached and not published.created,
        facts={
            **receipt.facts,
            "version": published.version,
            "created": published.created,
            "ref": recipe.publish.ref,
            "ref_version": published.ref.version if published.ref else None,
            "held_back": list(published.held_back),
            "mirrors": mirrors,
            "statistics": receipt.facts["counts"]["statistics"],
            "quarantine": f"{root}/{bad[0]}" if bad else None,
        },
    )


def _gate(config: PublishConfig) -> Gate:
    return Gate(
        allow_breaking=config.allow_breaking_schema,
        max_lengths=config.max_length_drift,
        max_sources=config.max_source_drift,
        max_quarantined=config.max_quarantine_drift,
        max_trained=config.max_trained_drift,
    )


def configuration_of(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe without what differs by machine: paths, store, ref, encoder."""
    decides = {*FILE_SETTINGS, *(["exports"] if recipe.publish.exports else [])}
    return recipe.model_dump(
        mode="json",
        by_alias=True,
        exclude={
            "sources": True,  # lineage has them by file, whatever order and grouping
            "tokenizer": True,
            "tokenize": {"encoder"},
            "publish": set(PublishConfig.model_fields) - decides,
            "audit": True,
            "golden": True,
            "validate_": {"max_quarantined"},
        },
    )


def _data_entry(file: DataFile) -> dict[str, Any]:
    return {
        "name": file.path.name,
        "kind": "data",
        "split": file.split,
        "rows": file.rows,
        "tokens": file.tokens,
    }


def _write_records(packed: Receipt, folder: Path) -> dict[str, Any]:
    """Lineage: one row per record, with its raw row, its side and what became of it."""
    records = read_table(packed.path("records.arrow"))
    path = folder / "records.parquet"
    pq.write_table(records, path, compression="zstd", compression_level=1, write_page_checksum=True)
    return _side_entry(path, "records", records)


def _write_quarantine(receipts: Sequence[Receipt], folder: Path) -> list[dict[str, Any]]:
    """All bad rows of the run with their raw bytes, so that they can be mended."""
    parts = [r.path("quarantined.arrow") for r in receipts if "quarantined.arrow" in r.files]
    if not parts:
        return []
    table = pa.concat_tables([read_table(part) for part in parts])
    path = folder / "quarantine.parquet"
    pq.write_table(table, path, compression="zstd", compression_level=1, write_page_checksum=True)
    return [_side_entry(path, "quarantine", table)]


def _side_entry(path: Path, kind: str, table: pa.Table) -> dict[str, Any]:
    return {"name": path.name, "kind": kind, "split": "all", "rows": table.num_rows, "tokens": 0}


def _encoders(tokenized: Sequence[Receipt]) -> list[dict[str, Any]]:
    """Each different report once, in order of first use."""
    seen: list[dict[str, Any]] = []
    for receipt in tokenized:
        if receipt.facts["encoder"] not in seen:
            seen.append(receipt.facts["encoder"])
    return seen

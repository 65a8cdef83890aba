"""publish: written files -> an immutable version in the store.

The files are there already, one job each (`packhouse.steps.files`); this step adds up what they
and the steps before say of the version. Committing is repeated at every run, so that a version
deleted from the store or published to another one is published again without work.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packhouse.audit import check_audit
from packhouse.errors import PackhouseError
from packhouse.fingerprint import canonical_json, library_versions
from packhouse.gates import GateOutcome, GateResult
from packhouse.jobs import ALL_LIBRARIES, ENGINE_VERSIONS, FILE_SETTINGS, Job
from packhouse.ledger import ledger_of
from packhouse.output_jobs import SIDES
from packhouse.packing import PackStatistics
from packhouse.recipe import PublishConfig, Recipe
from packhouse.step_store import Receipt
from packhouse.steps.audit import combine_audits
from packhouse.steps.mirror import mirror
from packhouse.steps.shard_io import inputs_of
from packhouse.store import (
    LocalFile,
    PublishedVersion,
    open_store,
    open_version,
    publish_version,
)
from packhouse.store.evolution import Gate
from packhouse.workspace import Workspace

__all__ = ["commit", "compute", "configuration_of"]

_SELECTED = ("sources", "dedup", "split")
_SHARD_STEPS = ("validate", "format", "tokenize")


def compute(job: Job, recipe: Recipe, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Say what the version holds; nothing is visible yet.

    Raises:
        ContractError: the ledger of the steps before does not add up.
    """
    (packed,) = inputs_of(job, workspace, "pack")
    (split,) = inputs_of(job, workspace, "split")
    shards = {step: inputs_of(job, workspace, step) for step in _SHARD_STEPS}
    ledger = ledger_of([*(r for rs in shards.values() for r in rs), packed, split])
    files = inputs_of(job, workspace, "files")
    return {
        "content_id": _content_id(files),
        "counts": {
            "ledger": [line.to_json() for line in ledger],
            "statistics": _statistics(packed, inputs_of(job, workspace, "gather")),
            "sides": split.facts["sides"],
            **{name: packed.facts[name] for name in _SELECTED if name in packed.facts},
        },
        "lineage": {
            "sources": [_source_facts(receipt) for receipt in shards["validate"]],
            "tokenizer": shards["tokenize"][0].facts["tokenizer"],
        },
        "encoders": _encoders(shards["tokenize"]),
        "audit": combine_audits(job, recipe, workspace),
    }


def _source_facts(validated: Receipt) -> dict[str, Any]:
    facts = {**validated.facts["origin"], "rows": validated.facts["rows_in"]}
    unused = validated.facts["extra_fields"]
    return facts | ({"unused_fields": unused} if unused else {})


def _content_id(files: Sequence[Receipt]) -> str:
    """Hash of the logical rows: of the content of each data file, in order."""
    data = [receipt for receipt in files if "content" in receipt.facts]
    parts = [[r.facts["files"][0]["split"], r.facts["content"]] for r in data]
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def _statistics(packed: Receipt, gathered: Sequence[Receipt]) -> dict[str, Any]:
    """What was planned and what was gathered, by side."""
    tallies: dict[str, Counter[str]] = {side: Counter() for side in SIDES}
    for receipt in gathered:
        tallies[receipt.facts["packs"]["side"]].update(receipt.facts["tally"])
    return {
        side: PackStatistics.of_parts(
            packed.facts["sides"][side]["statistics"], tallies[side]
        ).to_dict()
        for side in SIDES
    }


def commit(job: Job, recipe: Recipe, receipt: Receipt, workspace: Workspace) -> Receipt:
    """Publish the written files, or find that they are; then move the ref.

    The audit is held against the recipe's limits here, so at every run, whatever is cached. The
    results of the gates `audit`, `schema` and `drift` are the fact `gates`, of errors too.

    Raises:
        AuditError: a limit is passed; nothing was written to the store.
        ConflictError: the store holds other bytes under the same inputs.
        StoreRefusedError: the store cannot guard a publication.
    """
    audited = check_audit(receipt.facts["audit"], recipe.audit)
    files = [
        LocalFile(
            path=written.path(entry["name"]),
            split=entry["split"],
            rows=entry["rows"],
            tokens=entry["tokens"],
            sha256=written.files[entry["name"]].sha256,
            kind=entry["kind"],
            name=entry.get("path"),
        )
        for written in inputs_of(job, workspace, "files")
        for entry in written.facts["files"]
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
    try:
        published = publish_version(
            store,
            recipe.dataset,
            job.key[:16],
            files,
            facts,
            ref=recipe.publish.ref,
            gate=_gate(recipe.publish),
        )
    except PackhouseError as error:
        refused = [_schema_gate(error.changes, str(error))] if "changes" in error.facts else []
        error.facts["gates"] = (*audited, *refused)
        raise
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
            "gates": (*audited, *_ref_gates(recipe.publish, published)),
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


def _schema_gate(changes: Sequence[str], detail: str) -> GateResult:
    outcome: GateOutcome = "failed" if changes else "passed"
    return GateResult(name="schema", outcome=outcome, value=len(changes), limit=0, detail=detail)


def _ref_gates(config: PublishConfig, published: PublishedVersion) -> list[GateResult]:
    """Results of what the move of the ref had to keep to."""
    if published.drift is None:
        detail = f"'{config.ref}' has no other version to compare with"
        return [
            GateResult(name=name, outcome="not reached", detail=detail)
            for name in ("schema", "drift")
        ]
    if config.allow_breaking_schema:
        detail = "publish.allow_breaking_schema is set"
        schema = GateResult(name="schema", outcome="not reached", detail=detail)
    else:
        schema = _schema_gate(published.breaking, "; ".join(published.breaking))
    return [schema, *published.drift.results(_gate(config))]


def configuration_of(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe without what differs by machine: paths, store, ref, encoder."""
    decides = {*FILE_SETTINGS, *(["exports"] if recipe.publish.exports else [])}
    return recipe.model_dump(
        mode="json",
        by_alias=True,
        exclude={
            "shard_mb": True,
            "sources": True,  # lineage has them by file, whatever order and grouping
            "tokenizer": True,
            "tokenize": {"encoder"},
            "publish": set(PublishConfig.model_fields) - decides,
            "audit": True,
            "golden": True,
            "validate_": {"max_quarantined"},
        },
    )


def _encoders(tokenized: Sequence[Receipt]) -> list[dict[str, Any]]:
    """Each different report once, in order of first use."""
    seen: list[dict[str, Any]] = []
    for receipt in tokenized:
        if receipt.facts["encoder"] not in seen:
            seen.append(receipt.facts["encoder"])
    return seen

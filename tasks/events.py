"""Emit events for automations, `prefect event stream` and asset catalogs.

    packhouse.version.published     a version was committed, or found committed after a kill
    packhouse.version.refused       a gate stopped a version or held back its ref
    packhouse.run.quarantine.exceeded   more rows were bad than the recipe allows
    packhouse.run.ended             a run has ended and sends no more heartbeats

The resource of `packhouse.run.ended` is the run. That of the others is the dataset,
`packhouse.dataset.<name>`, so that an automation can follow a dataset from version to version, with
version, store and ref as labels; the rest is payload. A version is also a Prefect asset: the key of
`prefect.asset.materialization.succeeded` is its location in the store, its sources are the upstream
assets, and the payload is the same. An event may arrive twice or, after a kill, late, so a listener
should look up the ref.
"""

from pathlib import Path
from typing import Any

from prefect.assets import Asset, AssetProperties
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import AssetContext
from prefect.events import emit_event
from prefect.states import Completed
from pydantic import ValidationError

from packhouse.errors import (
    AuditError,
    ContractError,
    EmptyDatasetError,
    PackhouseError,
    QuarantineLimitError,
    SequenceTooLongError,
    TemplateError,
)
from packhouse.run.chain import Prepared

_GATES: dict[type[PackhouseError], str] = {
    AuditError: "audit",
    ContractError: "schema",
    EmptyDatasetError: "quarantine",
    QuarantineLimitError: "quarantine",
    SequenceTooLongError: "over_length",
    TemplateError: "template",
}


def gate_of(error: PackhouseError) -> str | None:
    """Return the gate that raised an error; None if the error is not a refusal.

    Example:
        >>> gate_of(QuarantineLimitError("9 of 304 rows are bad")), gate_of(PackhouseError("?"))
        ('quarantine', None)
    """
    return _GATES.get(type(error))


def announce_published(prepared: Prepared) -> None:
    """Announce a published version."""
    published = prepared.published
    splits = published.statistics.items()
    payload = {
        "dataset": prepared.dataset,
        "version": prepared.version,
        "ref": published.ref,
        "created": prepared.created,
        "ref_version": published.ref_version,
        "records": {split: published.sides[split].records for split, _ in splits},
        "packs": {split: side.num_packs for split, side in splits},
        "tokens": {split: side.num_tokens for split, side in splits},
        "trained_tokens": {split: side.num_trained for split, side in splits},
        "quarantined": sum(sum(line.quarantined.values()) for line in prepared.ledger),
    }
    emit_event("packhouse.version.published", resource=_resource(prepared), payload=payload)
    _announce_asset(prepared, payload)


def _announce_asset(prepared: Prepared, metadata: dict[str, object]) -> None:
    """Materialize the version as a Prefect asset, with the assets of its sources upstream.

    Prefect's `@materialize` needs the version before the publishing task runs, and emits nothing if
    that task is cached. So its events are emitted here.
    """
    version = _asset(
        f"{prepared.store.rstrip('/')}/{prepared.dataset}/v/{prepared.version}",
        AssetProperties(
            name=f"{prepared.dataset} {prepared.version}",
            description=f"Version {prepared.version} of {prepared.dataset}, packed for training.",
        ),
    )
    sources = {_asset(source) for source in prepared.sources}
    # Prefect's keys allow no spaces, so a store in such a folder is not an asset.
    if version is None:
        return
    AssetContext(
        downstream_assets={version},
        direct_asset_dependencies={source for source in sources if source is not None},
        materialized_by="packhouse",
        materialization_metadata={version.key: metadata},
    ).emit_events(Completed())


def _asset(place: str, properties: AssetProperties | None = None) -> Asset | None:
    """Return the asset at a path or URI; None if Prefect does not accept such a key.

    Example:
        >>> _asset("/data/chats.jsonl").key, _asset("s3://raw/a.parquet").key
        ('file:///data/chats.jsonl', 's3://raw/a.parquet')
        >>> _asset("/data/my chats.jsonl") is None
        True
    """
    key = place if "://" in place else f"file://{Path(place).absolute()}"
    try:
        return Asset(key=key, properties=properties)
    except ValidationError:
        return None


def announce_held(prepared: Prepared) -> None:
    """Announce a published version whose ref was held back."""
    payload = {"gate": "drift", "reasons": list(prepared.published.held_back)}
    emit_event("packhouse.version.refused", resource=_resource(prepared), payload=payload)


def announce_end(flow: object, flow_run: FlowRun, state: State[Any]) -> None:
    """Announce that a run has ended; a hook of every flow.

    The server also emits an event, but the last heartbeat may arrive after it, or have a later
    time if clocks differ, and the automation `packhouse-crashed` would wait for another one.
    This event is sent through the same channel as the heartbeats, after all of them.
    """
    emit_event(
        "packhouse.run.ended",
        resource={
            "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
            "prefect.resource.name": flow_run.name,
        },
        related=[
            {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
            for tag in sorted(flow_run.tags)
        ],
        payload={"state": state.name},
    )


def announce_refused(dataset: str, error: PackhouseError) -> None:
    """Announce that a gate stopped a version; do nothing for other errors."""
    gate = gate_of(error)
    if gate is None:
        return
    resource = {
        "prefect.resource.id": f"packhouse.dataset.{dataset}",
        "prefect.resource.name": dataset,
        "packhouse.gate": gate,
    }
    payload: dict[str, object] = {
        "gate": gate,
        "error": type(error).__name__,
        "message": str(error),
    }
    emit_event("packhouse.version.refused", resource=resource, payload=payload)
    if isinstance(error, QuarantineLimitError):
        facts = {"rows": error.facts.get("rows"), "reasons": error.facts.get("reasons")}
        emit_event("packhouse.run.quarantine.exceeded", resource=resource, payload=payload | facts)


def _resource(prepared: Prepared) -> dict[str, str]:
    return {
        "prefect.resource.id": f"packhouse.dataset.{prepared.dataset}",
        "prefect.resource.name": prepared.dataset,
        "packhouse.version": prepared.version,
        "packhouse.store": prepared.store,
        "packhouse.ref": prepared.published.ref,
    }

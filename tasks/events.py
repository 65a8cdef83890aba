"""Events for whoever listens: automations, `prefect event stream`, an asset catalogue.

    packhouse.version.published     a version was committed, or found committed after a kill
    packhouse.version.refused       a gate stopped a version, or held its ref back
    packhouse.quarantine.exceeded   more rows were bad than the recipe allows

Their resource is the dataset, `packhouse.dataset.<name>`, so that an automation follows a dataset
from version to version; version, store and ref are labels of it, and the rest is payload. A version
is an asset, too: `prefect.asset.materialization.succeeded` with the address of its manifest. Events
may come twice and, after a kill, late; a listener looks up the ref.
"""

from typing import Any

from prefect.events import emit_event

from packhouse.chain import Prepared
from packhouse.errors import (
    AuditError,
    ContractError,
    EmptyDatasetError,
    PackhouseError,
    QuarantineLimitError,
    SequenceTooLongError,
    TemplateError,
)

__all__ = ["announce_held", "announce_published", "announce_refused", "gate_of"]

_GATES: dict[type[PackhouseError], str] = {
    AuditError: "audit",
    ContractError: "schema",
    EmptyDatasetError: "quarantine",
    QuarantineLimitError: "quarantine",
    SequenceTooLongError: "over_length",
    TemplateError: "template",
}


def gate_of(error: PackhouseError) -> str | None:
    """Return which gate an error is of; None if it is no refusal but a failure.

    Example:
        >>> gate_of(QuarantineLimitError("9 of 304 rows are bad")), gate_of(PackhouseError("?"))
        ('quarantine', None)
    """
    return _GATES.get(type(error))


def announce_published(prepared: Prepared) -> None:
    """Say that a version is there."""
    statistics = prepared.facts["statistics"]
    payload = {
        "created": prepared.created,
        "ref_version": prepared.facts["ref_version"],
        "rows": {split: facts["num_sequences"] for split, facts in statistics.items()},
        "tokens": {split: facts["num_tokens"] for split, facts in statistics.items()},
    }
    emit_event("packhouse.version.published", resource=_resource(prepared), payload=payload)
    asset = f"{_place(prepared)}/v/{prepared.version}"
    emit_event(
        "prefect.asset.materialization.succeeded",
        resource={
            "prefect.resource.id": asset if "://" in asset else f"file://{asset}",
            "prefect.resource.name": f"{prepared.dataset} {prepared.version}",
        },
        related=[
            {
                "prefect.resource.id": f"packhouse.dataset.{prepared.dataset}",
                "prefect.resource.role": "asset-materialized-by",
            }
        ],
        payload=payload,
    )


def announce_held(prepared: Prepared) -> None:
    """Say that a version is published, and that its ref stays where it was."""
    payload = {"gate": "drift", "reasons": prepared.facts["held_back"]}
    emit_event("packhouse.version.refused", resource=_resource(prepared), payload=payload)


def announce_refused(dataset: str, error: PackhouseError) -> None:
    """Say that a gate stopped a version; nothing for an error that is no refusal."""
    gate = gate_of(error)
    if gate is None:
        return
    resource = {
        "prefect.resource.id": f"packhouse.dataset.{dataset}",
        "prefect.resource.name": dataset,
        "packhouse.gate": gate,
    }
    payload: dict[str, Any] = {"gate": gate, "error": type(error).__name__, "message": str(error)}
    emit_event("packhouse.version.refused", resource=resource, payload=payload)
    if isinstance(error, QuarantineLimitError):
        facts = {"rows": error.facts.get("rows"), "reasons": error.facts.get("reasons")}
        emit_event("packhouse.quarantine.exceeded", resource=resource, payload=payload | facts)


def _resource(prepared: Prepared) -> dict[str, str]:
    return {
        "prefect.resource.id": f"packhouse.dataset.{prepared.dataset}",
        "prefect.resource.name": prepared.dataset,
        "packhouse.version": prepared.version,
        "packhouse.store": prepared.store,
        "packhouse.ref": prepared.facts["ref"],
    }


def _place(prepared: Prepared) -> str:
    return f"{prepared.store.rstrip('/')}/{prepared.dataset}"

"""Decide what a refresh has to do, and what became of it: nothing, a new version, or a question.

A recipe is refreshed against the version that its ref points to. The plan of a run is made first:
the id of a version is an address of its inputs, so equal ids mean that neither a source nor the
tokenizer, the recipe, the engines or the libraries changed, and there is nothing to do but to hold
the version against the recipe's limits, which may have changed. Otherwise the
chain runs, and the ref moves; or, if someone is to approve it, a second ref `<ref>.candidate` does,
and what would change for readers is said.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packhouse.audit import check_audit
from packhouse.chain import Prepared
from packhouse.disks import write_whole
from packhouse.errors import IntegrityError, PackhouseError, VersionNotFoundError
from packhouse.fingerprint import canonical_json, digest, library_versions
from packhouse.gates import GateResult
from packhouse.golden import check_golden
from packhouse.jobs import ALL_LIBRARIES, ENGINE_VERSIONS, Plan, plan_jobs
from packhouse.last_run import touch_last_run
from packhouse.ledger import ROW_STEPS, LedgerLine, check_quarantine
from packhouse.recipe import Recipe, SourceConfig
from packhouse.sources.files import find_files
from packhouse.store import Drift, Manifest, OpenVersion, load_ref, open_store, open_version
from packhouse.store.diff import Diff, diff_versions
from packhouse.store.evolution import breaking_changes, measure_drift
from packhouse.store.layout import split_version
from packhouse.templates.sandbox import pinned_date
from packhouse.tokenization import fingerprint_tokenizer
from packhouse.workspace import Workspace

__all__ = [
    "Look",
    "Planned",
    "Refreshed",
    "candidate_of",
    "compare",
    "look",
    "outcome_of",
    "planned_version",
    "unchanged",
]

Outcome = Literal["unchanged", "published", "waiting", "held"]


@dataclass(frozen=True, slots=True)
class Planned:
    """The version that the sources would give now."""

    version_id: str
    plan: Plan | None = field(default=None, repr=False, compare=False)
    """None where a listing of the sources said enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a refresh finds before it does anything."""

    dataset: str
    ref: str
    version_id: str
    """Of the version that the sources would give now."""
    current: str | None
    """Version that the ref points to."""
    candidate: str | None = None
    """Version that waits for approval."""
    is_moved_back: bool = False
    """True if someone pointed the ref to a version that it had pointed to before: no publication
    does that."""
    plan: Plan | None = field(default=None, repr=False, compare=False)
    """What would be done, where looking took a plan: it need not be made again."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the ref's version is what the sources would give."""
        return _is_of(self.current, self.version_id)

    @property
    def is_waiting(self) -> bool:
        """Whether that version is published already and waits for approval."""
        return _is_of(self.candidate, self.version_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """What a refresh did."""

    dataset: str
    ref: str
    outcome: Outcome
    """`unchanged`: nothing to do; `published`: the ref moved; `waiting`: published, and someone is
    to move the ref; `held`: published, and the ref stays for the reasons in `message`."""
    version: str
    message: str
    """One sentence for people."""
    gates: tuple[GateResult, ...] = ()
    prepared: Prepared | None = None
    diff: Diff | None = None
    drift: Drift | None = None
    breaking: tuple[str, ...] = ()


def candidate_of(ref: str) -> str:
    """Name of the ref that points to the version waiting for approval.

    Example:
        >>> candidate_of("latest")
        'latest.candidate'
    """
    return f"{ref}.candidate"


def look(recipe: Recipe, planned: Planned) -> Look:
    """Compare the plan of a run with the recipe's ref; two small reads of the store."""
    store, ref = open_store(recipe.publish.store), recipe.publish.ref
    found = load_ref(store, recipe.dataset, ref)
    waiting = load_ref(store, recipe.dataset, candidate_of(ref))
    return Look(
        dataset=recipe.dataset,
        ref=ref,
        version_id=planned.version_id,
        plan=planned.plan,
        current=found.version if found else None,
        candidate=waiting.version if waiting else None,
        is_moved_back=found is not None and any(m.version == found.version for m in found.past),
    )


def compare(recipe: Recipe, before: str | None, version: str) -> dict[str, Any]:
    """Say how a version differs from the one that readers have: settings, counts, drift, schema.

    Reads the two manifests, no data. Empty where there was none before.
    """
    if before is None or before == version:
        return {}
    try:
        old = _open(recipe, before)
    except VersionNotFoundError:
        return {}
    new = _open(recipe, version)
    return {
        "diff": diff_versions(old, new, records=False),
        "drift": measure_drift(old.manifest, new.manifest),
        "breaking": tuple(breaking_changes(old.manifest, new.manifest)),
    }


def unchanged(recipe: Recipe, found: Look, cache: Path) -> Refreshed:
    """Hold the version that is published already against today's limits; there is nothing to do.

    Limits and golden conversations are in no key, so another limit gives the same version. What
    was found of its rows and tokens stands in its manifest.

    Args:
        recipe: with today's limits.
        found: whose `is_unchanged` or `is_waiting` holds.
        cache: folder under which tokenizer snapshots lie.

    Raises:
        PackhouseError: a gate refuses the version; it stays published.
    """
    version = found.current if found.is_unchanged else found.candidate
    assert version is not None
    if found.is_unchanged:
        message = f"nothing changed: '{found.ref}' is at {version} already"
    else:
        message = f"nothing changed: {version} still waits for approval"
    manifest = _open(recipe, version).manifest
    gates: list[GateResult] = []
    try:
        gates.append(check_golden(recipe, Workspace(cache=cache).tokenizers))
        gates.append(_published_quarantine(manifest, recipe.validate_.max_quarantined))
        gates += check_audit(manifest.audit, recipe.audit)
    except PackhouseError as error:
        facts = error.facts | {"gates": (*gates, *error.facts.get("gates", ()))}
        text = f"{error} ({version} is published already, and stays)"
        raise type(error)(text, **facts) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"the manifest of '{found.dataset}' {version} does not say what its gates look at "
            f"({type(error).__name__}: {error}); look at it with `packhouse verify`"
        ) from None
    gates += [
        GateResult(name=name, outcome="not reached", detail=message)
        for name in ("schema", "drift", "publish")
    ]
    return Refreshed(
        dataset=found.dataset,
        ref=found.ref,
        outcome="unchanged",
        version=version,
        message=message,
        gates=tuple(gates),
    )


def _published_quarantine(manifest: Manifest, limit: float) -> GateResult:
    """Check the limit after each step that can refuse rows, as the run did."""
    ledger = [LedgerLine(**line) for line in manifest.counts["ledger"] if line["step"] in ROW_STEPS]
    return [check_quarantine(ledger[: n + 1], limit) for n in range(len(ROW_STEPS))][-1]


def outcome_of(recipe: Recipe, found: Look, prepared: Prepared) -> Refreshed:
    """Say what came of a refresh that ran the chain."""
    facts = compare(recipe, found.current, prepared.version)
    at = prepared.facts["ref_version"]
    place = f"{recipe.publish.store.rstrip('/')}/{recipe.dataset}"
    command = f"packhouse ref set {place} {found.ref} {prepared.version}"
    outcome: Outcome
    if prepared.facts["held_back"]:  # also of a candidate, which then still is the former version
        outcome = "held"
        ref, reasons = prepared.facts["ref"], "; ".join(prepared.facts["held_back"])
        message = f"{prepared.version} is published, '{ref}' stays: {reasons}; {command}"
    elif prepared.facts["ref"] == candidate_of(found.ref):
        outcome = "waiting"
        message = f"{prepared.version} waits for approval; to promote it: {command}"
    elif at != prepared.version:
        outcome = "held"
        why = "someone moved it back there" if found.is_moved_back else "which was published later"
        message = (
            f"the sources give {prepared.version}, which is published, but '{found.ref}' points to "
            f"{at} ({why}), and a refresh leaves that alone; to move it: {command}"
        )
    else:
        outcome = "published"
        message = f"'{found.ref}' moved from {found.current or 'nothing'} to {prepared.version}"
    return Refreshed(
        dataset=recipe.dataset,
        ref=found.ref,
        outcome=outcome,
        version=prepared.version,
        message=message,
        gates=(*prepared.facts["gates"], _publish_gate(prepared, outcome, message)),
        prepared=prepared,
        **facts,
    )


def _publish_gate(prepared: Prepared, outcome: Outcome, message: str) -> GateResult:
    """Passed, unless the ref stays for a reason that no other gate shows."""
    is_shown = any(gate.outcome == "failed" for gate in prepared.facts["gates"])
    failed = outcome == "held" and not is_shown
    return GateResult(name="publish", outcome="failed" if failed else "passed", detail=message)


def _open(recipe: Recipe, version: str) -> OpenVersion:
    return open_version(recipe.publish.store, recipe.dataset, version)


def _is_of(version: str | None, version_id: str) -> bool:
    return version is not None and split_version(version)[0] == version_id


def planned_version(recipe: Recipe, cache: Path) -> Planned:
    """Return the version that the sources would give now, as cheaply as that is safe.

    Sources that all lie in object stores are listed: where no ETag changed since a plan was made
    with the same recipe, tokenizer, engines and libraries, that plan's answer is taken. Local files
    are hashed (1.8 GB/s), for a time stamp proves nothing; and so is everything new.

    Args:
        recipe: what would be prepared.
        cache: folder in which answers are kept, under `looks/`.
    """
    touch_last_run(cache, recipe.dataset)
    key = _listed_key(recipe)
    place = cache / "looks" / f"{key}.json"
    known = None if key is None else _read_answer(place)
    if known is not None:
        return Planned(known)
    plan = plan_jobs(recipe)
    if key is not None:
        dates = sorted({str(job.parts["date"]) for job in plan.format if job.parts["date"]})
        _write_answer(place, {"version_id": plan.version_id, "dates": dates})
    return Planned(plan.version_id, plan)


def _listed_key(recipe: Recipe) -> str | None:
    """What a listing says of all that decides a version; None if it does not say enough."""
    if any("://" not in s.path or s.path.startswith("file:") for s in _all_sources(recipe)):
        return None
    files = [
        [file.uri, file.name, file.size, file.pin]
        for source in _all_sources(recipe)
        for file in find_files(source)
    ]
    if not all(pin for *_, pin in files):
        return None
    template = Path(recipe.format.template)
    is_file = template.suffix in (".jinja", ".j2")
    return digest(
        {
            "files": files,
            "recipe": recipe.model_dump(mode="json", by_alias=True, exclude={"publish": {"store"}}),
            "template": template.read_text("utf-8") if is_file and template.is_file() else None,
            "tokenizer": fingerprint_tokenizer(recipe.tokenizer),
            "engines": ENGINE_VERSIONS,
            "libraries": library_versions(ALL_LIBRARIES),
            "python": list(sys.version_info[:2]),
        }
    )


def _all_sources(recipe: Recipe) -> list[SourceConfig]:
    return [*recipe.sources, *recipe.audit.benchmarks]


def _read_answer(place: Path) -> str | None:
    """The version id, unless the answer is damaged or its template printed another day."""
    try:
        answer = json.loads(place.read_bytes())
        stated = answer.pop("digest")
        if stated != digest(answer):
            return None
        today = pinned_date().date().isoformat()
        return str(answer["version_id"]) if answer["dates"] in ([], [today]) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_answer(place: Path, answer: dict[str, Any]) -> None:
    write_whole(place, canonical_json({**answer, "digest": digest(answer)}))

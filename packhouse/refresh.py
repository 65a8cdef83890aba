"""Decide what a refresh has to do, and say what it did: nothing, a new version, or a question.

A recipe is refreshed against the version that its ref points to. The plan of a run is made first.
The id of a version is an address of its inputs, so equal ids mean that neither a source nor the
tokenizer, the recipe, the engines or the libraries changed. Then there is nothing to do but to
check the version against the recipe's limits, which may have changed. Otherwise the chain runs and
the ref moves.

With approval the ref stays, and `<ref>.candidate` moves to every new version. Schema and drift are
measured against the version that the ref points to, never against the last candidate: ten
candidates, each 1% away from the one before, are 10% away from what readers have.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from packhouse.auditing import check_audit
from packhouse.cache.holds import forget_tries
from packhouse.chain import Prepared
from packhouse.engine.last_run import touch_last_run
from packhouse.engine.workspace import Workspace
from packhouse.errors import IntegrityError, PackhouseError, VersionNotFoundError
from packhouse.gates import GateResult
from packhouse.golden import check_golden
from packhouse.recipe import PublishConfig, Recipe, SourceConfig
from packhouse.records.ledger import ROW_STEPS, LedgerLine, check_quarantine
from packhouse.runtime.disks import write_whole
from packhouse.runtime.fingerprint import canonical_json, digest, library_versions
from packhouse.sources.files import find_files
from packhouse.steps import ALL_LIBRARIES, ENGINE_VERSIONS
from packhouse.steps.plan import Plan, plan_jobs
from packhouse.steps.publish import ref_gates
from packhouse.store import (
    Drift,
    Manifest,
    OpenVersion,
    load_ref,
    open_store,
    open_version,
    set_ref,
)
from packhouse.store.evolution import breaking_changes, measure_drift
from packhouse.store.layout import split_version
from packhouse.store.refs import changed_manifest
from packhouse.templates.sandbox import pinned_date
from packhouse.tokenization import fingerprint_tokenizer
from packhouse.views.diff import Diff, diff_versions

__all__ = [
    "Look",
    "Planned",
    "Refreshed",
    "candidate_of",
    "candidate_recipe",
    "compare",
    "finish_refresh",
    "look",
    "open_current",
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
    manifest_ids: Mapping[str, str] = field(default_factory=dict)
    """Version -> id of its manifest, as the refs recorded them."""
    is_moved_back: bool = False
    """True if someone pointed the ref to a version that it had pointed to before: no publication
    does that."""
    plan: Plan | None = field(default=None, repr=False, compare=False)
    """What would be done, where looking took a plan: it need not be made again."""

    @property
    def is_unchanged(self) -> bool:
        """True if the ref's version is what the sources would give."""
        return _is_of(self.current, self.version_id)

    @property
    def is_waiting(self) -> bool:
        """True if that version is published already and waits for approval."""
        return _is_of(self.candidate, self.version_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """What a refresh did."""

    dataset: str
    ref: str
    outcome: Outcome
    """`unchanged`: nothing to do; `published`: the ref moved; `waiting`: published, and someone is
    to move the ref; `held`: published, and a limit or a later version keeps the ref where it is."""
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


def candidate_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of a run whose version someone is to approve.

    It moves the candidate, whatever the distance from the last candidate: `finish_refresh` checks
    the recipe's limits against the version that readers have.
    """
    no_limits: dict[str, Any] = {
        name: None for name in PublishConfig.model_fields if name.endswith("_drift")
    }
    update = {
        **no_limits,
        "ref": candidate_of(recipe.publish.ref),
        "move_ref": True,
        "allow_breaking_schema": True,
    }
    return recipe.model_copy(update={"publish": recipe.publish.model_copy(update=update)})


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
        manifest_ids={each.version: each.manifest_id for each in (waiting, found) if each},
        is_moved_back=found is not None and any(m.version == found.version for m in found.past),
    )


def compare(recipe: Recipe, found: Look, version: str) -> dict[str, Any]:
    """Say how a version differs from the one that readers have: settings, counts, drift, schema.

    Reads the two manifests, no data. Empty where there was none before.

    Raises:
        IntegrityError: a manifest was changed since a ref recorded it.
    """
    if found.current == version:
        return {}
    old = open_current(recipe, found)
    if old is None:
        return {}
    new = _open(recipe, found, version)
    return {
        "diff": diff_versions(old, new, records=False),
        "drift": measure_drift(old.manifest, new.manifest),
        "breaking": tuple(breaking_changes(old.manifest, new.manifest)),
    }


def open_current(recipe: Recipe, found: Look) -> OpenVersion | None:
    """Open the version that readers have; None if there is none, or it was removed.

    Raises:
        IntegrityError: its manifest was changed since the ref recorded it.
    """
    if found.current is None:
        return None
    try:
        return _open(recipe, found, found.current)
    except VersionNotFoundError:
        return None


def unchanged(recipe: Recipe, found: Look, cache: Path) -> Refreshed:
    """Check a version that is published already against today's limits; nothing else is to do.

    Limits and golden conversations are in no key, so another limit gives the same version. What
    was found of its rows and tokens stands in its manifest.

    Args:
        recipe: with today's limits.
        found: whose `is_unchanged` or `is_waiting` holds.
        cache: folder under which tokenizer snapshots lie.

    Returns:
        `unchanged`; or `held`, for a candidate that is too far from the version readers have.

    Raises:
        PackhouseError: a gate refuses the version; it stays published.
    """
    version = found.current if found.is_unchanged else found.candidate
    assert version is not None
    manifest = _open(recipe, found, version).manifest
    gates: list[GateResult] = []
    try:
        gates.append(check_golden(recipe, Workspace(cache=cache).tokenizers))
        gates.append(_published_quarantine(manifest, recipe.validate_.max_quarantined))
        gates += check_audit(manifest.audit, recipe.audit)
        facts = compare(recipe, found, version)
    except PackhouseError as error:
        known = error.facts | {"gates": (*gates, *error.facts.get("gates", ()))}
        text = f"{error} ({version} is published already, and stays)"
        raise type(error)(text, **known) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"the manifest of '{found.dataset}' {version} does not say what its gates look at "
            f"({type(error).__name__}: {error}); look at it with `packhouse verify`"
        ) from None
    with suppress(OSError):  # nothing was ever done in this cache, or it cannot be written
        forget_tries(cache, found.version_id)
    limits = _limits(recipe, found, facts)
    reasons = _reasons(found, limits)
    outcome: Outcome = "held" if reasons else "unchanged"
    if found.is_unchanged:
        message = f"nothing changed: '{found.ref}' is at {version} already"
    elif reasons:
        message = f"nothing changed: {_held_message(recipe, found, version, reasons)}"
    else:
        message = f"nothing changed: {version} still waits for approval"
    return Refreshed(
        dataset=found.dataset,
        ref=found.ref,
        outcome=outcome,
        version=version,
        message=message,
        gates=(
            *gates,
            *limits,
            GateResult(name="publish", outcome="not reached", detail=message),
        ),
        **facts,
    )


def _published_quarantine(manifest: Manifest, limit: float) -> GateResult:
    """Check the limit after each step that can refuse rows, as the run did."""
    ledger = [LedgerLine(**line) for line in manifest.counts["ledger"] if line["step"] in ROW_STEPS]
    return [check_quarantine(ledger[: n + 1], limit) for n in range(len(ROW_STEPS))][-1]


def finish_refresh(recipe: Recipe, found: Look, prepared: Prepared) -> Refreshed:
    """Say what came of a refresh that ran the chain.

    Args:
        recipe: with the limits of its ref, also where `candidate_recipe` ran.
        found: what the refresh saw before it ran.
        prepared: what the run did.

    Raises:
        ConflictError: another run moved the candidate meanwhile.
    """
    facts = compare(recipe, found, prepared.version)
    at, ref = prepared.published.ref_version, prepared.published.ref
    gates: Sequence[GateResult] = prepared.gates
    reasons: Sequence[str] = prepared.published.held_back
    is_candidate = ref == candidate_of(found.ref)
    if is_candidate:
        # A publication moves a ref to a version only once. The candidate follows the sources, also
        # back to a version that it pointed to before; a run that came later keeps its place.
        if at != prepared.version and at == found.candidate:
            store = open_store(recipe.publish.store)
            at = set_ref(store, recipe.dataset, ref, prepared.version, expected=at).version
        limits = _limits(recipe, found, facts)
        reasons = _reasons(found, limits)
        others = [gate for gate in gates if gate.gate not in ("schema", "drift")]
        gates = (*others, *limits)
    outcome: Outcome
    if at not in (None, prepared.version):
        outcome = "held"
        why = "which was published later"
        if prepared.published.is_ref_left:
            why = "publish.move_ref is false"
        elif found.is_moved_back and not is_candidate:
            why = "someone moved it back there"
        message = (
            f"the sources give {prepared.version}, which is published, but '{ref}' points to "
            f"{at} ({why}), and a refresh leaves that alone; "
            f"to move it: {_command(recipe, ref, prepared.version)}"
        )
    elif reasons:
        outcome = "held"
        message = _held_message(recipe, found, prepared.version, reasons)
    elif is_candidate:
        outcome = "waiting"
        command = _command(recipe, found.ref, prepared.version)
        message = f"{prepared.version} waits for approval; to promote it: {command}"
    else:
        outcome = "published"
        message = f"'{found.ref}' moved from {found.current or 'nothing'} to {prepared.version}"
    is_shown = any(gate.outcome == "failed" for gate in gates)
    publish = GateResult(
        name="publish",
        outcome="failed" if outcome == "held" and not is_shown else "passed",
        detail=message,
    )
    published = replace(prepared.published, held_back=tuple(reasons), ref_version=at)
    return Refreshed(
        dataset=recipe.dataset,
        ref=found.ref,
        outcome=outcome,
        version=prepared.version,
        message=message,
        gates=(*gates, publish),
        prepared=replace(prepared, gates=tuple(gates), published=published),
        **facts,
    )


def _limits(recipe: Recipe, found: Look, facts: Mapping[str, Any]) -> list[GateResult]:
    """Hold what `compare` found against the limits of the recipe's ref."""
    breaking = facts.get("breaking", ())
    return ref_gates(recipe.publish, found.ref, facts.get("drift"), breaking)


def _reasons(found: Look, limits: Sequence[GateResult]) -> list[str]:
    """Return why the ref may not move, a sentence for each limit that is passed."""
    return [
        f"readers of {found.current} would break: {each.detail}"
        if each.name == "schema"
        else each.detail
        for each in limits
        if each.outcome == "failed"
    ]


def _held_message(recipe: Recipe, found: Look, version: str, reasons: Sequence[str]) -> str:
    command = _command(recipe, found.ref, version)
    return (
        f"{version} is published, '{found.ref}' stays: {'; '.join(reasons)}; "
        f"to move it all the same: {command}"
    )


def _command(recipe: Recipe, ref: str, version: str) -> str:
    place = f"{recipe.publish.store.rstrip('/')}/{recipe.dataset}"
    return f"packhouse ref set {place} {ref} {version}"


def _open(recipe: Recipe, found: Look, version: str) -> OpenVersion:
    """Open a version; a manifest that was changed since a ref recorded it is refused.

    A gate would otherwise believe counts that somebody changed in the store.
    """
    opened = open_version(recipe.publish.store, recipe.dataset, version)
    recorded = found.manifest_ids.get(version, "")
    if recorded not in ("", opened.manifest.manifest_id):
        raise changed_manifest(opened.manifest, recorded)
    return opened


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
        dates = sorted({job.parameters.date for job in plan.format if job.parameters.date})
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

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

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from packhouse.auditing.gate import check_audit
from packhouse.errors import IntegrityError, PackhouseError, VersionNotFoundError
from packhouse.read.files import find_files
from packhouse.recipe import PublishConfig, Recipe
from packhouse.records.gates import GateResult
from packhouse.records.ledger import ROW_STEPS, check_quarantine
from packhouse.render.sandbox import pinned_date
from packhouse.run.cache import Workspace
from packhouse.run.cache_room import forget_tries, touch_last_run
from packhouse.run.chain import Prepared, check_golden
from packhouse.run.steps import ALL_LIBRARIES, ENGINE_VERSIONS
from packhouse.run.steps.plan import Plan, plan_jobs
from packhouse.run.steps.publish import ref_gates
from packhouse.store import Drift, OpenVersion, load_ref, open_store, open_version, set_ref
from packhouse.store.evolution import (
    ManifestDiff,
    breaking_changes,
    diff_manifests,
    measure_drift,
)
from packhouse.store.manifest import changed_manifest
from packhouse.system.disks import read_checked, write_checked
from packhouse.system.fingerprint import digest, library_versions
from packhouse.tokenize import fingerprint_tokenizer

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
        return (self.current or "").startswith(f"{self.version_id}.g")

    @property
    def is_waiting(self) -> bool:
        """True if that version is published already and waits for approval."""
        return (self.candidate or "").startswith(f"{self.version_id}.g")


@dataclass(frozen=True, slots=True)
class Change:
    """How a version differs from the one that readers have, without its records."""

    diff: ManifestDiff
    drift: Drift
    breaking: list[str]
    """What of the schema would break readers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """What a refresh did."""

    dataset: str
    ref: str
    outcome: Outcome
    """`unchanged`: nothing to do; `published`: the ref moved; `waiting`: published, now or before,
    and someone is to move the ref; `held`: published, and a limit or a later version keeps the ref
    where it is."""
    version: str
    said: str
    """What happened, in one sentence."""
    command: str = ""
    """Moves the ref, where someone is to decide that."""
    gates: tuple[GateResult, ...] = ()
    prepared: Prepared | None = None
    change: Change | None = None
    """From the version that readers have; None where they have none, or this one."""

    @property
    def message(self) -> str:
        """What happened, and what to type, for people at a shell."""
        return f"{self.said}; to move it: {self.command}" if self.command else self.said


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
    limits = [name for name in PublishConfig.model_fields if name.endswith("_drift")]
    update = {**dict.fromkeys(limits), "move_ref": True, "allow_breaking_schema": True}
    update["ref"] = candidate_of(recipe.publish.ref)
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


def compare(recipe: Recipe, found: Look, version: str) -> Change | None:
    """Say how a version differs from the one that readers have, by the two manifests.

    Raises:
        IntegrityError: a manifest was changed since a ref recorded it.
    """
    old = None if found.current == version else open_current(recipe, found)
    if old is None:
        return None
    new = _open(recipe, found, version)
    ends = old.manifest, new.manifest
    return Change(diff_manifests(*ends), measure_drift(*ends), breaking_changes(*ends))


def open_current(recipe: Recipe, found: Look) -> OpenVersion | None:
    """Open the version that readers have; None if there is none, or it was removed.

    Raises:
        IntegrityError: its manifest was changed since the ref recorded it.
    """
    with suppress(VersionNotFoundError):
        return _open(recipe, found, found.current) if found.current else None
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
        `unchanged`; for a candidate `waiting`, or `held` if it is too far from the version that
        readers have.

    Raises:
        PackhouseError: a gate refuses the version; it stays published.
    """
    version = found.current if found.is_unchanged else found.candidate
    assert version is not None
    manifest = _open(recipe, found, version).manifest
    gates: list[GateResult] = []
    try:
        gates.append(check_golden(recipe, Workspace(cache=cache).tokenizers))
        rows = [line for line in manifest.facts.counts.ledger if line.step in ROW_STEPS]
        for end in range(len(ROW_STEPS)):  # after each step that can refuse rows, as the run did
            quarantine = check_quarantine(rows[: end + 1], recipe.validate_.max_quarantined)
        gates.append(quarantine)
        gates += check_audit(manifest.audit, recipe.audit)
        change = compare(recipe, found, version)
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
    limits, reasons = _limits(recipe, found, change)
    outcome: Outcome = "waiting"
    said = f"nothing changed: {version} still waits for approval"
    if found.is_unchanged:
        outcome = "unchanged"
        said = f"nothing changed: '{found.ref}' is at {version} already"
    elif reasons:
        outcome = "held"
        said = f"nothing changed: {_held_message(found, version, reasons)}"
    return Refreshed(
        dataset=found.dataset,
        ref=found.ref,
        outcome=outcome,
        version=version,
        said=said,
        command="" if found.is_unchanged else _command(recipe, found.ref, version),
        gates=(*gates, *limits, GateResult(name="publish", outcome="not reached", detail=said)),
        change=change,
    )


def finish_refresh(
    recipe: Recipe, found: Look, prepared: Prepared, by: str | None = None
) -> Refreshed:
    """Say what came of a refresh that ran the chain.

    Args:
        recipe: with the limits of its ref, also where `candidate_recipe` ran.
        found: what the refresh saw before it ran.
        prepared: what the run did.
        by: the run, for the ref's log; by default the person whose process this is.

    Raises:
        ConflictError: another run moved the candidate meanwhile.
    """
    change = compare(recipe, found, prepared.version)
    at, ref = prepared.published.ref_version, prepared.published.ref
    gates: Sequence[GateResult] = prepared.gates
    reasons: Sequence[str] = prepared.published.held_back
    is_candidate = ref == candidate_of(found.ref)
    if is_candidate:
        # A publication moves a ref to a version only once. The candidate follows the sources, also
        # back to a version that it pointed to before; a run that came later keeps its place.
        if at != prepared.version and at == found.candidate:
            store = open_store(recipe.publish.store)
            to, why = prepared.version, "the sources went back"
            at = set_ref(store, recipe.dataset, ref, to, expected=at, reason=why, by=by).version
        limits, reasons = _limits(recipe, found, change)
        gates = (*(each for each in gates if each.gate not in ("schema", "drift")), *limits)
    outcome: Outcome
    command = _command(recipe, found.ref, prepared.version)
    if at not in (None, prepared.version):
        outcome, command = "held", _command(recipe, ref, prepared.version)
        why = "which was published later"
        if prepared.published.is_ref_left:
            why = "publish.move_ref is false"
        elif found.is_moved_back and not is_candidate:
            why = "someone moved it back there"
        said = (
            f"the sources give {prepared.version}, which is published, but '{ref}' points to "
            f"{at} ({why}), and a refresh leaves that alone"
        )
    elif reasons:
        outcome = "held"
        said = _held_message(found, prepared.version, reasons)
    elif is_candidate:
        outcome = "waiting"
        now = found.current or "nothing yet"
        said = f"{prepared.version} waits for approval; '{found.ref}' points to {now}"
    else:
        outcome = "published"
        command = ""
        said = f"'{found.ref}' moved from {found.current or 'nothing'} to {prepared.version}"
    is_shown = outcome != "held" or any(gate.outcome == "failed" for gate in gates)
    publish = GateResult(name="publish", outcome="passed" if is_shown else "failed", detail=said)
    published = replace(prepared.published, held_back=tuple(reasons), ref_version=at)
    return Refreshed(
        dataset=recipe.dataset,
        ref=found.ref,
        outcome=outcome,
        version=prepared.version,
        said=said,
        command=command,
        gates=(*gates, publish),
        prepared=replace(prepared, gates=tuple(gates), published=published),
        change=change,
    )


def _limits(
    recipe: Recipe, found: Look, change: Change | None
) -> tuple[list[GateResult], list[str]]:
    """Hold what `compare` found against the limits of the ref; also why it may not move."""
    drift, breaking = (change.drift, change.breaking) if change else (None, ())
    limits = ref_gates(recipe.publish, found.ref, drift, breaking)
    reasons = [
        f"readers of {found.current} would break: {each.detail}"
        if each.name == "schema"
        else each.detail
        for each in limits
        if each.outcome == "failed"
    ]
    return limits, reasons


def _held_message(found: Look, version: str, reasons: Sequence[str]) -> str:
    return f"{version} is published, '{found.ref}' stays: {'; '.join(reasons)}"


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
    known = read_checked(place) if key else None
    # A template may print the day, and then another day is another version.
    if known and known["dates"] in ([], [pinned_date().date().isoformat()]):
        return Planned(known["version_id"])
    plan = plan_jobs(recipe)
    if key:
        dates = sorted({job.parameters.date for job in plan.format if job.parameters.date})
        write_checked(place, {"version_id": plan.version_id, "dates": dates})
    return Planned(plan.version_id, plan)


def _listed_key(recipe: Recipe) -> str | None:
    """What a listing says of all that decides a version; None if it does not say enough."""
    sources = [*recipe.sources, *recipe.audit.benchmarks]
    if any("://" not in each.path or each.path.startswith("file:") for each in sources):
        return None
    found = [file for each in sources for file in find_files(each)]
    files = [[file.uri, file.name, file.size, file.pin] for file in found]
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

"""Decide what a refresh must do, and report what it did.

A recipe is refreshed relative to the version that its ref points to. The plan of the run comes
first. A version id is a hash of all inputs, so if the planned id equals the current one, no source,
tokenizer, setting, engine or library has changed. Then only the limits of the recipe, which may
have changed, are checked against the version. Otherwise the chain runs and the ref moves.

With approval, the ref stays and `<ref>.candidate` moves to every new version.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from packhouse.addons.ci.command import CiJob, PlanFacts
from packhouse.auditing.audit_limits import check_audit
from packhouse.errors import PackhouseError, VersionNotFoundError
from packhouse.read.source_files import find_files
from packhouse.recipe import PublishConfig, Recipe
from packhouse.recipe.sections import ROW_FORMATS
from packhouse.records.gate_results import GateResult
from packhouse.records.ledger import check_quarantine
from packhouse.records.reasons import ROW_STEPS
from packhouse.registry import function_of_addon
from packhouse.render.jinja_sandbox import pinned_date
from packhouse.run.chain import Plan, Prepared, check_golden, plan_jobs, prepare
from packhouse.run.prepare_arguments import read_recipe
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import (
    Mirror,
    Workspace,
    forget_tries,
    open_mirror,
    touch_last_run,
)
from packhouse.run.steps.publish import ALL_LIBRARIES, ENGINE_VERSIONS, configuration_of
from packhouse.store import OpenVersion, load_ref, open_store, open_version, set_ref
from packhouse.store.manifest import changed_manifest
from packhouse.store.schema_drift import (
    ManifestDiff,
    RefChange,
    changed_settings,
    diff_manifests,
    ref_gates,
)
from packhouse.system.disks import check_cache, find_cache, read_checked, write_checked
from packhouse.system.fingerprint import digest, library_versions
from packhouse.system.progress import start_phase
from packhouse.system.terminal import check_interrupted
from packhouse.tokenize import fingerprint_tokenizer

Outcome = Literal["unchanged", "published", "waiting", "held"]


@dataclass(frozen=True, slots=True)
class Planned:
    """The version that the current sources would give."""

    version_id: str
    plan: Plan | None = field(default=None, repr=False, compare=False)
    """None if a listing of the sources was sufficient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshStatus:
    """State of refs and sources before a refresh."""

    dataset: str
    ref: str
    version_id: str
    """ID of the version that the current sources would give."""
    current: str | None
    """Version that the ref points to."""
    candidate: str | None = None
    """Version that waits for approval."""
    manifest_ids: Mapping[str, str] = field(default_factory=dict)
    """Version -> id of its manifest, as recorded by the refs."""
    is_moved_back: bool = False
    """True if someone moved the ref back to an earlier version, which publishing never does."""
    plan: Plan | None = field(default=None, repr=False, compare=False)
    """The plan, if one was needed, so that it is not made twice."""

    @property
    def is_unchanged(self) -> bool:
        """True if the ref's version is what the sources would give."""
        return (self.current or "").startswith(f"{self.version_id}.g")

    @property
    def is_waiting(self) -> bool:
        """True if that version is already published and waits for approval."""
        return (self.candidate or "").startswith(f"{self.version_id}.g")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(RefChange):
    """How a version differs from the one that readers have, apart from its records."""

    diff: ManifestDiff


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """Outcome of a refresh."""

    dataset: str
    ref: str
    outcome: Outcome
    """`unchanged`: nothing to do. `published`: the ref moved. `waiting`: published, now or before,
    and waiting for approval. `held`: published, but a limit or a later version keeps the ref in
    place."""
    version: str
    said: str
    """One sentence on what happened."""
    command: str = ""
    """Command that moves the ref, if a person has to decide."""
    gates: tuple[GateResult, ...] = ()
    prepared: Prepared | None = None
    change: Change | None = None
    """Difference from the version that readers have; None if there is none, or it is this one."""

    @property
    def message(self) -> str:
        """One sentence on what happened, with the command to run, for people at a shell."""
        return f"{self.said}. To move it: {self.command}" if self.command else self.said


def candidate_of(ref: str) -> str:
    """Return the name of the ref that points to the version waiting for approval.

    Example:
        >>> candidate_of("latest")
        'latest.candidate'
    """
    return f"{ref}.candidate"


def candidate_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe for a run that needs approval.

    It moves the candidate without drift limits: `finish_refresh` checks the recipe's limits against
    the version that readers have.
    """
    limits = [name for name in PublishConfig.model_fields if name.endswith("_drift")]
    update = {**dict.fromkeys(limits), "move_ref": True, "allow_breaking_schema": True}
    update["ref"] = candidate_of(recipe.publish.ref)
    return recipe.model_copy(update={"publish": recipe.publish.model_copy(update=update)})


def check_sources(recipe: Recipe, planned: Planned) -> RefreshStatus:
    """Compare the planned version with the recipe's ref (two small reads of the store)."""
    store, ref = open_store(recipe.publish.store), recipe.publish.ref
    found = load_ref(store, recipe.dataset, ref)
    waiting = load_ref(store, recipe.dataset, candidate_of(ref))
    return RefreshStatus(
        dataset=recipe.dataset,
        ref=ref,
        version_id=planned.version_id,
        plan=planned.plan,
        current=found.version if found else None,
        candidate=waiting.version if waiting else None,
        manifest_ids={each.version: each.manifest_id for each in (waiting, found) if each},
        is_moved_back=found is not None and any(m.version == found.version for m in found.past),
    )


def compare(recipe: Recipe, found: RefreshStatus, version: str) -> Change | None:
    """Return how a version differs from the one that readers have, from the two manifests.

    Raises:
        IntegrityError: a manifest was changed after a ref recorded it.
    """
    # Never compared with the last candidate: ten candidates, each 1% from the one before, can be
    # 10% from what readers have.
    old = None if found.current == version else open_current(recipe, found)
    if old is None:
        return None
    ends = old.manifest, _open(recipe, found, version).manifest
    return Change.of(*ends, diff=diff_manifests(*ends))


def open_current(recipe: Recipe, found: RefreshStatus) -> OpenVersion | None:
    """Open the version that readers have; None if there is none or it was deleted.

    Raises:
        IntegrityError: its manifest was changed after the ref recorded it.
    """
    with suppress(VersionNotFoundError):
        return _open(recipe, found, found.current) if found.current else None
    return None


def unchanged(recipe: Recipe, found: RefreshStatus, cache: Path) -> Refreshed:
    """Check a version that is already published against the current limits.

    Limits and golden conversations are not part of any key, so new limits give the same version.
    The manifest contains the counts that the limits need.

    Args:
        recipe: recipe with the current limits.
        found: state in which `is_unchanged` or `is_waiting` is true.
        cache: cache folder, for tokenizer snapshots.

    Returns:
        `unchanged`; for a candidate `waiting`, or `held` if it is too far from the version that
        readers have.

    Raises:
        PackhouseError: a gate refuses the version, which stays published.
    """
    version = found.current if found.is_unchanged else found.candidate
    assert version is not None
    manifest = _open(recipe, found, version).manifest
    gates: list[GateResult] = []
    try:
        gates.append(check_golden(recipe, Workspace(cache=cache).tokenizers))
        rows = [line for line in manifest.facts.counts.ledger if line.step in ROW_STEPS]
        for end in range(len(ROW_STEPS)):  # after each step that can quarantine, as in a run
            quarantine = check_quarantine(rows[: end + 1], recipe.validate_.max_quarantined)
        gates.append(quarantine)
        gates += check_audit(manifest.facts.audit, recipe.audit)
        change = compare(recipe, found, version)
    except PackhouseError as error:
        known = error.facts | {"gates": (*gates, *error.facts.get("gates", ()))}
        text = f"{error} ({version} is already published and remains)"
        raise type(error)(text, **known) from None
    # The version is published, so nobody will resume an earlier attempt at it.
    with suppress(OSError):  # the cache is unused or read-only
        forget_tries(cache, found.version_id)
    limits = ref_gates(recipe.publish, found.ref, change)
    reasons = change.reasons(recipe.publish) if change else ()
    outcome: Outcome = "waiting"
    state = f"{version} is published, but nobody has approved it"
    if found.is_unchanged:
        outcome, state = "unchanged", f"'{found.ref}' already points to {version}"
    elif reasons:
        outcome, state = "held", _held_message(found, version, reasons)
    said = f"nothing changed: {state}"
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
    recipe: Recipe, found: RefreshStatus, prepared: Prepared, by: str | None = None
) -> Refreshed:
    """Return the outcome of a refresh that ran the chain.

    Args:
        recipe: recipe with the limits of its ref, even if `candidate_recipe` ran.
        found: state before the run.
        prepared: result of the run.
        by: the run, for the ref's log. Default: the user of this process.

    Raises:
        ConflictError: another run moved the candidate in the meantime.
    """
    change = compare(recipe, found, prepared.version)
    at, ref = prepared.published.ref_version, prepared.published.ref
    gates: Sequence[GateResult] = prepared.gates
    reasons: Sequence[str] = prepared.published.held_back
    is_candidate = ref == candidate_of(found.ref)
    if is_candidate:
        # Publishing moves a ref to each version only once. The candidate follows the sources, even
        # back to an earlier version, unless another run has moved it since.
        if at != prepared.version and at == found.candidate:
            store = open_store(recipe.publish.store)
            to, why = prepared.version, "the sources returned to an earlier state"
            at = set_ref(store, recipe.dataset, ref, to, expected=at, reason=why, by=by).version
        limits = ref_gates(recipe.publish, found.ref, change)
        reasons = change.reasons(recipe.publish) if change else ()
        # The run compared the version with the last candidate and no limits. These compare it with
        # what readers have.
        gates = (*(each for each in gates if each.gate not in ("schema", "drift")), *limits)
    outcome: Outcome
    command = _command(recipe, found.ref, prepared.version)
    # The ref is at a third version: a later run or a person put it there.
    if at not in (None, prepared.version):
        outcome, command = "held", _command(recipe, ref, prepared.version)
        why = "which was published later"
        if prepared.published.is_ref_left:
            why = "publish.move_ref is false"
        # Without this, a refresh after a rollback claimed that the sources were back at an older
        # state.
        elif found.is_moved_back and not is_candidate:
            why = "someone moved it back"
        said = (
            f"the sources still produce {prepared.version}, which is already published, but "
            f"'{ref}' points to {at} ({why}). A refresh does not change this"
        )
    elif reasons:
        outcome, said = "held", _held_message(found, prepared.version, reasons)
    elif is_candidate:
        outcome, now = "waiting", found.current or "nothing yet"
        said = f"{prepared.version} is waiting for approval; '{found.ref}' points to {now}"
    else:
        outcome, command = "published", ""
        moved = f"moved from {found.current} to" if found.current else "now points to"
        said = f"'{found.ref}' {moved} {prepared.version}"
    # If the ref is held, some gate must fail; if no limit did, `publish` does.
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


def _held_message(found: RefreshStatus, version: str, reasons: Sequence[str]) -> str:
    return f"{version} is published, but '{found.ref}' did not move: {'; '.join(reasons)}"


def _command(recipe: Recipe, ref: str, version: str) -> str:
    place = f"{recipe.publish.store.rstrip('/')}/{recipe.dataset}"
    return f"packhouse ref set {place} {ref} {version}"


def _open(recipe: Recipe, found: RefreshStatus, version: str) -> OpenVersion:
    """Open a version, and reject a manifest that was changed after a ref recorded it.

    Otherwise a gate would trust counts that someone changed in the store.
    """
    opened = open_version(recipe.publish.store, recipe.dataset, version)
    recorded = found.manifest_ids.get(version, "")
    if recorded not in ("", opened.manifest.manifest_id):
        raise changed_manifest(opened.manifest, recorded)
    return opened


def planned_version(recipe: Recipe, cache: Path) -> Planned:
    """Return the version that the current sources would give, as cheaply as is safe.

    If all sources are in object stores, they are only listed: if no ETag has changed since a plan
    with the same recipe, tokenizer, engines and libraries, its result is reused. Local files are
    hashed (1.8 GB/s), because timestamps prove nothing, and so is everything new.

    Args:
        recipe: recipe to prepare.
        cache: cache folder; results are kept under `looks/`.
    """
    touch_last_run(cache, recipe.dataset)
    key = _listed_key(recipe)
    place = cache / "looks" / f"{key}.json"
    # Without a key, the sources must be read.
    known = read_checked(place) if key else None
    # A template may print the date; then every day gives another version.
    if known and known["dates"] in ([], [pinned_date().date().isoformat()]):
        return Planned(known["version_id"])
    plan = plan_jobs(recipe)
    if key:
        dates = sorted({job.parameters.date for job in plan.format if job.parameters.date})
        write_checked(place, {"version_id": plan.version_id, "dates": dates})
    return Planned(plan.version_id, plan)


def _listed_key(recipe: Recipe) -> str | None:
    """Return a key over everything that decides a version; None if a listing is not enough."""
    sources = [*recipe.sources, *recipe.audit.benchmarks]
    if any("://" not in each.path or each.path.startswith("file:") for each in sources):
        return None
    found = [file for each in sources for file in find_files(each)]
    files = [[file.uri, file.name, file.size, file.pin] for file in found]
    # A pin is an ETag or a blob id. Without one, equal names and sizes prove nothing.
    if not all(pin for *_, pin in files):
        return None
    template = Path(recipe.format.template)
    is_file = template.suffix in (".jinja", ".j2") and template.is_file()
    return digest(
        {
            "files": files,
            # The store does not affect the version id.
            "recipe": recipe.model_dump(mode="json", by_alias=True, exclude={"publish": {"store"}}),
            "template": template.read_text("utf-8") if is_file else None,
            "tokenizer": fingerprint_tokenizer(recipe.tokenizer),
            "engines": ENGINE_VERSIONS,
            "formats": sorted(ROW_FORMATS),
            "libraries": library_versions(ALL_LIBRARIES),
            "python": list(sys.version_info[:2]),
        }
    )


def run_job(
    job: CiJob,
    recipe_path: str,
    overrides: tuple[str, ...],
    *,
    cache: str | None,
    workers: int | None,
    approval: bool,
) -> None:
    """Refresh a recipe's dataset, and record the progress in `job`.

    Args:
        job: up to date whenever this returns or raises.
        recipe_path: path of the recipe.
        overrides: `key=value` settings that override the recipe.
        cache: folder or mirror of finished steps; None for the environment's setting.
        workers: number of worker processes.
        approval: move the candidate ref, and leave the ref to a reviewer.

    Raises:
        PackhouseError: a gate refused the version, or something could not be read or written.
        Interrupted: a signal arrived.
    """
    check_interrupted()  # an import may have swallowed the exception
    recipe = read_recipe(recipe_path, overrides)
    job.dataset = recipe.dataset
    place = find_cache(cache)
    folder = check_cache(place.folder)
    workspace = Workspace(cache=folder)
    start_phase("planning")
    touch_last_run(folder, recipe.dataset)
    plan = plan_jobs(recipe)
    start_phase("checking the store")
    found = check_sources(recipe, Planned(plan.version_id, plan))
    mirror = open_mirror(place)
    if mirror is not None:
        # Share one list, so that later notes of the mirror reach the summaries.
        mirror.notes.extend(job.notes)
        job.notes = mirror.notes
    job.facts = _plan_facts(recipe, plan, found, workspace, mirror)
    job.gates.add([GateResult(name="plan", outcome="passed")])
    if job.only_plan:
        return
    if found.is_unchanged or (approval and found.is_waiting):
        job.refreshed = unchanged(recipe, found, folder)
        job.gates.add(job.refreshed.gates)
        return
    published = candidate_recipe(recipe) if approval else recipe
    with LocalRunner(recipe=published, workspace=workspace, workers=workers) as local:
        prepared = prepare(published, local, folder, plan, job.gates, mirror)
        job.refreshed = finish_refresh(recipe, found, prepared)
    results = job.refreshed.gates
    # `publish` gets the time since the last gate. The comparison of two manifests takes none.
    job.gates.add([gate for gate in results if gate.name == "publish"])
    job.gates.add([gate for gate in results if gate.gate in ("schema", "drift")], seconds=0.0)


def _plan_facts(
    recipe: Recipe, plan: Plan, found: RefreshStatus, workspace: Workspace, mirror: Mirror | None
) -> PlanFacts:
    """Return everything that is known before the run."""
    steps = [job.ref for job in plan]
    done = {step for step in steps if workspace.steps.peek(*step) is not None}
    if mirror is not None:
        # Steps in the mirror will be fetched instead of computed.
        done |= mirror.holding(step for step in steps if step not in done)
    jobs = Counter(step for step, _ in steps)
    ready = Counter(step for step, key in steps if (step, key) in done)
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if current := open_current(recipe, found):
        settings = changed_settings(current.manifest.configuration, configuration_of(recipe))
        before, now = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
        for shard in current.manifest.facts.lineage.sources:
            before[shard.file].append(shard.sha256)
        for planned in plan.shards:
            now[planned.file].append(planned.sha256)
        sources = {
            name: "added" if name not in before else "removed" if name not in now else "changed"
            for name in sorted({*before, *now})
            if sorted(before.get(name, ())) != sorted(now.get(name, ()))
        }
    return PlanFacts(
        dataset=recipe.dataset,
        version_id=found.version_id,
        current=found.current,
        estimate=function_of_addon("estimate")(recipe, plan, workspace),
        cached={step: (ready[step], jobs[step]) for step in jobs},
        settings=settings,
        sources=sources,
    )

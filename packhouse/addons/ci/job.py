"""Do the work of `packhouse ci`: plan, gates, run. `command` formats the outcome."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from packhouse.addons.ci.command import CiJob, PlanFacts
from packhouse.addons.ci.refresh import (
    Look,
    Planned,
    candidate_recipe,
    finish_refresh,
    look,
    open_current,
    unchanged,
)
from packhouse.recipe import Recipe
from packhouse.records.gates import GateResult
from packhouse.registry import function_of_addon
from packhouse.run.cache import Mirror, Workspace, open_mirror
from packhouse.run.cache_room import touch_last_run
from packhouse.run.chain import prepare
from packhouse.run.given import read_recipe
from packhouse.run.local_pool import local_runner
from packhouse.run.steps.plan import Plan, plan_jobs
from packhouse.run.steps.publish import configuration_of
from packhouse.store import OpenVersion
from packhouse.store.evolution import changed_settings
from packhouse.system.disks import check_cache, find_cache
from packhouse.system.progress import start_phase
from packhouse.system.terminal import check_interrupted


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
    found = look(recipe, Planned(plan.version_id, plan))
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
    with local_runner(published, workspace, workers) as local:
        prepared = prepare(published, local, folder, plan, job.gates, mirror)
        job.refreshed = finish_refresh(recipe, found, prepared)
    results = job.refreshed.gates
    job.gates.add([gate for gate in results if gate.name == "publish"])
    job.gates.add([gate for gate in results if gate.gate in ("schema", "drift")], seconds=0.0)


def _plan_facts(
    recipe: Recipe, plan: Plan, found: Look, workspace: Workspace, mirror: Mirror | None
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
    current = open_current(recipe, found)
    if current is not None:
        settings = changed_settings(current.manifest.configuration, configuration_of(recipe))
        sources = _changed_sources(plan, current)
    return PlanFacts(
        dataset=recipe.dataset,
        version_id=found.version_id,
        current=found.current,
        estimate=function_of_addon("estimate")(recipe, plan, workspace),
        cached={step: (ready[step], jobs[step]) for step in jobs},
        settings=settings,
        sources=sources,
    )


def _changed_sources(plan: Plan, current: OpenVersion) -> dict[str, str]:
    before = _shards((shard.file, shard.sha256) for shard in current.manifest.facts.lineage.sources)
    now = _shards((shard.file, shard.sha256) for shard in plan.shards)
    changes = {}
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            changes[name] = (
                "added" if name not in before else "removed" if name not in now else "changed"
            )
    return changes


def _shards(pairs: Iterable[tuple[Any, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, digest in pairs:
        found.setdefault(name, []).append(digest)
    return {name: sorted(digests) for name, digests in found.items()}

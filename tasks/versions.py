"""Tasks for published versions and refs, retried after transient errors."""

from pathlib import Path
from typing import TypeVar

from prefect.client.schemas.objects import State
from prefect.states import Completed

from packhouse.addons.ci.refresh import RefreshStatus, check_sources, planned_version
from packhouse.addons.gc import GcReport, collect_garbage
from packhouse.errors import IntegrityError, VersionNotFoundError
from packhouse.recipe import Recipe
from packhouse.store import Ref, open_store, open_version, set_ref
from packhouse.store.object_keys import is_name
from packhouse.store.refs import earlier_move, scan_refs
from packhouse.store.version_reader import VerifyReport, verify_version
from packhouse.system.wording import counted
from tasks.artifacts import move_artifacts
from tasks.cleanup import end_questions
from tasks.outcomes import tag_run
from tasks.retries import retried_task
from tasks.steps import this_run

T = TypeVar("T")
Reports = list[tuple[str, T]]
"""Report of each verified dataset."""


@retried_task(name="look", task_run_name="look: {recipe.dataset}")
def look_at_sources(recipe: Recipe, cache: str) -> RefreshStatus:
    """Compare the sources with the published version without running any step."""
    return check_sources(recipe, planned_version(recipe, Path(cache)))


@retried_task(name="datasets")
def datasets_of(store: str, dataset: str | None, ref: str | None = None) -> list[str]:
    """Return the given dataset, or all of a store with this ref (or any, or a damaged one)."""
    if dataset is not None:
        return [dataset]
    opened = open_store(store)
    # A bucket may have other folders too.
    folders = sorted(filter(is_name, opened.list_folders("")))
    scans = {name: scan_refs(opened, name) for name in folders}
    found = [
        name
        for name, (refs, damaged) in scans.items()
        if damaged or any(ref in (None, each.name) for each in refs)
    ]
    if not found:
        what = f" with ref '{ref}'" if ref else ""
        raise VersionNotFoundError(f"store '{store}' has no dataset{what}")
    return found


@retried_task(name="verify", task_run_name="verify: {dataset}@{version}")
def verify_one(store: str, dataset: str, version: str) -> VerifyReport:
    """Check every byte, schema, count and value of a version; a missing version is a problem."""
    try:
        return verify_version(open_version(store, dataset, version))
    except (IntegrityError, VersionNotFoundError) as error:
        return VerifyReport(
            version=version,
            num_files=0,
            num_bytes=0,
            num_rows=0,
            num_tokens=0,
            problems=(str(error),),
        )


def checked(reports: Reports[VerifyReport]) -> State[Reports[VerifyReport]]:
    """Return the state of a run that verified versions.

    Raises:
        IntegrityError: a version is damaged.
    """
    problems = [f"{name}: {text}" for name, report in reports for text in report.problems]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise IntegrityError(f"{'; '.join(problems[:3])}{more}", problems=problems)
    files = sum(report.num_files for _, report in reports)
    size = sum(report.num_bytes for _, report in reports)
    message = f"{counted(len(reports), 'version')} intact: "
    message += f"{counted(files, 'file')}, {counted(size, 'byte')}"
    return Completed(data=reports, message=message)


@retried_task(name="move-ref", task_run_name="move {ref}: {dataset}@{version}")
def move_ref(
    store: str, dataset: str, version: str, ref: str, expected: str | None, reason: str
) -> Ref:
    """Point a ref to a version by compare-and-swap; the version may be given as another ref."""
    opened = open_store(store)
    target = open_version(opened, dataset, version).version
    return set_ref(opened, dataset, ref, target, expected=expected, reason=reason, by=this_run())


@retried_task(name="past-of-ref", task_run_name="past of {ref}: {dataset}")
def past_of_ref(store: str, dataset: str, ref: str, steps: int) -> tuple[str, str]:
    """Return the current version of a ref, and its version `steps` moves ago.

    This is a separate task: if it were retried together with the move, a lost response could move
    the ref back twice.
    """
    found, move = earlier_move(open_store(store), dataset, ref, steps)
    return found.version, move.version


@retried_task(name="collect", task_run_name="collect: {dataset}")
def collect(store: str, dataset: str, grace_hours: float, delete: bool) -> GcReport:
    """Find files that no reader can reach, and delete them if `delete` is true."""
    opened = open_store(store)
    return collect_garbage(opened, dataset, grace_s=grace_hours * 3600, dry_run=not delete)


def moved(store: str, dataset: str, ref: Ref) -> State[Ref]:
    """Create the artifact of a moved ref, and return the final state of the run."""
    move_artifacts(store, dataset, ref)
    end_questions(store, dataset, ref.name, ref.version)
    tag_run(dataset=dataset, version=ref.version)
    before = ref.parent or "nothing"
    message = f"'{ref.name}' of {dataset} moved from {before} to {ref.version}"
    return Completed(data=ref, message=message)


def collected(reports: Reports[GcReport]) -> State[Reports[GcReport]]:
    """Return the final state of a gc run."""
    size = sum(report.num_bytes for _, report in reports)
    found = sum(len(each.objects) for _, report in reports for each in report.garbage)
    deleted = sum(report.num_deleted for _, report in reports)
    message = f"{counted(size, 'byte')} in {counted(found, 'object')} of interrupted publishes"
    if not found:
        message = "no objects of interrupted publishes"
    elif deleted:
        message += f": {counted(deleted, 'object')} deleted"
    else:
        message += ": nothing deleted. Run again with `delete` to delete them"
    return Completed(data=reports, message=message)

"""`packhouse ci RECIPE`: a data refresh as a job of a pipeline, with exit codes it understands."""

import json
import sys
from pathlib import Path

import click

from packhouse.addons.ci.summary import BUG, CiJob, plan_markdown, summary_json, to_junit
from packhouse.cli import exit_interrupted
from packhouse.cli.options import json_option, run_options, set_option
from packhouse.errors import ConfigError
from packhouse.system.disks import disk_error
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.terminal import Interrupted, echo, ignore_signals, interruption, print_note


@click.command()
@click.argument("recipe_path", metavar="RECIPE", type=click.Path())
@set_option()
@run_options
@click.option("--plan-only", is_flag=True, help="Say what would come; run and publish nothing.")
@click.option("--approval", is_flag=True, help="Publish, and leave it to someone to move the ref.")
@click.option("--summary", type=click.Path(path_type=Path), help="Write markdown for a comment.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write the gates as JUnit XML.")
@click.option("--json-file", type=click.Path(path_type=Path), help="Write the summary as JSON.")
@json_option("Print the summary as JSON.")
def ci(
    recipe_path: str,
    overrides: tuple[str, ...],
    cache: str | None,
    workers: int,
    plan_only: bool,
    approval: bool,
    summary: Path | None,
    junit: Path | None,
    json_file: Path | None,
    as_json: bool,
) -> None:
    """Refresh the dataset of RECIPE as a job of a pipeline: plan, run, gates, summaries.

    If nothing changed, only the gates are checked. Needs no server. Summaries are written however
    the job ends, by SIGTERM and Ctrl-C too. If one cannot be written, the others are, and the exit
    code is 5 where it would be 0.

    \b
    Exit codes: 0 published or unchanged (or planned),
    2, 3  bad input: the recipe; a source or the tokenizer,
    4     refused by a gate: nothing published,
    7     held back by drift: published, and the ref not moved,
    5, 6  infrastructure: the store or a disk; network or storage hiccups,
    130, 143, 129  stopped by Ctrl-C (SIGINT); by SIGTERM; by SIGHUP,
    1     a bug.

    \b
    packhouse ci recipe.yaml --plan-only --summary plan.md
    packhouse ci recipe.yaml --cache s3://ci/cache --junit gates.xml
    """
    job = CiJob(dataset=Path(recipe_path).stem, only_plan=plan_only)
    try:
        for path in (summary, junit, json_file):
            _check_folder(path)
        with show_progress():
            start_phase("starting")
            from packhouse.addons.ci.job import run_job  # takes over a second

            run_job(job, recipe_path, overrides, cache=cache, workers=workers, approval=approval)
    except BaseException as error:  # whatever it is, a pipeline needs its summaries
        job.error = interruption() or error  # code in C may turn a signal into another error
    ignore_signals()
    gates = job.all_gates()
    _write(job, summary, job.markdown(gates))
    _write(job, junit, to_junit(job.dataset, gates, job.error))
    _write(job, json_file, json.dumps(summary_json(job, gates), sort_keys=True, indent=2))
    if job.error is not None and job.exit_code == BUG:
        raise job.error  # with its traceback, and exit code 1
    _say(job, summary_json(job, gates), as_json)
    sys.exit(job.exit_code)


def _check_folder(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(
            f"'{path}' cannot be written: '{path.parent}' is no folder; make it first"
        )
    if path is not None and path.is_dir():
        raise ConfigError(f"'{path}' cannot be written: it is a folder; name a file in it")


def _write(job: CiJob, path: Path | None, text: str) -> None:
    """Write a summary; one that cannot be written keeps no other from being written."""
    if path is None or not path.absolute().parent.is_dir() or path.is_dir():
        return  # `_check_folder` has said so
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        job.unwritten.append(disk_error(error, path, "the summary", "name another file"))


def _say(job: CiJob, facts: dict[str, object], as_json: bool) -> None:
    if as_json:
        echo(json.dumps(facts, sort_keys=True))
    else:
        for note in job.notes:
            print_note(f"note: {note}")
        for error in job.unwritten:
            print_note(f"{type(error).__name__}: {error}")
    if isinstance(job.error, Interrupted):
        exit_interrupted(job.error, keeps_steps=True)
    if as_json:
        return
    if job.error is not None:
        print_note(f"{type(job.error).__name__}: {job.error}")
    elif job.refreshed is not None:
        echo(f"{job.refreshed.dataset}: {job.refreshed.outcome}: {job.refreshed.message}")
    elif job.facts is not None:
        echo(plan_markdown(job.facts))

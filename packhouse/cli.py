"""The `packhouse` command: for people who have data, on any machine, without Prefect.

Commands live in `packhouse/commands/` and are imported when they are called, so that
`packhouse --help` answers at once. An error of packhouse ends the command with one sentence on
stderr (or one JSON object, with --json) and the exit code of its class.
"""

import importlib
import json
import os
import shlex
import sys
import traceback
from typing import NoReturn

import click

from packhouse.errors import PackhouseError
from packhouse.escaping import for_terminal
from packhouse.runtime.interrupts import Interrupted, handle_signals
from packhouse.terminal import echo, print_note

# name -> (module, one line for the list of commands)
COMMANDS = {
    "prepare": ("packhouse.commands.prepare", "Prepare data: a recipe, or files and a tokenizer."),
    "init": ("packhouse.commands.init", "Look at data, and write a recipe that reads it."),
    "new": ("packhouse.commands.new", "Write a project of your own: flows, schedules, an image."),
    "audit": ("packhouse.commands.audit", "Audit anyone's data: what its tokens would teach."),
    "ls": ("packhouse.commands.versions", "List datasets, versions and refs of a store."),
    "show": ("packhouse.commands.versions", "Show a version: files, ledger, lineage, settings."),
    "stats": ("packhouse.commands.stats", "Count records, tokens and lengths by source and split."),
    "report": ("packhouse.commands.report", "Write a page with charts and samples of a version."),
    "inspect": ("packhouse.commands.inspect", "Print packs, tokens coloured by trained or not."),
    "sql": ("packhouse.commands.sql", "Ask a version in SQL: its records, packs and counts."),
    "trace": ("packhouse.commands.trace", "Say from which row a token comes, or where a row went."),
    "dropped": ("packhouse.commands.dropped", "Print what was left out, row or record, and why."),
    "verify": ("packhouse.commands.versions", "Check every byte and value of a version."),
    "pull": ("packhouse.commands.versions", "Copy a version to a folder, verified, resumable."),
    "diff": ("packhouse.commands.diff", "Compare two versions: rows, tokens, settings."),
    "ref": ("packhouse.commands.refs", "List, set or roll back refs such as `latest`."),
    "gc": ("packhouse.commands.gc", "Reclaim what dead publishers left; shows what first."),
    "cache": ("packhouse.commands.cache", "Look at finished steps on this machine; make room."),
    "doctor": ("packhouse.commands.doctor", "Check a store, or room in the cache, before a run."),
    "explain": ("packhouse.commands.explain", "Say which steps of a recipe would run, and why."),
    "plan": ("packhouse.commands.plan", "Estimate a recipe: rows, records, tokens, packs."),
    "ci": ("packhouse.commands.ci", "Refresh a dataset as a job of a pipeline; gates, summaries."),
    "quarantine": ("packhouse.commands.quarantine", "List, show and mend the rows that are bad."),
    "golden": ("packhouse.commands.golden", "Pin and check what becomes of conversations."),
    "export": ("packhouse.commands.export", "Write a version in the format of a trainer."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PackhouseError as error:
            exit_with(error, as_json="--json" in sys.argv)
        except Interrupted as error:
            exit_interrupted(error, keeps_steps=False)
        except click.ClickException as error:  # repeats arguments, which a shell may have expanded
            of = getattr(error, "ctx", None) or ctx  # the command's own, where it got that far
            raise click.UsageError(for_terminal(error.format_message()), of) from None


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="packhouse")
def cli() -> None:
    """Prepare instruction data as versions of packed tokens; look at, check and fetch them.

    \b
    packhouse init rows.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct
    packhouse prepare recipe.yaml
    packhouse show ./store/stanford-alpaca
    packhouse inspect s3://bucket/store/stanford-alpaca --packs 2

    Every command takes --json. S3 endpoint and credentials come from the usual AWS environment
    variables and profile.
    """


def exit_with(error: PackhouseError, *, as_json: bool) -> NoReturn:
    """Print an error as one sentence, or one JSON object, and exit with its class's code."""
    name = type(error).__name__
    if as_json:
        facts = {key: value for key, value in error.facts.items() if _is_plain(value)}
        echo(json.dumps({"error": name, "message": str(error), **facts}, sort_keys=True))
    else:
        print_note(f"{name}: {error}")
    sys.exit(error.exit_code)


def exit_interrupted(error: Interrupted, *, keeps_steps: bool) -> NoReturn:
    """Say how to go on after a signal, and exit with 130 or 143."""
    program = click.get_current_context().find_root().command_path
    kept = "; finished steps are kept" if keeps_steps else ""
    echo(f"{error}{kept}. To go on, run again:", err=True)
    echo(f"  {program} {shlex.join(sys.argv[1:])}", err=True)
    sys.exit(error.exit_code)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | dict | list | None)


def main() -> None:
    """Run the command line."""
    handle_signals()
    os.environ.setdefault("PACKHOUSE_WITHOUT_PANDAS", "1")  # see packhouse.runtime.without_pandas
    sys.excepthook = lambda *error: echo("".join(traceback.format_exception(*error)), err=True)
    cli(prog_name="packhouse")

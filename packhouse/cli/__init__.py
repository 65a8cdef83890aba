"""The `packhouse` command, which works without Prefect, and options that several commands share.

Commands are listed in `packhouse/registry.py` and imported only when called, so `packhouse --help`
is fast. A PackhouseError prints its message to stderr (with --json, one JSON object to stdout) and
exits with the code of its class.
"""

import atexit
import gc
import importlib
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click

from packhouse.errors import PackhouseError
from packhouse.registry import COMMAND_GROUPS, COMMANDS, is_there
from packhouse.system.disks import default_cache
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import Interrupted, echo, handle_signals, print_note

Decorator = Callable[[Callable[..., object]], Callable[..., object]]


def set_option(what: str = "Override a recipe value: --set pack.seq_len=4096.") -> Decorator:
    """Return --set, which may be given several times."""
    return click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=what)


def cache_option(what: str = "Cache folder.") -> Decorator:
    """Return --cache, a folder of this machine."""
    what = f"{what} [default: $PACKHOUSE_CACHE, or ~/.cache/packhouse]"
    folder = click.Path(path_type=Path)
    return click.option("--cache", type=folder, default=default_cache, help=what)


def number_option(
    name: str, what: str, *, default: int | None = None, least: int = 0, into: str | None = None
) -> Decorator:
    """Return an option with a whole number of at least `least`; `into` names its parameter."""
    names, kind = filter(None, (name, into)), click.IntRange(min=least)
    return click.option(*names, default=default, show_default=True, type=kind, help=what)


def json_option(what: str = "Print JSON.") -> Decorator:
    """Return --json."""
    return click.option("--json", "as_json", is_flag=True, help=what)


def recipe_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add RECIPE, --set, --cache and --json."""
    recipe = click.argument("recipe_path", metavar="RECIPE", type=click.Path())
    return recipe(set_option()(cache_option()(json_option()(command))))


def run_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add --cache, which may be a mirror, and --workers."""
    what = "Cache folder, or s3://bucket/prefix to share the cache between machines."
    cache = click.option("--cache", metavar="PATH|URI", help=what)
    what = (
        "Number of worker processes. Does not affect the output. "
        "[default: one per 100 MB of input, up to one per core]"
    )
    return cache(number_option("--workers", what, least=1)(command))


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _) in COMMANDS.items() if is_there(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS or not is_there(module := COMMANDS[cmd_name][0]):
            return None
        # By name, since `plan` and `audit` are also functions.
        found = vars(importlib.import_module(module)).values()
        return next(c for c in found if isinstance(c, click.Command) and c.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        installed = self.list_commands(ctx)
        # Pad the names, so that all sections line up.
        width = max(map(len, installed))
        for title, names in COMMAND_GROUPS.items():
            rows = [(name.ljust(width), COMMANDS[name][1]) for name in names if name in installed]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PackhouseError as error:
            exit_with(error, as_json="--json" in sys.argv)
        except Interrupted as error:
            exit_interrupted(error, keeps_steps=False)
        except click.ClickException as error:  # the message may repeat arguments, so escape it
            # Prefer the context of the subcommand, if it was reached.
            of = getattr(error, "ctx", None) or ctx
            raise click.UsageError(for_terminal(error.format_message()), of) from None


_FIRST_STEPS = """\
packhouse turns instruction data into versioned datasets of packed tokens. To get started:

  packhouse init rows.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct   # write recipe.yaml
  packhouse prepare recipe.yaml                                      # publish a version
  packhouse inspect ./store/rows                                     # see what is trained

`packhouse --help` lists all commands; `packhouse COMMAND --help` explains one."""


_SETTINGS = {"help_option_names": ["-h", "--help"]}


@click.group(cls=_LazyGroup, invoke_without_command=True, context_settings=_SETTINGS)
@click.version_option(package_name="packhouse")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Turn instruction data into versioned datasets of packed tokens.

    Every command accepts --json. STORE/DATASET[@REF] names a version: REF is a ref such as `prod`,
    or a version ID; the default is `latest`. The S3 endpoint and credentials come from the usual
    AWS environment variables or profile.
    """
    if ctx.invoked_subcommand is None:
        echo(_FIRST_STEPS)


def exit_with(error: PackhouseError, *, as_json: bool) -> NoReturn:
    """Print an error as text or as one JSON object, and exit with the code of its class."""
    name = type(error).__name__
    if as_json:
        plain = (str, int, float, bool, dict, list, type(None))
        facts = {key: value for key, value in error.facts.items() if isinstance(value, plain)}
        echo(json.dumps({"error": name, "message": str(error), **facts}, sort_keys=True))
    else:
        print_note(f"{name}: {error}")
    sys.exit(error.exit_code)


def exit_interrupted(error: Interrupted, *, keeps_steps: bool) -> NoReturn:
    """Print how to continue after a signal, and exit with 130 or 143."""
    program = click.get_current_context().find_root().command_path
    kept = "; finished steps are kept" if keeps_steps else ""
    echo(f"{error}{kept}. To continue, run:", err=True)
    echo(f"  {program} {shlex.join(sys.argv[1:])}", err=True)
    sys.exit(error.exit_code)


def own_process() -> None:
    """Set up a process that runs only this command."""
    # SIGTERM is handled like Ctrl-C, so that child processes are stopped too.
    handle_signals()
    # A run imports and builds objects that stay: looking for cycles among them takes 0.1 s.
    gc.set_threshold(100_000)
    # Before numpy is imported, whose threads would spin for 0.05 s. A user's setting wins.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Skip the last garbage collection: it takes 0.2 s (0.4 s with Prefect) for memory that the
    # kernel frees anyway.
    atexit.register(gc.freeze)


def main() -> None:
    """Run the command line."""
    own_process()
    sys.excepthook = lambda *error: echo("".join(traceback.format_exception(*error)), err=True)
    cli(prog_name="packhouse")

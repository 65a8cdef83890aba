"""`packhouse audit DATA`: check the tokens and masks of rows prepared by any tool."""

import json
import sys
from textwrap import indent
from typing import TYPE_CHECKING

import click

from packhouse.cli.options import json_option, set_option
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.terminal import Interrupted, console, echo

if TYPE_CHECKING:
    from packhouse.addons.audit_any.audit import AuditReport

FOUND = 4
"""Exit code if there are findings."""


@click.command()
@click.argument("data", metavar="DATA...", nargs=-1, required=True)
@click.option(
    "--tokenizer", required=True, help="Tokenizer folder, or Hub name: org/name[@revision]."
)
@click.option("--template", help="Chat template used for the rows. [default: the tokenizer's]")
@set_option("Set a recipe value for raw rows: --set pack.seq_len=4096. May be repeated.")
@click.option("--cache", metavar="PATH", help="Cache folder.")
@json_option("Print the report as one line of JSON.")
def audit(
    data: tuple[str, ...],
    tokenizer: str,
    template: str | None,
    overrides: tuple[str, ...],
    cache: str | None,
    as_json: bool,
) -> None:
    """Check the tokens and masks of rows from any tool, without publishing anything.

    DATA can be files or folders of rows with `input_ids` and either `labels` or a mask (Parquet,
    Arrow, JSON, JSON Lines or `save_to_disk` output), a version (STORE/DATASET[@REF]), or raw rows
    as for `packhouse prepare`.

    \b
    Example:
      $ packhouse audit chats.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct
      100 raw rows, 97 records, 15,166 tokens, 39.1% of them trained
      ...

    \b
    Exit codes:
      0    no findings
      2    invalid option
      3    a file or the tokenizer cannot be read, or no rows are left
      4    findings
      5    a disk error
      130  stopped by Ctrl-C (143: by SIGTERM)
    """
    from packhouse.cli import exit_interrupted

    try:
        with show_progress():
            start_phase("importing")
            from packhouse.addons.audit_any.audit import audit as audit_data

            report = audit_data(
                data[0] if len(data) == 1 else list(data),
                tokenizer,
                template=template,
                cache=cache,
                progress=False,
                overrides=overrides,
            )
    except Interrupted as error:
        exit_interrupted(error, keeps_steps=False)
    if as_json:
        echo(json.dumps(report.to_json(), sort_keys=True))
    else:
        _print(report)
    sys.exit(0 if report.is_clean else FOUND)


def _print(report: "AuditReport") -> None:
    from rich.padding import Padding
    from rich.text import Text

    from packhouse.cli.tokens import coloured, plain

    out = console(soft_wrap=False)
    for line in report.summary():
        out.print(line)
    for finding in report.findings:
        out.print(Text(f"\n{finding.title}", "bold yellow"))
        out.print(f"  {finding.remedy}")
        for example in finding.examples:
            out.print(Padding(Text(example.title, "cyan"), (0, 0, 0, 4), expand=False))
            if example.runs and not out.is_terminal:
                echo(indent(plain(example.runs).rstrip(), " " * 6))
            elif example.runs:
                text = coloured(example.runs)
                text.rstrip()
                out.print(Padding(text, (0, 0, 0, 6), expand=False))
    if report.is_clean:
        out.print(Text("nothing found", "bold green"))

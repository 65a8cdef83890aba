"""Detect the format of files, show rows as trained, and write a recipe: `packhouse init`."""

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import yaml
from pydantic import ValidationError

from packhouse.addons.init.choose_format import (
    NAME_THE_FIELDS,
    Candidate,
    Proposal,
    Trial,
    as_options,
    bad_rows,
    explained,
    media_advice,
    propose,
    render_sample,
    try_source,
)
from packhouse.addons.init.file_survey import Survey, as_line, survey
from packhouse.addons.init.turns_in_texts import marks_left
from packhouse.cli import json_option
from packhouse.cli.token_display import coloured, pipeline_of, plain, rows_with_masks, runs_of
from packhouse.errors import ConfigError, PackhouseError, SourceError, TemplateError
from packhouse.read.compression import name_row
from packhouse.read.csv_files import DELIMITERS
from packhouse.read.source_files import find_files, source_name
from packhouse.read.unread_fields import MIN_ROWS, MIN_SHARE
from packhouse.recipe import Recipe, SourceConfig, ValidateConfig, parse_recipe
from packhouse.recipe.recipe_file import apply_override, explain_mistakes
from packhouse.records.ledger import LedgerLine, RenderCounts, check_quarantine, factor_note
from packhouse.render.renderer import usual_template
from packhouse.run.prepare_arguments import data_uri, name_of, pinned, tokenizer_name
from packhouse.run.step_cache import Workspace
from packhouse.system.disks import default_cache, temporary_folder
from packhouse.system.escaping import for_terminal
from packhouse.system.progress import show_progress, start_phase, step_progress
from packhouse.system.terminal import console, echo, print_note, print_text
from packhouse.system.wording import counted
from packhouse.tokenize import load_snapshot, run_tokenizer

_SHOWN_ROWS = 3
_SHOWN_EXAMPLES = 2
"""Number of example rows shown per candidate."""
_SHOWN_TOKENS = 400
_SHOWN_FIELDS = 60
_LEAST_SEQ_LEN, _MOST_SEQ_LEN = 2048, 32_768
_MAX_FILES = 200
"""Maximum number of files surveyed per path."""
_REPEATS = "its text also appears in other fields"
_CONSISTS = "its text is made of fields that are read"
_UNDECIDED = 7
"""Exit code if the user has to choose a reading."""


@click.command()
@click.argument("data", metavar="DATA...", nargs=-1, required=True)
@click.option(
    "--tokenizer", required=True, help="Tokenizer folder, or Hub name: org/name[@revision]."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("recipe.yaml"),
    show_default=True,
    help="Output file for the recipe.",
)
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override how rows are read: format=chat, template=NAME or validate.KEY=VALUE.",
)
@click.option("--yes", is_flag=True, help="Write the recipe without asking for confirmation.")
@click.option("--cache", type=click.Path(path_type=Path), default=default_cache, hidden=True)
@json_option("Print the findings as JSON, without prompting.")
def init(
    data: tuple[str, ...],
    tokenizer: str,
    out: Path,
    overrides: tuple[str, ...],
    yes: bool,
    cache: Path,
    as_json: bool,
) -> None:
    """Detect the format of DATA and write a commented recipe for it.

    DATA can be files, folders, globs or URIs (s3://, gs://, az://, hf://). `init` shows sample rows
    with trained tokens in green and asks for confirmation. If the rows can be read in several ways,
    or some text would be lost, it does not write a recipe. Instead, it lists each way with the
    command that selects it, and exits with code 7.

    \b
    Example:
      $ packhouse init chats.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct
      ...
      wrote recipe.yaml
    """
    if out.exists():
        raise ConfigError(f"'{out}' already exists. Choose another file with -o, or delete it.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"cannot write '{out.name}': folder '{out.absolute().parent}' does not exist. "
            "Create it, or choose another file with -o."
        )
    given: dict[str, Any] = {}
    for override in overrides:
        apply_override(given, override)
    validate: dict[str, Any] = given.pop("validate", {})
    template = given.pop("template", "")
    try:
        rules = ValidateConfig.model_validate(validate)
        SourceConfig.model_validate({**given, "path": ""})
    except ValidationError as error:
        model = ValidateConfig if error.title == "ValidateConfig" else SourceConfig
        raise ConfigError(
            f"{explain_mistakes(error, '--set', model=model)}. `packhouse init` sets how "
            "rows are read; write other settings into the recipe, or pass them to "
            "`packhouse prepare` with --set."
        ) from None
    with show_progress(), temporary_folder("init") as folder:
        proposals = [
            found
            for item in data
            for found in _look_at(data_uri(item, cache), given, rules, folder)
        ]
        undecided = [each for each in proposals if each.reading is None]
        if undecided:
            said_so = given | {f"validate.{key}": value for key, value in validate.items()}
            said_so |= {"template": template} if template else {}
            _show_candidates(undecided, said_so, tokenizer, out, cache, as_json=as_json)
            raise click.exceptions.Exit(_UNDECIDED)
        names = [source_name(SourceConfig(path=each.path)) for each in proposals]
        sources = [
            # Several files can share a name, but sources cannot.
            {"path": each.path}
            | ({"name": f"{name[:60]}-{number}"} if names.count(name) > 1 else {})
            | each.settings
            for number, (each, name) in enumerate(zip(proposals, names, strict=True), 1)
        ]
        raw: dict[str, Any] = {
            "dataset": name_of(data[0]),
            "sources": sources,
            **({"validate": validate} if validate else {}),
            "tokenizer": tokenizer_name(tokenizer, cache),
        }
        raw |= _template(raw["sources"], template, raw["tokenizer"], cache)
        recipe = pinned(parse_recipe(raw, where="init"))
        with step_progress("check", len(proposals)):
            trials = [
                try_source(_tried(proposal, source, folder), recipe.validate_)
                for proposal, source in zip(proposals, recipe.sources, strict=True)
            ]
        start_phase("rendering examples")
        tokenizers = Workspace(cache=cache).tokenizers
        rendered, refusals = [], []
        try:
            for source, trial in zip(recipe.sources, trials, strict=True):
                rendered.append(render_sample(recipe, source, trial, tokenizers))
        except TemplateError as error:
            refusals.append(str(error))
    refusals += _refusals(recipe, proposals, trials, [bad for _, bad, _ in rendered])
    samples = [sample for sample, _, _ in rendered]
    lengths = np.concatenate([[1], *(sample["num_tokens"].to_numpy() for sample in samples)])[1:]
    if not len(lengths) and len(samples) == len(trials):
        raise SourceError("\n".join(refusals))
    # The smallest power of two that fits all rows.
    fits = 2 ** int(np.ceil(np.log2(lengths.max(initial=_LEAST_SEQ_LEN))))
    raw["pack"]["seq_len"] = int(np.clip(fits, _LEAST_SEQ_LEN, _MOST_SEQ_LEN))
    root = out.absolute().parent
    for source in raw["sources"]:
        source["path"] = path_in_recipe(source["path"], root)
    raw["tokenizer"] = tokenizer
    if "://" not in tokenizer and Path(tokenizer).expanduser().is_dir():
        raw["tokenizer"] = path_in_recipe(tokenizer, root)
    num_good = sum(trial.num_good for trial in trials)
    said = _of_lengths(lengths, num_good)
    text = recipe_text(raw, proposals, said, str(out))
    if as_json:
        echo(json.dumps({"file": str(out), "recipe": raw, "refusals": refusals}))
    else:
        for number, proposal in enumerate(proposals):
            _show_file(proposal)
            print_text(f"proposed: {json.dumps(proposal.settings, ensure_ascii=False)}", 2)
            if number < len(samples):
                _show_rows(samples[number], recipe, cache, _SHOWN_ROWS)
        echo(said)
        counts = RenderCounts.total(counts for *_, counts in rendered)
        if factor := factor_note(counts, recipe.format):
            print_text(f"note: {factor}")
        if joined := _joined_answers(counts, sum(rows.num_rows for rows in samples)):
            print_text(f"note: this recipe {joined}")
        for note in filter(None, map(_equal_prompts, trials)):
            print_text(f"note: this recipe {note}")
        for trial in trials:  # marks that were refused, unless the user set the format
            talks = [] if trial.sample is None else trial.sample["messages"].to_pylist()
            if (found := marks_left(talks)) is not None:
                print_note(f"note: {found}")
        if num_long := int((lengths > _MOST_SEQ_LEN).sum()):
            print_text(
                f"note: {counted(num_long, 'record is', 'records are')} longer than "
                "`pack.seq_len`, so `packhouse prepare` would drop such records. If the model can "
                "read them, raise it."
            )
        for refusal in refusals:
            print_note(f"`packhouse prepare` would reject these rows: {refusal}")
        repeats = [line for each in proposals for line in field_lines(each)]
        left_out = "".join(
            f" Leave out {line}?" for line in repeats if _REPEATS in line or _CONSISTS in line
        )
        question = for_terminal(f"Is this right?{left_out} Write {out}?")
        if not yes and sys.stdin.isatty() and not click.confirm(question, default=True):
            echo("Nothing was written. `--yes` writes the recipe anyway, so that you can edit it.")
            raise click.exceptions.Exit(1)
    out.write_text(text, encoding="utf-8")
    if not as_json:
        unasked = "" if yes or sys.stdin.isatty() else " (not confirmed: no terminal)"
        first = "change it as noted above, then run " if refusals else ""
        print_text(f"wrote {out}{unasked}. Next: {first}packhouse prepare {shlex.quote(str(out))}")


def _look_at(
    path: str, given: Mapping[str, Any], rules: ValidateConfig, folder: Path
) -> list[Proposal]:
    """Propose one reading for all files of a path, or one for each file if they differ."""
    files = find_files(SourceConfig(path=path))
    proposals = []
    with step_progress("read", min(len(files), _MAX_FILES)):
        for file in files[:_MAX_FILES]:
            found = survey(file, given)
            if "format" not in given:  # else the user has seen the names
                _check_header(found)
            proposals.append(propose(found, given, rules, folder))
    first = proposals[0]
    are_alike = all(
        each.reading is not None
        and first.reading is not None
        and (each.reading.settings, each.survey.settings, each.survey.file_format)
        == (first.reading.settings, first.survey.settings, first.survey.file_format)
        for each in proposals
    )
    if len(files) == 1 or are_alike:
        size = sum(file.size for file in files)
        for each in proposals[1:]:
            first.survey.fields.update(
                {n: f for n, f in each.survey.fields.items() if n not in first.survey.fields}
            )
        return [replace(first, path=path, num_files=len(files), size=size)]
    if len(files) > _MAX_FILES:
        raise SourceError(
            f"'{path}' matches {len(files):,} files of different kinds. Select files of one "
            "kind with a folder or glob.",
            path=path,
        )
    return proposals


def _check_header(found: Survey) -> None:
    """Check that the first line of a table contains column names, not values.

    Raises:
        SourceError: the file has no header; the message suggests a header line.
    """
    if found.file_format not in (*DELIMITERS, "xlsx"):
        return
    examples = [
        row for layout in found.layouts.values() for row in layout.rows if isinstance(row, dict)
    ]
    names = ["text"] if len(found.fields) == 1 else ["question", "answer"]
    names = [f"column{n}" for n in range(1, len(found.fields) - 1)] + names
    # For file 234 of docs/decisions/2026-11-27-thirty-files.md, a header with commas was advised,
    # although semicolons divide its columns.
    delimiter = DELIMITERS.get(found.file_format, ",")
    for name, held in found.fields.items():
        is_sentence = len(name.split()) > 4 or name.rstrip().endswith("?")
        is_value = held.has_few_values and len(held.values) < found.num_rows / 2
        # pandas names an unnamed column 0, so a number above a column of texts is a valid name.
        is_number = name.strip().isdigit() and all(
            str(row.get(name) or "0").strip().isdigit() for row in examples
        )
        if is_sentence or is_number or (is_value and name in held.values):
            raise SourceError(
                f"source file '{found.file.uri}': its first line ({name[:60]!r}) does not "
                "name the columns. Insert a header line above it that names its "
                f"{counted(len(names), 'column')}, such as {delimiter.join(names)}. If it does "
                f"name them, {NAME_THE_FIELDS}",
                uri=found.file.uri,
            )


def _template(
    sources: Sequence[Mapping[str, Any]], given: str, tokenizer: str, cache: Path
) -> dict[str, Any]:
    """Return the `format` and `pack` sections for the sources' formats.

    `given` is the template chosen by the user, or "" for the usual one.
    """
    formats = {source["format"] for source in sources} - {"tokenized"}  # needs no template
    for alone in ("text", "classification", "kto"):
        if alone in formats and len(formats) > 1:
            others = ", ".join(sorted(formats - {alone}))
            raise ConfigError(
                f"the files contain {alone} and {others}, which need separate recipes. Run "
                "`packhouse init` for each kind, with -o."
            )
    pack: dict[str, Any] = {"seq_len": _MOST_SEQ_LEN}
    if formats == {"text"}:
        return {"format": {"template": "text"}, "pack": pack}
    tokenizers, has_labels = Workspace(cache=cache).tokenizers, formats == {"classification"}
    call = partial(usual_template, tokenizer, tokenizers, has_labels=has_labels)
    template = given or str(run_tokenizer(call, tokenizer))
    if template == "sequence_classification" or formats == {"kto"}:
        pack["strategy"] = "none"
    return {"format": {"template": template}, "pack": pack}


def _tried(proposal: Proposal, source: SourceConfig, folder: Path) -> SourceConfig:
    """Return the source itself, or a source with its examples if it was only read in part."""
    if not proposal.survey.part:
        return source
    path = folder / f"{source_name(source)}.jsonl"
    path.write_bytes(b"".join(as_line(row) for _, row in proposal.survey.examples))
    update = {"path": str(path), "file_format": "auto", "encoding": "utf-8", "rows_at": None}
    return source.model_copy(update={**update, "table": None})


def _refusals(
    recipe: Recipe,
    proposals: Sequence[Proposal],
    trials: Sequence[Trial],
    refused: Sequence[pa.Table],
) -> list[str]:
    """Return messages with the reasons why a run would stop, with counts and the option to set."""
    said = []
    for proposal, trial in zip(proposals, trials, strict=True):
        said += [
            f"'{name}' of '{proposal.path}' contains text in {number:,} of "
            f"{counted(trial.num_rows, 'row')} that the recipe would not read. To leave it out, "
            "add it to `ignored_fields` of the source."
            for name, number in trial.unread.items()
        ]
        # `prepare` stops at the same limit. Of 180 public files, 5 repeat 81% to 99% of their rows.
        if trial.num_repeats > recipe.audit.max_duplicates * trial.num_good:
            said.append(
                f"{trial.num_repeats:,} of {counted(trial.num_good, 'row')} of '{proposal.path}' "
                "repeat an earlier row. Set `dedup: {exact: drop}` in the recipe to keep one of "
                f"each, or raise audit.max_duplicates ({recipe.audit.max_duplicates})."
            )
    reasons = sum((trial.bad for trial in trials), Counter[str]())
    examples: dict[str, str] = {}
    for proposal, trial in zip(proposals, trials, strict=True):
        for reason, bad in trial.first_bad.items():
            examples.setdefault(reason, _named(proposal, *bad))
    for proposal, table in zip(proposals, refused, strict=False):
        for reason, bad in bad_rows(table):
            reasons[reason] += 1
            examples.setdefault(reason, _named(proposal, *bad))
    if not reasons:
        return said
    ledger = LedgerLine(
        step="validate",
        rows_in=sum(trial.num_rows for trial in trials),
        rows_out=sum(trial.num_good for trial in trials),
        quarantined=dict(reasons),
        dropped={"filtered": sum(trial.num_dropped for trial in trials)},
    )
    shown = "; ".join(f"{reason}: {row}" for reason, row in examples.items())
    try:
        check_quarantine([ledger], recipe.validate_.max_quarantined)
    except PackhouseError as error:
        some_have_none = any(trial.num_good for trial in trials)
        advice = f". {media_advice(some_have_none)}" if reasons["media"] else ""
        said.append(f"{error} ({shown}){advice}")
    else:
        print_note(
            f"note: {counted(reasons.total(), 'row is', 'rows are')} bad and will be "
            f"quarantined ({shown})"
        )
    return said


def _named(proposal: Proposal, row: int, byte_offset: int | None, detail: str) -> str:
    """Return a fault with the line of its row, or its number, as in the errors of `prepare`."""
    found = proposal.survey
    if found.part:  # the trial read the examples
        return f"row {found.examples[row][0]:,}: {detail}"
    encoding = found.settings.get("encoding", "utf-8")
    offset = byte_offset if proposal.num_files == 1 else None
    return f"{name_row(found.file.uri, row, offset, encoding)}: {detail}"


# Terminal output.


def _show_candidates(
    proposals: Sequence[Proposal],
    given: Mapping[str, Any],
    tokenizer: str,
    out: Path,
    cache: Path,
    *,
    as_json: bool,
) -> None:
    """Print the possible readings of each file, with example rows and commands to choose one."""
    found = []
    start_phase("rendering examples")
    for proposal in proposals:
        tried = [(each, *_examples(each, tokenizer, cache)) for each in proposal.candidates]
        # For the others, a setting of the recipe may help, which is written after the choice.
        usable = sorted(tried, key=lambda each: bool(each[-1]))
        if not as_json:
            _show_file(proposal)
            if num_bad := proposal.survey.num_bad:
                which = f"{counted(num_bad, 'row')} cannot be read ({proposal.survey.first_bad})"
                print_note(f"note: {which}")
            num_more = proposal.num_candidates - len(proposal.candidates)
            more = f" (the first {len(usable):,} are shown)" if num_more else ""
            print_text(
                f"These rows can be read in {len(usable) + num_more:,} ways{more}, so nothing was "
                "written. Run the command for the right one."
                if len(usable) > 1
                else "Only one way to read these rows was found, and it may be wrong, so "
                "nothing was written. If it is right, run its command."
            )
        for number, (candidate, recipe, rows, counts, why_not) in enumerate(usable, 1):
            reading, unread = candidate.reading, candidate.trial.unread
            ignored = dict.fromkeys([*given.get("ignored_fields", ()), *unread])
            settings = {**given, **reading.settings}
            settings |= {"template": reading.template} if reading.template else {}
            settings |= {"ignored_fields": list(ignored)} if ignored else {}
            path = path_in_recipe(proposal.path, Path.cwd())
            parts = ["packhouse", "init", path, "--tokenizer", tokenizer, "-o", str(out)]
            command = shlex.join([*parts, *as_options(settings)])
            left = {n: f"text in {counted(rows, 'example')}" for n, rows in unread.items()}
            left |= candidate.unexplained
            found.append({"settings": settings, "leaves_out": left, "command": command})
            if as_json:
                continue
            reads = ", ".join(f"{name} ({ours})" for name, ours in reading.reads.items())
            reads += f", template {reading.template}" if reading.template else ""
            console().print(f"\n{number}. {reads}", style="bold")
            if left:
                said = ", ".join(f"{name} ({what})" for name, what in left.items())
                print_text(f"leaves out {said}", 3)
            for reason, number in candidate.trial.bad.items():
                of_all = counted(candidate.trial.num_rows, "example")
                print_text(f"rejects {number:,} of {of_all} ({reason})", 3)
            for note in (_joined_answers(counts, rows.num_rows), _equal_prompts(candidate.trial)):
                if note:
                    print_text(note, 3)
            if why_not:
                print_text(f"`packhouse prepare` would refuse the recipe: {why_not}", 3)
            else:
                numbers = [row for row, _ in candidate.layout.examples]
                _show_rows(rows, recipe, cache, _SHOWN_EXAMPLES, numbers)
            echo(command)  # in one line, to be copied
        if not as_json:
            for line in f"\nIf none is right, {NAME_THE_FIELDS}".split("\n"):
                print_text(line)
            print_text(
                "If nothing in this file is what a model should learn to write, as in logs, "
                "results of an evaluation or texts for a search, there is nothing to train."
            )
    if as_json:
        echo(json.dumps({"candidates": found}))


def _joined_answers(counts: RenderCounts, num_rows: int) -> str:
    """Return a note on answers whose first word is not trained, or nothing.

    Otherwise, only `prepare` would tell it: 607 answers of one public file.
    """
    number = counts.notes.get("straddles_start", 0)
    if not number:
        return ""
    return (
        f"does not train the first word of {counted(number, 'answer')} of "
        f"{counted(num_rows, 'example')}, because it is one token with the end of the prompt"
    )


def _equal_prompts(trial: Trial) -> str:
    """Return a note if all examples have the same prompt, such as images that were left out."""
    talks = [] if trial.sample is None else trial.sample["messages"].to_pylist()
    prompts = {json.dumps(talk[:-1]) for talk in talks}
    if len(talks) < 3 or len(prompts) > 1 or prompts == {"[]"}:
        return ""
    return f"has the same prompt in all {len(talks):,} examples"


def _examples(
    candidate: Candidate, tokenizer: str, cache: Path
) -> tuple[Recipe, pa.Table, RenderCounts, str]:
    """Return the recipe of a candidate, its rows and counts, and why none can be rendered."""
    source = candidate.source
    raw: dict[str, Any] = {
        "dataset": "examples",
        "sources": [source.model_dump(mode="json", exclude_unset=True)],
        "tokenizer": tokenizer_name(tokenizer, cache),
    }
    template = candidate.reading.template
    raw |= _template([{"format": source.format}], template, raw["tokenizer"], cache)
    recipe = pinned(parse_recipe(raw, where="init"))
    tokenizers = Workspace(cache=cache).tokenizers
    try:
        rows, refused, counts = render_sample(recipe, source, candidate.trial, tokenizers)
    except TemplateError as error:
        return recipe, pa.table({}), RenderCounts(), str(error)
    return recipe, rows, counts, "" if rows.num_rows else refused["detail"][0].as_py()


def _show_file(proposal: Proposal) -> None:
    console().print(f"\n{proposal.path}", style="bold")
    for line in (file_facts(proposal), *field_lines(proposal)[:_SHOWN_FIELDS]):
        print_text(line, 2)


def _show_rows(
    sample: pa.Table,
    recipe: Recipe,
    cache: Path,
    num_shown: int,
    numbers: Sequence[int] | None = None,
) -> None:
    out = console()
    tokenizers = Workspace(cache=cache).tokenizers
    pipeline = pipeline_of(
        partial(load_snapshot, recipe.tokenizer, tokenizers, recipe.tokenize.pipeline)
    )
    places = np.unique(np.linspace(0, sample.num_rows - 1, num_shown).astype(int))
    for row in rows_with_masks(sample.take(places)):
        # Of a long row, the end of the prompt and the beginning of the answer.
        trained = np.asarray(row["trained"], np.bool_)
        first = int(np.argmax(trained)) - _SHOWN_TOKENS // 2
        first = max(0, min(first, len(trained) - _SHOWN_TOKENS))
        shown = slice(first, first + _SHOWN_TOKENS)
        runs = runs_of(row["input_ids"][shown], trained[shown], pipeline)
        number = row["row"] if numbers is None else numbers[row["row"]]
        title = (
            f"-- row {number:,}: {counted(row['num_tokens'], 'token')}, {sum(row['trained']):,} "
            "trained (green) --"
        )
        out.print(f"\n{title}", style="cyan")
        out.print("... " if first else "", end="")
        out.print(coloured(runs) if out.is_terminal else plain(runs))
        out.print(" ..." if shown.stop < len(trained) else "")


def file_facts(proposal: Proposal) -> str:
    """Return a one-line summary of a file: format, size, rows and shapes."""
    found = proposal.survey
    what = f"{proposal.num_files:,} files, " if proposal.num_files > 1 else ""
    size = proposal.size
    shown = f"{size:,} bytes" if size < 10**6 else f"{size / 10**6:,.1f} MB"
    rows = counted(found.num_rows, "row")
    read = f"{rows} read, {found.part}" if found.part else rows
    of_first = " in the first file" if proposal.num_files > 1 else ""
    num_sets = len({keys[0] if isinstance(keys, tuple) else keys for keys in found.layouts})
    shapes = f" with {num_sets:,} different sets of fields" if num_sets > 1 else ""
    # A system prompt next to the rows would otherwise be lost without a word.
    beside = f"; not read: {', '.join(found.beside)}, next to the rows" if found.beside else ""
    return f"{found.file_format}, {what}{shown}, {read}{of_first}{shapes}{beside}"


def field_lines(proposal: Proposal) -> list[str]:
    """Return one line per field with its type and use."""
    found, reading = proposal.survey, proposal.reading
    why = explained(found)
    ignored = set(reading.settings.get("ignored_fields") or ()) if reading is not None else set()
    read = {name for each in proposal.candidates for name in each.reading.reads}
    read |= {*reading.reads} if reading is not None else set()
    rows = [layout.rows[0] for layout in found.layouts.values() if isinstance(layout.rows[0], dict)]
    lines = []
    for name, held in found.fields.items():
        num_rows = held.kinds.total() - held.kinds["nothing"]
        some = "" if num_rows in (0, found.num_rows) else f", in {counted(num_rows, 'row')}"
        ways = {each.reading.reads.get(name) for each in proposal.candidates} - {None}
        if reading is None and ways:
            use = f"may be read as {' or '.join(sorted(map(str, ways)))}"
        elif reading is not None and name in reading.reads:
            use = f"read as {reading.reads[name]}"
        elif name in ignored:
            use = "ignored, as --set says"
        elif name in why:
            use = f"ignored ({why[name]})"
        elif any(name in each.trial.unread for each in proposal.candidates):
            use = "not read in any of the ways below"
        elif reading is not None and not reading.reads:
            use = "read from rows that have it"
        elif not any(read & row.keys() for row in rows if name in row):
            use = "not read, in rows without the fields that are read"
        elif held.has_media:
            use = "ignored (images, audio or video)"
        elif held.num_texts < max(MIN_ROWS, MIN_SHARE * found.num_rows):
            use = "ignored (text in few rows)"
        elif all(_is_repeated(row, name) for row in rows):
            use = f"ignored ({_REPEATS})"
        else:
            use = "ignored" if reading is None else f"ignored ({_CONSISTS})"
        shown = name if name == name.strip() else repr(name)
        lines.append(f"{shown}: {held.kind}{some}; {use}")
    return lines


def _is_repeated(row: Mapping[str, Any], name: str) -> bool:
    value = " ".join(str(row.get(name) or "").split())
    return any(value in " ".join(str(row[other]).split()) for other in row if other != name)


def _of_lengths(lengths: Any, num_good: int) -> str:
    if not len(lengths):
        return "lengths are unknown"
    median, most = np.percentile(lengths, [50, 99])
    of_all = f" of {num_good:,}, spread over the data and including the longest texts"
    return (
        f"tokens of {counted(len(lengths), 'record')}{of_all if len(lengths) < num_good else ''}: "
        f"median {median:,.0f}, 99% have at most {most:,.0f}, maximum {lengths.max():,}"
    )


# The recipe, with comments on the findings and the reason for each setting.

_WHY = {
    "encoding": "the file is not UTF-8",
    "file_format": "not clear from the file name",
    "rows_at": "the rows are the list in this field of the file's object",
    "unwrap": "each row is in its own list",
    "select": "the fields of a row, computed from the file's fields with SQL",
    "fields": "our field: the file's field",
    "roles": "the speaker: user or assistant",
    "label_names": "the classes, in the order of their numbers",
    "ignored_fields": "not read",
}
_FORMATS = {
    "mixed": "rows of several shapes, each read in its own format",
    "text": "plain text; all of it is trained",
    "preference": "the chosen answers; `pairs` reads the rejected ones, too",
}


def path_in_recipe(path: str, folder: Path) -> str:
    """Return a path relative to the folder of the recipe; addresses are unchanged."""
    if "://" in path:
        return path
    return os.path.relpath(Path(path).expanduser(), folder)


def recipe_text(
    raw: Mapping[str, Any], proposals: Sequence[Proposal], lengths: str, name: str
) -> str:
    """Return a recipe as YAML with comments.

    Args:
        raw: the recipe; its sources are in the same order as `proposals`.
        proposals: findings for each source.
        lengths: comment on token counts, for the `pack` section.
        name: path of the recipe file, for the commands in the first comment.
    """
    lines = [
        "# Written by `packhouse init`.",
        "# Edit as needed, then inspect the rows and publish a version:",
        _comment(f"  packhouse inspect {shlex.quote(name)}"),
        _comment(f"  packhouse prepare {shlex.quote(name)}"),
        "# All settings: docs/reference/recipe.md.",
        _line("dataset", raw["dataset"]),
        "sources:",
    ]
    for source, proposal in zip(raw["sources"], proposals, strict=True):
        lines.append(_comment(file_facts(proposal), 2))
        lines += [_comment(f"  {line}", 2) for line in field_lines(proposal)]
        for key, value in source.items():
            lead = "  - " if key == "path" else "    "
            why = _FORMATS.get(str(value), "") if key == "format" else _WHY.get(key, "")
            lines.append(lead + _line(key, value, why))
    why = {"chat": "the tokenizer's chat template"}.get(raw["format"]["template"], "")
    pack_why = {
        "seq_len": "pack size in tokens; longer records are dropped",
        "strategy": "a row each",
    }
    lines += [
        *([_line("validate", raw["validate"])] if "validate" in raw else []),
        _line("tokenizer", raw["tokenizer"]),
        "format:",
        f"  {_line('template', raw['format']['template'], why)}",
        "pack:",
        _comment(lengths, 2),
        *(f"  {_line(key, value, pack_why[key])}" for key, value in raw["pack"].items()),
        "# split:",
        "#   eval_fraction: 0.01            # hold out 1% for evaluation",
        "# publish:",
        "#   store: ./store                 # a folder, or s3://bucket/prefix",
    ]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, why: str = "") -> str:
    # Without `width`, PyYAML folds long values, and the comment would follow the last line.
    line = yaml.safe_dump(
        {key: value},
        default_flow_style=None if isinstance(value, dict | list) else False,
        allow_unicode=True,
        width=2**20,
        sort_keys=False,
    ).rstrip("\n")
    return f"{line:<34} # {why}" if why else line


def _comment(text: str, indent: int = 0) -> str:
    """Return a one-line YAML comment, with control characters of file and field names escaped."""
    return " " * indent + "# " + for_terminal(text)

"""`packhouse init DATA...`: look at files, show rows as they are trained, write a recipe."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import yaml

from packhouse.addons.init.files import Look, look_at
from packhouse.cli.options import json_option
from packhouse.cli.tokens import coloured, pipeline_of, plain, rows_with_masks, runs_of
from packhouse.errors import ConfigError, SourceError
from packhouse.recipe import Recipe, SourceConfig, parse_recipe
from packhouse.records.render_counts import SplitText, factor_note, total
from packhouse.registry import function_of_addon
from packhouse.run.cache import Workspace
from packhouse.system.disks import default_cache
from packhouse.system.escaping import for_terminal
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.terminal import console, echo, print_note, print_text
from packhouse.system.wording import counted

# Write a recipe with comments that say what was seen and why each setting is there.


_WHY = {
    "encoding": "the file is not UTF-8",
    "file_format": "what the file's name does not say",
    "rows_at": "the rows are the list in this field of the file's one object",
    "unwrap": "each row stands in a list of its own",
    "select": "the fields of a row, made of the file's by SQL",
    "fields": "our field: the file's field",
    "roles": "who speaks: user or assistant",
    "label_names": "the classes, in the order of their numbers",
}
_FORMATS = {
    "mixed": "rows of several shapes, each read by its own",
    "text": "plain text; all of it is trained",
    "preference": "the chosen answers; `pairs` reads the rejected ones, too",
}


def file_facts(look: Look) -> str:
    """Return what was found, as one line for people."""
    what = f"{look.num_files:,} files, " if look.num_files > 1 else ""
    size = f"{look.size:,} bytes" if look.size < 10**6 else f"{look.size / 10**6:,.1f} MB"
    return f"{look.file_format}, {what}{size}"


def path_in_recipe(path: str, folder: Path) -> str:
    """Return a path as a recipe in `folder` names it."""
    if "://" in path:
        return path
    return os.path.relpath(Path(path).expanduser(), folder)


def recipe_text(
    raw: Mapping[str, Any], looks: Sequence[Look], lengths: Sequence[str], name: str
) -> str:
    """Return a recipe as YAML with comments.

    Args:
        raw: the recipe; its sources are those of `looks`, in their order.
        looks: what was found.
        lengths: lines about tokens, for `pack`.
        name: of the recipe's file, for the command to run.
    """
    lines = [
        "# Written by `packhouse init`, which looked at the first rows of each file.",
        "# Change what is wrong; these show rows as they are trained, and make the version:",
        _comment(f"  packhouse inspect {name}"),
        _comment(f"  packhouse prepare {name}"),
        "# All settings: docs/reference/recipe.md.",
        _line("dataset", raw["dataset"]),
        "sources:",
    ]
    for source, look in zip(raw["sources"], looks, strict=True):
        lines.append(_comment(file_facts(look), 2))
        lines += [_comment(f"  {field}: {what}", 2) for field, what in look.fields.items()]
        if look.is_guess:
            lines.append(_comment("a guess by the order of the fields: look at the rows", 2))
        for key, value in source.items():
            lead = "  - " if key == "path" else "    "
            why = _FORMATS.get(str(value), "") if key == "format" else _WHY.get(key, "")
            lines.append(lead + _line(key, value, why))
    why = {"chat": "the tokenizer's own"}.get(raw["format"]["template"], "")
    strategy = [raw["pack"]["strategy"]] if "strategy" in raw["pack"] else []
    lines += [
        _line("tokenizer", raw["tokenizer"]),
        "format:",
        f"  {_line('template', raw['format']['template'], why)}",
        "pack:",
        *(_comment(line, 2) for line in lengths),
        "  "
        + _line("seq_len", raw["pack"]["seq_len"], "tokens of a pack; longer rows are dropped"),
        *(f"  {_line('strategy', each, 'a label a row')}" for each in strategy),
        "# split:",
        "#   eval_fraction: 0.01            # hold out a hundredth for evaluation",
        "# publish:",
        "#   store: ./store                 # a folder, or s3://bucket/prefix",
    ]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, why: str = "") -> str:
    line = yaml.safe_dump(
        {key: value},
        default_flow_style=None if isinstance(value, dict | list) else False,
        allow_unicode=True,
        width=2**20,
        sort_keys=False,
    ).rstrip("\n")
    return f"{line:<34} # {why}" if why else line


def _comment(text: str, indent: int = 0) -> str:
    """A comment in one line, whatever a file's name or field holds."""
    return " " * indent + "# " + for_terminal(text)


_SHOWN_ROWS = 2
_SHOWN_TOKENS = 400
_SAMPLE_ROWS = 500
_LEAST_SEQ_LEN, _MOST_SEQ_LEN = 2048, 32_768


@click.command()
@click.argument("data", metavar="DATA...", nargs=-1, required=True)
@click.option("--tokenizer", required=True, help="Folder, or name on the Hub: org/name[@revision].")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("recipe.yaml"),
    show_default=True,
    help="The recipe to write.",
)
@click.option("--question", metavar="FIELD", help="Field of the question, if it is not found.")
@click.option("--answer", metavar="FIELD", help="Field of the answer.")
@click.option("--yes", is_flag=True, help="Write it without a question.")
@click.option("--cache", type=click.Path(path_type=Path), default=default_cache, hidden=True)
@json_option("Print what was found as JSON; ask nothing.")
def init(
    data: tuple[str, ...],
    tokenizer: str,
    out: Path,
    question: str | None,
    answer: str | None,
    yes: bool,
    cache: Path,
    as_json: bool,
) -> None:
    """Look at DATA, and write a recipe that reads it, with comments.

    DATA are files, folders, globs, addresses (s3://, gs://, az://, hf://). The first rows of each
    file tell its format, its encoding and which fields hold question and answer. Two rows of each
    are shown as they would be trained, trained tokens in green, and you are asked whether that is
    right. Without a terminal the recipe is written as proposed.

    \b
    packhouse init talks.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct
    packhouse init faq.xlsx chats/ --tokenizer ./llama -o support.yaml --yes
    """
    if out.exists():
        raise ConfigError(f"'{out}' is there already; name another file with -o, or remove it")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder '{out.absolute().parent}' to write '{out.name}' to")
    if (question is None) != (answer is None):
        raise ConfigError("give --question and --answer, or neither")
    asked = None if question is None or answer is None else (question, answer)
    with show_progress():
        start_phase("looking at the files")
        from packhouse.run.given import data_uri, name_of, pinned, tokenizer_name

        looks = [look for item in data for look in look_at(data_uri(item, cache), asked)]
        raw: dict[str, Any] = {
            "dataset": name_of(data[0]),
            "sources": _sources(looks),
            "tokenizer": tokenizer_name(tokenizer, cache),
            "format": {},
            "pack": {"seq_len": _MOST_SEQ_LEN},
        }
        raw["format"]["template"] = _template(looks, raw["tokenizer"], cache)
        if raw["format"]["template"] == "sequence_classification":
            raw["pack"]["strategy"] = "none"
        recipe = pinned(parse_recipe(raw, where="init"))
        start_phase("rendering the first rows")
        samples, texts = zip(
            *(_sample(recipe, source, cache) for source in recipe.sources), strict=True
        )
    factor = factor_note(total(texts), recipe.format)
    is_split = any(len(each["row"].unique()) < each.num_rows for each in samples)
    lengths = np.concatenate([sample["num_tokens"].to_numpy() for sample in samples])
    fits = 2 ** int(np.ceil(np.log2(lengths.max())))  # the least power of two for all rows
    raw["pack"]["seq_len"] = int(np.clip(fits, _LEAST_SEQ_LEN, _MOST_SEQ_LEN))
    folder = out.absolute().parent
    for source in raw["sources"]:
        source["path"] = path_in_recipe(source["path"], folder)
    raw["tokenizer"] = tokenizer
    if "://" not in tokenizer and Path(tokenizer).expanduser().is_dir():
        raw["tokenizer"] = path_in_recipe(tokenizer, folder)
    said = _of_lengths(lengths, "record" if is_split else "row")
    text = recipe_text(raw, looks, [said], str(out))
    if as_json:
        echo(json.dumps({"file": str(out), "recipe": raw}))
    else:
        for look, sample in zip(looks, samples, strict=True):
            _show(look, sample, recipe, cache)
        echo(said)
        if factor:
            print_text(f"note: {factor}")
        if (
            not yes
            and sys.stdin.isatty()
            and not click.confirm(f"Right? Write {out}?", default=True)
        ):
            echo("Nothing is written. `--yes` writes the recipe as it is, to be changed by hand.")
            raise click.exceptions.Exit(1)
    out.write_text(text, encoding="utf-8")
    if not as_json:
        unasked = "" if yes or sys.stdin.isatty() else " (there is no terminal to ask at)"
        print_text(f"written to {out}{unasked}; next: packhouse prepare {out}")


def _sources(looks: list[Look]) -> list[dict[str, Any]]:
    """Sources of a recipe, with names of their own where files have the same name."""
    from packhouse.read.files import source_name

    names = [source_name(SourceConfig(path=look.path)) for look in looks]
    sources = []
    for number, (look, name) in enumerate(zip(looks, names, strict=True), 1):
        own = {"name": f"{name[:60]}-{number}"} if names.count(name) > 1 else {}
        sources.append({"path": look.path, **own, **look.settings})
    return sources


def _template(looks: list[Look], tokenizer: str, cache: Path) -> str:
    """The template for rows of these formats."""
    from packhouse.run.rendering import usual_template
    from packhouse.tokenize import run_tokenizer

    formats = {look.settings["format"] for look in looks} - {"tokenized"}  # no template writes it
    for alone in ("text", "classification"):
        if alone in formats and len(formats) > 1:
            others = ", ".join(sorted(formats - {alone}))
            raise ConfigError(
                f"the files hold {alone} and {others}, which take a template each: call `packhouse "
                "init` for each kind, with -o"
            )
    if formats == {"text"}:
        return "text"
    tokenizers, has_labels = Workspace(cache=cache).tokenizers, formats == {"classification"}
    call = partial(usual_template, tokenizer, tokenizers, has_labels=has_labels)
    return str(run_tokenizer(call, tokenizer))


def _sample(recipe: Recipe, source: SourceConfig, cache: Path) -> tuple[pa.Table, SplitText]:
    """Read, render and tokenize the first rows of a source.

    Returns:
        Their records, schema `tables.TOKENIZED`, and the bytes that were rendered.

    Raises:
        SourceError: none of them passes; says why the first did not.
    """
    tokenizers = Workspace(cache=cache).tokenizers
    rows = function_of_addon("try_first_rows")(recipe, source, tokenizers, max_rows=_SAMPLE_ROWS)
    tokenized, refused = rows.tokenized, rows.refused()
    num_seen = len({*tokenized["row"].to_pylist(), *(each["row"] for each in refused)})
    if not tokenized.num_rows:
        raise SourceError(
            f"source '{source.path}': none of the first {counted(num_seen, 'row')} passes; row "
            f"{refused[0]['row']:,}: {refused[0]['detail']}",
            path=source.path,
        )
    if refused:
        print_note(
            f"note: {len(refused):,} of the first {counted(num_seen, 'row')} of '{source.path}' "
            f"are bad; row {refused[0]['row']:,}: {refused[0]['detail']}",
        )
    return tokenized, rows.text


def _of_lengths(lengths: npt.NDArray[np.integer[Any]], unit: str) -> str:
    median, most = np.percentile(lengths, [50, 99])
    return (
        f"tokens of the first {counted(len(lengths), unit)}: median {median:,.0f}, 99% have at "
        "most "
        f"{most:,.0f}, the longest {lengths.max():,}"
    )


def _show(look: Look, sample: pa.Table, recipe: Recipe, cache: Path) -> None:
    """Print what was found in a source, and rows of it with trained tokens in green."""
    from packhouse.tokenize import load_snapshot

    out = console()
    out.print(f"\n{look.path}", style="bold")
    out.print(f"  {file_facts(look)}")
    for name, what in look.fields.items():
        print_text(f"{name}: {what}", 2)
    proposed = json.dumps(look.settings, ensure_ascii=False)
    print_text(f"proposed: {proposed}" + (" (a guess)" if look.is_guess else ""), 2)
    tokenizers = Workspace(cache=cache).tokenizers
    pipeline = pipeline_of(
        partial(load_snapshot, recipe.tokenizer, tokenizers, recipe.tokenize.pipeline)
    )
    for row in rows_with_masks(sample.slice(0, _SHOWN_ROWS)):
        ids, trained = (row[name][:_SHOWN_TOKENS] for name in ("input_ids", "trained"))
        runs = runs_of(ids, np.asarray(trained, np.bool_), pipeline)
        title = (
            f"-- row {row['row']:,}: {counted(row['num_tokens'], 'token')}, {row['num_trained']:,} "
            "trained (green) --"
        )
        out.print(f"\n{title}", style="cyan")
        out.print(coloured(runs) if out.is_terminal else plain(runs))
        out.print("" if row["num_tokens"] <= _SHOWN_TOKENS else " ...")

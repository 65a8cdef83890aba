"""Write the pages of docs/reference/ that are generated from the code: `make reference`.

Recipe keys come from the pydantic models, commands from click, reason codes and errors from their
tables, the Python API from signatures and docstrings. A test compares the pages with the code.
"""

import copy
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import click
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from packhouse.addons.where_select import FUNCTION_GROUPS
from packhouse.cli import COMMANDS, cli
from packhouse.read.row_formats import row_formats
from packhouse.recipe import Recipe
from packhouse.recipe.audit_section import QUALITY_COUNTERS
from packhouse.recipe.sections import docstrings_of
from packhouse.records.duckdb_functions import text_function
from packhouse.records.reasons import DROP_REASONS, QUARANTINE_REASONS, Reason
from packhouse.registry import TEXT_FUNCTIONS
from packhouse.system.plugins import NameOf

FOLDER = Path(__file__).parent / "reference"

EXAMPLES: dict[str, Any] = {
    "audit.quality.languages": ["en", "de"],
    "audit.quality.max_other_languages": 0.01,
    **{f"audit.quality.max_{counter}": 0.01 for counter in QUALITY_COUNTERS},
    "dataset": "my-chats",
    "tokenizer": "Qwen/Qwen2.5-0.5B-Instruct",
    "shard_mb": 256,
    "golden": "golden.json",
    "sources.path": "s3://bucket/chats/*.jsonl.gz",
    "sources.name": "chats",
    "sources.format": "sharegpt",
    "sources.file_format": "jsonl",
    "sources.fields": {"instruction": "question_text"},
    "sources.ignored_fields": ["editor_note", "input.source"],
    "sources.label_names": ["negative", "positive"],
    "sources.where": ["length(output) > 20", "lang = 'en'"],
    "sources.weight": 0.5,
    "sources.max_records": 5000,
    "validate.max_quarantined": 0.05,
    "format.template": "alpaca",
    "format.chat_template_kwargs": {"enable_thinking": False},
    "format.train_on": "last_assistant",
    "validate.refused_orders": ["consecutive_user", "starts_with_assistant"],
    "format.never_train": ["system", "tool"],
    "format.reasoning": "train_last",
    "format.system": "You are a helpful assistant.",
    "format.prompt": "Is this good or bad?\n{text}\n",
    "tokenize.encoder": "hf",
    "pack.seq_len": 4096,
    "split.eval_fraction": 0.02,
    "split.eval_count": 1000,
    "dedup.near_threshold": 0.7,
    "audit.min_answer_coverage": 0.95,
    "audit.benchmarks": [{"path": "gsm8k_test.jsonl"}],
    "publish.store": "s3://bucket/prefix",
    "publish.ref": "candidate",
    "publish.also": ["hf://datasets/my-org/my-chats"],
    "publish.max_length_drift": 0.1,
    "publish.max_source_drift": 0.1,
    "publish.max_quarantine_drift": 0.01,
    "publish.max_trained_drift": 0.05,
    "publish.exports": ["trl", "mds"],
}
"""Example value of a key, if neither another choice nor twice the default is a good one."""

WITH: dict[str, dict[str, Any]] = {
    "format.never_train": {"train_on": "all"},
    "audit.quality.max_other_languages": {"languages": ["en", "de"]},
}
"""Other keys of the section that a key requires."""

MODULES = {
    "packhouse": "Prepare data, open versions, and load them in a trainer. Modules are imported "
    "on first use. Training with torch needs the extra `torch`.",
}
"""Modules whose public names the API page describes, in order."""

MADE = "<!-- Made by `make reference` from the code; change it there. -->\n\n"


def describe_type(annotation: Any) -> str:
    """Return a type in words: `one of `a`, `b`; or nothing`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        kinds = [describe_type(one) for one in inner if one is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is list:
        return f"list of {describe_type(inner[0])}"
    if origin is dict:
        return f"mapping of {describe_type(inner[0])} to {describe_type(inner[1])}"
    if hasattr(annotation, "__metadata__"):
        return describe_type(inner[0])
    names = {str: "text", bool: "true or false", int: "whole number", float: "number"}
    return names.get(annotation) or annotation.__name__.removesuffix("Config").lower()


def describe_field(field: FieldInfo) -> str:
    """Return the type of a field in words."""
    names = built_in_names(field)
    if names:
        return "one of " + ", ".join(f"`{name}`" for name in names) + ", or a plug-in's name"
    return describe_type(field.annotation)


def built_in_names(field: FieldInfo) -> tuple[str, ...]:
    """Return the built-in names of a field that also accepts plug-ins; none for other fields."""
    return next((item.built_in for item in field.metadata if isinstance(item, NameOf)), ())


def bounds(field: FieldInfo) -> str:
    """Return the limits of a number: `, at least 1, at most 4,096`."""
    metadata = list(field.metadata)
    for part in (field.annotation, *get_args(field.annotation)):
        for item in getattr(part, "__metadata__", ()):
            metadata += item.metadata if isinstance(item, FieldInfo) else [item]
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return "".join(
        f", {word} {getattr(item, name):,}"
        for item in metadata
        for name, word in words.items()
        if hasattr(item, name)
    )


def example(key: str, field: FieldInfo) -> str:
    """Return a line or two of YAML with a value that is not the default."""
    value = EXAMPLES.get(key, field.default)
    if key not in EXAMPLES:
        is_literal = get_origin(field.annotation) is Literal
        choices = get_args(field.annotation) if is_literal else built_in_names(field)
        if choices:
            value = next(one for one in choices if one != field.default)
        elif isinstance(value, bool):
            value = not value
        elif isinstance(value, int):
            value = 2 * value or 1
        elif isinstance(value, float):
            value = 0.01 if not value else value
    *sections, name = key.split(".")
    tree: Any = {**WITH.get(key, {}), name: value}
    for section in reversed(sections):
        if section == "sources":
            tree = [tree if name == "path" else {"path": "chats.jsonl"} | tree]
        tree = {section: tree}
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=90)


def recipe_page() -> str:
    """Return every key of a recipe, with type, default, meaning and example."""
    lines = [
        "# Recipe keys\n",
        "A recipe is a YAML file. Only `dataset`, `sources` and `tokenizer` are required; unknown "
        "keys are refused. `--set section.key=value` on the command line and `section={...}` in "
        "`packhouse.prepare` set the same keys. Paths are relative to the recipe's folder, except "
        "`publish.store`, which is relative to the working directory. `${PACKHOUSE_X}` and "
        "`${PACKHOUSE_X:-default}` in a text are replaced from the environment.\n",
    ]
    sections, texts = [], docstrings_of(Recipe)
    for name, field in Recipe.model_fields.items():
        models = [field.annotation, *get_args(field.annotation)]
        model = next((m for m in models if inspect.isclass(m) and issubclass(m, BaseModel)), None)
        if model is None:
            lines += key_lines(name, field, texts[name])
        else:
            sections.append((field.alias or name, model))
    for name, model in sections:
        lines.append(f"## {name}\n")
        lines.append(f"{inspect.getdoc(model)}\n")
        if name == "sources":
            lines.append(f"{texts[name]} A list, of at least one.\n")
        lines += section_lines(name, model)
    return MADE + "\n".join(lines)


def section_lines(name: str, model: type[BaseModel]) -> list[str]:
    """Return the keys of a section and of its subsections."""
    lines, texts = [], docstrings_of(model)
    for key, field in model.model_fields.items():
        models = [field.annotation, *get_args(field.annotation)]
        inner = next((m for m in models if inspect.isclass(m) and issubclass(m, BaseModel)), None)
        if inner is None or inner is not field.annotation:
            lines += key_lines(f"{name}.{key}", field, texts[key])
        if inner is not None and get_origin(field.annotation) is not list:
            lines += section_lines(f"{name}.{key}", inner)
    return lines


def key_lines(key: str, field: FieldInfo, text: str) -> list[str]:
    """Return heading, type, default, meaning and example of one key."""
    default = field.default
    if default is PydanticUndefined:
        said = "required"
    elif default is None:
        said = "optional"
    else:
        said = f"default `{yaml.safe_dump(default, default_flow_style=True).split(chr(10))[0]}`"
    return [
        f"### `{key}`\n",
        f"*{describe_field(field)}{bounds(field)}; {said}*\n",
        " ".join(text.split()) + "\n",
        f"```yaml\n{example(key, field)}```\n",
    ]


def walk(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command of a group, with its full name."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield f"{prefix} {name}", command
            if isinstance(command, click.Group):
                yield from walk(command, f"{prefix} {name}")


def commands_page() -> str:
    """Return the help of every command."""
    lines = [
        "# Commands\n",
        "`packhouse COMMAND --help` prints the same text. Every command accepts `--json`. A "
        "`VERSION` is `STORE/DATASET`, followed by `@REF` or `@VERSION` unless it is `@latest`. "
        "All commands share the same [exit codes](exit-codes.md).\n",
        "| command | what it does |\n|---|---|",
    ]
    for name, (_, summary) in COMMANDS.items():
        lines.append(f"| [`packhouse {name}`](#packhouse-{name}) | {summary} |")
    lines.append("")
    for name, command in walk(cli, "packhouse"):
        command = copy.copy(command)
        vars(command)["_help_option"] = None  # click keeps it from its first context
        context = click.Context(
            command,
            info_name=name,
            max_content_width=90,
            terminal_width=90,
            help_option_names=["-h", "--help"],
        )
        level = "##" if name.count(" ") == 1 else "###"
        lines.append(f"{level} {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return MADE + "\n".join(lines)


def row_formats_page() -> str:
    """Return the fields of every row format."""
    lines = [
        "# Row formats\n",
        "Fields of each row format and the names that are recognized. A source's [`fields`]"
        "(recipe.md#sourcesfields) maps other names to the first one. [Read your own data format]"
        "(../how-to/own-format.md) shows rows.\n",
        "| format | required fields | optional fields |\n|---|---|---|",
    ]
    for name, known in row_formats().items():
        fields = [
            "; ".join(
                " or ".join(f"`{each}`" for each in names) for names in some.values() if names
            )
            for some in (known.required, known.optional)
        ]
        if fields[0]:
            lines.append(f"| `{name}` | {fields[0]} | {fields[1]} |")
    return MADE + "\n".join(lines) + "\n"


def reasons_page() -> str:
    """Return every reason code with its remedy."""
    lines = [
        "# Reason codes\n",
        "Each code is a reason why a row was not published, with its fix. `packhouse quarantine "
        "ls` shows the rows; [fix bad rows](../how-to/bad-rows.md) explains how to bring them "
        "back. The ledger counts the same codes.\n",
        "## Quarantined rows\n",
    ]
    for step, reasons in QUARANTINE_REASONS.items():
        lines += [f"### {step}\n", *table_of(reasons)]
    lines += [
        "## Dropped rows\n",
        "Valid rows that a recipe setting excludes, in the step `pack`. The ledger counts their "
        "rows and tokens.\n",
        *table_of(DROP_REASONS),
    ]
    return MADE + "\n".join(lines)


def table_of(reasons: dict[str, Reason]) -> list[str]:
    """Return a table of reason codes."""
    rows = [f"| `{code}` | {it.meaning} | {it.remedy} |" for code, it in reasons.items()]
    return ["| reason | what it says | what helps |", "|---|---|---|", *rows, ""]


def api_page() -> str:
    """Return signatures and docstrings of the public names, and the errors."""
    lines = ["# Python API\n"]
    for module_name, summary in MODULES.items():
        module = importlib.import_module(module_name)
        lines += [f"## {module_name}\n", f"{summary}\n"]
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                if not issubclass_of(value, (Exception, BaseModel)):
                    lines += api_lines(module_name, name, value)
    lines += [
        "## packhouse.Recipe\n",
        "A recipe as a frozen model: [its keys](recipe.md). `packhouse.load_recipe` reads one.\n",
        "## packhouse.errors\n",
        "Each is a `packhouse.PackhouseError`; its details are attributes.\n",
        "| error | when | exit code |\n|---|---|---|",
    ]
    errors = importlib.import_module("packhouse.errors")
    for name, kind in sorted(vars(errors).items()):
        if not issubclass_of(kind, (errors.PackhouseError,)):
            continue
        first = (inspect.getdoc(kind) or "").split("\n\n")[0]
        lines.append(f"| `{name}` | {' '.join(first.split())} | {kind.exit_code} |")
    return MADE + re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def issubclass_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return True if a class is a subclass of one of these."""
    return inspect.isclass(value) and issubclass(value, kinds)


def api_lines(module: str, name: str, value: Any) -> list[str]:
    """Return heading, signature and docstring of a function or class, and of its own methods."""
    lines = [f"### {module}.{name}\n", signature(name, value), *docstring(value), ""]
    if inspect.isclass(value):
        for member, inner in vars(value).items():
            what = inner.fget if isinstance(inner, property) else getattr(inner, "func", inner)
            if member.startswith("_") or not inspect.isfunction(what) or not inspect.getdoc(what):
                continue
            text = docstring(what)
            called = "" if what is not inner else "()"
            lines += [f"**`{name}.{member}{called}`** {text[0]}", *text[1:], ""]
    return lines


def signature(name: str, value: Any) -> str:
    """Return a signature as a block of Python, with one argument per line if it is long."""
    try:
        given = inspect.signature(value)
    except ValueError:
        return ""
    plain = (
        given.replace(return_annotation=inspect.Signature.empty)
        if inspect.isclass(value)
        else given
    )
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", f"{name}{plain}")
    if len(text) > 88:
        head, _, rest = text.partition("(")
        arguments, _, tail = rest.rpartition(")")
        parts = re.split(r", (?![^\[({]*[\])}])", arguments)
        text = f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f"){tail}"
    return f"```text\n{text}\n```\n"


HEADS = ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:", "Example:", "Source:")


def docstring(value: Any) -> list[str]:
    """Return a docstring as Markdown: lists for arguments and errors, a block for the example."""
    lines: list[str] = []
    section = ""
    for line in (inspect.getdoc(value) or "").splitlines():
        if line in HEADS:
            section = line
            lines += (
                ["", f"*{line.rstrip(':')}*", ""] if section != "Example:" else ["", "```pycon"]
            )
        elif section == "Example:" and line.strip():
            lines.append(line[4:])
        elif section == "Example:":
            continue
        elif section in ("Args:", "Raises:", "Attributes:") and re.match(r"    \S", line):
            name, _, text = line.strip().partition(":")
            lines.append(f"- `{name}`:{text}")
        else:
            lines.append(
                ("  " if section in ("Args:", "Raises:", "Attributes:") else "") + line.strip()
            )
    if section == "Example:":
        lines.append("```")
    return [line.rstrip() for line in lines]


def functions_page() -> str:
    """Return the functions that expressions may call, and those for quality filters."""
    lines = [
        "# Functions in expressions\n",
        "A source's `where` and `select` can call these functions ([filter and reshape rows]"
        "(../how-to/filter-and-reshape.md)). `packhouse sql` has all DuckDB functions and the "
        "quality functions.\n",
        "## Quality\n",
        "Arguments are texts; null gives null. [Quality](../quality.md) defines the functions. "
        "`language` needs the extra `quality`.\n",
        "| function | returns |\n|---|---|",
    ]
    for name, (_, kind) in TEXT_FUNCTIONS.items():
        given = ", ".join(inspect.signature(text_function(name)).parameters)
        lines.append(f"| `{name}({given})` | {kind} |")
    lines += [
        "\n## Objects as text\n",
        "In `select`, `json(field)` returns a field's value as JSON, with the keys in the file's "
        "order; text is unchanged. `json(tool, args)` returns an object of several fields, and "
        "must be the whole expression. `concat_ws` and other functions that join texts refuse "
        "objects: use `json(field)`, or `to_json(input.field)` for an object in an object.\n",
        "## DuckDB\n",
        "See [DuckDB's documentation](https://duckdb.org/docs/stable/sql/functions/overview).\n",
    ]
    for group, names in FUNCTION_GROUPS.items():
        codes = ", ".join(f"`{name}`" for name in names.split())
        lines.append(f"### {group}\n\n{codes}\n")
    return MADE + "\n".join(lines)


PAGES = {
    "functions.md": functions_page,
    "recipe.md": recipe_page,
    "row-formats.md": row_formats_page,
    "commands.md": commands_page,
    "reasons.md": reasons_page,
    "api.md": api_page,
}

if __name__ == "__main__":
    for file, page in PAGES.items():
        (FOLDER / file).write_text(page())

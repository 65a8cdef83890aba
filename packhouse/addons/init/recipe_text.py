"""Write a recipe with comments that say what was seen and why each setting is there."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from packhouse.addons.init.files import Look
from packhouse.escaping import for_terminal

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

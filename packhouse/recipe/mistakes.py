"""What is wrong with a recipe, in plain words: the line, the key, what is allowed, what was meant.

    recipe 'r.yaml', line 7: pack.strategy cannot be 'best-fit'; did you mean 'best_fit'?
    recipe 'r.yaml', line 9: split.eval_fraction must be below 1, and is 10 (0.1 means 10%)

Text that was given is repeated only where it resembles what is allowed: it may be a secret in the
wrong field.
"""

import re
from collections.abc import Callable
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from packhouse.near import near_name

Loc = tuple[int | str, ...]

MOST_SHOWN = 5
_MAX_CHARS = 500

# Error type of pydantic -> our words; {x} is a fact of the error.
_BOUNDS = {
    "greater_than": "must be above {gt:,.15g}",
    "greater_than_equal": "must be at least {ge:,.15g}",
    "less_than": "must be below {lt:,.15g}",
    "less_than_equal": "must be at most {le:,.15g}",
}
_KINDS = {
    "bool": "must be true or false",
    "dict": "must be a mapping of keys",
    "float": "must be a number",
    "int": "must be a whole number",
    "list": "must be a list",
    "model": "must be a mapping of keys",
    "string": "must be text",
}
_TAGS = ("one", "several")  # of a union of the two; pydantic puts them into places
_PATTERNS = {
    "Name": "may have lower-case letters, digits, '-', '_' and single dots, and begins with a "
    "letter or digit: my-data",
    "Target": "must be hf://datasets/ORG/NAME or wandb://PROJECT",
}


def explain_mistakes(
    error: ValidationError,
    model: type[BaseModel],
    where: str,
    line_of: Callable[[Loc], int | None],
) -> str:
    """Return a line for each of the first mistakes.

    Args:
        error: of the whole recipe.
        model: the recipe's.
        where: the recipe, for messages: "recipe 'r.yaml'".
        line_of: line of a key in the file, from 1; None where it does not stand there.
    """
    found = error.errors(include_url=False)
    lines = []
    for item in found[:MOST_SHOWN]:
        item["loc"] = tuple(part for part in item["loc"] if part not in _TAGS)
        line = line_of(item["loc"])
        place = where if line is None else f"{where}, line {line}"
        lines.append(f"{place}: {_explain(item, model)}"[:_MAX_CHARS])
    if len(found) > MOST_SHOWN:
        lines.append(f"{where}: and {len(found) - MOST_SHOWN} more mistakes")
    return "\n".join(lines)


def _explain(item: ErrorDetails, model: type[BaseModel]) -> str:
    loc: Loc = item["loc"]
    kind, value, facts = item["type"], item["input"], item.get("ctx", {})
    key = ".".join(map(str, loc))
    owner = _model_at(model, loc[:-1])
    if kind == "extra_forbidden":
        names = [field.alias or name for name, field in owner.model_fields.items()]
        return f"unknown key '{key}'" + (
            near_name(str(loc[-1]), names) or f"; known: {', '.join(names)}"
        )
    if kind == "missing":
        field = owner.model_fields.get(str(loc[-1]))
        what = " ".join((field.description or "").partition(".")[0].split()) if field else ""
        return f"'{key}' is missing" + (f": {what[:1].lower()}{what[1:]}" if what else "")
    if kind == "literal_error":
        allowed = re.findall("'([^']+)'", facts["expected"])
        if len(str(value)) < 40 and (near := near_name(str(value), allowed)):
            return f"'{key}' cannot be '{value}'{near}"
        return f"'{key}' must be one of {', '.join(allowed)}; got {_kind_of(value)}"
    if kind in _BOUNDS:
        limit = next(iter(facts.values()))
        share = " (0.1 means 10%)" if kind.startswith("less") and limit == 1 else ""
        return f"'{key}' {_BOUNDS[kind].format(**facts)}, got {_kind_of(value)}{share}"
    if kind == "string_pattern_mismatch":
        rule = _PATTERNS["Target" if "also" in loc else "Name"]
        return f"'{key}' {rule}"
    if kind.endswith(("too_short", "too_long")):
        least, most = facts.get("min_length"), facts.get("max_length")
        unit = "character" if kind.startswith("string") else "item"
        bound = f"at least {least}" if most is None else f"at most {most}"
        return f"'{key}' must have {bound} {unit}{'s' * ((least or most) != 1)}"
    if (name := kind.partition("_")[0]) in _KINDS:
        return f"'{key}' {_KINDS[name]}, got {_kind_of(value)}"
    if kind == "invalid_key":
        return f"key '{key}' must be text; put it between quotes"
    message = item["msg"].removeprefix("Value error, ")
    if isinstance(value, dict):  # a rule over the keys of a section, or over sections
        return f"'{key}': {message}" if loc else message
    return f"'{key}': {message}, got {_kind_of(value)}"


def _model_at(model: type[BaseModel], loc: Loc) -> type[BaseModel]:
    """The section that a key is in."""
    for part in loc:
        for name, field in model.model_fields.items():
            if part in (name, field.alias):
                models = [field.annotation, *get_args(field.annotation)]
                model = next(
                    (m for m in models if isinstance(m, type) and issubclass(m, BaseModel)), model
                )
    return model


def _kind_of(value: object) -> str:
    """What was given, but not text: it may be a secret in the wrong field."""
    if isinstance(value, str):
        return f"text of {len(value):,} characters"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | None):
        return "nothing" if value is None else f"{value!r:.40}"
    return f"a {'mapping' if isinstance(value, dict) else type(value).__name__}"

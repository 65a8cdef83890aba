"""Reading a recipe: YAML, overrides, the environment, and errors that say what to write instead."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from packhouse.errors import ConfigError
from packhouse.recipe.model import Recipe
from packhouse.recipe.settings import HUB_NAME, IN_A_FILE
from packhouse.recipe.source import SourceConfig
from packhouse.system.wording import near_files, near_name

# What is wrong with a recipe, in plain words: the line, the key, what is allowed, what was meant.
#
#     recipe 'r.yaml', line 7: pack.strategy cannot be 'best-fit'; did you mean 'best_fit'?
#     recipe 'r.yaml', line 9: split.eval_fraction must be below 1, and is 10 (0.1 means 10%)
#
# Text that was given is repeated only where it resembles what is allowed: it may be a secret in
# the wrong field.


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


def is_recipe_path(path: object) -> bool:
    """Return True for the path of a recipe: a `.yaml` or `.yml` file.

    Example:
        >>> is_recipe_path("recipe.yaml"), is_recipe_path("rows.jsonl"), is_recipe_path([])
        (True, False, False)
    """
    return isinstance(path, str | Path) and str(path).endswith((".yaml", ".yml"))


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), settings: Mapping[str, object] | None = None
) -> Recipe:
    """Read a recipe from YAML, with settings and `section.key=value` overrides put over it.

    Sources, tokenizer and template are relative to the recipe's folder, the store to the working
    directory. A tokenizer `org/name` without such a folder is a name of the Hub. `${PACKHOUSE_X}`
    and `${PACKHOUSE_X:-default}` are taken from the environment; no other variable is, so that no
    credential can slip into a recipe.

    Args:
        path: the file.
        overrides: `section.key=value`, as `--set` takes them.
        settings: keys and sections that go over the file's; overrides go over these.

    Raises:
        ConfigError: no such file, not YAML, a key twice, an unknown key or a value out of bounds.

    Example:
        >>> recipe = load_recipe("deployments/demo/recipe.yaml", ["pack.seq_len=4096"])
        >>> recipe.dataset, recipe.pack.seq_len
        ('demo', 4096)
    """
    path = Path(path)
    text, where = _read_text(path), f"recipe '{path}'"
    raw = _parse_yaml(text, where)
    if raw is None:
        raise ConfigError(f"{where} is empty; see deployments/recipes for examples")
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must be a mapping of keys, got {type(raw).__name__}")
    keys = merge_settings(raw, settings or {})
    for override in overrides:
        apply_override(raw, override)
        keys.append(override.partition("=")[0])
    try:
        expanded = expand_variables(raw)
    except RecursionError:
        raise ConfigError(
            f"{where}: an alias (`*name`) stands inside what it names; write the value out"
        ) from None
    root = cache(lambda: _Loader(text).get_single_node())  # parsed again if there are mistakes

    def line_of(loc: tuple[int | str, ...]) -> int | None:
        starts = (".".join(map(str, loc[:n])) for n in range(1, len(loc) + 1))
        return None if any(start in keys for start in starts) else _line_of(root(), loc)

    return parse_recipe(expanded, where=where, folder=path.parent, line_of=line_of)


def _line_of(node: yaml.Node | None, loc: tuple[int | str, ...]) -> int | None:
    """The line of a key in a recipe's YAML, or of the last part of the way to it that is there."""
    line = None
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            pairs = [(k, v) for k, v in node.value if getattr(k, "value", None) == part]
            if not pairs:
                break
            key, node = pairs[0]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = near_files(path, ".yaml", ".yml") or "; see deployments/recipes for examples"
        raise ConfigError(f"no recipe at '{path}'{near}") from None
    except IsADirectoryError:
        raise ConfigError(f"recipe '{path}' is a folder; give a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"recipe '{path}' is not UTF-8 (byte {error.start:,}); save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {reason}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, where YAML would silently take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = key.tag, key.value
                if name in lines:
                    problem = f"key '{key.value}' is in line {lines[name]} already; keep one"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                lines[name] = key.start_mark.line + 1
        return node


MAX_RECIPE_CHARS = 2**20
"""Characters of a recipe with its aliases written out."""


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """Characters and nodes of a value in which every alias counts as what it names."""
    if id(node) not in known:
        known[id(node)] = 0  # while it is counted: an alias inside what it names is refused later
        parts: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        own = 1 if parts or isinstance(node, yaml.CollectionNode) else len(node.value)
        known[id(node)] = own + sum(_written_out(part, known) for part in parts)
    return known[id(node)]


def _parse_yaml(text: str, where: str) -> Any:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if (size := _written_out(node, {})) > MAX_RECIPE_CHARS:
            raise ConfigError(
                f"{where}: its aliases (`*name`) stand for {size:,} characters, over "
                f"{MAX_RECIPE_CHARS:,}; write out what is needed"
            )
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        at = f", line {place.line + 1}, column {place.column + 1}" if place else ""
        raise ConfigError(f"{where}{at}: {getattr(error, 'problem', None) or 'no YAML'}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be read") from None
    except ValueError as error:  # such as a date with a 13th month
        raise ConfigError(f"{where}: {error}; put text between quotes") from None


def parse_recipe(
    raw: Mapping[str, object],
    *,
    where: str = "recipe",
    folder: Path | None = None,
    line_of: Callable[[tuple[int | str, ...]], int | None] = lambda loc: None,
) -> Recipe:
    """Check a mapping against the model and resolve its relative paths against `folder`.

    Args:
        raw: what the YAML holds.
        where: the recipe, for messages.
        folder: of the recipe's file; None leaves paths as they are.
        line_of: line of a key in the file.

    Raises:
        ConfigError: the first mistakes, each with its key, what was given and what is allowed.
    """
    try:
        recipe = Recipe.model_validate(raw, context=IN_A_FILE)
    except ValidationError as error:
        raise ConfigError(explain_mistakes(error, Recipe, where, line_of)) from None
    return recipe if folder is None else _resolve(recipe, folder)


def merge_settings(raw: dict[str, Any], settings: Mapping[str, object]) -> list[str]:
    """Put settings over a recipe's mapping: sections key by key, None leaves a key as it is.

    Returns:
        The keys that were put there.

    Example:
        >>> raw = {"pack": {"seed": 1}}
        >>> merge_settings(raw, {"pack": {"seq_len": 4096}, "tokenizer": "t"}); raw
        ['pack.seq_len', 'tokenizer']
        {'pack': {'seed': 1, 'seq_len': 4096}, 'tokenizer': 't'}
    """
    put = []
    for key, value in settings.items():
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if isinstance(value, Mapping) and isinstance(raw.get(key, {}), dict):
            raw[key] = {**raw.get(key, {}), **value}
            put += [f"{key}.{name}" for name in value]
        elif value is not None:
            raw[key] = value
            put.append(key)
    return put


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Put `section.key=value` over a recipe's mapping.

    Raises:
        ConfigError: no such form, or the key leads into a value.

    Example:
        >>> raw = {"pack": {"seed": 1}}
        >>> apply_override(raw, "pack.seq_len=4096"); raw
        {'pack': {'seed': 1, 'seq_len': 4096}}
    """
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set takes section.key=value, got '{override}'")
    *parents, last = key.split(".")
    place: Any = raw
    for parent in parents:
        if isinstance(place, list):
            place = place[_index(place, parent, override)]
        else:
            place = place.setdefault(parent, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {override}: '{parent}' is a value, not a section")
    parsed = _parse_yaml(value, f"--set {key}")
    place[_index(place, last, override) if isinstance(place, list) else last] = parsed


_WHERE = {"store", "ref", "move_ref", "also", "allow_breaking_schema"}


def changes_data(overrides: Sequence[str]) -> bool:
    """Return True if `key=value` overrides, or keys, change what a recipe makes or may publish.

    Where a version goes, limits on moving its ref, and the encoder change neither.

    Example:
        >>> changes_data(["publish.store=./mine", "dataset=mine", "publish.max_length_drift=1"])
        False
        >>> changes_data(["publish.store=./mine", "pack.seq_len=4096"])
        True
    """
    for override in overrides:
        section, _, key = override.partition("=")[0].partition(".")
        is_where = section == "publish" and (key.split(".")[0] in _WHERE or key.endswith("_drift"))
        if not is_where and (section, key) not in (("dataset", ""), ("tokenize", "encoder")):
            return True
    return False


def _index(place: Sequence[object], index: str, override: str) -> int:
    if index not in map(str, range(len(place))):
        raise ConfigError(f"--set {override}: '{index}' is not one of items 0 to {len(place) - 1}")
    return int(index)


_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def expand_variables(value: object) -> Any:
    """Put `${PACKHOUSE_X}` and `${PACKHOUSE_X:-default}` of the environment into every text.

    Raises:
        ConfigError: another variable is named, or one that is not set.
    """
    if isinstance(value, dict):
        return {key: expand_variables(item) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_variables(item) for item in value]
    return _VARIABLE.sub(_variable, value) if isinstance(value, str) else value


def _variable(match: re.Match[str]) -> str:
    name, default = match.groups()
    if not name.startswith("PACKHOUSE_"):
        raise ConfigError(f"recipes take only PACKHOUSE_* from the environment, not ${{{name}}}")
    value = os.environ.get(name, default)
    if value is None:
        raise ConfigError(f"the recipe needs the environment variable {name}, which is not set")
    return value


def _resolve(recipe: Recipe, folder: Path) -> Recipe:
    audit, format_ = recipe.audit, recipe.format
    update: dict[str, Any] = {
        "sources": _sources_at(recipe.sources, folder),
        "tokenizer": tokenizer_at(recipe.tokenizer, folder),
        "audit": audit.model_copy(update={"benchmarks": _sources_at(audit.benchmarks, folder)}),
    }
    if recipe.golden is not None:
        update["golden"] = _at(recipe.golden, folder)
    if format_.template.endswith((".jinja", ".j2")):
        template = _at(format_.template, folder)
        update["format"] = format_.model_copy(update={"template": template})
    return recipe.model_copy(update=update)


def _sources_at(sources: list[SourceConfig], folder: Path) -> list[SourceConfig]:
    return [each.model_copy(update={"path": _at(each.path, folder)}) for each in sources]


def _at(uri: str, folder: Path) -> str:
    if "://" in uri:
        return uri
    return os.path.normpath(folder / Path(uri).expanduser())


def tokenizer_at(name: str, folder: Path) -> str:
    """Return a tokenizer's folder, if it is there, else a name of the Hub as it is."""
    place = _at(name, folder)
    return name if HUB_NAME.fullmatch(name) and not Path(place).is_dir() else place

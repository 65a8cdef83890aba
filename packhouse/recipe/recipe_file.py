"""Read a recipe: parse YAML, apply overrides and environment variables, explain mistakes."""

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
from packhouse.recipe.recipe import Recipe
from packhouse.recipe.sections import HUB_NAME, IN_A_FILE, SourceConfig, docstrings_of
from packhouse.system.wording import near_files, near_name

# Messages name the line and the key, and what is allowed or was probably meant.
#
#     recipe 'r.yaml', line 7: 'pack.strategy' cannot be 'best-fit'; did you mean 'best_fit'?
#     recipe 'r.yaml', line 9: 'split.eval_fraction' must be below 1, got 10 (0.1 means 10%)
#
# A message repeats the given text only if it resembles an allowed value, because it may be a secret
# that was pasted into the wrong field.


Loc = tuple[int | str, ...]

MOST_SHOWN = 5
_MAX_CHARS = 500

# Error type of pydantic -> our wording; {x} comes from the error's context.
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
_TAGS = ("one", "several")  # of source.Expressions; pydantic adds them to the path of an error
_PATTERNS = {
    "Name": "may contain lower-case letters, digits, '-', '_' and single dots, and must begin with "
    "a letter or digit: my-data",
    "Target": "must be hf://datasets/ORG/NAME or wandb://PROJECT",
}


def explain_mistakes(
    error: ValidationError,
    where: str,
    line_of: Callable[[tuple[int | str, ...]], int | None] = lambda loc: None,
    model: type[BaseModel] = Recipe,
) -> str:
    """Return a line for each of the first mistakes: its place, its key and what is allowed."""
    found = error.errors(include_url=False)
    lines = []
    for item in found[:MOST_SHOWN]:
        item["loc"] = tuple(part for part in item["loc"] if part not in _TAGS)
        line = line_of(item["loc"])
        place = where if line is None else f"{where}, line {line}"
        lines.append(f"{place}: {_explain(item, model)}"[:_MAX_CHARS])
    if len(found) > MOST_SHOWN:
        lines.append(f"{where}: {len(found) - MOST_SHOWN} more errors")
    return "\n".join(lines)


def _explain(item: ErrorDetails, owner: type[BaseModel]) -> str:
    loc: Loc = item["loc"]
    kind, value, facts = item["type"], item["input"], item.get("ctx", {})
    key = ".".join(map(str, loc))
    recipe = owner
    for part in loc[:-1]:  # `owner` becomes the model of the section that contains the key
        owner = _sections(owner).get(str(part), owner)
    if kind == "extra_forbidden":
        names = [field.alias or name for name, field in owner.model_fields.items()]
        # `seq_len` instead of `pack.seq_len`
        of = [n for n, section in _sections(recipe).items() if loc[-1] in section.model_fields]
        hint = f"; did you mean '{of[0]}.{loc[-1]}'?" if len(of) == 1 else ""
        hint = near_name(str(loc[-1]), names) or hint or f"; known: {', '.join(names)}"
        return f"unknown key '{key}'{hint}"
    if kind == "missing":
        text = docstrings_of(owner).get(str(loc[-1]), "")
        what = " ".join(text.partition(".")[0].split())
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
        return f"key '{key}' must be text. Put it in quotes"
    message = item["msg"].removeprefix("Value error, ")
    # A rule about several keys or items has no single value to show; a message that already says
    # how to fix the mistake is complete.
    if isinstance(value, dict | list) or ". " in message:
        return f"'{key}': {message}" if loc else message
    return f"'{key}': {message}, got {_kind_of(value)}"


def _sections(owner: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the models of the keys that are sections."""
    return {
        field.alias or name: model
        for name, field in owner.model_fields.items()
        for model in (field.annotation, *get_args(field.annotation))
        if isinstance(model, type) and issubclass(model, BaseModel)
    }


def _kind_of(value: object) -> str:
    """Describe a value without repeating text, which may be a secret in the wrong field."""
    if isinstance(value, str):
        return f"text of {len(value):,} characters"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | None):
        return "nothing" if value is None else f"{value!r:.40}"
    return f"a {'mapping' if isinstance(value, dict) else type(value).__name__}"


def is_recipe_path(path: object) -> bool:
    """Return True if a path is that of a recipe: a `.yaml` or `.yml` file.

    Example:
        >>> is_recipe_path("recipe.yaml"), is_recipe_path("rows.jsonl"), is_recipe_path([])
        (True, False, False)
    """
    return isinstance(path, str | Path) and str(path).endswith((".yaml", ".yml"))


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), settings: Mapping[str, object] | None = None
) -> Recipe:
    """Read a recipe from YAML and apply settings and `section.key=value` overrides.

    Paths of sources, tokenizer and template are relative to the recipe's folder, the store to the
    working directory. A tokenizer `org/name` is read from the Hub, unless there is a folder of that
    name. `${PACKHOUSE_X}` and `${PACKHOUSE_X:-default}` are replaced from the environment. Other
    variables are rejected.

    Args:
        path: YAML file.
        overrides: `section.key=value`, as for `--set`. They override `settings`.
        settings: Keys and sections that override those of the file.

    Raises:
        ConfigError: The file is missing, is not YAML, or has a duplicate key, an unknown key or a
            value out of bounds.

    Example:
        >>> recipe = load_recipe("deployments/demo/recipe.yaml", ["pack.seq_len=4096"])
        >>> recipe.dataset, recipe.pack.seq_len
        ('demo', 4096)
    """
    path = Path(path)
    where = f"recipe '{path}'"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = near_files(path, ".yaml", ".yml") or ". See deployments/recipes for examples"
        raise ConfigError(f"no recipe at '{path}'{near}") from None
    except IsADirectoryError:
        raise ConfigError(f"{where} is a folder. Pass a YAML file") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.start:,}"
        raise ConfigError(f"{where} is not UTF-8 ({byte}). Save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {reason}") from None
    raw = _parse_yaml(text, where)
    if raw is None:
        raise ConfigError(f"{where} is empty. See deployments/recipes for examples")
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must be a mapping of keys, got {type(raw).__name__}")
    keys = merge_settings(raw, settings or {})
    for override in overrides:
        apply_override(raw, override)
        keys.append(override.partition("=")[0])
    try:
        expanded = expand_variables(raw)
    except RecursionError:
        what = "an alias (`*name`) is inside its own anchor (`&name`). Write the value out"
        raise ConfigError(f"{where}: {what}") from None
    root = cache(lambda: _Loader(text).get_single_node())  # only for messages

    def line_of(loc: tuple[int | str, ...]) -> int | None:
        starts = (".".join(map(str, loc[:n])) for n in range(1, len(loc) + 1))
        return None if any(start in keys for start in starts) else _line_of(root(), loc)

    return parse_recipe(expanded, where=where, folder=path.parent, line_of=line_of)


def _line_of(node: yaml.Node | None, loc: tuple[int | str, ...]) -> int | None:
    """Return the line of a key in the YAML, or of its nearest parent that is there."""
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


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys; PyYAML would silently use the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = key.tag, key.value
                if name in lines:
                    problem = f"key '{key.value}' is already set in line {lines[name]}. Remove one"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                lines[name] = key.start_mark.line + 1
        return node


MAX_RECIPE_CHARS = 2**20
"""Maximum size of a recipe in characters, with all aliases expanded."""


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the size of a value (characters and nodes) with all its aliases expanded."""
    if id(node) not in known:
        known[id(node)] = 0  # stops at an alias inside its own anchor, which load_recipe refuses
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
        # Before the values are built: a few lines of nested aliases can stand for gigabytes.
        if (size := _written_out(node, {})) > MAX_RECIPE_CHARS:
            what = f"expands to {size:,} characters because of its aliases (`*name`)"
            limit = f"the limit is {MAX_RECIPE_CHARS:,}. Use fewer aliases"
            raise ConfigError(f"{where}: {what}; {limit}")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        at = f", line {place.line + 1}, column {place.column + 1}" if place else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(f"{where}{at}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except ValueError as error:  # such as a date with a 13th month
        raise ConfigError(f"{where}: {error}. Put text in quotes") from None


def parse_recipe(
    raw: Mapping[str, object],
    *,
    where: str = "recipe",
    folder: Path | None = None,
    line_of: Callable[[tuple[int | str, ...]], int | None] = lambda loc: None,
) -> Recipe:
    """Check a mapping against the model and resolve its relative paths against `folder`.

    Args:
        raw: Content of the YAML file.
        where: The recipe, as named in messages.
        folder: Folder of the recipe file; None leaves paths unchanged.
        line_of: Returns the line of a key in the file.

    Raises:
        ConfigError: Lists the first mistakes, each with its key and what is allowed.
    """
    try:
        recipe = Recipe.model_validate(raw, context=IN_A_FILE)
    except ValidationError as error:
        raise ConfigError(explain_mistakes(error, where, line_of)) from None
    if folder is None:
        return recipe
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


def merge_settings(raw: dict[str, Any], settings: Mapping[str, object]) -> list[str]:
    """Override keys of a recipe's mapping; sections are merged key by key, None changes nothing.

    Returns:
        The keys that were set.

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
    """Set one key of a recipe's mapping from `section.key=value`.

    Raises:
        ConfigError: The text has another form, or the key goes through a plain value.

    Example:
        >>> raw = {"pack": {"seed": 1}}
        >>> apply_override(raw, "pack.seq_len=4096"); raw
        {'pack': {'seed': 1, 'seq_len': 4096}}
    """
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError("--set takes section.key=value. Try --set pack.seq_len=4096")
    *parents, last = key.split(".")
    place: Any = raw
    for parent in parents:
        if isinstance(place, list):
            place = place[_index(place, parent, override)]
        else:
            place = place.setdefault(parent, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {key}: '{parent}' is a value, not a section. Check the key")
    parsed = _parse_yaml(value, f"--set {key}")
    place[_index(place, last, override) if isinstance(place, list) else last] = parsed


_WHERE = {"store", "ref", "move_ref", "also", "allow_breaking_schema"}


def changes_data(overrides: Sequence[str]) -> bool:
    """Return True if overrides (`key=value` or keys) change the data or what may be published.

    The target of a version, limits on moving its ref, and the encoder change neither.

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
        key, last = override.partition("=")[0], len(place) - 1
        raise ConfigError(f"--set {key}: no item '{index}'. The list has items 0 to {last}")
    return int(index)


_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def expand_variables(value: object) -> Any:
    """Replace `${PACKHOUSE_X}` and `${PACKHOUSE_X:-default}` in all texts from the environment.

    Raises:
        ConfigError: A variable is not set, or its name does not begin with PACKHOUSE_.
    """
    if isinstance(value, dict):
        return {key: expand_variables(item) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_variables(item) for item in value]
    return _VARIABLE.sub(_variable, value) if isinstance(value, str) else value


def _variable(match: re.Match[str]) -> str:
    name, default = match.groups()
    if not name.startswith("PACKHOUSE_"):  # no credential may get into a recipe
        rule = "only variables named PACKHOUSE_* are allowed. Rename it"
        raise ConfigError(f"the recipe uses ${{{name}}}, but {rule}")
    value = os.environ.get(name, default)
    fix = f"Set it, or write ${{{name}:-default}} in the recipe"
    if value is None:
        raise ConfigError(f"the environment variable {name} is not set. {fix}")
    return value


def _sources_at(sources: list[SourceConfig], folder: Path) -> list[SourceConfig]:
    return [each.model_copy(update={"path": _at(each.path, folder)}) for each in sources]


def _at(uri: str, folder: Path) -> str:
    return uri if "://" in uri else os.path.normpath(folder / Path(uri).expanduser())


def tokenizer_at(name: str, folder: Path) -> str:
    """Return the path of a tokenizer's folder; a Hub name without a local folder is unchanged."""
    place = _at(name, folder)
    return name if HUB_NAME.fullmatch(name) and not Path(place).is_dir() else place

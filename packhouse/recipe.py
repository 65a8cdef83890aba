"""The recipe: everything that decides what a version holds, as one closed, frozen model.

It is the parameter of the flow, so field names, bounds and docstrings are what people read in the
run form; hence flat enums, optional fields, and URIs as `str` (`Path` turns `s3://b` into `s3:/b`).
Each section is handed to the step of the same name and is part of that step's cache key.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from packhouse.errors import ConfigError

__all__ = [
    "AuditConfig",
    "DedupConfig",
    "FormatConfig",
    "PackConfig",
    "PublishConfig",
    "Recipe",
    "SourceConfig",
    "SplitConfig",
    "TokenizeConfig",
    "ValidateConfig",
    "load_recipe",
]

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]|\.[a-z0-9_-])*$", max_length=64)]

RowFormat = Literal[
    "auto",
    "alpaca",  # instruction, input, output
    "prompt_completion",  # prompt, completion
    "question_answer",  # question, answer
    "dolly",  # instruction, context, response
    "chat",  # messages: [{role, content}]
    "messages",  # the row itself is the list of messages
    "sharegpt",  # conversations: [{from, value}]
    "oasst",  # a message tree: text, role, replies
    "classification",  # text, label
    "text",  # text
    "preference",  # prompt, chosen
]


Target = Annotated[str, Field(pattern=r"^(hf://datasets/[\w.-]+/[\w.-]+|wandb://[\w.-]+)$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take `true` for 1."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("takes no boolean")
        return value


class SourceConfig(_Section):
    """One source of raw rows."""

    path: str
    """File, folder, glob, `s3://bucket/key` or `hf://datasets/org/name/file`."""

    name: Name | None = None
    """Name in lineage and statistics; by default the file's name without its endings."""

    format: RowFormat = "auto"
    """Shape of a row. `auto` looks at every row and refuses a file of mixed shapes."""

    file_format: Literal["auto", "json", "jsonl", "csv", "tsv", "parquet", "arrow"] = "auto"
    """Format of the file; `auto` goes by its name and checks its first bytes."""

    fields: dict[str, str] = {}
    """Our field -> the file's field, where they differ: `{instruction: question_text}`."""

    label_names: list[str] | None = None
    """Classification: text of label 0, 1, ...; it is what a generative template trains."""

    oasst_paths: Literal["best", "all"] = "best"
    """Message trees: the best-ranked path only, or every path from root to leaf."""


class ValidateConfig(_Section):
    """What makes a row bad, and how many bad rows are too many."""

    max_quarantined: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of rows that may be quarantined before the run fails."""

    max_row_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20
    """Bytes of one raw row; longer rows are quarantined unparsed."""

    max_chars: Annotated[int, Field(gt=0)] = 1_000_000
    """Characters of one message; longer ones are quarantined before the tokenizer sees them."""

    allow_ends_on_user: bool = False
    """Keep conversations that end on a user turn (the open question is not trained)."""


class FormatConfig(_Section):
    """How a conversation becomes text, and which of it is trained."""

    template: str = "chat"
    """`alpaca`, `chat` (the tokenizer's own), `completion`, `classification`,
    `sequence_classification`, `text`, or a path to a Jinja file."""

    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which turns are trained; `all` trains every token of the rendering."""

    system: str | None = None
    """System prompt put before conversations that have none."""

    prompt: str | None = None
    """Classification: text with `{text}` that asks for the label."""


class TokenizeConfig(_Section):
    """How text becomes ids."""

    encoder: Literal["auto", "hf", "fast"] = "auto"
    """`auto` uses the fast encoder where it reproduced HF's ids, else HF. Never changes the ids."""

    control_text: Literal["text", "allow", "quarantine"] = "text"
    """Control-token text inside contents: keep as ordinary text, allow as control token, or bad."""


class PackConfig(_Section):
    """How sequences become rows of at most `seq_len` tokens."""

    seq_len: Annotated[int, Field(gt=0, le=2**24)] = 2048
    """Pack size in tokens."""

    strategy: Literal["best_fit", "first_fit", "next_fit", "concat", "none"] = "best_fit"
    """`best_fit` (decreasing) wastes least; `concat` cuts records at pack ends, for continued
    pretraining; `none` publishes one record a row, padded at load time."""

    over_length: Literal["drop", "error", "truncate_turns"] = "drop"
    """Records over `seq_len`: drop and count, fail, or keep the leading whole turns that fit."""

    seed: int = 0
    """Order of packs and of equal lengths within them."""


class DedupConfig(_Section):
    """What happens to conversations that repeat an earlier one."""

    exact: Literal["keep", "drop"] = "keep"
    """Equal in every message: keep all, or only the first in order of file and row. Equal
    conversations are on one side, train or eval, either way."""


class SplitConfig(_Section):
    """Which records are for evaluation."""

    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of groups that go to eval, by hash of the group key."""

    eval_count: Annotated[int | None, Field(ge=0)] = None
    """Number of records in eval instead (the groups of lowest hash, until that many)."""

    group_by: Literal["prompt", "record"] = "prompt"
    """What stays on one side: records of the same prompt, or exact duplicates only."""

    seed: int = 0
    """Another seed is another assignment."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.eval_count is not None and self.eval_fraction:
            raise ValueError("give eval_fraction or eval_count, not both")
        return self


Share = Annotated[float, Field(ge=0, le=1)]


class AuditConfig(_Section):
    """What stops publication: limits on what the tokens would teach, for each source and the whole.

    Limits decide no byte: they are part of no key, and hold at every run, cached or not.
    """

    min_answer_coverage: Share = 0.99
    """Share of the answers' bytes that must be trained (of turns that `train_on` trains)."""

    max_unterminated_turns: Share = 0.0
    """Share of trained turns without a trained end token: the model would not learn to stop."""

    max_leaked_headers: Share = 0.0
    """Share of trained turns that begin with their own header or with BOS."""

    max_trained_prompts: Share = 0.0
    """Trained bytes of prompts, as a share of all trained content. Not with `train_on: all`."""

    max_untrained_rows: Share = 0.0
    """Share of rows without a trained token (rows for a classification head have none)."""

    max_untrained_packs: Share = 0.0
    """Share of packs without a trained token: their loss is NaN."""

    max_cut_sequences: Share = 0.0
    """Share of packed sequences that end on a trained token that is no end token."""

    max_double_bos: Share = 0.0
    """BOS tokens that are not a row's first, by rows."""

    max_missing_bos: Share = 0.0
    """Share of rows that lack the BOS which the tokenizer itself would put."""

    max_double_ends: Share = 0.0
    """End tokens right behind an end token, by turns."""

    max_unknown_tokens: Share = 0.01
    """Share of tokens that are unknown to the tokenizer."""

    max_duplicates: Share = 0.3
    """Share of rows that repeat an earlier one exactly."""

    benchmarks: list[SourceConfig] = []
    """Files of benchmarks that must not be trained; unlike the limits, part of the version."""

    benchmark_ngram: Annotated[int, Field(ge=5, le=100)] = 13
    """Words in a row that a row shares with a benchmark to count as contaminated."""

    max_contaminated: Share = 0.0
    """Share of rows that may be contaminated."""


class PublishConfig(_Section):
    """Where a version goes, and in which files."""

    store: str = "./store"
    """Root of the object store: a folder or `s3://bucket/prefix`."""

    ref: Name = "latest"
    """Ref that moves to the new version."""

    also: list[Target] = []
    """Where else the version goes: `hf://datasets/ORG/NAME`, `wandb://PROJECT`."""

    allow_breaking_schema: bool = False
    """Move the ref even if readers of its current version would miss or misread something."""

    max_length_drift: Share | None = None
    """Largest distance of record lengths from the ref's version at which the ref still moves."""

    max_source_drift: Share | None = None
    """The same for the sources' shares of the rows."""

    max_quarantine_drift: Share | None = None
    """The same for the share of quarantined rows."""

    max_trained_drift: Share | None = None
    """The same for the share of trained tokens."""

    file_format: Literal["parquet", "arrow", "jsonl"] = "parquet"
    """Format of the published files."""

    layout: Literal["labels", "compact"] = "labels"
    """`labels` holds a label per token; `compact` holds the trained ranges instead."""

    position_ids: bool = False
    """Also publish `position_ids`, restarting at each record."""

    max_file_mb: Annotated[int, Field(gt=0)] = 256
    """Upper size of one published file in MiB of token data, before compression."""


class Recipe(_Section):
    """Everything that decides what a version holds."""

    dataset: Name
    """Name of the dataset in the store."""

    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    """Where raw rows come from."""

    tokenizer: str
    """Folder of the tokenizer, as `save_pretrained` writes it."""

    validate_: Annotated[ValidateConfig, Field(alias="validate")] = ValidateConfig()
    format: FormatConfig = FormatConfig()
    tokenize: TokenizeConfig = TokenizeConfig()
    pack: PackConfig = PackConfig()
    dedup: DedupConfig = DedupConfig()
    split: SplitConfig = SplitConfig()
    audit: AuditConfig = AuditConfig()

    golden: str | None = None
    """File of conversations with the text, ids and trained tokens that must come of them; checked
    at every run. `packhouse golden write` makes one."""

    publish: PublishConfig = PublishConfig()


def load_recipe(path: str | Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe from YAML, with `section.key=value` overrides put over it.

    Sources, tokenizer and template are relative to the recipe's folder, the store to the working
    directory. `${PACKHOUSE_X}` and `${PACKHOUSE_X:-default}` are taken from the environment; no
    other variable is, so that no credential can slip into a recipe.

    Raises:
        ConfigError: no such file, not YAML, a key twice, an unknown key or a value out of bounds.
    """
    path = Path(path)
    raw = _parse_yaml(_read_text(path), f"recipe '{path}'")
    if not isinstance(raw, dict):
        raise ConfigError(f"recipe '{path}' must be a mapping of keys, got {type(raw).__name__}")
    for override in overrides:
        _override(raw, override)
    try:
        expanded = _expand(raw)
    except RecursionError:
        raise ConfigError(
            f"recipe '{path}': an alias (`*name`) stands inside what it names; write the value out"
        ) from None
    return parse_recipe(expanded, where=f"recipe '{path}'", folder=path.parent)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no recipe at '{path}'; see deployments/recipes for examples") from None
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


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        at = f", line {place.line + 1}, column {place.column + 1}" if place else ""
        raise ConfigError(f"{where}{at}: {getattr(error, 'problem', None) or 'no YAML'}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be read") from None
    except ValueError as error:  # such as a date with a 13th month
        raise ConfigError(f"{where}: {error}; put text between quotes") from None


def parse_recipe(
    raw: dict[str, Any], *, where: str = "recipe", folder: Path | None = None
) -> Recipe:
    """Check a mapping against the model and resolve its relative paths against `folder`.

    Raises:
        ConfigError: the first mistakes, each with its key, what was given and what is allowed.
    """
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error)}") from None
    return recipe if folder is None else _resolve(recipe, folder)


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set takes section.key=value, got '{override}'")
    *parents, last = key.split(".")
    place: Any = raw
    for parent in parents:
        if isinstance(place, list):
            place = _item(place, parent, override)
        else:
            place = place.setdefault(parent, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {override}: '{parent}' is a value, not a section")
    parsed = _parse_yaml(value, f"--set {override}")
    if isinstance(place, list):
        _item(place, last, override)
        place[int(last)] = parsed
    else:
        place[last] = parsed


def _item(place: list[Any], index: str, override: str) -> Any:
    if index not in map(str, range(len(place))):
        raise ConfigError(f"--set {override}: '{index}' is not one of items 0 to {len(place) - 1}")
    return place[int(index)]


_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def _expand(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item) for item in value]
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
    sources = [s.model_copy(update={"path": _at(s.path, folder)}) for s in recipe.sources]
    benchmarks = [
        s.model_copy(update={"path": _at(s.path, folder)}) for s in recipe.audit.benchmarks
    ]
    update: dict[str, Any] = {
        "sources": sources,
        "audit": recipe.audit.model_copy(update={"benchmarks": benchmarks}),
        "tokenizer": _at(recipe.tokenizer, folder),
    }
    if recipe.golden is not None:
        update["golden"] = _at(recipe.golden, folder)
    if recipe.format.template.endswith((".jinja", ".j2")):
        template = _at(recipe.format.template, folder)
        update["format"] = recipe.format.model_copy(update={"template": template})
    return recipe.model_copy(update=update)


def _at(uri: str, folder: Path) -> str:
    if "://" in uri:
        return uri
    return os.path.normpath(folder / Path(uri).expanduser())


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors()[:5]:
        key = ".".join(str(part) for part in item["loc"]) or "recipe"
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key '{key}'{_hint(item['loc'])}")
        elif item["type"] == "missing":
            lines.append(f"'{key}' is missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"'{key}': {message}, got {item['input']!r}")
    return "; ".join(lines)


def _hint(loc: tuple[int | str, ...]) -> str:
    import difflib

    model: Any = Recipe
    for part in loc[:-1]:
        if isinstance(part, str):
            model = _submodel(model, part)
    names = [field.alias or name for name, field in model.model_fields.items()]
    near = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return f" (did you mean '{near[0]}'?)" if near else f" (known: {', '.join(names)})"


def _submodel(model: Any, key: str) -> Any:
    for name, field in model.model_fields.items():
        if key in (name, field.alias):
            return SourceConfig if key in ("sources", "benchmarks") else field.annotation
    return model

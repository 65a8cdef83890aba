"""The recipe: everything that decides what a version holds, as one closed, frozen model.

It is the parameter of the flow, so field names, bounds and docstrings are what people read in the
run form; hence flat enums, optional fields, and URIs as `str` (`Path` turns `s3://b` into `s3:/b`).
Each section is handed to the step of the same name and is part of that step's cache key.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from packhouse.recipe.audit import AuditConfig
from packhouse.recipe.settings import (
    DedupConfig,
    FormatConfig,
    Name,
    PackConfig,
    PublishConfig,
    Section,
    SplitConfig,
    Strategy,
    TokenizeConfig,
    Uri,
    ValidateConfig,
    is_renderer,
)
from packhouse.recipe.source import RowFormatName, SourceConfig
from packhouse.system.escaping import PAGE_STYLE, html_table, html_text
from packhouse.system.plugins import Plugin, find_plugin

Preferences = Literal["pairs", "kto"]
"""Formats of rows that say which answers are better; all sources are of one, or none is."""


class Recipe(Section):
    """Everything that decides what a version holds.

    Frozen and checked when it is made. Paths are relative to the working directory; `load_recipe`
    makes those of a file relative to it.

    Raises:
        pydantic.ValidationError: an unknown key, or a value out of bounds; `load_recipe` and
            `prepare` say it as a ConfigError with line and remedy.

    Example:
        >>> recipe = Recipe.model_validate({"dataset": "sums", "sources": [{"path": "rows.jsonl"}],
        ...     "tokenizer": "Qwen/Qwen2.5-0.5B-Instruct", "pack": {"seq_len": 4096}})
        >>> recipe.pack.seq_len, recipe.pack.strategy, recipe.validate_.max_quarantined
        (4096, 'best_fit', 0.01)
    """

    dataset: Name
    """Name of the dataset in the store."""

    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    """Where raw rows come from."""

    tokenizer: Uri
    """Folder of the tokenizer, as `save_pretrained` writes it; or its name on the Hugging Face Hub,
    `org/name` or `org/name@revision`."""

    validate_: Annotated[ValidateConfig, Field(alias="validate")] = ValidateConfig()
    format: FormatConfig = FormatConfig()
    tokenize: TokenizeConfig = TokenizeConfig()
    pack: PackConfig = PackConfig()
    dedup: DedupConfig = DedupConfig()
    split: SplitConfig = SplitConfig()
    audit: AuditConfig = AuditConfig()

    shard_mb: Annotated[int, Field(ge=1, le=4096)] | None = None
    """MiB of raw bytes that a job reads, by default 32. More means fewer jobs, each of which takes
    more memory; it changes the version's id (which follows from its jobs), and no published row."""

    golden: Uri | None = None
    """File of conversations with the text, ids and trained tokens that must come of them; checked
    at every run. `packhouse golden write` makes one."""

    publish: PublishConfig = PublishConfig()

    @property
    def preferences(self) -> Preferences | None:
        """What the rows prefer: `pairs` of answers, single answers (`kto`); None: they do not."""
        return preferences_in(source.format for source in self.sources)

    def _repr_html_(self) -> str:
        """Show in a notebook what is set, as it is set, and what a run would make of it.

        What it would make needs the code of a run, which is above this module; a recipe whose rows
        or tokenizer are not there yet is shown without.
        """
        table = html_table(_lines(self.model_dump(mode="json", by_alias=True, exclude_unset=True)))
        try:
            preview = import_module("packhouse.addons.report.recipe_report").recipe_cell(self)
        except Exception as error:  # whatever it is, a notebook shows the recipe
            preview = f'<div class="quiet">{html_text(f"not tried: {error}"[:500])}</div>'
        return f'{PAGE_STYLE}<div class="packhouse"><b>Recipe</b>{table}{preview}</div>'

    @model_validator(mode="after")
    def _a_label_is_of_one_record(self) -> Self:
        if self.format.template == "sequence_classification" and self.pack.strategy != "none":
            raise ValueError(
                "format.template sequence_classification needs pack.strategy none: a pack of many "
                "records has no one label"
            )
        return self

    @model_validator(mode="after")
    def _preferences_stay_whole(self) -> Self:
        """A pair is one record of two sequences, each a prompt and one trained answer."""
        kind = self.preferences
        if kind is None:
            return self
        if others := sorted({source.format for source in self.sources} - {kind}):
            raise ValueError(f"sources of format {kind} and {others[0]} make no one dataset")
        pack, format_ = self.pack, self.format
        refused = {
            f"format.template {format_.template}": format_.template
            in ("text", "classification", "sequence_classification"),
            f"format.train_on {format_.train_on}": format_.train_on != "assistant",
            "format.turns alone": format_.turns == "alone",
            "format.reasoning strip": format_.reasoning == "strip",
            f"pack.over_length {pack.over_length}": pack.over_length not in ("drop", "error"),
            "pack.strategy concat": pack.strategy == "concat",
            "pack.pad_record_to_multiple_of": pack.pad_record_to_multiple_of > 1,
            "loss_weight": any(source.is_weighted for source in self.sources),
        }
        for setting in (name for name, is_set in refused.items() if is_set):
            raise ValueError(f"{setting} is not for sources of format {kind}: each answer is whole")
        if kind == "kto" and pack.strategy != "none":
            raise ValueError("format kto needs pack.strategy none: a pack has no one label")
        for name in {each.format for each in self.publish.exports} - {"arrow", "trl"}:
            raise ValueError(f"export {name} would train rejected answers like chosen ones")
        return self

    @model_validator(mode="after")
    def _a_weight_is_of_trained_tokens(self) -> Self:
        weighted = [source.path for source in self.sources if source.is_weighted]
        if weighted and self.format.template == "sequence_classification":
            raise ValueError(
                f"source '{weighted[0]}' has a loss_weight, and sequence_classification trains no "
                "tokens: leave it out, and weigh classes in the trainer"
            )
        return self

    @model_validator(mode="after")
    def _matches_have_a_side(self) -> Self:
        is_split = self.split.eval_fraction or self.split.eval_count
        if self.audit.benchmarks and self.audit.on_match == "same_side" and not is_split:
            raise ValueError(
                "audit.on_match same_side puts rows into eval, and nothing else goes there: set "
                "split.eval_fraction or split.eval_count, or take on_match drop"
            )
        return self


def preferences_in(formats: Iterable[str]) -> Preferences | None:
    """Return what rows prefer whose sources have these formats.

    Example:
        >>> preferences_in(["pairs"]), preferences_in(["preference", "chat"])
        ('pairs', None)
    """
    known: tuple[Preferences, ...] = get_args(Preferences)
    given = set(formats)
    return next((name for name in known if name in given), None)


def plugins_of(recipe: Recipe) -> list[Plugin]:
    """Return the plug-ins that a recipe names.

    Raises:
        ConfigError: see `find_plugin`.
    """
    formats = {source.format for source in recipe.sources}.difference(get_args(RowFormatName))
    strategies = {recipe.pack.strategy}.difference(get_args(Strategy))
    return [
        *(find_plugin("row_formats", name) for name in sorted(formats)),
        *(find_plugin("renderers", name) for name in [recipe.format.template] if is_renderer(name)),
        *(find_plugin("packing_strategies", name) for name in strategies),
        *(find_plugin("checks", name) for name in recipe.audit.checks),
    ]


def _lines(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Keys and values of nested settings, a line each: `pack.seq_len`, `2048`."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _lines(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _lines(item, f"{name}[{number}]")
    else:
        yield name, str(value)

"""The recipe: everything that decides what a version holds, as one closed, frozen model.

It is also the flow's parameter: users see the field names, bounds and docstrings in the run form.
That is why it has flat enums and optional fields. Each section goes to the step of the same name
and is part of that step's cache key.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from packhouse.recipe.audit_section import AuditConfig
from packhouse.recipe.sections import (
    ROW_FORMATS,
    DedupConfig,
    FormatConfig,
    Name,
    PackConfig,
    PublishConfig,
    Section,
    SourceConfig,
    SplitConfig,
    Strategy,
    TokenizeConfig,
    Uri,
    ValidateConfig,
    is_renderer,
)
from packhouse.system.escaping import PAGE_STYLE, html_table, html_text
from packhouse.system.plugins import Plugin, find_plugin

Preferences = Literal["pairs", "kto"]
"""Row formats with preferences between answers. All sources of a dataset must use the same one, or
none."""


class Recipe(Section):
    """Everything that decides what a version holds.

    Frozen, and validated when it is created. Paths are relative to the working directory;
    `load_recipe` resolves those in a file relative to the file.

    Raises:
        pydantic.ValidationError: A key is unknown or a value out of bounds. `load_recipe` and
            `prepare` raise a ConfigError instead, with the line and a fix.

    Example:
        >>> recipe = Recipe.model_validate({"dataset": "sums", "sources": [{"path": "rows.jsonl"}],
        ...     "tokenizer": "Qwen/Qwen2.5-0.5B-Instruct", "pack": {"seq_len": 4096}})
        >>> recipe.pack.seq_len, recipe.pack.strategy, recipe.validate_.max_quarantined
        (4096, 'best_fit', 0.01)
    """

    dataset: Name
    """Name of the dataset in the store."""

    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    """Sources of raw rows."""

    tokenizer: Uri
    """Folder of the tokenizer, as written by `save_pretrained`; or its name on the Hugging Face
    Hub, `org/name` or `org/name@revision`."""

    # `model_construct()`, because `ValidateConfig()` would build validators at import: with those
    # of all sections, 0.1 s.
    validate_: Annotated[ValidateConfig, Field(alias="validate")] = ValidateConfig.model_construct()
    format: FormatConfig = FormatConfig.model_construct()
    tokenize: TokenizeConfig = TokenizeConfig.model_construct()
    pack: PackConfig = PackConfig.model_construct()
    dedup: DedupConfig = DedupConfig.model_construct()
    split: SplitConfig = SplitConfig.model_construct()
    audit: AuditConfig = AuditConfig.model_construct()

    # Shards of 8 or 16 MiB need 40 MB less memory, but 10% more CPU.
    shard_mb: Annotated[int, Field(ge=1, le=4096)] | None = None
    """MiB of raw data per job (default 32). A larger value means fewer jobs that need more memory.
    Changes the version ID, which is made from the jobs, but no published row."""

    golden: Uri | None = None
    """File of conversations with their expected text, token IDs and trained tokens, checked in
    every run. `packhouse golden write` creates it."""

    publish: PublishConfig = PublishConfig.model_construct()

    @property
    def preferences(self) -> Preferences | None:
        """`pairs` or `kto` for preference data, else None."""
        return preferences_in(source.format for source in self.sources)

    def _repr_html_(self) -> str:
        """Show the settings in a notebook, with a preview of the first records.

        If the rows or the tokenizer are missing, the settings are shown without it.
        """
        table = html_table(_lines(self.model_dump(mode="json", by_alias=True, exclude_unset=True)))
        try:  # imported by name, because its code is in a layer above this module
            preview = import_module("packhouse.addons.report.recipe_report").recipe_cell(self)
        except Exception as error:  # the settings are shown even if the preview fails
            preview = f'<div class="quiet">{html_text(f"no preview: {error}"[:500])}</div>'
        return f'{PAGE_STYLE}<div class="packhouse"><b>Recipe</b>{table}{preview}</div>'

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.format.template == "sequence_classification":
            self._refuse_packing("format.template sequence_classification")
        weighted = [source.path for source in self.sources if source.is_weighted]
        if weighted and self.format.template == "sequence_classification":
            raise ValueError(
                f"source '{weighted[0]}' has a loss_weight, but template sequence_classification "
                "trains no tokens. Remove it and weight the classes in the trainer"
            )
        is_split = self.split.eval_fraction or self.split.eval_count
        if self.audit.benchmarks and self.audit.on_match == "same_side" and not is_split:
            raise ValueError(
                "audit.on_match same_side moves rows to eval, but the recipe has no eval split. "
                "Set split.eval_fraction or split.eval_count, or use on_match: drop"
            )
        return self

    @model_validator(mode="after")
    def _preferences_stay_whole(self) -> Self:
        """Refuse settings that would cut or mix preference data.

        A pair is one record of two sequences, each a prompt and one trained answer.
        """
        kind = self.preferences
        if kind is None:
            return self
        if others := sorted({source.format for source in self.sources} - {kind}):
            raise ValueError(
                f"sources of format {kind} and {others[0]} cannot be combined in one dataset. "
                "Write a separate recipe for each"
            )
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
            raise ValueError(
                f"{setting} cannot be used with sources of format {kind}, whose answers are "
                "always trained in full. Remove or change it"
            )
        if kind == "kto":
            self._refuse_packing("format kto")
        for name in {each.format for each in self.publish.exports} - {"arrow", "trl"}:
            problem = "would train on rejected answers as if they were chosen. Use trl or arrow"
            raise ValueError(f"export {name} {problem}")
        return self

    def _refuse_packing(self, setting: str) -> None:
        if (strategy := self.pack.strategy) != "none":
            raise ValueError(
                f"{setting} has one label per record, which packing would lose; pack.strategy is "
                f"{strategy}. Set pack.strategy: none"
            )


def preferences_in(formats: Iterable[str]) -> Preferences | None:
    """Return the kind of preference data among these source formats, or None.

    Example:
        >>> preferences_in(["pairs"]), preferences_in(["preference", "chat"])
        ('pairs', None)
    """
    known: tuple[Preferences, ...] = get_args(Preferences)
    given = set(formats)
    return next((name for name in known if name in given), None)


def plugins_of(recipe: Recipe) -> list[Plugin]:
    """Return the plug-ins that a recipe uses.

    Raises:
        ConfigError: A plug-in is not installed or cannot be used; see `find_plugin`.
    """
    formats = {source.format for source in recipe.sources}.difference(ROW_FORMATS)
    strategies = {recipe.pack.strategy}.difference(get_args(Strategy))
    return [
        *(find_plugin("row_formats", name) for name in sorted(formats)),
        *(find_plugin("renderers", name) for name in [recipe.format.template] if is_renderer(name)),
        *(find_plugin("packing_strategies", name) for name in strategies),
        *(find_plugin("checks", name) for name in recipe.audit.checks),
    ]


def _lines(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as key and value, one per line: `pack.seq_len`, `2048`."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _lines(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _lines(item, f"{name}[{number}]")
    else:
        yield name, str(value)

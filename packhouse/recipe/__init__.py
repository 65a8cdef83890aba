"""The recipe: everything that decides what a version contains, with a model for each section."""

from packhouse.recipe.audit import AuditConfig, QualityConfig
from packhouse.recipe.model import Recipe
from packhouse.recipe.reading import load_recipe, parse_recipe
from packhouse.recipe.settings import (
    DedupConfig,
    FormatConfig,
    PackConfig,
    PublishConfig,
    SplitConfig,
    TokenizeConfig,
    ValidateConfig,
)
from packhouse.recipe.source import MIXING, SourceConfig

__all__ = [
    "MIXING",
    "AuditConfig",
    "DedupConfig",
    "FormatConfig",
    "PackConfig",
    "PublishConfig",
    "QualityConfig",
    "Recipe",
    "SourceConfig",
    "SplitConfig",
    "TokenizeConfig",
    "ValidateConfig",
    "load_recipe",
    "parse_recipe",
]

"""The recipe: everything that decides what a version contains, with a model for each section."""

from packhouse.recipe.audit_section import AuditConfig, QualityConfig
from packhouse.recipe.recipe import Recipe
from packhouse.recipe.recipe_file import load_recipe, parse_recipe
from packhouse.recipe.sections import (
    MIXING,
    DedupConfig,
    FormatConfig,
    PackConfig,
    PublishConfig,
    SourceConfig,
    SplitConfig,
    TokenizeConfig,
    ValidateConfig,
)

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

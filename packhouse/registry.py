"""Names of add-ons and commands; their modules are imported on first use.

An add-on is a folder or module in `packhouse/addons/` plus its lines here. No other module imports
it, so everything else works without it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from packhouse.errors import ConfigError

COMMANDS = {
    "init": (
        "packhouse.addons.init.command",
        "Detect the format of your data and write a recipe for it.",
    ),
    "plan": (
        "packhouse.addons.plan",
        "Estimate the rows, tokens and packs of a recipe without running it.",
    ),
    "explain": (
        "packhouse.addons.plan",
        "Show which steps of a recipe would run, and why.",
    ),
    "prepare": (
        "packhouse.cli.prepare",
        "Prepare a dataset from a recipe, or from files and a tokenizer.",
    ),
    "new": (
        "packhouse.addons.new_project",
        "Create a project with flows, schedules and a container image.",
    ),
    "show": (
        "packhouse.cli.store_commands",
        "Show the files, counts, lineage and settings of a version.",
    ),
    "stats": (
        "packhouse.addons.ask.sql_commands",
        "Show the record counts, token counts and record lengths of a version.",
    ),
    "inspect": ("packhouse.addons.ask.inspect", "Print packs with trained tokens highlighted."),
    "report": (
        "packhouse.addons.report.command",
        "Write an HTML report on a version, with charts and samples.",
    ),
    "sql": (
        "packhouse.addons.ask.sql_commands",
        "Query the records, packs and counts of a version with SQL.",
    ),
    "diff": (
        "packhouse.addons.ask.diff",
        "Compare the rows, tokens and settings of two versions.",
    ),
    "audit": (
        "packhouse.addons.audit_any.audit",
        "Check the tokens and masks of data from any tool.",
    ),
    "verify": ("packhouse.cli.store_commands", "Check every byte and value of a version."),
    "trace": (
        "packhouse.addons.ask.trace",
        "Find the source row of a token, or what happened to a row.",
    ),
    "dropped": (
        "packhouse.addons.ask.trace",
        "List dropped rows with the reason for each.",
    ),
    "quarantine": ("packhouse.addons.quarantine", "List, show and fix bad rows."),
    "golden": (
        "packhouse.addons.golden",
        "Pin the tokens and masks of conversations, and check them.",
    ),
    "ls": ("packhouse.cli.store_commands", "List the datasets, versions and refs in a store."),
    "ref": ("packhouse.cli.store_commands", "List, move or roll back refs such as `latest`."),
    "pull": ("packhouse.cli.store_commands", "Download a version and verify it."),
    "export": (
        "packhouse.addons.exports",
        "Export a version in a trainer's format.",
    ),
    "ci": (
        "packhouse.addons.ci.command",
        "Refresh a dataset in a CI job and check its gates.",
    ),
    "cache": ("packhouse.addons.cache", "List cached steps, and delete those no longer needed."),
    "gc": (
        "packhouse.cli.store_commands",
        "Delete files left by interrupted publishes (dry run by default).",
    ),
    "doctor": (
        "packhouse.addons.doctor",
        "Check that a store works and that the cache has enough space.",
    ),
}
"""Commands by name: the module with the `click` command of that name, and its line in `--help`."""

COMMAND_GROUPS = {
    "Prepare": ("init", "plan", "explain", "prepare", "new"),
    "Look": ("show", "stats", "inspect", "report", "sql", "diff"),
    "Check": ("audit", "verify", "trace", "dropped", "quarantine", "golden"),
    "Publish": ("ls", "ref", "pull", "export", "ci"),
    "Maintain": ("cache", "gc", "doctor"),
}
"""Sections of `packhouse --help`. Each command is in one of them."""

PUBLIC = {
    "audit": "packhouse.addons.audit_any.audit",
    "AuditReport": "packhouse.addons.audit_any.audit",
    "Export": "packhouse.addons.exports",
    "export_version": "packhouse.addons.exports",
    "PackTally": "packhouse.addons.packs_in_memory",
    "pack_dataset": "packhouse.addons.packs_in_memory",
    "TokenizedDataset": "packhouse.addons.dart_math.supervised",
    "make_supervised_dataset": "packhouse.addons.dart_math.supervised",
    "plan": "packhouse.addons.plan",
    "PackingReport": "packhouse.addons.torch.check_packing",
    "check_packing": "packhouse.addons.torch.check_packing",
    "check_ranks": "packhouse.addons.torch.check_packing",
    "PackingHandle": "packhouse.addons.torch.enable_packing",
    "enable_packing": "packhouse.addons.torch.enable_packing",
    "block_causal_mask": "packhouse.addons.torch.enable_packing",
    "block_mask": "packhouse.addons.torch.enable_packing",
    "cu_seqlens": "packhouse.addons.torch.enable_packing",
    "packed_mask_mod": "packhouse.addons.torch.enable_packing",
    "segment_ids": "packhouse.addons.torch.enable_packing",
    "balance_rows": "packhouse.addons.torch.training_loop",
    "count_targets": "packhouse.addons.torch.training_loop",
    "prepare_finetuning_batch": "packhouse.addons.torch.training_loop",
    "split_batch_into_microbatches": "packhouse.addons.torch.training_loop",
    "token_loss": "packhouse.addons.torch.training_loop",
    "enable_preferences": "packhouse.addons.torch.enable_packing",
    "consumed_records": "packhouse.addons.torch.training_loop",
    "training_receipt": "packhouse.addons.torch.training_loop",
    "write_receipt": "packhouse.addons.torch.training_loop",
}
"""Names of add-ons that users import from `packhouse`, with the module of each."""

FUNCTIONS = {
    "ask": "packhouse.addons.ask.duckdb_queries",
    "count_quality": "packhouse.addons.quality",
    "combine_quality": "packhouse.addons.quality",
    "language_key": "packhouse.addons.quality",
    "refuse_unsaved": "packhouse.addons.spreadsheets_databases",
    "audit_given": "packhouse.addons.audit_any.token_audit",
    "unpublished_report": "packhouse.addons.report.version_report",
    "version_report": "packhouse.addons.report.version_report",
    "version_cell": "packhouse.addons.report.recipe_report",
    "FramedPage": "packhouse.addons.report.recipe_report",
    "lengths_svg": "packhouse.addons.report.recipe_report",
    "estimate": "packhouse.addons.plan",
    "try_first_rows": "packhouse.addons.plan",
    "check_pinned": "packhouse.addons.golden",
    "pin": "packhouse.addons.golden",
    "count_reasons": "packhouse.addons.quarantine",
    "explain_bad_rows": "packhouse.addons.quarantine",
    "read_quarantined": "packhouse.addons.quarantine",
    "make_rows": "packhouse.addons.renderers",
    "dart_math_template": "packhouse.addons.dart_math",
    "find_near": "packhouse.addons.near_dedup",
    "BENCHMARKS": "packhouse.addons.contamination",
    "benchmarks_of": "packhouse.addons.contamination",
    "benchmark_job": "packhouse.addons.contamination",
    "match_shards": "packhouse.addons.contamination",
    "contamination_of": "packhouse.addons.contamination",
    "open_step_mirror": "packhouse.addons.mirrors",
    "copy_version": "packhouse.addons.mirrors",
    "check_published_exports": "packhouse.addons.exports",
    "write_published_export": "packhouse.addons.exports",
}
"""Functions of add-ons that the rest of packhouse uses, with the module of each."""


DECODERS = {
    "xlsx": ("packhouse.addons.spreadsheets_databases", "workbook_as_arrow"),
    "sqlite": ("packhouse.addons.spreadsheets_databases", "read_database"),
    "duckdb": ("packhouse.addons.spreadsheets_databases", "read_database"),
}
"""File formats that an add-on converts to Arrow, with module and function. The function takes the
file, its URI, the format and the name of a table, and returns the Arrow file."""

TEXT_FUNCTIONS = {
    "has_email": ("packhouse.addons.quality", "BOOLEAN"),
    "has_phone": ("packhouse.addons.quality", "BOOLEAN"),
    "has_card": ("packhouse.addons.quality", "BOOLEAN"),
    "has_secret": ("packhouse.addons.quality", "BOOLEAN"),
    "has_html": ("packhouse.addons.quality", "BOOLEAN"),
    "has_mojibake": ("packhouse.addons.quality", "BOOLEAN"),
    "has_invisible": ("packhouse.addons.quality", "BOOLEAN"),
    "is_empty": ("packhouse.addons.quality", "BOOLEAN"),
    "is_refusal": ("packhouse.addons.quality", "BOOLEAN"),
    "echoes": ("packhouse.addons.quality", "BOOLEAN"),
    "repetition": ("packhouse.addons.quality", "DOUBLE"),
    "language": ("packhouse.addons.quality", "VARCHAR"),
}
"""Text functions for `where`, `select` and `packhouse sql`, with module and return type. All
arguments are Arrow string arrays; null gives null."""

TEXT_FUNCTIONS_VERSION = 1
"""Part of the cache key of sources that use a text function. Raise it when a result changes."""


def has_function(name: str) -> bool:
    """Return True if the add-on of one of `FUNCTIONS` is installed."""
    return is_there(FUNCTIONS[name])


def function_of_addon(name: str) -> Any:
    """Import one of `FUNCTIONS`.

    Raises:
        ConfigError: Its add-on is not part of this installation.
    """
    return _load(FUNCTIONS[name], name)


def decoder(file_format: str) -> Any:
    """Import the function of one of `DECODERS`.

    Raises:
        ConfigError: Its add-on is not part of this installation.
    """
    return _load(*DECODERS[file_format])


def _load(module: str, name: str) -> Any:
    if not is_there(module):
        addon = ".".join(module.split(".")[:3])
        raise ConfigError(f"this needs {addon}, which is not installed. Reinstall packhouse")
    return getattr(import_module(module), name)


BUILDS_ON = {"packhouse.addons.report": "packhouse.addons.ask.duckdb_queries"}
"""Add-ons that need another one, by folder: the report shows results of queries."""


def is_there(module: str) -> bool:
    """Return True if a module is installed; imports only its package."""
    try:
        base = BUILDS_ON.get(module.rpartition(".")[0])
        return find_spec(module) is not None and (base is None or is_there(base))
    except ModuleNotFoundError:  # the folder is missing
        return False

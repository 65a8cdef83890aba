"""Names of add-ons and commands; their modules are imported on first use.

An add-on is a folder or module in `packhouse/addons/` plus its lines here. No other module imports
it, so everything else works without it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from packhouse.errors import ConfigError

# A table instead of entry points or a scan of folders: it also works in a checkout that is not
# installed, and a search for a name finds it.
_COMMANDS = {
    "init": ("addons.init.command", "Detect the format of your data and write a recipe for it."),
    "plan": ("addons.plan", "Estimate the rows, tokens and packs of a recipe without running it."),
    "explain": ("addons.plan", "Show which steps of a recipe would run, and why."),
    "prepare": ("cli.prepare", "Prepare a dataset from a recipe, or from files and a tokenizer."),
    "new": ("addons.new_project", "Create a project with flows, schedules and a container image."),
    "show": ("cli.store_commands", "Show the files, counts, lineage and settings of a version."),
    "stats": (
        "addons.ask.sql_commands",
        "Show the record counts, token counts and record lengths of a version.",
    ),
    "inspect": ("addons.ask.inspect", "Print packs with trained tokens highlighted."),
    "report": (
        "addons.report.command",
        "Write an HTML report on a version, with charts and samples.",
    ),
    "sql": (
        "addons.ask.sql_commands",
        "Query the records, packs and counts of a version with SQL.",
    ),
    "diff": ("addons.ask.diff", "Compare the rows, tokens and settings of two versions."),
    "audit": ("addons.audit_any.audit", "Check the tokens and masks of data from any tool."),
    "verify": ("cli.store_commands", "Check every byte and value of a version."),
    "trace": ("addons.ask.trace", "Find the source row of a token, or what happened to a row."),
    "dropped": ("addons.ask.trace", "List dropped rows with the reason for each."),
    "quarantine": ("addons.quarantine", "List, show and fix bad rows."),
    "golden": ("addons.golden", "Pin the tokens and masks of conversations, and check them."),
    "ls": ("cli.store_commands", "List the datasets, versions and refs in a store."),
    "ref": ("cli.store_commands", "List, move or roll back refs such as `latest`."),
    "pull": ("cli.store_commands", "Download a version and verify it."),
    "export": ("addons.exports", "Export a version in a trainer's format."),
    "ci": ("addons.ci.command", "Refresh a dataset in a CI job and check its gates."),
    "cache": ("addons.cache", "List cached steps, and delete those no longer needed."),
    "gc": ("addons.gc", "Delete files left by interrupted publishes (dry run by default)."),
    "doctor": ("addons.doctor", "Check that a store works and that the cache has enough space."),
}
COMMANDS = {name: (f"packhouse.{module}", line) for name, (module, line) in _COMMANDS.items()}
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
    name: f"packhouse.{module}"
    for module, names in {
        "api": ("Version", "open_version", "prepare"),
        "errors": ("PackhouseError",),
        "load.collators": ("ClassificationCollator", "PackedCollator", "PaddedCollator"),
        "load.dataset": ("PackedDataset",),
        "load.mapped_rows": ("load_packed", "load_preferences"),
        "load.streaming": ("StreamingPackedDataset",),
        "recipe": ("Recipe", "load_recipe"),
        "addons.audit_any.audit": ("audit", "AuditReport"),
        "addons.exports": ("Export", "export_version"),
        "addons.packs_in_memory": ("PackTally", "pack_dataset"),
        "addons.dart_math.supervised": ("TokenizedDataset", "make_supervised_dataset"),
        "addons.plan": ("plan",),
        "addons.torch.check_packing": ("PackingReport", "check_packing", "check_ranks"),
        "addons.torch.enable_packing": (
            "PackingHandle",
            "enable_packing",
            "block_causal_mask",
            "block_mask",
            "cu_seqlens",
            "packed_mask_mod",
            "segment_ids",
            "enable_preferences",
        ),
        "addons.torch.training_loop": (
            "balance_rows",
            "count_targets",
            "prepare_finetuning_batch",
            "split_batch_into_microbatches",
            "token_loss",
            "consumed_records",
            "training_receipt",
            "write_receipt",
        ),
    }.items()
    for name in names
}
"""Names that users import from `packhouse`, with the module of each."""

FUNCTIONS = {
    name: f"packhouse.{module}"
    for module, names in {
        "addons.ask.duckdb_queries": ("ask",),
        "addons.quality": ("count_quality", "combine_quality", "language_key"),
        "addons.spreadsheets_databases": ("refuse_unsaved",),
        "addons.audit_any.token_audit": ("audit_given",),
        "addons.report.version_report": ("unpublished_report", "version_report"),
        "addons.report.recipe_report": ("version_cell", "FramedPage", "lengths_svg"),
        "addons.plan": ("estimate", "try_first_rows"),
        "addons.golden": ("check_pinned", "pin"),
        "addons.quarantine": ("count_reasons", "explain_bad_rows", "read_quarantined"),
        "addons.renderers": ("make_rows",),
        "addons.dart_math": ("dart_math_template",),
        "addons.near_dedup": ("near_fingerprints", "merge_fingerprints", "find_near"),
        "addons.contamination": (
            "BENCHMARKS",
            "benchmarks_of",
            "benchmark_job",
            "match_shards",
            "contamination_of",
        ),
        "addons.cache": ("cache_room", "keep_limits"),
        "addons.mirrors": ("open_step_mirror", "copy_version"),
        "addons.tokenized_rows": ("read_given", "text_of_given"),
        "addons.where_select": (
            "reshape",
            "find_columns",
            "columns_read",
            "expression_key",
            "expression_libraries",
        ),
        "addons.gcs_azure": ("CloudStore", "make_filesystem", "status_of"),
        "addons.exports": ("check_published_exports", "write_published_export"),
    }.items()
    for name in names
}
"""Functions of add-ons that the rest of packhouse uses, with the module of each."""


DECODERS = {
    "xlsx": ("packhouse.addons.spreadsheets_databases", "workbook_as_arrow"),
    "sqlite": ("packhouse.addons.spreadsheets_databases", "read_database"),
    "duckdb": ("packhouse.addons.spreadsheets_databases", "read_database"),
}
"""File formats that an add-on converts to Arrow, with module and function. The function takes the
file, its URI, the format and the name of a table, and returns the Arrow file."""

ROW_FORMATS = {
    "tokenized": "packhouse.addons.tokenized_rows",
    "oasst": "packhouse.addons.message_trees",
    "oasst_flat": "packhouse.addons.message_trees",
}
"""Row formats of add-ons, with module; its `FORMATS` has them by name."""

GIVEN_VERSION = 1
"""Part of the cache keys of tokenized rows. Raise it when the same ids would give other tables."""

TEXT_FUNCTIONS = {
    name: ("packhouse.addons.quality", returns)
    for returns, names in {
        "BOOLEAN": (
            *("has_email", "has_phone", "has_card", "has_secret", "has_html", "has_mojibake"),
            *("has_invisible", "is_empty", "is_refusal", "echoes"),
        ),
        "DOUBLE": ("repetition",),
        "VARCHAR": ("language",),
    }.items()
    for name in names
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


def row_format(name: str) -> Any:
    """Import one of `ROW_FORMATS`.

    Raises:
        ConfigError: Its add-on is not part of this installation.
    """
    return _load(ROW_FORMATS[name], "FORMATS")[name]


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

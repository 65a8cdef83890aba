"""Add-ons and commands by name; their modules are imported when they are asked for.

An add-on is a folder or a module of `packhouse/addons/` and its lines here. Nothing else of
packhouse imports it, so that without it all the rest works.
"""

from importlib.util import find_spec

COMMANDS = {
    "prepare": ("packhouse.commands.prepare", "Prepare data: a recipe, or files and a tokenizer."),
    "init": ("packhouse.addons.init.command", "Look at data, and write a recipe that reads it."),
    "new": (
        "packhouse.addons.new_project.command",
        "Write a new project: flows, schedules, an image.",
    ),
    "audit": ("packhouse.commands.audit", "Audit anyone's data: what its tokens would teach."),
    "ls": ("packhouse.commands.versions", "List datasets, versions and refs of a store."),
    "show": ("packhouse.commands.versions", "Show a version: files, ledger, lineage, settings."),
    "stats": ("packhouse.commands.stats", "Count records, tokens and lengths by source and split."),
    "report": ("packhouse.commands.report", "Write a page with charts and samples of a version."),
    "inspect": ("packhouse.commands.inspect", "Print packs, tokens coloured by trained or not."),
    "sql": ("packhouse.commands.sql", "Ask a version in SQL: its records, packs and counts."),
    "trace": ("packhouse.commands.trace", "Say from which row a token comes, or where a row went."),
    "dropped": ("packhouse.commands.dropped", "Print what was left out, row or record, and why."),
    "verify": ("packhouse.commands.versions", "Check every byte and value of a version."),
    "pull": ("packhouse.commands.versions", "Copy a version to a folder, verified, resumable."),
    "diff": ("packhouse.commands.diff", "Compare two versions: rows, tokens, settings."),
    "ref": ("packhouse.commands.refs", "List, set or roll back refs such as `latest`."),
    "gc": ("packhouse.commands.gc", "Reclaim what dead publishers left; shows what first."),
    "cache": ("packhouse.commands.cache", "Look at finished steps on this machine; make room."),
    "doctor": ("packhouse.addons.doctor", "Check a store, or room in the cache, before a run."),
    "explain": ("packhouse.commands.explain", "Say which steps of a recipe would run, and why."),
    "plan": ("packhouse.commands.plan", "Estimate a recipe: rows, records, tokens, packs."),
    "ci": (
        "packhouse.addons.ci.command",
        "Refresh a dataset as a job of a pipeline; gates, summaries.",
    ),
    "quarantine": ("packhouse.commands.quarantine", "List, show and fix bad rows."),
    "golden": ("packhouse.commands.golden", "Pin how conversations are rendered, and check it."),
    "export": ("packhouse.commands.export", "Write a version in the format of a trainer."),
}
"""Commands by name: the module of a `click` command of that name, and a line for `--help`."""

PUBLIC = dict.fromkeys(("PackTally", "pack_dataset"), "packhouse.addons.packs_in_memory")
"""Names that users import from `packhouse` itself, and the module of each."""


def is_there(module: str) -> bool:
    """Return True if a module is installed; nothing but its folder is imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the folder is missing
        return False

"""Checks of plug-ins: what they find fault with in the conversations of a shard."""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from packhouse.errors import PluginError
from packhouse.system.plugins import Plugin

_WORST = 5
_MAX_DETAIL = 200


def run_check(plugin: Plugin, conversations: pa.Table) -> dict[str, object]:
    """Let a plug-in look at a shard: it returns a dict, the number of a bad row -> what is wrong.

    Args:
        plugin: the check, called with the table.
        conversations: table of schema `tables.VALIDATED`.

    Returns:
        Plain JSON: the check, rows, rows that failed, and the first of these.

    Raises:
        PluginError: its code failed, or it returned something else.
    """
    with plugin.named_in_errors(f" on {conversations.num_rows:,} conversations"):
        found = plugin.load()(conversations)
    if not isinstance(found, dict) or not all(
        type(row) is int and isinstance(detail, str) for row, detail in found.items()
    ):
        raise PluginError(f"{plugin} returned no dict of row numbers and texts")
    if found and not 0 <= min(found) <= max(found) < conversations.num_rows:
        raise PluginError(
            f"{plugin} named row {max(found, key=abs)} of {conversations.num_rows:,} conversations"
        )
    first = sorted(found)[:_WORST]
    places = conversations.select(["source", "row"]).take(pa.array(first, pa.int64())).to_pylist()
    return {
        "check": plugin.name,
        "plugin": str(plugin),
        "rows": conversations.num_rows,
        "failed": len(found),
        "worst": [
            {**place, "detail": found[index][:_MAX_DETAIL]}
            for index, place in zip(first, places, strict=True)
        ],
    }


def combine_checks(shards: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, object]]:
    """Add up what checks found, by the name of the check."""
    combined: dict[str, dict[str, Any]] = {}
    for found in shards:
        total = combined.setdefault(
            found["check"], {"plugin": found["plugin"], "rows": 0, "failed": 0, "worst": []}
        )
        total["rows"] += found["rows"]
        total["failed"] += found["failed"]
        total["worst"] = [*total["worst"], *found["worst"]][:_WORST]
    return combined

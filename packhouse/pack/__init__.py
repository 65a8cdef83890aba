"""Packing: a plan over lengths, one gather of tokens, the published layout and its contract.

The data's way: `apply_over_length` on each shard -> `plan_packs` over all lengths of a side ->
`gather` -> `check_packed` -> `to_layout`.
"""

from packhouse.pack.gather import GatherTally, PackStatistics, gather
from packhouse.pack.layout import (
    IGNORE_INDEX,
    check_packed,
    expand_labels,
    expand_weights,
    position_ids,
    preference_names,
    published_schema,
    supervised_names,
    to_layout,
)
from packhouse.pack.overlength import Admitted, apply_over_length
from packhouse.pack.plan import (
    STRATEGIES,
    IndexArray,
    PackPlan,
    join_plans,
    lower_bound,
    pack_costs,
    plan_packs,
    step_imbalance,
)

__all__ = [
    "IGNORE_INDEX",
    "STRATEGIES",
    "VERSION",
    "Admitted",
    "GatherTally",
    "IndexArray",
    "PackPlan",
    "PackStatistics",
    "apply_over_length",
    "check_packed",
    "expand_labels",
    "expand_weights",
    "gather",
    "join_plans",
    "lower_bound",
    "pack_costs",
    "plan_packs",
    "position_ids",
    "preference_names",
    "published_schema",
    "step_imbalance",
    "supervised_names",
    "to_layout",
]

VERSION = 1
"""Of the engine; part of the step's cache key. Raise it whenever published bytes change."""

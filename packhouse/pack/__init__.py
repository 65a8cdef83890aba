"""Packing: a plan over lengths, one gather of tokens, the published layout and its contract.

The data's way: `apply_over_length` on each shard -> `plan_packs` over all lengths of a side ->
`gather` -> `check_packed` -> `to_layout`.
"""

VERSION = 1
"""Of the engine; part of the step's cache key. Raise it whenever published bytes change."""

"""Pack records: plan from lengths, gather tokens, check packs and convert them to a layout.

Data flow: `apply_over_length` on each shard -> `plan_packs` on all lengths of a side -> `gather`
-> `check_packed` -> `to_layout`.
"""

VERSION = 1
"""Version of packing; part of the step's cache key. Raise it when published bytes change."""

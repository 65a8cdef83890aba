"""Find conversations that repeat others, to the letter, in substance or nearly, and apply policy.

`fingerprints.py` describes the conversations of one shard; `near.py` joins the descriptions of all
shards; `units.py` sees to it that split conversations are compared whole; `policy.py` drops what
repeats and keeps together what is alike. The first in the order of
file and row stays; nothing depends on shards, workers or hash seeds.
"""

from packhouse.pack.dedup.fingerprints import (
    FINGERPRINTS,
    fingerprint_table,
    near_libraries,
    needs_fingerprints,
)
from packhouse.pack.dedup.policy import DedupFacts, Deduplicated, Repeats, deduplicate, facts_of

__all__ = [
    "FINGERPRINTS",
    "VERSION",
    "DedupFacts",
    "Deduplicated",
    "Repeats",
    "deduplicate",
    "facts_of",
    "fingerprint_table",
    "near_libraries",
    "needs_fingerprints",
]

VERSION = 1
"""Part of cache keys. Raise it when the same rows would give other fingerprints or decisions."""

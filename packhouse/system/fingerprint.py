"""Compute content keys: equal inputs give equal keys in every process.

A key is the sha256 of canonical JSON (sorted keys, no spaces, no sets, one spelling per float).
Each step decides what goes into its keys (`packhouse.run.step`); this module only hashes.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON of a value; raise TypeError for sets and other types.

    Example:
        >>> canonical_json({"b": 1, "a": [True, None]})
        b'{"a":[true,null],"b":1}'
    """
    # No NaN: it is not JSON, and readers write it differently.
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def digest(value: object) -> str:
    """Return the sha256 of a value's canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as file:
        # BLAKE3 would save 0.7 s of a run over 520,020 rows, but change every receipt and digest.
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def library_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return installed versions by distribution name, without importing any of them."""
    return {name: _version(name) for name in sorted(distributions)}

"""Small JSON files that later processes may read, each behind its own digest.

A file that is missing, cut short or changed reads as None: what it held is made again.
"""

import hashlib
from pathlib import Path
from typing import Any

import orjson

from packhouse.system.disks import write_whole


def write_checked(file: Path, content: dict[str, Any]) -> None:
    """Write digest and content beside their final name, then move them there at once."""
    body = orjson.dumps(content)
    digest = hashlib.sha256(body).hexdigest().encode()
    write_whole(file, digest + b"\n" + body)


def read_checked(file: Path) -> dict[str, Any] | None:
    """Read what `write_checked` wrote, or None if it is not there as it was written."""
    try:
        digest, _, body = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    content: dict[str, Any] = orjson.loads(body)
    return content

"""Read files of any supported format into shards of checked conversations.

`scan_source` finds a source's files and cuts them into shards; `read_shard` reads one of them.
"""

from packhouse.read.shard_reader import ShardRows, raw_rows, read_shard, with_raw_rows
from packhouse.read.sharding import SourceShard, scan_source

__all__ = [
    "VERSION",
    "ShardRows",
    "SourceShard",
    "raw_rows",
    "read_shard",
    "scan_source",
    "with_raw_rows",
]

VERSION = 11
"""Part of cache keys. Raise it when the same bytes would give other rows, reasons or order, except
for a new row format: keys of `auto` and `mixed` sources have the names of all formats."""

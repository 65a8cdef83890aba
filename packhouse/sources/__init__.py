"""Read files of any supported format into shards of checked conversations.

`scan_source` finds a source's files and cuts them into shards; `read_shard` reads one of them.
"""

from packhouse.sources.reading import ShardRows, read_shard
from packhouse.sources.shards import SourceShard, scan_source

__all__ = ["ShardRows", "SourceShard", "read_shard", "scan_source"]

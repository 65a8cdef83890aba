"""Give bad rows of later steps their original bytes back.

Format and tokenize see conversations, not rows; what they refuse is to be mended in its row. The
row's shard is read and parsed again, which happens for shards with such rows only.
"""

import hashlib
from collections.abc import Sequence

import pyarrow as pa

from packhouse.recipe import ValidateConfig
from packhouse.sources.reading import find_raw_rows
from packhouse.sources.shards import SourceShard
from packhouse.tables import QUARANTINED

__all__ = ["with_raw_rows"]


def with_raw_rows(
    quarantined: pa.Table, shard: SourceShard, rules: ValidateConfig, max_bytes: int = 64 * 2**10
) -> pa.Table:
    """Put each row's bytes and place, as they stand in its file, into a table of bad rows.

    Args:
        quarantined: schema `tables.QUARANTINED`; all rows are of this shard.
        shard: where they come from.
        rules: as for `read_shard`.
        max_bytes: of a row that are kept.

    Raises:
        SourceError: the file changed since it was scanned.
    """
    if not quarantined.num_rows:
        return quarantined
    numbers = [row - shard.row_start for row in quarantined["row"].to_pylist()]
    found = find_raw_rows(shard, rules, numbers)
    raw = [row for row, _ in found]
    columns: dict[str, Sequence[object]] = {
        "byte_offset": [offset for _, offset in found],
        "raw": [row[:max_bytes] for row in raw],
        "raw_size": [len(row) for row in raw],
        "raw_sha256": [hashlib.sha256(row).hexdigest() for row in raw],
    }
    for name, values in columns.items():
        place = QUARANTINED.get_field_index(name)
        field = QUARANTINED.field(name)
        quarantined = quarantined.set_column(place, field, pa.array(values, field.type))
    return quarantined

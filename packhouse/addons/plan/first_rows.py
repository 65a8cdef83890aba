"""The first rows of a source, as the recipe would train them, before anything is prepared."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from packhouse.errors import SourceError
from packhouse.read import ShardRows, read_shard, scan_source
from packhouse.recipe import Recipe, SourceConfig
from packhouse.records.render_counts import RenderCounts, SplitText
from packhouse.records.tables import REFUSED, read_table
from packhouse.run.rendering import run_template, try_rows
from packhouse.system.disks import temporary_folder

_SAMPLE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRows:
    """What became of them."""

    read: ShardRows
    num_bytes: int
    """That they were read from."""
    tokenized: pa.Table
    """Records of rows that pass, schema `tables.TOKENIZED`."""
    bad: pa.Table
    """Those that do not, of any step, schema `tables.QUARANTINED`."""
    text: SplitText
    rendered: RenderCounts

    def refused(self) -> list[dict[str, Any]]:
        """Return source, row, reason and detail of bad rows, in the order of the steps."""
        columns = self.bad.select(["source", "row", "reason", "detail"])
        return list(columns.to_pylist())


def try_first_rows(
    recipe: Recipe,
    source: SourceConfig,
    tokenizers: Path,
    *,
    uri: str | None = None,
    max_rows: int | None = 500,
) -> FirstRows:
    """Read, render and tokenize the first megabyte of a source.

    Args:
        recipe: says how.
        source: one of the recipe's.
        tokenizers: folder of the tokenizers' files.
        uri: file of the source; None: the first that has rows.
        max_rows: that are rendered; None: all.

    Raises:
        SourceError: the source has no rows.
    """
    shards = [
        shard
        for shard in scan_source(source, _SAMPLE_BYTES, recipe.validate_.max_row_bytes)
        if (shard.num_rows != 0 if uri is None else shard.uri == uri)
    ]
    if not shards:
        raise SourceError(f"source '{source.path}' has no rows")
    shard = shards[0]
    rows = read_shard(shard, source, recipe.validate_, recipe.split.group_by)
    with temporary_folder("sample") as folder:
        rows.write(folder, max_rows)
        call = partial(try_rows, recipe, shard.row_format, source.label_names, tokenizers, folder)
        reply = run_template(call, recipe, rows.validated.slice(0, max_rows).nbytes)
        return FirstRows(
            read=rows,
            num_bytes=shard.byte_end - shard.byte_start,
            tokenized=read_table(folder / "tokenized.arrow"),
            bad=pa.concat_tables([rows.quarantined, read_table(folder / REFUSED)]),
            text=SplitText(**reply["text"]),
            rendered=RenderCounts(**reply["counts"]),
        )

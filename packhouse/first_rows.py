"""The first rows of a source, as the recipe would train them, before anything is prepared."""

from functools import partial
from pathlib import Path

import pyarrow as pa

from packhouse.errors import SourceError
from packhouse.foreign import REFUSED, run_template, try_rows
from packhouse.recipe import Recipe, SourceConfig
from packhouse.records.split_text import SplitText
from packhouse.records.tables import read_table
from packhouse.runtime.disks import temporary_folder
from packhouse.sources import read_shard, scan_source

_SAMPLE_BYTES = 2**20


def try_first_rows(
    recipe: Recipe, source: SourceConfig, tokenizers: Path, max_rows: int = 500
) -> tuple[pa.Table, list[dict[str, object]], SplitText]:
    """Read, render and tokenize the first rows of a source, of its first megabyte.

    Returns:
        Records of rows that pass, schema `tables.TOKENIZED`; of those that do not: row, reason,
        detail; and the bytes that were rendered.

    Raises:
        SourceError: the source has no rows.
    """
    shards = [s for s in scan_source(source, _SAMPLE_BYTES) if s.num_rows != 0]
    if not shards:
        raise SourceError(f"source '{source.path}' has no rows")
    rows = read_shard(shards[0], source, recipe.validate_, recipe.split.group_by)
    with temporary_folder("sample") as folder:
        rows.write(folder, max_rows)
        row_format = shards[0].row_format
        call = partial(try_rows, recipe, row_format, source.label_names, tokenizers, folder)
        reply = run_template(call, recipe, rows.validated.slice(0, max_rows).nbytes)
        tokenized = read_table(folder / "tokenized.arrow")
        bad = pa.concat_tables([rows.quarantined, read_table(folder / REFUSED)])
        columns = ["source", "row", "reason", "detail"]
        return tokenized, bad.select(columns).to_pylist(), SplitText(**reply["text"])

"""Check published files against their manifest, without other inputs.

Values are checked with `pack.layout.check_packed`, which a run also uses before it publishes; here
it checks the bytes in the store. Files are read in batches, so memory is bounded by one row group.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from packhouse.errors import ContractError, IntegrityError
from packhouse.pack.layout import (
    PREFERENCE_NAMES,
    Layout,
    check_packed,
    published_schema,
    supervised_names,
)
from packhouse.store.manifest import FileEntry, Manifest, schema_fingerprint, schema_to_json
from packhouse.system.worker import at

_BATCH_ROWS = 1024
_JSON_BLOCK_BYTES = 2**20  # larger if a row is: pyarrow refuses rows longer than a block
_ANY = 2**31 - 1  # IDs and lengths are int32; used if the manifest states no limit


def check_data_file(path: Path, entry: FileEntry, manifest: Manifest) -> None:
    """Check schema, row count, token count and values of a data file; ignore other files.

    Raises:
        ContractError: A rule is broken; names the first one and its row.
        IntegrityError: The file cannot be read.
    """
    if entry.kind != "data" or path.suffix not in (".parquet", ".arrow", ".jsonl"):
        return
    rows = tokens = 0
    for batch in _stored_batches(path, entry=entry):
        if rows == 0 and path.suffix != ".jsonl":  # JSON has no schema
            found = schema_to_json(batch.schema)
            if schema_fingerprint(found) != manifest.schema_fingerprint:
                names = batch.schema.names
                raise ContractError(f"its schema differs from the manifest; it has columns {names}")
        at(f"row {rows:,}")
        tokens += check_rows(supervised_names(batch), rows, manifest)
        rows += batch.num_rows
    if rows != entry.rows:
        raise ContractError(f"it has {rows:,} rows, but the manifest says {entry.rows:,}")
    columns = {column.name for column in manifest.facts.schema.fields}
    if tokens != entry.tokens and {"input_ids", "preference_ids"} & columns:
        raise ContractError(f"it has {tokens:,} tokens, but the manifest says {entry.tokens:,}")


def read_batches(
    path: Path,
    columns: list[str] | None = None,
    *,
    max_rows: int = _BATCH_ROWS,
    entry: FileEntry | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read a Parquet (with page checksums), Arrow or JSON Lines file in batches of rows.

    Columns of preference data are renamed to those of supervised rows.

    Args:
        path: Path of the file.
        columns: Columns to read from a Parquet file, if it has them; default: all.
        max_rows: Maximum rows per batch of a Parquet file; raise it for short rows.
        entry: The file's entry in the manifest, which limits what is decoded; see `check_footer`.

    Raises:
        IntegrityError: The file is damaged.
    """
    columns = None if columns is None else stored_names(columns)
    return map(supervised_names, _stored_batches(path, columns, max_rows, entry))


def check_footer(footer: pq.FileMetaData, entry: FileEntry) -> None:
    """Compare the row and value counts of a Parquet footer with the manifest before decoding.

    A few kilobytes of Parquet can expand to gigabytes of equal IDs. No column has more values than
    the file has tokens; an empty list counts as one value, hence tokens + rows.

    Raises:
        IntegrityError: The number of rows differs, or a column has too many values.
    """
    if footer.num_rows != entry.rows:
        raise IntegrityError(
            f"'{entry.key}' has {footer.num_rows:,} rows, but the manifest says {entry.rows:,}. "
            "Publish the version again",
            key=entry.key,
        )
    most = entry.tokens + entry.rows
    for number in range(footer.num_columns):
        groups = map(footer.row_group, range(footer.num_row_groups))
        values = sum(group.column(number).num_values for group in groups)
        if values > most:
            raise IntegrityError(
                f"column '{footer.schema.column(number).path}' of '{entry.key}' has {values:,} "
                f"values, but the manifest says {entry.tokens:,} tokens. Publish the version again",
                key=entry.key,
            )


def stored_names(columns: Iterable[str]) -> list[str]:
    """Return the names that these columns may have in a file, including those of preferences."""
    names = [*columns]
    return [*names, *(PREFERENCE_NAMES[name] for name in names if name in PREFERENCE_NAMES)]


def _stored_batches(
    path: Path,
    columns: list[str] | None = None,
    max_rows: int = _BATCH_ROWS,
    entry: FileEntry | None = None,
) -> Iterator[pa.RecordBatch]:
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                if entry is not None:
                    check_footer(file.metadata, entry)
                # Our row groups hold about 2 M tokens each, so that a batch of one is bounded too.
                groups = file.metadata.num_row_groups
                rows = file.metadata.row_group(0).num_rows if groups else 1
                read = 0
                for batch in file.iter_batches(max(1, min(rows, max_rows)), columns=columns):
                    read += batch.num_rows
                    yield batch
                due = file.metadata.num_rows
                if read != due:  # the footer has no checksum, and a flipped bit can hide values
                    raise pa.ArrowInvalid(f"it has {read:,} rows, but its footer says {due:,}")
        elif path.suffix == ".jsonl":
            yield from _json_batches(path)
        else:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
    except MemoryError:  # Arrow's out-of-memory error is both a MemoryError and an ArrowException
        raise
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"'{path.name}' cannot be read: {error}") from None


def _json_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with path.open("rb") as file:
        first = file.readline()
        longest = max(map(len, file), default=0)
    present, schema = orjson.loads(first), None
    is_preferences = "preference_ids" in present
    if is_preferences or "input_ids" in present:
        has_labels = {"labels", "preference_labels"} & {*present}
        schema = published_schema(
            "labels" if has_labels else "compact",
            *(name in present for name in ("position_ids", "label", "loss_weights")),
            of_preferences=is_preferences,
        )
    yield from pyarrow.json.open_json(
        path,
        read_options=pyarrow.json.ReadOptions(
            block_size=max(_JSON_BLOCK_BYTES, len(first), longest)
        ),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema),
    )


def check_rows(batch: pa.RecordBatch, first_row: int, manifest: Manifest) -> int:
    """Check the values of a batch of a data file and return its number of tokens.

    Raises:
        ContractError: A rule is broken; names the first one and its row.
    """
    names = batch.schema.names
    if "input_ids" not in names or not batch.num_rows:
        return 0
    layout: Layout = "labels" if "labels" in names else "compact"
    due = published_schema(layout).names
    if missing := [name for name in due if name not in names]:
        raise ContractError(f"packed rows lack the columns {', '.join(missing)}")
    facts = manifest.facts
    check_packed(
        batch,
        facts.configuration.pack.seq_len or _ANY,
        facts.lineage.tokenizer.vocab_size or _ANY,
        layout,
        # A piece of a record cut by `concat` may have no trained token; a classifier trains on the
        # label column only.
        allow_untrained=facts.configuration.pack.strategy == "concat" or "label" in names,
        first_row=first_row,
    )
    return int(pc.sum(pc.list_value_length(batch["input_ids"])).as_py())

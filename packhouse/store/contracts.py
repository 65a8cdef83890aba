"""Checks of a published file that need only the file and the manifest.

Values are checked with `packing.check_packed`, the one contract of packed rows: a run checks it
before it publishes, and here it is checked on the bytes in the store. Files are read a batch of
rows at a time, so memory is bounded by a row group, whatever the size of the file.
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

_BATCH_ROWS = 1024
_JSON_BLOCK_BYTES = 2**20  # more where a row is longer: pyarrow refuses rows that straddle blocks
_ANY = 2**31 - 1  # ids and lengths are int32: no limit where the manifest states none


def check_data_file(path: Path, entry: FileEntry, manifest: Manifest) -> None:
    """Check schema, row count, token count and values of one data file; others pass.

    Raises:
        ContractError: the first rule that is broken, with its row.
        IntegrityError: the file cannot be read.
    """
    if entry.kind != "data" or path.suffix not in (".parquet", ".arrow", ".jsonl"):
        return
    rows = tokens = 0
    for batch in _stored_batches(path, entry=entry):
        if rows == 0 and path.suffix != ".jsonl":  # JSON has no schema
            found = schema_to_json(batch.schema)
            if schema_fingerprint(found) != manifest.schema_fingerprint:
                names = batch.schema.names
                raise ContractError(f"schema differs from the manifest's: it has columns {names}")
        tokens += check_rows(supervised_names(batch), rows, manifest)
        rows += batch.num_rows
    if rows != entry.rows:
        raise ContractError(f"holds {rows:,} rows, and its manifest says {entry.rows:,}")
    columns = {column.name for column in manifest.facts.schema.fields}
    if tokens != entry.tokens and {"input_ids", "preference_ids"} & columns:
        raise ContractError(f"{tokens:,} tokens, and the manifest says {entry.tokens:,}")


def read_batches(
    path: Path,
    columns: list[str] | None = None,
    *,
    max_rows: int = _BATCH_ROWS,
    entry: FileEntry | None = None,
) -> Iterator[pa.RecordBatch]:
    """Row batches of a Parquet (page checksums verified), Arrow or JSON Lines file.

    Columns of preferences have the names that those of supervised rows have.

    Args:
        path: the file.
        columns: those that are read of a Parquet file, where it has them; all by default.
        max_rows: of a batch of a Parquet file; packs are long, and records short.
        entry: of a data file in its manifest, which bounds what is decoded; see `check_footer`.

    Raises:
        IntegrityError: the file is damaged.
    """
    columns = None if columns is None else stored_names(columns)
    return map(supervised_names, _stored_batches(path, columns, max_rows, entry))


def check_footer(footer: pq.FileMetaData, entry: FileEntry) -> None:
    """Bound the rows and values of a data file by its manifest, before anything is decoded.

    A few kilobytes of Parquet can stand for gigabytes of equal ids. No column of packs has more
    values than tokens; an empty list counts as one value.

    Raises:
        IntegrityError: it holds other rows, or more values.
    """
    if footer.num_rows != entry.rows:
        raise IntegrityError(
            f"'{entry.key}' holds {footer.num_rows:,} rows, and its manifest says "
            f"{entry.rows:,}; publish the version again",
            key=entry.key,
        )
    most = entry.tokens + entry.rows
    for number in range(footer.num_columns):
        groups = map(footer.row_group, range(footer.num_row_groups))
        values = sum(group.column(number).num_values for group in groups)
        if values > most:
            raise IntegrityError(
                f"column '{footer.schema.column(number).path}' of '{entry.key}' holds {values:,} "
                f"values, and its manifest says {entry.tokens:,} tokens; publish the version again",
                key=entry.key,
            )


def stored_names(columns: Iterable[str]) -> list[str]:
    """Return the names that columns may have in a file: their own, and those of preferences."""
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
                # A row group of ours holds 2 M tokens, however long a row is.
                groups = file.metadata.num_row_groups
                rows = file.metadata.row_group(0).num_rows if groups else 1
                read = 0
                for batch in file.iter_batches(max(1, min(rows, max_rows)), columns=columns):
                    read += batch.num_rows
                    yield batch
                due = file.metadata.num_rows
                if read != due:  # a footer has no checksum: one bit of it may hide values
                    raise pa.ArrowInvalid(f"it holds {read:,} rows, and should hold {due:,}")
        elif path.suffix == ".jsonl":
            yield from _json_batches(path)
        else:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
    except MemoryError:  # of Arrow, too
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
    """Check the values of a batch of a data file; returns its number of tokens, 0 without any.

    Raises:
        ContractError: the first rule that is broken, with its row.
    """
    names = batch.schema.names
    if "input_ids" not in names or not batch.num_rows:
        return 0
    layout: Layout = "labels" if "labels" in names else "compact"
    due = published_schema(layout).names
    if missing := [name for name in due if name not in names]:
        raise ContractError(f"rows of tokens have no column {', '.join(missing)}")
    facts = manifest.facts
    check_packed(
        batch,
        facts.configuration.pack.seq_len or _ANY,
        facts.lineage.tokenizer.vocab_size or _ANY,
        layout,
        # Pieces of records may train nothing, and classifiers train on the label.
        allow_untrained=facts.configuration.pack.strategy == "concat" or "label" in names,
        first_row=first_row,
    )
    return int(pc.sum(pc.list_value_length(batch["input_ids"])).as_py())

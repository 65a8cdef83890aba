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
from packhouse.packing import check_packed, published_schema, supervised_names
from packhouse.packing.layout import PREFERENCE_NAMES, Layout
from packhouse.store.manifest import FileEntry, Manifest, schema_fingerprint, schema_to_json

_BATCH_ROWS = 1024
_JSON_BLOCK_BYTES = 2**20  # more where a row is longer: pyarrow refuses rows that straddle blocks
_JSON_LINE_BYTES = 2**25  # more is no row of ours
_JSON_BRACKETS = 500  # of a row that may lie deep: a list has one, a range has one
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
    for batch in _stored_batches(path):
        if rows == 0 and path.suffix != ".jsonl":  # JSON has no schema
            found = schema_to_json(batch.schema)
            if schema_fingerprint(found) != manifest.schema_fingerprint:
                names = batch.schema.names
                raise ContractError(f"schema differs from the manifest's: it has columns {names}")
        tokens += check_rows(supervised_names(batch), rows, manifest)
        rows += batch.num_rows
    if rows != entry.rows:
        raise ContractError(f"{rows:,} rows, and the manifest says {entry.rows:,}")
    columns = [field["name"] for field in manifest.schema.get("fields", ())]
    if tokens != entry.tokens and {"input_ids", "preference_ids"} & {*columns}:
        raise ContractError(f"{tokens:,} tokens, and the manifest says {entry.tokens:,}")


def read_batches(
    path: Path, columns: list[str] | None = None, *, max_rows: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Row batches of a Parquet (page checksums verified), Arrow or JSON Lines file.

    Columns of preferences have the names that those of supervised rows have.

    Args:
        path: the file.
        columns: those that are read of a Parquet file, where it has them; all by default.
        max_rows: of a batch of a Parquet file; packs are long, and records short.

    Raises:
        IntegrityError: the file is damaged.
    """
    columns = None if columns is None else stored_names(columns)
    return map(supervised_names, _stored_batches(path, columns, max_rows))


def stored_names(columns: Iterable[str]) -> list[str]:
    """Return the names that columns may have in a file: their own, and those of preferences."""
    names = [*columns]
    return [*names, *(PREFERENCE_NAMES[name] for name in names if name in PREFERENCE_NAMES)]


def _stored_batches(
    path: Path, columns: list[str] | None = None, max_rows: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
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
                    batch = reader.get_batch(index)
                    batch.validate(full=True)  # Arrow follows offsets out of the file, unasked
                    yield batch
    except MemoryError:  # of Arrow, too
        raise
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"'{path.name}' cannot be read: {error}") from None


def checked_rows(
    batches: Iterable[pa.RecordBatch], manifest: Manifest, name: str, first_row: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yield row batches of a data file, each held to the contract before it is used.

    A digest says that a file is the manifest's; who can write to the store can write both.

    Args:
        batches: rows of the file.
        manifest: of its version.
        name: of the file, for errors.
        first_row: number of the first row in the file.

    Raises:
        IntegrityError: a rule is broken, or Arrow cannot read the file.
    """
    try:
        for batch in batches:
            check_rows(batch, first_row, manifest)
            first_row += batch.num_rows
            yield batch
    except MemoryError:  # of Arrow, too
        raise
    except (ContractError, pa.ArrowException, OSError) as error:
        raise IntegrityError(f"'{name}' is no file of a run: {error}") from None


def _json_batches(path: Path) -> Iterator[pa.RecordBatch]:
    longest, present = 0, None
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(_JSON_LINE_BYTES), b""):
            longest = max(longest, len(line))
            # Arrow crashes where lists lie 100,000 deep in each other; orjson refuses 1,024.
            if present is None or line.count(b"[") + line.count(b"{") > _JSON_BRACKETS:
                try:
                    row = orjson.loads(line)
                except ValueError as error:
                    raise IntegrityError(f"'{path.name}' cannot be read: {error}") from None
                present = row if present is None else present
    if not isinstance(present, dict):
        raise IntegrityError(f"'{path.name}' cannot be read: its first line is no row")
    schema = None
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
        read_options=pyarrow.json.ReadOptions(block_size=max(_JSON_BLOCK_BYTES, longest)),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema),
    )


def check_rows(batch: pa.RecordBatch, first_row: int, manifest: Manifest) -> int:
    """Check types and values of a batch of a data file; returns its number of tokens.

    Without `input_ids` it checks types, and that `record_ids` holds no null.

    Raises:
        ContractError: the first rule that is broken, with its row.
    """
    names = batch.schema.names
    for field in (*published_schema("labels", True, True, True), _RANGES):
        found = batch.schema.field(field.name).type if field.name in names else field.type
        if _shape(found) != _shape(field.type):
            raise ContractError(f"column '{field.name}' is {str(found)[:100]}, not {field.type}")
    if "input_ids" not in names or not batch.num_rows:
        if "record_ids" in names and batch["record_ids"].flatten().null_count:
            raise ContractError("column 'record_ids' holds a null")
        return 0
    layout: Layout = "labels" if "labels" in names else "compact"
    due = published_schema(layout).names
    if missing := [name for name in due if name not in names]:
        raise ContractError(f"rows of tokens have no column {', '.join(missing)}")
    pack = manifest.configuration.get("pack", {})
    check_packed(
        batch,
        pack.get("seq_len") or _ANY,
        manifest.lineage.get("tokenizer", {}).get("vocab_size") or _ANY,
        layout,
        # Pieces of records may train nothing, and classifiers train on the label.
        allow_untrained=pack.get("strategy") == "concat" or "label" in names,
        first_row=first_row,
    )
    return int(pc.sum(pc.list_value_length(batch["input_ids"])).as_py())


_RANGES = published_schema("compact").field("trained_ranges")


def _shape(kind: pa.DataType) -> object:
    """A type without its width: `[int]` of a list of any whole numbers."""
    types = pa.types
    if types.is_dictionary(kind):
        return _shape(kind.value_type)
    if types.is_nested(kind) and not types.is_struct(kind) and kind.num_fields == 1:
        return [_shape(kind.field(0).type)]
    if types.is_struct(kind):
        return {field.name: _shape(field.type) for field in kind}
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    named = {"int": types.is_integer, "float": types.is_floating}
    return next((name for name, is_one in named.items() if is_one(kind)), str(kind))

"""What must hold inside a published file, checked without anything but the file and the manifest.

The values are held against the one contract of packed rows, `packing.check_packed`, that a run
checks before it publishes; here it is asked of the bytes that lie in the store. Files are read a
batch of rows at a time, so memory is bounded by a row group, whatever the size of the file.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from packhouse.errors import ContractError, IntegrityError
from packhouse.packing import check_packed, published_schema
from packhouse.packing.layout import Layout
from packhouse.store.manifest import FileEntry, Manifest, schema_fingerprint, schema_to_json

__all__ = ["check_data_file", "count_problems", "read_batches"]

_BATCH_ROWS = 1024
_JSON_BLOCK_BYTES = 2**25  # of a row that is longer, pyarrow would say that it straddles blocks
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
    for batch in read_batches(path):
        if rows == 0 and path.suffix != ".jsonl":  # JSON has no schema
            _check_schema(batch.schema, manifest)
        tokens += _check_rows(batch, rows, manifest)
        rows += batch.num_rows
    if rows != entry.rows:
        raise ContractError(f"{rows:,} rows, and the manifest says {entry.rows:,}")
    columns = [field["name"] for field in manifest.schema.get("fields", ())]
    if tokens != entry.tokens and "input_ids" in columns:
        raise ContractError(f"{tokens:,} tokens, and the manifest says {entry.tokens:,}")


def count_problems(manifest: Manifest) -> list[str]:
    """Compare the counts that a run wrote with the manifest's files; one sentence each.

    A run writes its ledger and, for each split, packs and tokens; `engines` says that it was a run.
    """
    ledger = manifest.counts.get("ledger", [])
    statistics = manifest.counts.get("statistics", {})
    if "publish" in manifest.engines and not (ledger and statistics):
        return ["manifest.json: a run wrote this version, and its counts are missing"]
    data = [entry for entry in manifest.files if entry.kind == "data"]
    found = []
    for split, stated in statistics.items():
        files = [entry for entry in data if entry.split == split]
        for name, count in (
            ("num_packs", sum(entry.rows for entry in files)),
            ("num_tokens", sum(entry.tokens for entry in files)),
        ):
            if stated.get(name, count) != count:
                found.append(
                    f"manifest.json: {name} of split '{split}' is {stated[name]:,}, and its files "
                    f"hold {count:,}"
                )
    tokens = sum(entry.tokens for entry in data)
    if ledger and ledger[-1].get("tokens_out") not in (None, tokens):
        found.append(
            f"manifest.json: the ledger ends with {ledger[-1]['tokens_out']:,} tokens, and the "
            f"files hold {tokens:,}"
        )
    if statistics and (unknown := sorted({entry.split for entry in data} - set(statistics))):
        found.append(f"manifest.json: splits that the run did not count: {', '.join(unknown)}")
    return found


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Row batches of a Parquet (page checksums verified), Arrow or JSON Lines file.

    Raises:
        IntegrityError: the file is damaged.
    """
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                yield from file.iter_batches(batch_size=_rows_at_once(file.metadata))
        elif path.suffix == ".jsonl":
            yield from _json_batches(path)
        else:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"'{path.name}' cannot be read: {error}") from None


def _rows_at_once(metadata: pq.FileMetaData) -> int:
    """A row group of ours holds 2 M tokens, however long a row is; batches may span groups."""
    sizes: list[int] = [metadata.row_group(0).num_rows] if metadata.num_row_groups else []
    return max(1, min([_BATCH_ROWS, *sizes]))


def _json_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with path.open("rb") as file:
        try:
            present = json.loads(file.readline() or b"{}")
        except ValueError as error:
            raise IntegrityError(f"'{path.name}' cannot be read: {error}") from None
    schema = None
    if "input_ids" in present:
        layout: Layout = "labels" if "labels" in present else "compact"
        schema = published_schema(
            layout, "position_ids" in present, "label" in present, "loss_weights" in present
        )
    yield from pyarrow.json.open_json(
        path,
        read_options=pyarrow.json.ReadOptions(block_size=_JSON_BLOCK_BYTES),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema),
    )


def _check_rows(batch: pa.RecordBatch, first_row: int, manifest: Manifest) -> int:
    """Check the values of a batch; returns its number of tokens.

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


def _check_schema(schema: pa.Schema, manifest: Manifest) -> None:
    found = schema_to_json(schema)
    if manifest.schema_fingerprint and schema_fingerprint(found) != manifest.schema_fingerprint:
        columns = [field["name"] for field in found["fields"]]
        raise ContractError(f"schema differs from the manifest's: it has columns {columns}")

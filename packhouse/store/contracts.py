"""What must hold inside a published file, checked without anything but the file and the manifest.

Vectorised over row batches, so the cost is about that of reading the columns: ids below the
vocabulary, labels -100 or the id, equal list lengths, `seq_lengths` that add up, positions that
restart at each record, no pack over `seq_len`, at least one trained token in every pack.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from packhouse.errors import ContractError, IntegrityError
from packhouse.packing.layout import IGNORE_INDEX
from packhouse.store.manifest import FileEntry, Manifest, schema_fingerprint, schema_to_json

__all__ = ["check_data_file", "check_packs", "read_batches"]


def check_data_file(path: Path, entry: FileEntry, manifest: Manifest) -> None:
    """Check schema, row count, token count and values of one data file; others pass.

    Raises:
        ContractError: the first rule that is broken, with its row.
        IntegrityError: the file cannot be read.
    """
    if entry.kind != "data" or path.suffix not in (".parquet", ".arrow", ".jsonl"):
        return
    rows = tokens = 0
    limits = pack_limits(manifest)
    for batch in read_batches(path):
        if rows == 0 and path.suffix != ".jsonl":  # JSON has no schema
            _check_schema(batch.schema, manifest)
        tokens += check_packs(batch, first_row=rows, **limits)
        rows += batch.num_rows
    if rows != entry.rows:
        raise ContractError(f"{rows:,} rows, and the manifest says {entry.rows:,}")
    if "input_ids" in _names(manifest) and tokens != entry.tokens:
        raise ContractError(f"{tokens:,} tokens, and the manifest says {entry.tokens:,}")


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Row batches of a Parquet (page checksums verified), Arrow or JSON Lines file.

    Raises:
        IntegrityError: the file is damaged.
    """
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                yield from file.iter_batches(batch_size=1024)
        elif path.suffix == ".jsonl":
            yield from pyarrow.json.read_json(path).to_batches()
        else:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"'{path.name}' cannot be read: {error}") from None


def pack_limits(manifest: Manifest) -> dict[str, int | None]:
    """`seq_len` and `vocab_size` of a version, where its manifest states them."""
    pack = manifest.configuration.get("pack")
    tokenizer = manifest.lineage.get("tokenizer")
    seq_len = pack.get("seq_len") if isinstance(pack, dict) else None
    vocab_size = tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None
    return {"seq_len": seq_len, "vocab_size": vocab_size}


def check_packs(
    batch: pa.RecordBatch,
    *,
    first_row: int = 0,
    seq_len: int | None = None,
    vocab_size: int | None = None,
) -> int:
    """Check the values of a batch of packs; returns its number of tokens.

    Columns that a layout does not have are not checked.

    Raises:
        ContractError: the first rule that is broken, with its row.

    Example:
        >>> packs = {"input_ids": [[7, 8, 9]], "labels": [[-100, 8, 9]], "seq_lengths": [[2, 2]]}
        >>> check_packs(pa.RecordBatch.from_pydict(packs))
        Traceback (most recent call last):
        ...
        packhouse.errors.ContractError: row 0: seq_lengths add up to 4, and there are 3 tokens
    """
    if "input_ids" not in batch.schema.names:
        return 0
    ids, starts, lengths = _lists(batch, "input_ids")
    _check_ids(ids, starts, lengths, first_row, seq_len, vocab_size)
    if "labels" in batch.schema.names:
        trained = _check_labels(_lists(batch, "labels"), ids, starts, lengths, first_row)
        # A class label is what classifiers train on; all others need a token to train on.
        if "label" not in batch.schema.names:
            _refuse(trained == 0, first_row, lambda i: "no trained token in the pack")
    if "seq_lengths" in batch.schema.names:
        sequences = _lists(batch, "seq_lengths")
        _check_sums(sequences, lengths, first_row)
        if "position_ids" in batch.schema.names:
            _check_positions(_lists(batch, "position_ids"), sequences[0], lengths, first_row)
    return int(lengths.sum())


def _check_ids(
    ids: Any, starts: Any, lengths: Any, first_row: int, seq_len: int | None, vocab: int | None
) -> None:
    if seq_len is not None:
        _refuse(lengths > seq_len, first_row, lambda i: f"{lengths[i]:,} tokens, over {seq_len:,}")
    wrong = ids < 0 if vocab is None else (ids < 0) | (ids >= vocab)
    _refuse_values(wrong, starts, first_row, lambda i: f"token id {ids[i]} is not in [0, {vocab})")


def _check_labels(labels: Any, ids: Any, starts: Any, lengths: Any, first_row: int) -> Any:
    """Labels are -100 or the id; returns the number of trained tokens of each pack."""
    values, _, counts = labels
    _refuse(counts != lengths, first_row, lambda i: f"{counts[i]} labels, {lengths[i]} tokens")
    wrong = (values != IGNORE_INDEX) & (values != ids)
    _refuse_values(
        wrong, starts, first_row, lambda i: f"label {values[i]} at token {ids[i]}: -100 or the id"
    )
    trained = np.concatenate(([0], np.cumsum(values != IGNORE_INDEX)))
    return trained[starts + lengths] - trained[starts]


def _check_sums(sequences: Any, lengths: Any, first_row: int) -> None:
    values, starts, counts = sequences
    sums = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    totals = sums[starts + counts] - sums[starts]
    _refuse_values(values < 1, starts, first_row, lambda i: f"a record of {values[i]} tokens")
    _refuse(
        totals != lengths,
        first_row,
        lambda i: f"seq_lengths add up to {totals[i]}, and there are {lengths[i]} tokens",
    )


def _check_positions(positions: Any, seq_lengths: Any, lengths: Any, first_row: int) -> None:
    """Positions count 0, 1, ... in each record: [3, 2] -> [0, 1, 2, 0, 1]."""
    values, starts, counts = positions
    _refuse(counts != lengths, first_row, lambda i: f"{counts[i]} positions, {lengths[i]} tokens")
    firsts = np.repeat(np.cumsum(seq_lengths) - seq_lengths, seq_lengths)
    wrong = values != np.arange(len(values)) - firsts
    _refuse_values(wrong, starts, first_row, lambda i: f"position {values[i]} does not restart")


def _lists(batch: pa.RecordBatch, name: str) -> tuple[Any, Any, Any]:
    """Flat values, and start and length of each row's list, of a list column without nulls."""
    column = batch.column(name)
    if column.null_count:
        raise ContractError(f"column '{name}' has nulls")
    values = column.flatten()
    if values.null_count:
        raise ContractError(f"column '{name}' has nulls inside")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return values.to_numpy(zero_copy_only=False), np.cumsum(lengths) - lengths, lengths


def _refuse(wrong: Any, first_row: int, say: Any) -> None:
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ContractError(f"row {first_row + index}: {say(index)}", row=first_row + index)


def _refuse_values(wrong: Any, starts: Any, first_row: int, say: Any) -> None:
    if wrong.any():
        index = int(np.argmax(wrong))
        row = first_row + int(np.searchsorted(starts, index, side="right")) - 1
        raise ContractError(f"row {row}: {say(index)}", row=row)


def _check_schema(schema: pa.Schema, manifest: Manifest) -> None:
    found = schema_to_json(schema)
    if manifest.schema_fingerprint and schema_fingerprint(found) != manifest.schema_fingerprint:
        columns = [field["name"] for field in found["fields"]]
        raise ContractError(f"schema differs from the manifest's: it has columns {columns}")


def _names(manifest: Manifest) -> list[str]:
    return [field["name"] for field in manifest.schema.get("fields", ())]

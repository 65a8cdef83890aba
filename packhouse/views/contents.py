"""The records of the packs, each once, with digests of its tokens and of what of them is trained.

Two versions are compared by these: a changed template changes `ids_digest`, a changed rule of what
is trained `mask_digest` alone. Reads the data files a batch at a time; holds about 500 bytes a
record, and the tokens of records that go on in another pack (`concat`).
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from packhouse.packing.layout import records_of
from packhouse.store.contracts import read_batches

__all__ = ["CONTENTS", "CONTENTS_READ", "find_records", "read_contents"]

CONTENTS = pa.schema(
    [
        ("record_id", pa.string()),
        ("split", pa.string()),
        ("copies", pa.int64()),
        ("num_tokens", pa.int64()),
        ("num_trained", pa.int64()),
        ("ids_digest", pa.string()),
        ("mask_digest", pa.string()),
    ]
)
"""Of one copy each: tokens, trained ones, and 16 hexadecimal digits of BLAKE2b of either."""

CONTENTS_READ = ("input_ids", "labels", "trained_ranges", "seq_lengths", "record_ids")
"""Columns of the data files that it is made of, `labels` or `trained_ranges`."""


def read_contents(files: Iterable[tuple[Path, str]], sizes: Mapping[str, int]) -> pa.Table:
    """Return the view `contents`, schema `CONTENTS`: a row for each record id.

    Args:
        files: data files with their splits, in published order.
        sizes: tokens of one copy of each record: a piece of fewer goes on in another pack. One that
            is not named is whole wherever it stands.

    Raises:
        ContractError: the files hold no record ids.
        IntegrityError: a file is damaged.
    """
    rows: dict[str, dict[str, Any]] = {}
    cut: dict[str, tuple[bytearray, bytearray]] = {}
    for path, split in files:
        for batch in read_batches(path, [*CONTENTS_READ]):
            for record_id, ids, mask in records_of(batch):
                whole = sizes.get(record_id, len(ids))
                row = rows.get(record_id)
                if row is None:
                    row = {"record_id": record_id, "split": split, "copies": 0, "num_tokens": whole}
                    rows[record_id] = row
                row["copies"] += len(ids)  # tokens of all copies, till all are read
                if "ids_digest" in row:
                    continue
                tokens, trained = ids.astype("<i4").tobytes(), mask.tobytes()
                if len(ids) < whole:
                    pieces = cut.setdefault(record_id, (bytearray(), bytearray()))
                    pieces[0].extend(tokens)
                    pieces[1].extend(trained)
                    if len(pieces[1]) < whole:
                        continue
                    tokens, trained = (bytes(piece) for piece in cut.pop(record_id))
                trained = trained[:whole]
                row["num_trained"] = trained.count(1)
                row["ids_digest"] = _digest(tokens[: 4 * whole])
                row["mask_digest"] = _digest(trained)
    for row in rows.values():
        row["copies"] //= max(row["num_tokens"], 1)
    return pa.Table.from_pylist(list(rows.values()), CONTENTS)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def find_records(
    files: Iterable[Path], record_ids: Collection[str]
) -> dict[str, tuple[list[int], list[bool]]]:
    """Token ids and trained mask of a few records: of the first copy, or the first piece."""
    found: dict[str, tuple[list[int], list[bool]]] = {}
    for path in files:
        for batch in read_batches(path, [*CONTENTS_READ]):
            if len(found) == len(record_ids):
                return found
            for record_id, ids, mask in records_of(batch):
                if record_id in record_ids and record_id not in found:
                    found[record_id] = ids.tolist(), mask.tolist()
    return found

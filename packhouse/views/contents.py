"""The records of the packs, each once, with digests of its tokens and of what of them is trained.

Two versions are compared by these: a changed template changes `ids_digest`, a changed rule of what
is trained `mask_digest` alone, a changed weight `weights_digest` alone. Made of a batch of the data
files at a time; holds about 600 bytes a record, and the tokens of records that go on in another
pack (`concat`).
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.views.locating import Sequences

CONTENTS = pa.schema(
    [
        ("record_id", pa.string()),
        ("split", pa.string()),
        ("copies", pa.int64()),
        ("num_tokens", pa.int64()),
        ("num_trained", pa.int64()),
        ("total_weight", pa.float64()),
        ("label", pa.int64()),
        ("ids_digest", pa.string()),
        ("mask_digest", pa.string()),
        ("weights_digest", pa.string()),
    ]
)
"""Of one copy each: tokens, trained ones, their loss weights, the label of its pack, and 16
hexadecimal digits of BLAKE2b of tokens, mask and weights; no digest of weights that are all 1."""

_PIECES = ("ids", "mask", "weights")


def read_contents(parts: Iterable[Sequences], sizes: Mapping[str, int]) -> pa.Table:
    """Return the view `contents`, schema `CONTENTS`: a row for each record id.

    Args:
        parts: sequences with tokens, masks and weights.
        sizes: tokens of one copy of each record: a piece of fewer goes on in another pack. One that
            is not named is whole wherever it stands.
    """
    rows: dict[str, dict[str, Any]] = {}
    cut: dict[str, list[bytearray]] = {}
    for part in parts:
        ends = np.cumsum(part.num_tokens)
        given = (part.ids.astype("<i4"), part.mask.view(np.uint8), part.weights.astype("<f4"))
        split = part.splits.dictionary[0].as_py() if len(ends) else ""
        bounds = zip((ends - part.num_tokens).tolist(), ends.tolist(), strict=True)
        labelled = zip(part.record_ids.to_pylist(), part.label.to_pylist(), bounds, strict=True)
        for record_id, label, (start, end) in labelled:
            whole = sizes.get(record_id, end - start)
            row = rows.get(record_id)
            if row is None:
                row = {"record_id": record_id, "split": split, "copies": 0, "num_tokens": whole}
                rows[record_id] = row
            row["copies"] += end - start  # tokens of all copies, till all are read
            if "ids_digest" in row:
                continue
            pieces = [values[start:end].tobytes() for values in given]
            if end - start < whole:
                own = cut.setdefault(record_id, [bytearray() for _ in _PIECES])
                for piece, more in zip(own, pieces, strict=True):
                    piece.extend(more)
                if len(own[1]) < whole:
                    continue
                pieces = [bytes(piece) for piece in cut.pop(record_id)]
            row |= _of_copy(
                label, pieces[0][: 4 * whole], pieces[1][:whole], pieces[2][: 4 * whole]
            )
    for row in rows.values():
        row["copies"] //= max(row["num_tokens"], 1)
    return pa.Table.from_pylist(list(rows.values()), CONTENTS)


def _of_copy(label: int | None, ids: bytes, mask: bytes, weights: bytes) -> dict[str, object]:
    given = np.frombuffer(weights, "<f4")
    is_plain = np.array_equal(given, np.frombuffer(mask, np.uint8))
    return {
        "label": label,
        "num_trained": mask.count(1),
        "total_weight": round(float(given.sum(dtype=np.float64)), 4),
        "ids_digest": _digest(ids),
        "mask_digest": _digest(mask),
        "weights_digest": "" if is_plain else _digest(weights),
    }


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()

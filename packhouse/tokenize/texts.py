"""Token ids of many records -> their texts, at once."""

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.tokenize.encoders import load_tokenizer
from packhouse.tokenize.pipeline import read_pipeline
from packhouse.tokenize.snapshot import TokenizerSnapshot

_BLOCK = 2**12  # lists that are joined at once: of 100,000 tokens each, under 2 GB


def decode_lists(ids: pa.LargeListArray, snapshot: TokenizerSnapshot) -> pa.LargeStringArray:
    """Return the text of each list of ids, control tokens included.

    Bytes that are no UTF-8, such as those of a cut character, show as U+FFFD.
    """
    table = read_pipeline(snapshot.backend).token_bytes
    if table is None:
        tokenizer = load_tokenizer(snapshot.backend)
        texts = (tokenizer.decode(one, skip_special_tokens=False) for one in ids.to_pylist())
        return pa.array(texts, pa.large_string())
    parts = [
        _joined(ids.slice(start, _BLOCK), table) for start in range(0, max(len(ids), 1), _BLOCK)
    ]
    return pa.concat_arrays(parts)


def _joined(ids: pa.LargeListArray, table: pa.BinaryArray) -> pa.LargeStringArray:
    values = ids.flatten().to_numpy(zero_copy_only=False)
    tokens = table.take(pa.array(np.clip(values, 0, len(table) - 1)))
    offsets = ids.offsets.to_numpy() - ids.offsets[0].as_py()
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), tokens)
    joined = pc.binary_join(lists, b"")
    try:
        return joined.cast(pa.large_string())
    except pa.ArrowInvalid:
        texts = (one.decode("utf-8", "replace") for one in joined.to_pylist())
        return pa.array(texts, pa.large_string())


def decode(
    load: Callable[[], TokenizerSnapshot | None], rows: Sequence[Sequence[int]]
) -> list[str]:
    """Text of each row of ids, control tokens included."""
    snapshot = load()
    assert snapshot is not None, "the caller loaded it before"
    tokenizer = load_tokenizer(snapshot.backend)
    return [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in rows]

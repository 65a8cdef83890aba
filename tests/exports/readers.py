"""Convert rows to (context, target) as each trainer does, written from its published format."""

import json
import struct
from itertools import pairwise
from pathlib import Path

Learnt = list[tuple[tuple[int, ...], int]]


def unshifted(ids: list[int], labels: list[int], seq_lengths: list[int]) -> Learnt:
    """transformers: position t predicts `labels[t + 1]` and sees only its own record."""
    learnt, start = [], 0
    begin = {}
    for length in seq_lengths:
        begin |= dict.fromkeys(range(start, start + length), start)
        start += length
    for t in range(len(ids) - 1):
        if labels[t + 1] != -100:
            learnt.append((tuple(ids[begin[t] : t + 1]), labels[t + 1]))
    return learnt


def restarts(position_ids: list[int]) -> list[int]:
    """Return the lengths between zeros."""
    starts = [t for t, position in enumerate(position_ids) if position == 0]
    return [b - a for a, b in zip(starts, [*starts[1:], len(position_ids)], strict=True)]


def megatron(ids: list[int], loss_mask: list[int], seq_start_id: list[int]) -> Learnt:
    """Megatron-Bridge: for each sequence, inputs ids[:-1], targets ids[1:], weights mask[:-1]."""
    learnt = []
    bounds = [*seq_start_id, len(ids)]
    for start, end in pairwise(bounds):
        inputs, targets = ids[start : end - 1], ids[start + 1 : end]
        for t, (target, weight) in enumerate(zip(targets, loss_mask[start : end - 1], strict=True)):
            if weight:
                learnt.append((tuple(inputs[: t + 1]), target))
    return learnt


def mds_rows(folder: Path) -> list[dict[str, list[int]]]:
    """Return the samples of MDS shards, read as the format specifies."""
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    rows = []
    for shard in index["shards"]:
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        (number,) = struct.unpack_from("<I", data)
        assert number == shard["samples"]
        offsets = struct.unpack_from(f"<{number + 1}I", data, 4)
        header = json.loads(data[4 + 4 * len(offsets) : offsets[0]])
        assert header["column_names"] == sorted(header["column_names"])
        for start, end in pairwise(offsets):
            rows.append(_mds_sample(data[start:end], header["column_names"]))
    return rows


def _mds_sample(data: bytes, names: list[str]) -> dict[str, list[int]]:
    sizes = struct.unpack_from(f"<{len(names)}I", data)
    at, row = 4 * len(names), {}
    for name, size in zip(names, sizes, strict=True):
        part = data[at : at + size]
        at += size
        width = 1 << (part[0] & 3)
        assert part[0] >> 2 == 1
        length = int.from_bytes(part[1 : 1 + width], "little")
        row[name] = list(struct.unpack(f"<{length}i", part[1 + width :]))
    assert at == len(data)
    return row

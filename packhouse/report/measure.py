"""What a report counts in the files of a version: lengths, fill, trained tokens, samples.

All of it is read in one child with limits, for a store may be a stranger's. Lengths and outcomes
come from the records files, whole. Masks and samples come from the data files: the first 16 million
tokens of each split, which packing has shuffled; the report says when that is not all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.packing.layout import trained_tokens
from packhouse.records.lists import list_offsets
from packhouse.report.samples import page_record, record_bounds, rows_with_masks, weight_runs
from packhouse.store.contracts import check_rows, read_batches
from packhouse.store.manifest import Manifest
from packhouse.views.tables import checked

__all__ = ["MAX_READ_TOKENS", "Files", "measure"]

MAX_READ_TOKENS = 2**24
"""Tokens of a split whose masks are read."""
_SHOWN_TOKENS = 40_000  # in all samples
_PACKS = 40  # of a split, at most
_PACK_TOKENS = 16_000
_EXAMPLES = 3  # rows of each reason
_RAW_BYTES = 400  # of a bad row
_TOO_LONG = pa.array(["over_seq_len", "first_turn_too_long"])  # outcomes
_BINS = 20  # of the share of a pack that is tokens, and of a record that is trained
_TURNS = 12

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Local copies of the files of a version that a report reads."""

    data: Mapping[str, Sequence[Path]]
    """By split, in order; those whose masks are not read may be left out."""
    rows: Mapping[str, int]
    """Packs in these files."""
    records: Sequence[Path]
    quarantine: Sequence[Path]
    dropped: Sequence[Path]
    """Of rows that were left out before they were records."""
    seq_len: int
    rules: Manifest
    """What packs are held against: whoever wrote a store may have written others."""
    samples: int = _SHOWN_TOKENS
    """Tokens of samples, about."""
    sides: Sequence[str] = ("",)
    """Names of the sequences of a record, in order: of a pair, `chosen` and `rejected`."""

    @property
    def num_bytes(self) -> int:
        """Size of all of them."""
        data = [path for paths in self.data.values() for path in paths]
        return sum(
            path.stat().st_size for path in (*data, *self.records, *self.quarantine, *self.dropped)
        )


def measure(files: Files) -> dict[str, Any]:
    """Read the files and return plain JSON.

    Returns:
        `lengths`: `[source, split, tokens, records]` of each length that occurs, copies included.
        `too_long`: `[split, tokens, records]` of those that were left out for their length.
        `dropped`: examples by reason. `quarantine`: examples by step and reason.
        `splits`: packs, fill, records per pack, trained shares, tokens by answer, trained tokens
        of each loss weight (none where no row has weights), samples. Of pairs, shares and trained
        tokens are of each side.
    """
    splits = {name: _read_split(name, files) for name in files.data}
    shown: dict[str, list[dict[str, Any]]] = {}  # copies of a record, and both sides of a pair
    for record in (r for each in splits.values() for p in each["samples"] for r in p["records"]):
        shown.setdefault(record["id"], []).append(record)
    lengths, too_long, dropped = _read_records(files.records, shown)
    for reason, rows in _read_dropped(files.dropped).items():
        dropped.setdefault(reason, []).extend(rows)
    return {
        "lengths": lengths,
        "too_long": too_long,
        "dropped": dropped,
        "quarantine": _read_quarantine(files.quarantine),
        "splits": splits,
    }


def _read_records(
    paths: Sequence[Path], shown: Mapping[str, Sequence[dict[str, Any]]]
) -> tuple[list[list[Any]], list[list[Any]], dict[str, list[dict[str, Any]]]]:
    """Count lengths, keep examples of dropped rows, and put the place of each shown record in."""
    counts: Counter[tuple[str, str, int]] = Counter()
    too_long: Counter[tuple[str, int]] = Counter()
    dropped: dict[str, list[dict[str, Any]]] = {}
    wanted = pa.array(sorted(shown), pa.string())
    columns = ["record_id", "source", "row", "split", "outcome", "num_tokens", "times", "repeats"]
    for path in paths:
        for batch in read_batches(path, columns):
            table = checked("records", pa.table(batch).select(columns))
            kept = table.filter(pc.greater(table["times"], 0))
            groups = kept.group_by(["source", "split", "num_tokens"])
            for row in groups.aggregate([("times", "sum")]).to_pylist():
                name = str(row["source"]).partition("/")[0]
                counts[name, str(row["split"]), row["num_tokens"]] += row["times_sum"]
            is_too_long = pc.is_in(table["outcome"].cast(pa.string()), _TOO_LONG)
            for row in table.filter(is_too_long).select(["split", "num_tokens"]).to_pylist():
                too_long[str(row["split"]), row["num_tokens"]] += 1
            for row in table.filter(pc.is_in(table["record_id"], wanted)).to_pylist():
                for record in shown[row["record_id"]]:
                    record.setdefault("place", f"{row['source']}:{row['row']}")
            for reason, rows in _by(table.filter(pc.equal(table["times"], 0)), ["outcome"]):
                found = dropped.setdefault(reason[0], [])
                for row in rows.slice(0, _EXAMPLES - len(found)).to_pylist():
                    what = "shares words with" if reason[0] == "contaminated" else "repeats record"
                    said = f"{what} {row['repeats']}" if row["repeats"] else ""
                    found.append({"source": str(row["source"]), "row": row["row"], "detail": said})
    return _lines(counts), _lines(too_long), dropped


def _lines(counts: Counter[Any]) -> list[list[Any]]:
    return [[*key, number] for key, number in sorted(counts.items())]


def _read_dropped(paths: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Examples of rows that were left out before they were records, by reason."""
    found: dict[str, list[dict[str, Any]]] = {}
    columns = ["source", "row", "reason", "detail"]
    for path in paths:
        for batch in read_batches(path, columns):
            table = checked("dropped", pa.table(batch).select(columns))
            for (reason,), rows in _by(table, ["reason"]):
                examples = found.setdefault(reason, [])
                for row in rows.slice(0, _EXAMPLES - len(examples)).to_pylist():
                    row["detail"] = row["detail"][:_RAW_BYTES]
                    examples.append(row)
    return found


def _by(table: pa.Table, names: list[str]) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    """Yield the rows of each combination of values, in order."""
    keys = table.select(names).group_by(names).aggregate([]).to_pylist()
    for key in sorted(tuple(str(each[name]) for name in names) for each in keys):
        mask = np.ones(table.num_rows, bool)
        for name, value in zip(names, key, strict=True):
            mask &= pc.equal(table[name].cast(pa.string()), value).to_numpy()
        yield key, table.filter(pa.array(mask))


def _read_quarantine(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Examples of each step and reason, with the first bytes of the row."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    columns = ["source", "row", "step", "reason", "detail", "raw", "raw_size"]
    for path in paths:
        for batch in read_batches(path, columns):
            table = checked("quarantine", pa.table(batch).select(columns))
            for key, rows in _by(table, ["step", "reason"]):
                examples = found.setdefault(key, [])
                for row in rows.slice(0, _EXAMPLES - len(examples)).to_pylist():
                    raw = row.pop("raw")[:_RAW_BYTES].decode("utf-8", "replace")
                    examples.append({**row, "raw": raw, "detail": row["detail"][:_RAW_BYTES]})
    return [
        {"step": step, "reason": reason, "examples": examples}
        for (step, reason), examples in sorted(found.items())
    ]


def _read_split(name: str, files: Files) -> dict[str, Any]:
    """Masks and fill of the packs that are read, and samples evenly among them.

    Raises:
        ContractError: a pack is none that a run writes.
    """
    tally = _Tally(files.seq_len, len(files.sides))
    seen = tokens = shown = 0
    samples: list[dict[str, Any]] = []
    step, budget = 1, files.samples // max(len(files.data), 1)
    for batch in _batches(files.data[name]):
        check_rows(batch, seen, files.rules)
        if not seen:  # packs are alike in length: as many as the room for samples holds
            mean = max(1, len(pc.list_flatten(batch["input_ids"])) // max(batch.num_rows, 1))
            count = max(1, min(_PACKS, budget // min(mean, _PACK_TOKENS)))
            step = max(1, min(files.rows[name], MAX_READ_TOKENS // mean) // count)
        tokens += tally.add(batch)
        first = -seen % step
        for number in range(first, batch.num_rows, step):
            if shown < budget and len(samples) < _PACKS:
                samples.append(_sample(seen + number, batch.slice(number, 1), files.sides))
                shown += sum(len(record["ids"]) for record in samples[-1]["records"])
        seen += batch.num_rows
        if tokens >= MAX_READ_TOKENS:
            break
    return {**tally.to_json(), "read_packs": seen, "read_tokens": tokens, "samples": samples}


def _batches(paths: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        yield from read_batches(path)


class _Tally:
    """Counts over packs, a batch of them at a time."""

    def __init__(self, seq_len: int, num_sides: int = 1) -> None:
        self.seq_len, self.num_sides = seq_len, num_sides
        self.fill = np.zeros(_BINS, np.int64)
        self.per_pack: Counter[int] = Counter()
        self.shares = np.zeros(_BINS, np.int64)
        self.trained: Counter[int] = Counter()
        self.turns = np.zeros((2, _TURNS), np.int64)  # trained tokens, answers
        self.weights: Counter[float] = Counter()

    def add(self, batch: pa.RecordBatch) -> int:
        """Count a batch; return its tokens."""
        if not batch.num_rows:
            return 0
        offsets = _offsets(batch["input_ids"])
        flags = trained_tokens(batch, offsets)
        lengths = pc.list_flatten(batch["seq_lengths"]).to_numpy(zero_copy_only=False)
        lengths = lengths.astype(np.int64)
        share = np.minimum(np.diff(offsets) * _BINS // max(self.seq_len, 1), _BINS - 1)
        self.fill += np.bincount(share, minlength=_BINS)
        per_pack = np.diff(_offsets(batch["seq_lengths"])) // self.num_sides
        self.per_pack.update(per_pack.tolist())
        if "loss_weights" in batch.schema.names:
            weights = pc.list_flatten(batch["loss_weights"]).to_numpy(zero_copy_only=False)[flags]
            values, counts = np.unique(weights, return_counts=True)
            self.weights.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        if not len(lengths) or lengths.sum() != len(flags):
            return len(flags)  # positions of records are unknown
        starts = np.cumsum(lengths) - lengths
        trained = np.add.reduceat(flags, starts, dtype=np.int64)
        share = np.minimum(trained * _BINS // lengths, _BINS - 1)
        self.shares += np.bincount(share, minlength=_BINS)
        values, counts = np.unique(trained, return_counts=True)
        self.trained.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._add_turns(flags, starts)
        return len(flags)

    def _add_turns(self, flags: npt.NDArray[np.bool_], starts: Ints) -> None:
        """Count trained runs by their number in the record: [0,1,1,0,1 | 1,1] -> 2 + 2, 1."""
        begins = flags.copy()
        begins[1:] &= ~flags[:-1]
        begins[starts] = flags[starts]
        at = np.flatnonzero(begins)
        if not len(at):
            return
        sizes = np.add.reduceat(flags, at, dtype=np.int64)
        record = np.searchsorted(starts, at, side="right")
        first = np.r_[True, record[1:] != record[:-1]]
        number = np.arange(len(at)) - np.maximum.accumulate(np.where(first, np.arange(len(at)), 0))
        number = np.minimum(number, _TURNS - 1)
        self.turns[0] += np.bincount(number, sizes, _TURNS).astype(np.int64)
        self.turns[1] += np.bincount(number, minlength=_TURNS)

    def to_json(self) -> dict[str, Any]:
        return {
            "fill": self.fill.tolist(),
            "per_pack": sorted(self.per_pack.items()),
            "shares": self.shares.tolist(),
            "trained": sorted(self.trained.items()),
            "turns": self.turns.T.tolist(),
            "weights": sorted(self.weights.items()),
        }


def _offsets(lists: pa.ListArray) -> Ints:
    offsets = list_offsets(lists).astype(np.int64)
    return np.asarray(offsets - offsets[0])


def _sample(number: int, batch: pa.RecordBatch, sides: Sequence[str]) -> dict[str, Any]:
    """A pack as the page's script takes it; of a long one, the first records."""
    (row,) = rows_with_masks(batch)
    ids, trained = row["input_ids"], row["trained"]
    records, room = [], _PACK_TOKENS
    weights = row.get("loss_weights")
    if "label" in row:
        sides = ("good" if row["label"] else "bad",)
    for (name, start, end), side in zip(record_bounds(row), cycle(sides), strict=False):
        if room <= 0:
            break
        record = page_record(name, ids[start:end], trained[start:end], start, room)
        if side:
            record["side"] = side
        if weights is not None:
            record["weights"] = weight_runs(weights[start : start + len(record["ids"])])
        records.append(record)
        room -= len(record["ids"])
    counts = {"num_tokens": len(ids), "num_records": len(row["seq_lengths"]) // len(sides)}
    return {"pack": number, **counts, "records": records}

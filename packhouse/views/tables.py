"""The views of a version as Arrow tables, made of what a question names and of nothing else."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import IntegrityError
from packhouse.store.contracts import read_batches
from packhouse.tokenization import TokenizerSnapshot
from packhouse.views.contents import CONTENTS, CONTENTS_READ, read_contents
from packhouse.views.locating import Ints, Places, locate_records, read_sequences
from packhouse.views.texts import texts_of

__all__ = ["COLUMNS", "ON_REQUEST", "Tables", "columns_of_files"]

_OF_FILES = ("record_id", "source", "row", "group_key", "split", "outcome", "num_tokens", "times")

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "records": (
        *_OF_FILES,
        *("repeats", "num_trained", "pack", "position"),
        *("text", "input_ids", "trained"),
    ),
    "packs": (
        *("split", "pack", "num_records", "num_tokens", "num_trained", "fill"),
        *("text", "input_ids", "record_ids"),
    ),
    "contents": tuple(CONTENTS.names),
    "quarantine": (
        *("source", "row", "byte_offset", "step", "reason", "detail", "raw_size", "raw_sha256"),
        "raw",
    ),
    "dropped": ("source", "row", "record_id", "reason", "detail", "repeats"),
    "ledger": ("step", "event", "reason", "rows", "tokens"),
    "audit": ("source", "name", "value"),
    "versions": ("version", "refs", "rows", "tokens", "bytes", "content_id", "manifest_id"),
}
"""The views and their columns, as `*` gives them, but for those `ON_REQUEST`."""

_NUMBERS = {"row", "num_tokens", "times", "byte_offset", "raw_size"}
_MAY_BE_NULL = {"repeats", "byte_offset"}

ON_REQUEST = {"text", "input_ids", "trained", "record_ids", "raw"}
"""Columns that are read or computed only where a question names them."""

_IN_PACKS = {"num_trained", "pack", "position", "text", "input_ids", "trained"}
_OF_DETAIL = ("source", "row", "record_id", "repeats")


def columns_of_files(view: str, asked: Collection[str]) -> dict[str, list[str]]:
    """Return which columns of which kind of files a view is made of.

    Args:
        view: its name.
        asked: columns of it; others are left out.

    Example:
        >>> columns_of_files("records", ["source"])
        {'records': ['source']}
        >>> columns_of_files("packs", ["fill"])
        {'data': ['seq_lengths']}
    """
    columns = _asked(view, asked)
    named = {*columns}
    data = ["seq_lengths"]
    data += ["input_ids"] if named & {"text", "input_ids"} else []
    data += ["labels", "trained_ranges"] if named & {"num_trained", "trained"} else []
    match view:
        case "records":
            of_files = [name for name in columns if name not in _IN_PACKS]
            if not named & _IN_PACKS:
                return {"records": of_files}
            needed = {*of_files, "record_id", "num_tokens", "times"}
            return {"records": sorted(needed), "data": ["record_ids", *data]}
        case "packs":
            return {"data": [*data, *(["record_ids"] if "record_ids" in named else [])]}
        case "contents":
            return {"records": ["record_id", "num_tokens", "times"], "data": [*CONTENTS_READ]}
        case "quarantine":
            return {"quarantine": columns}
        case "dropped":
            of_records = {*_OF_DETAIL} if "detail" in named else {*_OF_DETAIL} & named
            of_dropped = [name for name in columns if name not in ("record_id", "repeats")]
            return {
                "records": sorted({"outcome", *of_records}),
                "dropped": of_dropped or ["reason"],
            }
    return {}


def _asked(view: str, columns: Collection[str]) -> list[str]:
    wanted = [name for name in COLUMNS[view] if name in columns]
    return wanted or [COLUMNS[view][1]]  # count(*) names none


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the views are made of: files on this disk, and facts of the manifest."""

    files: Mapping[str, list[tuple[Path, str]]]
    """Path and split of each file, by kind."""
    facts: Mapping[str, list[dict[str, Any]]]
    """Rows of the views that are no files."""
    seq_len: int
    columns: Collection[str]
    """Those that are asked for, of any view."""
    load: Callable[[], TokenizerSnapshot | None] | None
    """Loads the tokenizer; None where it is not asked for."""
    num_sides: int = 1
    """Sequences of a record: 2 of a pair."""

    def view(self, name: str) -> pa.Table:
        """Return a view, with the columns that are asked for.

        Raises:
            IntegrityError: a file is not what such a file holds.
        """
        make = getattr(self, f"_{name}", None)
        if make is None:
            return _facts_table(name, self.facts.get(name, []))
        try:
            made: pa.Table = make()
        except (pa.ArrowException, KeyError, OSError) as error:
            raise IntegrityError(f"the files of '{name}' cannot be read: {error}") from None
        return made

    def _records(self) -> pa.Table:
        asked = _asked("records", self.columns)
        read = columns_of_files("records", asked)
        table = self._read("records", read["records"])
        if "data" in read:
            rows = self._placed(table, read["data"])
            for name in sorted(_IN_PACKS & {*asked}):
                table = table.append_column(name, self._placed_column(name, rows, table))
        return table.select(asked)

    def _read(self, kind: str, columns: list[str]) -> pa.Table:
        paths = [path for path, _ in self.files.get(kind, [])]
        read = (batch for path in paths for batch in read_batches(path, columns, max_rows=2**16))
        parts = [pa.table(batch) for batch in read]
        if not parts:
            return pa.table({name: pa.nulls(0) for name in columns})
        return checked(kind, pa.concat_tables(parts, promote_options="permissive").select(columns))

    def _placed(self, table: pa.Table, columns: list[str]) -> Places:
        def ints(name: str) -> Ints:
            return np.asarray(table[name].to_numpy(), np.int64)

        ids = table["record_id"].combine_chunks()
        sequences = read_sequences(self.files.get("data", []), columns)
        return locate_records(ids, ints("num_tokens"), ints("times"), sequences)

    def _placed_column(self, name: str, rows: Places, table: pa.Table) -> pa.Array:
        missing = ~rows.is_packed
        if name in ("pack", "position", "num_trained"):
            return pa.array(getattr(rows, name), mask=missing)
        made = rows.trained if name == "trained" else rows.input_ids
        if made is None:
            return pa.nulls(table.num_rows, pa.string())
        if name == "text":
            made = texts_of(made, self.load)
        return pc.if_else(pa.array(missing), pa.scalar(None, made.type), made)

    def _packs(self) -> pa.Table:
        asked = _asked("packs", self.columns)
        read = columns_of_files("packs", asked)["data"]
        sequences = read_sequences(self.files.get("data", []), read)
        split = sequences.splits.indices.to_numpy(zero_copy_only=False)
        is_first = (np.diff(sequences.pack, prepend=-1) != 0) | (np.diff(split, prepend=-1) != 0)
        starts = np.flatnonzero(is_first)

        def summed(values: Ints) -> Ints:
            return np.add.reduceat(values, starts) if len(starts) else values

        tokens = summed(sequences.num_tokens)
        columns: dict[str, Any] = {
            "split": sequences.splits.take(pa.array(starts)).cast(pa.string()),
            "pack": sequences.pack[starts],
            "num_records": summed(np.ones_like(sequences.pack)) // self.num_sides,
            "num_tokens": tokens,
            "num_trained": summed(sequences.num_trained),
            "fill": tokens / max(self.seq_len, 1),
        }
        if {"text", "input_ids"} & {*asked}:
            edges = pa.array(np.concatenate([[0], np.cumsum(tokens)]), pa.int64())
            ids = pa.LargeListArray.from_arrays(edges, pa.array(sequences.ids))
            columns["input_ids"] = ids
            if "text" in asked:
                columns["text"] = texts_of(ids, self.load)
        if "record_ids" in asked:
            edges = pa.array([*starts.tolist(), len(sequences.pack)], pa.int64())
            columns["record_ids"] = pa.LargeListArray.from_arrays(edges, sequences.record_ids)
        return pa.table({name: columns[name] for name in asked})

    def _contents(self) -> pa.Table:
        read = columns_of_files("contents", self.columns)
        table = self._read("records", read["records"])
        table = table.filter(pc.greater(table["times"].cast(pa.int64()), 0))
        record_ids, lengths = (table[name].to_pylist() for name in ("record_id", "num_tokens"))
        of_one = dict(zip(record_ids, lengths, strict=True))
        contents = read_contents(self.files.get("data", []), of_one)
        return contents.select(_asked("contents", self.columns))

    def _quarantine(self) -> pa.Table:
        table = self._read("quarantine", _asked("quarantine", self.columns))
        if "raw" in table.column_names:
            texts = [raw.decode("utf-8", "replace") for raw in table["raw"].to_pylist()]
            at = table.column_names.index("raw")
            table = table.set_column(at, "raw", pa.array(texts, pa.string()))
        return table

    def _dropped(self) -> pa.Table:
        """Records that are in no pack, and rows that never became one."""
        asked = _asked("dropped", self.columns)
        read = columns_of_files("dropped", asked)
        records = self._read("records", read["records"])
        gone = records.filter(pc.not_equal(records["outcome"], "kept"))
        if "detail" in asked:
            gone = gone.append_column("detail", self._detail(gone, records))
        gone = gone.rename_columns({"outcome": "reason"})
        left = self._read("dropped", read["dropped"])
        both = pa.concat_tables([gone, left], promote_options="permissive")
        return both.select(asked)

    def _detail(self, gone: pa.Table, records: pa.Table) -> pa.Array:
        kept = records.filter(pc.equal(records["outcome"], "kept"))
        repeats = gone["repeats"].cast(pa.string())
        matched = pc.binary_join_element_wise("shares words with", repeats, " ")
        is_matched = pc.equal(gone["outcome"], "contaminated")
        detail = pc.if_else(is_matched, pc.fill_null(matched, ""), _repeated(repeats, kept))
        is_over = pc.equal(gone["outcome"], "over_seq_len")
        return pc.if_else(is_over, f"more than seq_len {self.seq_len:,} tokens", detail)


def _repeated(repeats: pa.ChunkedArray, kept: pa.Table) -> pa.Array:
    """Say for each id of a record that is repeated where its row is: `repeats a.jsonl row 7`."""
    at = pc.index_in(repeats, kept["record_id"].combine_chunks())
    source, row = kept["source"].take(at), kept["row"].take(at).cast(pa.string())
    said = pc.binary_join_element_wise("repeats", source, "row", row, " ")
    return pc.fill_null(said, "")


def checked(kind: str, table: pa.Table) -> pa.Table:
    """Return columns as runs write them: numbers from 0, texts; nulls only where nothing is due.

    Raises:
        IntegrityError: whoever wrote the file wrote something else.
        pa.ArrowException: a column is of another type, and cannot be cast.
    """
    made = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count and name not in _MAY_BE_NULL:
            raise IntegrityError(f"the files of '{kind}' hold nulls in column '{name}'")
        if name in _NUMBERS:
            column = column.cast(pa.int64())
            if (pc.min(column).as_py() or 0) < 0:
                raise IntegrityError(
                    f"the files of '{kind}' hold a number below 0 in column '{name}'"
                )
            made[name] = column
        else:
            made[name] = column.cast(pa.binary() if name == "raw" else pa.string())
    return pa.table(made)


def _facts_table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    numbers = {"rows", "tokens", "bytes", "value"}
    fields = [(col, pa.int64() if col in numbers else pa.string()) for col in COLUMNS[name]]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))

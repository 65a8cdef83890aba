"""The views of a version as Arrow tables, made of what a question names and of nothing else."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import IntegrityError
from packhouse.store.contracts import read_batches
from packhouse.store.manifest import Manifest
from packhouse.tokenize import TokenizerSnapshot
from packhouse.views.contents import CONTENTS, read_contents
from packhouse.views.locating import (
    Ints,
    Places,
    Sequences,
    each_sequences,
    join_sequences,
    locate_records,
)
from packhouse.views.texts import texts_of

OF_FILES = (
    *("record_id", "source", "row", "group_key", "split", "outcome", "num_tokens", "times"),
    "repeats",
)
"""Columns of `records` that need no packs."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "records": (
        *OF_FILES,
        *("num_trained", "total_weight", "label", "pack", "position"),
        *("text", "input_ids", "trained", "loss_weights"),
    ),
    "packs": (
        *("split", "pack", "num_records", "num_tokens", "num_trained", "total_weight", "label"),
        *("fill", "num_padding"),
        *("text", "input_ids", "trained", "loss_weights", "record_ids", "seq_lengths"),
    ),
    "contents": tuple(CONTENTS.names),
    "quarantine": (
        *("source", "row", "byte_offset", "step", "reason", "detail", "raw_size", "raw_sha256"),
        "raw",
    ),
    "dropped": ("source", "row", "record_id", "reason", "detail", "repeats"),
    "ledger": ("step", "event", "reason", "number", "unit", "tokens"),
    "audit": ("source", "name", "value"),
    "versions": ("version", "refs", "packs", "tokens", "bytes", "content_id", "manifest_id"),
}
"""The views and their columns, as `*` gives them, but for those `ON_REQUEST`."""

_NUMBERS = {"row", "num_tokens", "times", "byte_offset", "raw_size"}
_MAY_BE_NULL = {"repeats", "byte_offset"}

ON_REQUEST = {
    *("text", "input_ids", "trained", "loss_weights"),
    *("record_ids", "seq_lengths", "raw"),
}
"""Columns that are read or computed only where a question names them."""

_DETAILS = ("source", "row", "record_id", "repeats")


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
    named = {*_asked(view, asked)}
    data = ["seq_lengths"]
    data += ["input_ids"] if named & {"text", "input_ids"} else []
    data += ["labels", "trained_ranges"] if named & _OF_MASK else []
    data += ["loss_weights"] if named & _OF_WEIGHTS else []
    data += ["label"] if "label" in named else []
    match view:
        case "records":
            of_files = sorted(named & {*OF_FILES})
            if named <= {*OF_FILES}:
                return {"records": of_files}
            needed = {*of_files, "record_id", "num_tokens", "times"}
            return {"records": sorted(needed), "data": ["record_ids", *data]}
        case "packs":
            return {"data": [*data, *(["record_ids"] if "record_ids" in named else [])]}
        case "contents":
            return {
                "records": ["record_id", "num_tokens", "times"],
                "data": columns_of_files("records", COLUMNS["records"])["data"],
            }
        case "quarantine":
            return {"quarantine": _asked(view, {*asked, "step", "reason"})}
        case "dropped":
            of_records = {*_DETAILS} if "detail" in named else {*_DETAILS} & named
            of_dropped = named - {"record_id", "repeats"} | {"reason"}
            return {"records": sorted({"outcome", *of_records}), "dropped": sorted(of_dropped)}
    return {}


_OF_MASK = {"num_trained", "trained", "total_weight", "loss_weights"}
_OF_WEIGHTS = {"total_weight", "loss_weights"}


def _asked(view: str, columns: Collection[str]) -> list[str]:
    wanted = [name for name in COLUMNS[view] if name in columns]
    return wanted or [COLUMNS[view][1]]  # count(*) names none


_ROWS = 2**16  # of lineage that are read at once
_BAD_ROWS = 2**8  # each may hold 64 KiB


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the views are made of: files on this disk, and facts of the manifest."""

    files: Mapping[str, list[tuple[Path, str]]]
    """Path and split of each file, by kind."""
    manifest: Manifest
    """Of the version; its files may be left out."""
    columns: Collection[str]
    """Those that are asked for, of any view."""
    facts: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows of the views that are no files."""
    load: Callable[[], TokenizerSnapshot | None] | None = None
    """Loads the tokenizer; None where it is not asked for."""
    record_ids: Collection[str] | None = None
    """Of `records`: those that are wanted; None: all."""
    most_of_each: int | None = None
    """Of `dropped` and `quarantine`: so many rows of each reason; None: all."""
    checks_packs: bool = False
    """True: packs are read whole and held against the manifest; else as far as they are read."""

    @property
    def seq_len(self) -> int:
        """Of a pack; 1 where the version does not say."""
        return int(self.manifest.configuration.get("pack", {}).get("seq_len") or 1)

    def view(self, name: str) -> pa.Table:
        """Return a view, with the columns that are asked for.

        Raises:
            ContractError: packs have no record ids, or break the rules.
            IntegrityError: a file is not what such a file holds.
        """
        return pa.concat_tables(self.parts(name))

    def parts(self, name: str) -> Iterator[pa.Table]:
        """Yield a view in parts, at least one, so that not all of it is in memory.

        A part is some thousand rows of a file, or packs of 2 million tokens. One part are
        `contents`, `dropped`, `packs` with text, and `records` with columns of the packs.

        Raises:
            ContractError: packs have no record ids, or break the rules.
            IntegrityError: a file is not what such a file holds.
        """
        make = getattr(self, f"_{name}", None)
        if make is None:
            numbers = {"number", "packs", "tokens", "bytes", "value"}
            columns = [(c, pa.int64() if c in numbers else pa.string()) for c in COLUMNS[name]]
            yield pa.Table.from_pylist(self.facts.get(name, []), schema=pa.schema(columns))
            return
        try:
            yield from make()
        except MemoryError:  # of Arrow, too
            raise
        except (pa.ArrowException, KeyError, OSError) as error:
            raise IntegrityError(f"the files of '{name}' cannot be read: {error}") from None

    def _records(self) -> Iterator[pa.Table]:
        asked = _asked("records", self.columns)
        columns = columns_of_files("records", asked)
        parts = map(self._wanted, self._read("records", columns["records"]))
        if "data" not in columns:
            yield from (part.select(asked) for part in parts)
            return
        table = pa.concat_tables(parts)
        rows = self._placed(table)
        for name in (name for name in asked if name not in OF_FILES):
            table = table.append_column(name, self._placed_column(name, rows, table))
        yield table.select(asked)

    def _read(self, kind: str, columns: list[str]) -> Iterator[pa.Table]:
        yield _checked(kind, pa.table({name: pa.nulls(0) for name in columns}))
        max_rows = _BAD_ROWS if "raw" in columns else _ROWS
        for path, _ in self.files.get(kind, []):
            for batch in read_batches(path, columns, max_rows=max_rows):
                yield _checked(kind, pa.table(batch).select(columns))

    def _wanted(self, table: pa.Table) -> pa.Table:
        if self.record_ids is None:
            return table
        return table.filter(pc.is_in(table["record_id"], pa.array(self.record_ids, pa.string())))

    def _placed(self, table: pa.Table) -> Places:
        def ints(name: str) -> Ints:
            return np.asarray(table[name].to_numpy(), np.int64)

        parts, wanted = self._each_sequences("records"), self.record_ids
        sequences = join_sequences(part if wanted is None else part.of(wanted) for part in parts)
        ids = table["record_id"].combine_chunks()
        return locate_records(ids, ints("num_tokens"), ints("times"), sequences)

    def _each_sequences(self, view: str) -> Iterator[Sequences]:
        columns = columns_of_files(view, self.columns)["data"]
        rules = self.manifest if self.checks_packs else None
        return each_sequences(self.files.get("data", []), columns, self.columns, rules)

    def _placed_column(self, name: str, rows: Places, table: pa.Table) -> pa.Array:
        missing = ~rows.is_packed
        made = getattr(rows, "input_ids" if name == "text" else name)
        if isinstance(made, np.ndarray):
            return pa.array(made, mask=missing)
        if made is None:
            return pa.nulls(table.num_rows, pa.string())
        if name == "text":
            made = texts_of(made, self.load)
        return pc.if_else(pa.array(missing), pa.scalar(None, made.type), made)

    def _packs(self) -> Iterator[pa.Table]:
        parts = self._each_sequences("packs")
        if "text" in self.columns:  # a tokenizer is loaded once
            parts = iter([join_sequences(parts)])
        yield self._packs_of(next(parts, join_sequences([])))
        yield from map(self._packs_of, parts)

    def _packs_of(self, sequences: Sequences) -> pa.Table:
        asked = _asked("packs", self.columns)
        num_sides = 2 if self.manifest.preferences == "pairs" else 1
        split = sequences.splits.indices.to_numpy(zero_copy_only=False)
        is_first = (np.diff(sequences.pack, prepend=-1) != 0) | (np.diff(split, prepend=-1) != 0)
        starts = np.flatnonzero(is_first)  # sequences of packs 0 0 1 -> packs begin at 0 and 2

        def summed(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.add.reduceat(values, starts) if len(starts) else values

        def lists(edges: Iterable[Any], values: Any) -> pa.Array:
            return pa.LargeListArray.from_arrays(pa.array(edges, pa.int64()), pa.array(values))

        tokens = summed(sequences.num_tokens)
        of_tokens = np.concatenate([[0], np.cumsum(tokens)])
        of_sequences = np.append(starts, len(sequences.pack))
        make: dict[str, Callable[[], Any]] = {
            "split": lambda: sequences.splits.take(pa.array(starts)).cast(pa.string()),
            "pack": lambda: sequences.pack[starts],
            "num_records": lambda: summed(np.ones_like(sequences.pack)) // num_sides,
            "num_tokens": lambda: tokens,
            "num_trained": lambda: summed(sequences.num_trained),
            "total_weight": lambda: np.round(summed(sequences.total_weight), 4),
            "label": lambda: sequences.label.take(pa.array(starts)),
            "fill": lambda: tokens / self.seq_len,
            "num_padding": lambda: np.maximum(self.seq_len - tokens, 0),
            "text": lambda: texts_of(lists(of_tokens, sequences.ids), self.load),
            "input_ids": lambda: lists(of_tokens, sequences.ids),
            "trained": lambda: lists(of_tokens, sequences.mask),
            "loss_weights": lambda: lists(of_tokens, sequences.weights),
            "record_ids": lambda: lists(of_sequences, sequences.record_ids),
            "seq_lengths": lambda: lists(of_sequences, sequences.num_tokens),
        }
        return pa.table({name: make[name]() for name in asked})

    def _contents(self) -> Iterator[pa.Table]:
        table = pa.concat_tables(self._read("records", ["record_id", "num_tokens", "times"]))
        table = table.filter(pc.greater(table["times"], 0))
        record_ids, lengths = (table[name].to_pylist() for name in ("record_id", "num_tokens"))
        of_one = dict(zip(record_ids, lengths, strict=True))
        data = columns_of_files("contents", self.columns)["data"]
        parts = each_sequences(self.files.get("data", []), data)
        yield read_contents(parts, of_one).select(_asked("contents", self.columns))

    def _quarantine(self) -> Iterator[pa.Table]:
        parts = self._read("quarantine", columns_of_files("quarantine", self.columns)["quarantine"])
        for table in self._first(parts, ["step", "reason"]):
            if "raw" in table.column_names:
                texts = [raw.decode("utf-8", "replace") for raw in table["raw"].to_pylist()]
                at = table.column_names.index("raw")
                table = table.set_column(at, "raw", pa.array(texts, pa.string()))
            yield table.select(_asked("quarantine", self.columns))

    def _dropped(self) -> Iterator[pa.Table]:
        """Records that are in no pack, and rows that never became one."""
        asked = _asked("dropped", self.columns)
        read = columns_of_files("dropped", asked)
        parts = (
            part.filter(pc.not_equal(part["outcome"], "kept"))
            for part in self._read("records", read["records"])
        )
        gone = pa.concat_tables(self._first(parts, ["outcome"]))
        if "detail" in asked:
            gone = gone.append_column("detail", self._detail(gone))
        gone = gone.rename_columns({"outcome": "reason"})
        left = self._first(self._read("dropped", read["dropped"]), ["reason"])
        yield pa.concat_tables([gone, *left], promote_options="permissive").select(asked)

    def _detail(self, gone: pa.Table) -> pa.Array:
        """Say why each record is in no pack, as far as its reason does not."""
        matched = pc.binary_join_element_wise("shares words with", gone["repeats"], " ")
        is_matched = pc.equal(gone["outcome"], "contaminated")
        repeated = self._repeated(gone["repeats"])
        detail = pc.if_else(is_matched, pc.fill_null(matched, ""), repeated)
        is_over = pc.equal(gone["outcome"], "over_seq_len")
        return pc.if_else(is_over, f"more than seq_len {self.seq_len:,} tokens", detail)

    def _first(self, parts: Iterable[pa.Table], keys: list[str]) -> Iterator[pa.Table]:
        """Yield the rows of parts, of each combination of values so many as are wanted."""
        if self.most_of_each is None:
            yield from parts
            return
        seen: Counter[tuple[str, ...]] = Counter()
        for part in parts:
            yield part.slice(0, 0)
            for key in part.group_by(keys).aggregate([]).to_pylist():
                named = tuple(key.values())
                if (room := self.most_of_each - seen[named]) > 0:
                    is_of = reduce(pc.and_, (pc.equal(part[name], key[name]) for name in keys))
                    rows = part.filter(is_of).slice(0, room)
                    seen[named] += rows.num_rows
                    yield rows

    def _repeated(self, repeats: pa.ChunkedArray) -> pa.Array:
        """Say for each id of a record that is repeated where its row is: `repeats a.jsonl row 7`.

        Reads the records a second time, so that not all of their ids are in memory.
        """
        named = pc.unique(repeats)
        kept = pa.concat_tables(
            part.filter(
                pc.and_(pc.equal(part["outcome"], "kept"), pc.is_in(part["record_id"], named))
            )
            for part in self._read("records", ["record_id", "source", "row", "outcome"])
        )
        at = pc.index_in(repeats, kept["record_id"].combine_chunks())
        source, row = kept["source"].take(at), kept["row"].take(at).cast(pa.string())
        return pc.fill_null(pc.binary_join_element_wise("repeats", source, "row", row, " "), "")


def _checked(kind: str, table: pa.Table) -> pa.Table:
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

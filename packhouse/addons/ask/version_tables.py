"""Present the files of a version as tables that DuckDB scans, one batch in memory at a time.

Arrow and JSON Lines files work, too. Lists whose lengths do not add up are an error.

`data` files become two tables. Both use the same batch, and no token is copied:

    batch       seq_lengths [3 2] [4], input_ids [a a a b b] [c c c c]
    packs       one row per pack:      num_tokens 5, 4
    sequences   one row per sequence:  pack 0 0 1, position 0 3 0, num_tokens 3 2 4
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ContractError, IntegrityError, PackhouseError
from packhouse.pack.pack_columns import trained_tokens
from packhouse.records.arrays import flat_list, list_items
from packhouse.records.table_schemas import DROPPED, QUARANTINED, RECORDS
from packhouse.store.manifest import Manifest
from packhouse.store.version_reader import read_batches

_ROWS = 2**16  # of lineage in a batch
_BAD_ROWS = 2**8  # each may hold 64 KiB
_PACKS = 2**8  # half a million tokens, of which several columns and masks are in memory

_TEXT, _NUMBER = pa.string(), pa.int64()
_OF_TOKENS = {
    "input_ids": pa.list_(pa.int32()),
    "trained": pa.list_(pa.bool_()),
    "loss_weights": pa.list_(pa.float32()),
}
_OF_BOTH = {
    **{"split": _TEXT, "pack": _NUMBER, "num_tokens": _NUMBER, "num_trained": _NUMBER},
    **{"total_weight": pa.float64(), "label": _NUMBER},
    **_OF_TOKENS,
}


def _columns_of(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the columns of a published table: names as text, integers as 64 bits."""
    kinds = {field.name: field.type for field in schema}
    for name, kind in kinds.items():
        if pa.types.is_dictionary(kind):
            kinds[name] = _TEXT
        elif pa.types.is_integer(kind):
            kinds[name] = _NUMBER
    return {"number": _NUMBER, **kinds}


TABLES: Mapping[str, Mapping[str, pa.DataType]] = {
    "records": _columns_of(RECORDS),
    "dropped": _columns_of(DROPPED),
    "quarantine": _columns_of(QUARANTINED),
    "packs": {
        **_OF_BOTH,
        "num_sequences": _NUMBER,
        **{"record_ids": pa.list_(_TEXT), "seq_lengths": pa.list_(_NUMBER)},
    },
    "sequences": {"start": _NUMBER, **_OF_BOTH, "record_id": _TEXT, "position": _NUMBER},
}
"""Columns of each table. `number` counts the rows across all files of a kind, `start` the tokens
in all packs before a sequence. `trained` is a mask in both layouts of packs. `loss_weights` are 1
for trained tokens if packs have no such column."""

_MASK = ("labels", "trained_ranges")  # a file has exactly one of them
_FILE_COLUMNS = {  # file columns needed for each column of packs and sequences, plus seq_lengths
    **{"record_id": ("record_ids",), "record_ids": ("record_ids",), "label": ("label",)},
    **{"input_ids": ("input_ids",), "trained": _MASK, "num_trained": _MASK},
    **{"loss_weights": (*_MASK, "loss_weights"), "total_weight": (*_MASK, "loss_weights")},
}


def columns_of_files(table: str, columns: Collection[str]) -> tuple[str, list[str]]:
    """Return the kind of file that a table is built from, and the file columns it needs.

    Example:
        >>> columns_of_files("records", ["number", "row"])
        ('records', ['row'])
        >>> columns_of_files("packs", ["num_trained"])
        ('data', ['labels', 'seq_lengths', 'trained_ranges'])
    """
    if table in ("packs", "sequences"):
        named = {each for name in columns for each in _FILE_COLUMNS.get(name, ())}
        return "data", sorted({"seq_lengths", *named})
    # Any file column will do to count rows: `number` itself is computed.
    return table, sorted({*columns} - {"number"}) or ["source"]


@dataclass(frozen=True, kw_only=True)
class VersionFiles:
    """Local files of a version."""

    files: Mapping[str, list[tuple[Path, str]]]
    """Path and split of each file in published order, by kind."""
    manifest: Manifest
    """Manifest of the version; it may list no files."""

    @property
    def seq_len(self) -> int:
        """Pack size in tokens; 1 if the version does not record it."""
        return self.manifest.facts.configuration.pack.seq_len or 1


@dataclass(kw_only=True)
class FileTable:
    """A table over files. Every scan reads them again."""

    name: str
    """A key of `TABLES`."""
    files: VersionFiles
    columns: Collection[str] = ()
    """Columns to read; all others are null."""
    errors: list[BaseException] = field(default_factory=list)
    """Errors that ended a scan. DuckDB would replace them with its own."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Start a scan (Arrow PyCapsule interface). Columns are named `TABLE:COLUMN`."""
        kinds = TABLES[self.name].items()
        schema = pa.schema([(f"{self.name}:{name}", kind) for name, kind in kinds])
        named = (pa.RecordBatch.from_arrays(b.columns, schema=schema) for b in self.batches())
        reader = pa.RecordBatchReader.from_batches(schema, named)
        return reader.__arrow_c_stream__(requested_schema)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read the table batch by batch.

        Raises:
            ContractError: packs have no record ids or violate the data contract.
            IntegrityError: the content of a file is invalid.
        """
        kinds = TABLES[self.name]
        kind, columns = columns_of_files(self.name, self.columns)
        made = self._packed(columns) if kind == "data" else self._rows(columns)
        try:
            for num_rows, arrays in made:
                values = {
                    name: arrays[name].cast(of)
                    if name in arrays and name in self.columns
                    else pa.nulls(num_rows, of)
                    for name, of in kinds.items()
                }
                yield pa.RecordBatch.from_pydict(values, pa.schema([*kinds.items()]))
        except (PackhouseError, MemoryError) as error:
            self.errors.append(error)
            raise
        except (pa.ArrowException, KeyError, OSError) as error:
            damage = IntegrityError(f"the files of '{kind}' cannot be read: {error}")
            self.errors.append(damage)
            raise damage from None

    def _rows(self, columns: list[str]) -> Iterator[tuple[int, dict[str, pa.Array]]]:
        first = 0
        max_rows = _BAD_ROWS if "raw" in columns else _ROWS
        for path, _ in self.files.files.get(self.name, []):
            # Not DuckDB's own reader: Arrow checks the CRC32 of each page and DuckDB does not (18
            # of 30 flipped bits changed an answer).
            for batch in read_batches(path, columns, max_rows=max_rows):
                made = {name: batch[name] for name in columns}
                made["number"] = pa.array(np.arange(first, first + batch.num_rows))
                yield batch.num_rows, made
                first += batch.num_rows

    def _packed(self, columns: list[str]) -> Iterator[tuple[int, dict[str, pa.Array]]]:
        first: dict[str, int] = {}
        before = 0
        for path, split in self.files.files.get("data", []):
            start = first.get(split, 0)
            for batch in read_batches(path, columns, max_rows=_PACKS):
                if "record_ids" in columns and "record_ids" not in batch.schema.names:
                    raise ContractError(f"'{path.name}' has no record_ids")
                try:
                    made = self._flattened(batch, columns, split, start, before)
                except MemoryError:  # includes pa.ArrowMemoryError, which is an ArrowException too
                    raise
                except (KeyError, ValueError, IndexError, TypeError, pa.ArrowException) as error:
                    raise IntegrityError(
                        f"'{path.name}' holds no packs of records: {type(error).__name__}"
                    ) from None
                yield len(made["pack"]), made
                start += batch.num_rows
                before += pc.sum(made["num_tokens"]).as_py() or 0
            first[split] = start

    def _flattened(
        self, batch: pa.RecordBatch, columns: Collection[str], split: str, first: int, before: int
    ) -> dict[str, pa.Array]:
        """Return the columns of a batch of packs: one row per pack, or one per sequence.

        Args:
            batch: packs, with those of the named columns that exist.
            columns: file columns that were read.
            split: split of the file.
            first: number of the first pack within its split.
            before: number of tokens in earlier packs.

        Raises:
            ValueError: lengths do not add up.
        """
        of_packs = self.name == "packs"
        lengths, sequences = flat_list(batch["seq_lengths"])
        if (lengths < 0).any():
            raise ValueError("a length below 0")
        # For lengths [3 2 | 3] of two packs: sequences [0 2 3], of_sequences [0 3 5 8].
        of_sequences = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        of_whole = of_sequences[sequences]
        edges = of_whole if of_packs else of_sequences
        pack = np.arange(batch.num_rows)
        if not of_packs:
            pack = np.repeat(pack, np.diff(sequences))
        made = {
            "split": pa.DictionaryArray.from_arrays(np.zeros(len(pack), np.int32), [split]),
            "pack": pa.array(pack + first),
            "num_tokens": pa.array(np.diff(edges)),
        }
        names = {*columns} & {*batch.schema.names}
        if "label" in names:
            made["label"] = batch["label"].take(pa.array(pack))
        if "record_ids" in names:
            ids, of_ids = list_items(batch["record_ids"])
            if not np.array_equal(of_ids, sequences) or ids.null_count:
                raise ValueError("not one id for each sequence")
            made |= {"record_id": ids, "record_ids": _lists(sequences, ids)}
        if of_packs:
            made["num_sequences"] = pa.array(np.diff(sequences))
            made["seq_lengths"] = _lists(sequences, lengths)
        else:
            made["start"] = pa.array(edges[:-1] + before)
            made["position"] = pa.array(edges[:-1] - of_whole[pack])
        of_tokens: dict[str, npt.NDArray[Any]] = {}
        if "input_ids" in names:
            of_tokens["input_ids"] = flat_list(batch["input_ids"])[0].astype(np.int32)
        if {*_MASK} & names:
            mask = trained_tokens(batch, of_whole)
            of_tokens["trained"] = mask
            is_weighted = "loss_weights" in names
            weights = flat_list(batch["loss_weights"])[0] if is_weighted else mask
            of_tokens["loss_weights"] = weights.astype(np.float32)
        for name, values in of_tokens.items():
            if len(values) != edges[-1]:
                raise ValueError("lengths do not add up")
            made[name] = _lists(edges, values)
        for name, of in (("num_trained", "trained"), ("total_weight", "loss_weights")):
            if of in of_tokens and name in self.columns:
                kind = np.int64 if of == "trained" else np.float64
                # Differences of one running sum give the sums of all rows: mask [1 0 1 1] with
                # edges [0 2 4] has sums [0 1 1 2 3], so the rows have 1 and 2 trained tokens.
                sums = np.concatenate([[0], np.cumsum(of_tokens[of], dtype=kind)])
                made[name] = pa.array(sums[edges[1:]] - sums[edges[:-1]])
        return made


def _lists(edges: npt.NDArray[Any], values: Any) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(edges, pa.int32()), pa.array(values))

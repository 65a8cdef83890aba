"""Rows that another tool tokenized: files and objects read, and laid flat for the audit.

They are files, folders, datasets or lists of dicts. Files are decoded in a worker process: some
kilobytes of Parquet may stand for gigabytes.

A mask is whatever says so: `labels` (below 0: not trained, and wrong above -100), `loss_mask`,
`loss_weights`, `completion_mask`, `assistant_masks`; a token is trained if all that are there say
so. Without any of them every token is. Records of a row are parted by `seq_lengths`, else
`cu_seqlens`, else `position_ids` that do not rise by one, else the segment numbers of an
`attention_mask`; otherwise the row is one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from glob import glob
from itertools import chain, islice
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packhouse.auditing.tokens import Tokens
from packhouse.errors import ConfigError, SourceError
from packhouse.pack.layout import MASK_COLUMNS, published_schema, to_layout
from packhouse.read.file_formats import BOM, compression_of
from packhouse.read.streams import FileStream
from packhouse.system.arrays import Bools, Float64s, Int64s
from packhouse.system.worker import stream_from_worker
from packhouse.tokenize.encoders import Pipeline

Values = Float64s

_CU_SEQLENS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q")
_MASKS = (*MASK_COLUMNS, "loss_weights")
MASKS = frozenset(("labels", *_MASKS))
"""Columns that say which tokens are trained."""

_PER_TOKEN = ("labels", *_MASKS, "attention_mask", "position_ids")
_WHOLE = ("input_ids", "labels", "position_ids", "seq_lengths", *_CU_SEQLENS)
COLUMNS = ("input_ids", *_PER_TOKEN, "seq_lengths", *_CU_SEQLENS, "trained_ranges", "record_ids")
"""What is read of a row; `trained_ranges` is packhouse's own compact layout."""


_KNOWN = (*COLUMNS, "label")
_BATCH_ROWS = 1000
_ENDINGS = (".parquet", ".arrow", ".jsonl", ".json", ".ndjson")
_COMPRESSED = (".gz", ".zst")
_EXPANDED = 20  # bytes of a row that a compressed byte stands for; only memory depends on it
_PATH = b"path"
"""In the metadata of a batch without ids: the file that it is of."""


def token_batches(data: object) -> Iterator[pa.RecordBatch] | None:
    """Return the rows with `input_ids` of some data; None if its rows have none: it is raw.

    Args:
        data: a Parquet, Arrow, JSON or JSON Lines file; a folder of them, or one that
            `save_to_disk` wrote; a list of these; a `datasets.Dataset`, a pandas or polars frame,
            an Arrow table, a list of dicts, or whatever has `len` and gives dicts by number.

    Raises:
        SourceError: a file cannot be read.
        ConfigError: rows that Arrow cannot hold.
    """
    batches = iter(_read(data))
    first = next(batches, None)
    if first is None or "input_ids" not in first.schema.names:
        return None
    return chain([first], map(_with_ids, batches))


def _with_ids(batch: pa.RecordBatch) -> pa.RecordBatch:
    if "input_ids" not in batch.schema.names:
        metadata = batch.schema.metadata or {}
        where = f"'{metadata[_PATH].decode()}' has" if _PATH in metadata else "some rows have"
        raise SourceError(f"{where} no `input_ids`, which others have; audit each kind by itself")
    return batch


def _read(data: Any) -> Iterable[pa.RecordBatch]:
    if isinstance(data, str | Path):
        return chain.from_iterable(map(_read_in_worker, _files(Path(data))))
    if isinstance(data, list | tuple) and data and all(isinstance(d, str | Path) for d in data):
        return chain.from_iterable(map(_read, data))
    if isinstance(data, pa.Table):
        return _selected(data.to_batches(_BATCH_ROWS))
    if hasattr(data, "with_format") and hasattr(data, "column_names"):  # of `datasets`
        names = data.column_names
        if isinstance(names, dict):
            raise ConfigError(
                f"data is a dict of splits; give one: data[{next(iter(names))!r:.40}]"
            )
        known = data.select_columns([name for name in names if name in _KNOWN])
        tables = known.with_format("arrow").iter(_BATCH_ROWS) if known.column_names else ()
        return chain.from_iterable(table.to_batches() for table in tables)
    if hasattr(data, "to_arrow"):  # polars
        return _selected(data.to_arrow().to_batches(_BATCH_ROWS))
    if hasattr(data, "iloc"):  # pandas
        columns = [name for name in data.columns if name in _KNOWN]
        rows = ({name: row[name] for name in columns} for row in data[columns].to_dict("records"))
        return _of_rows(rows)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, dict):
        return _of_rows(data[number] for number in range(len(data)))
    return ()


def _selected(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.select([name for name in batch.schema.names if name in _KNOWN])


def _of_rows(rows: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    rows = iter(rows)
    number = 0
    while taken := list(islice(rows, _BATCH_ROWS)):
        if not all(isinstance(row, dict) and "input_ids" in row for row in taken):
            if number:
                raise SourceError(f"a row behind row {number:,} is no dict with `input_ids`")
            return
        names = [name for name in _KNOWN if any(name in row for row in taken)]
        plain = [{name: _plain(row.get(name)) for name in names} for row in taken]
        try:
            yield pa.RecordBatch.from_pylist(plain)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            said = " ".join(map(str, error.args))[:200]
            strange = _strange_value(plain, number)
            where = f"rows {number:,} to {number + len(taken) - 1:,} are no lists of numbers"
            raise SourceError(strange or f"{where} ({said})") from None
        number += len(taken)


def _strange_value(rows: Sequence[dict[str, Any]], first_row: int) -> str:
    """Say which value is no list of numbers, of rows that Arrow cannot hold."""
    for number, row in enumerate(rows, first_row):
        for name, value in row.items():
            is_list = isinstance(value, list)
            strange = [v for v in value if not isinstance(v, int | float | None)] if is_list else []
            if strange or not (is_list or value is None or name == "label"):
                held = f"{strange[0] if strange else value!r}"[:40]
                what = "a list with " if strange else ""
                return f"row {number:,}: column '{name}' holds {what}{held}, not a list of numbers"
    return ""


def _plain(value: object) -> object:
    """A list of numbers of an array or tensor; one of several dimensions is not looked at."""
    if value is None or isinstance(value, int):
        return value
    array = value if isinstance(value, list) else np.asarray(value).tolist()
    return array


def _files(path: Path) -> Sequence[Path]:
    """The files of a path or pattern, in order; those of a saved dataset as it lists them."""
    if path.is_file():
        return [path]
    if not path.exists():
        found = glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no "/rows/*"
        return sorted(file for file in map(Path, found) if file.is_file())
    if (path / "dataset_dict.json").is_file():
        return [
            file for split in sorted(path.iterdir()) if split.is_dir() for file in _files(split)
        ]
    if (path / "state.json").is_file():
        return sorted(path.glob("data-*.arrow"))
    return sorted(file for file in path.rglob("*") if _ending(file) in _ENDINGS)


def _ending(path: Path) -> str:
    """The ending of a name, without that of a compression."""
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return Path(name).suffix


def _read_in_worker(path: Path) -> Iterator[pa.RecordBatch]:
    size = path.stat().st_size
    expanded = size * (_EXPANDED if path.name.lower().endswith(_COMPRESSED) else 1)
    return stream_from_worker(
        partial(_read_file, path),
        what=f"file '{path}'",
        blames=SourceError,
        num_bytes=expanded,
        more_memory=2 * expanded,
    )


def _read_file(path: Path) -> Iterator[pa.RecordBatch]:
    """In a worker: rows of a file; one batch without `input_ids` where it has none."""
    with path.open("rb") as file:
        head = file.read(8)
    try:
        if head.startswith(b"PAR1") or _ending(path) == ".parquet":
            with pq.ParquetFile(path) as parquet:
                columns = [name for name in parquet.schema_arrow.names if name in _KNOWN]
                batches = parquet.iter_batches(_BATCH_ROWS, columns=columns)
                yield from batches if "input_ids" in columns else _without_ids(path)
        elif head.startswith((b"ARROW1", b"\xff\xff\xff\xff")) or _ending(path) == ".arrow":
            with pa.memory_map(str(path)) as source:
                batches = _selected(_arrow_batches(source))
                for batch in batches:
                    yield from [batch] if "input_ids" in batch.schema.names else _without_ids(path)
        else:
            is_empty = True
            for batch in _of_rows(_json_rows(path, head)):
                is_empty = False
                yield batch
            if is_empty and _ending(path) != ".json":  # what tools write beside rows is one
                yield from _without_ids(path)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"'{path}' cannot be read: {error}") from None


def _without_ids(path: Path) -> Iterator[pa.RecordBatch]:
    """A batch that says of which file it is, and nothing else."""
    schema = pa.schema([("raw", pa.bool_())], {_PATH: str(path)})
    yield pa.RecordBatch.from_arrays([pa.array([True])], schema=schema)


def _arrow_batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Batches of an IPC file, or of a stream, which `datasets` writes."""
    try:
        reader = pa.ipc.open_file(source)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    except pa.ArrowInvalid:
        source.seek(0)
        batches = iter(pa.ipc.open_stream(source))
    for batch in batches:
        batch.validate(full=True)  # its offsets may decrease, or lead elsewhere
        yield batch


def _json_rows(path: Path, head: bytes) -> Iterator[object]:
    """Rows of JSON Lines or of an array; nothing of a file that is neither."""
    compression, _ = compression_of(head, path.name)
    chunks = iter(FileStream(str(path), compression))
    first = next(chunks, b"").removeprefix(BOM)
    if first.lstrip().startswith(b"["):
        if b'"input_ids"' in first:
            yield from _json_array(chain([first], chunks))
        return
    for number, line in enumerate(_lines(chain([first], chunks)), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            if number > 1:
                raise SourceError(f"'{path}' line {number:,} is not JSON") from None
            return
        yield row


def _json_array(chunks: Iterator[bytes]) -> Iterator[object]:
    try:
        yield from json.loads(b"".join(chunks))
    except ValueError:
        return


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Lines of chunks: b"ab\nc" and b"d\n" -> b"ab" and b"cd"."""
    rest: list[bytes] = []  # a line of many chunks is joined once
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        for other in others:
            yield b"".join(rest)
            rest = [other]
    yield b"".join(rest)


@dataclass(frozen=True, slots=True)
class Padding:
    """What fills rows up to one length: pad tokens, or end tokens behind the end of an answer."""

    id: int | None
    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    """If it is the pad token, too, the last one in front is no padding."""
    unk_id: int | None = None
    """Where a tokenizer has no pad token, this one often fills rows."""

    def places(self, ids: Int64s, trained: Bools) -> Bools:
        """Return which tokens are padding: pad, end or unknown tokens at either end of a row.

        With end 2 and pad 0: [7 8 2 0 0] -> [0 0 0 1 1], and [7 8 2 2 2] -> [0 0 0 1 1]. In
        [7 8 0 0], of which the first pad alone is trained, it stands for an end: [0 0 0 1].
        """
        found = np.zeros(len(ids), np.bool_)
        first, last = ids[0], ids[-1]
        if self._fills(first):
            number = int(np.argmin(np.append(ids == first, False)))
            is_own = first == self.id or number > 1
            found[: (number - (first == self.bos_id)) * is_own] = True
        if self._fills(last) and not found[-1]:
            begin = len(ids) - int(np.argmin(np.append(ids[::-1] == last, False)))
            is_end = int(last) in self.end_ids
            is_alone = begin + 1 == len(ids)
            if is_alone and last == self.unk_id != self.id:
                return found
            is_behind_end = not self.end_ids.isdisjoint(ids[max(begin - 2, 0) : begin].tolist())
            stands_for_end = is_end or (trained[begin] and not trained[begin + 1 :].any())
            keeps = stands_for_end and (not is_behind_end or (is_end and is_alone))
            found[begin + keeps :] = True
        return found

    def _fills(self, token: np.int64) -> bool:
        return token in (self.id, self.unk_id) or int(token) in self.end_ids


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRows(Tokens):
    """Records of many rows behind one another, without padding."""

    trained: Bools
    rows: Int64s
    """Row of each record."""
    row_lengths: Int64s
    """Tokens of the row of each record, without padding."""
    num_rows: int
    faults: Mapping[str, list[tuple[int, int]]]
    """Finding -> (row, token of `ids`), where a row contradicts itself; -1: the row is left out."""
    joined: list[tuple[int, int]]
    """The same, where a record begins and an attention mask of ones joins it to the one before."""

    @property
    def is_last(self) -> Bools:
        """Return, for each record, if it is the last one of its row."""
        return np.append(self.rows[1:] != self.rows[:-1], True)[: len(self.rows)]


def read_token_rows(
    batch: pa.RecordBatch, first_row: int, pad: Padding, pipeline: Pipeline
) -> TokenRows:
    """Lay rows with `input_ids` flat.

    Args:
        batch: some of `COLUMNS`; others are not looked at.
        first_row: number of the first row.
        pad: what rows may end with.
        pipeline: of their tokenizer.

    Raises:
        SourceError: ids, labels, positions or lengths that are no whole numbers.

    Example:
        >>> rows = [{"input_ids": [7, 8, 9], "labels": [-100, 8, 9], "position_ids": [0, 1, 0]}]
        >>> read = read_token_rows(pa.RecordBatch.from_pylist(rows), 0, Padding(None), None)
        >>> read.offsets.tolist(), read.rows.tolist()
        ([0, 2, 3], [0, 0])
        >>> read.range_starts.tolist(), read.range_ends.tolist()  # none goes beyond its record
        ([1, 2], [2, 3])
    """
    names = batch.schema.names
    if "trained_ranges" in names and "labels" not in names:
        batch = to_layout(batch, published_schema("labels"))
    columns = {name: _numbers(batch[name]) for name in COLUMNS if name in batch.schema.names}
    read = {name: column for name, column in columns.items() if column is not None}
    for name in columns:
        if name in _WHOLE or name in MASKS:
            _check_numbers(name, batch[name], read.get(name), first_row)
    laid = _Laid(pad)
    for number in range(batch.num_rows):
        laid.add(
            {name: values[offsets[number] : offsets[number + 1]]
             for name, (values, offsets) in read.items()},
            first_row + number,
        )  # fmt: skip
    parts = zip(*laid.parts, strict=True)
    ids, trained, starts, rows, lengths = (np.concatenate(each) for each in parts)
    offsets = np.append(starts, len(ids))
    # Trained [0 1 1 1 0 1], records at [0 3]: ranges [1, 3), [3, 4) and [5, 6).
    is_first = np.isin(np.arange(len(ids) + 1), offsets)
    before, after = np.append(False, trained)[:-1], np.append(trained, False)[1:]
    return TokenRows(
        ids=ids,
        offsets=offsets,
        range_starts=np.flatnonzero(trained & (~before | is_first[:-1])),
        range_ends=np.flatnonzero(trained & (~after | is_first[1:])) + 1,
        pipeline=pipeline,
        trained=trained,
        rows=rows,
        row_lengths=lengths,
        num_rows=batch.num_rows,
        joined=laid.faults.pop("joined", []),
        faults=laid.faults,
    )


def _check_numbers(
    name: str, column: pa.Array, read: tuple[Values, Int64s] | None, first_row: int
) -> None:
    """Refuse a column that would be left out, or read as other numbers than it holds."""
    if read is None and name in ("input_ids", *MASKS):
        held = str(column.type)[:80]
        hint = "; a class of the whole row goes by `label`" if name == "labels" else ""
        raise SourceError(f"column '{name}' holds {held}, not a list of numbers in each row{hint}")
    if read is None or name not in _WHOLE or column.null_count == len(column):
        return
    if pa.types.is_boolean(column.type.value_type):
        raise SourceError(f"column '{name}' holds true and false, not whole numbers")
    values, offsets = read
    broken = np.flatnonzero(np.isfinite(values) & (values % 1 != 0))
    if len(broken):
        row = first_row + int(np.searchsorted(offsets, broken[0], "right")) - 1
        value = float(values[broken[0]])
        raise SourceError(f"row {row:,}: column '{name}' holds {value}, which is no whole number")


def _numbers(column: pa.Array) -> tuple[Values, Int64s] | None:
    """Values and offsets of a list column of numbers; None where it holds no such lists."""
    if pa.types.is_null(column.type):  # nothing in any row
        column = column.cast(pa.list_(pa.null()))
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list and not pa.types.is_fixed_size_list(kind):
        return None
    value = kind.value_type
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    if not any(is_kind(value) for is_kind in kinds):
        return None
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = column.flatten()
    if pa.types.is_boolean(value) or pa.types.is_null(value):
        flat = flat.cast(pa.int8())
    values = flat.to_numpy(zero_copy_only=False).astype(np.float64)
    return values, np.append(0, np.cumsum(lengths)).astype(np.int64)


_Part = tuple[Int64s, Bools, Int64s, Int64s, Int64s]
"""Ids of a row and which are trained; begins of its records, and of each the row and its length."""
_NONE = np.zeros(0, np.int64)
_NO_PART: _Part = (_NONE, np.zeros(0, np.bool_), _NONE, _NONE, _NONE)


@dataclass(slots=True)
class _Laid:
    """Rows behind one another, as far as they are read."""

    pad: Padding
    parts: list[_Part] = field(default_factory=lambda: [_NO_PART])
    num_tokens: int = 0
    faults: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def fault(self, name: str, row: int, token: int) -> None:
        """Note a fault at a token of the row that is being read; -1: the row is left out."""
        self.faults.setdefault(name, []).append(
            (row, token + self.num_tokens if token >= 0 else -1)
        )

    def add(self, row: Mapping[str, Values], number: int) -> None:
        """Take in a row without its padding."""
        values = row["input_ids"]
        per_token = [row[name] for name in _PER_TOKEN if name in row]
        is_even = all(len(each) in (0, len(values)) for each in per_token)
        # Of rows without a token, the others are asked for nothing. NaN stays NaN.
        is_whole = is_even and all(isfinite(each.sum()) for each in (values, *per_token))
        if not is_whole or not len(values) or values.min() < 0:
            is_empty = is_even and not len(values)
            self.fault("empty" if is_empty else "uneven", number, -1)
            return
        ids = values.astype(np.int64)
        trained = np.ones(len(ids), np.bool_)
        labels = row.get("labels", values[:0])
        if len(labels):
            trained &= labels >= 0
        for name in _MASKS:
            if len(row.get(name, ())):
                trained &= row[name] != 0
        attention = row.get("attention_mask", values[:0])
        is_masked = attention <= 0 if len(attention) else np.zeros(len(ids), np.bool_)
        is_padding = self.pad.places(ids, trained)
        is_token = ~(is_masked | is_padding)
        if not is_token.any():
            name = "hidden" if is_masked.all() and not is_padding.all() else "empty"
            self.fault("padding" if is_padding.all() and trained.any() else name, number, -1)
            return
        has_mask = any(name in row and len(row[name]) for name in MASKS)
        if not has_mask:
            self.fault("unmasked", number, 0)
        if not is_token.all():
            holes = ~is_token & (ids != self.pad.id)
            self._check_left_out(number, is_token, holes, trained & has_mask, is_masked)
        stated = trained | ((labels < 0) & (labels != -100)) if len(labels) else trained
        if len(labels) and (wrong := stated & is_token & (labels != ids)).any():
            self.fault("mislabeled", number, int(np.argmax(wrong[is_token])))
        starts = self._boundaries(row, number, is_token)
        ids, trained = ids[is_token], trained[is_token]
        by_hand = not len(row.get("seq_lengths", ()))  # TRL's collator leaves first labels out
        if by_hand and len(labels) and (crossing := starts[1:][trained[starts[1:]]]).size:
            self.fault("crossing", number, int(crossing[0]))
        own = np.full(len(starts), number), np.full(len(starts), len(ids))
        self.parts.append((ids, trained, starts + self.num_tokens, *own))
        self.num_tokens += len(ids)

    def _check_left_out(
        self, number: int, is_token: Bools, holes: Bools, trained: Bools, is_masked: Bools
    ) -> None:
        """Note tokens that attention does not see, and padding that is trained or in front.

        Args:
            number: of the row.
            is_token: which are its tokens; all others are left out.
            holes: which are left out and no pad tokens.
            trained: which a mask says are trained.
            is_masked: where `attention_mask` is 0.
        """
        places = np.flatnonzero(is_token)
        first, last = int(places[0]), int(places[-1])
        holes[:first] = holes[last:] = False
        if holes.any():
            self.fault("hidden", number, int(np.searchsorted(places, np.argmax(holes))))
        is_wrong = trained & ~holes & ~is_token
        is_wrong[:first] |= ~is_masked[:first]
        if is_wrong.any():
            before = int(np.searchsorted(places, np.argmax(is_wrong)))
            self.fault("padding", number, max(before - 1, 0))

    def _boundaries(self, row: Mapping[str, Values], number: int, is_token: Bools) -> Int64s:
        """Where the records of a row begin; notes what contradicts itself."""
        # Records of 3 and 2 tokens, as rows say it: seq_lengths [3 2], cu_seqlens [0 3 5],
        # attention_mask [1 1 1 2 2], position_ids [0 1 2 0 1]. All give the starts [0 3].
        attention, positions = (
            row[name][is_token] if len(row.get(name, ())) else np.zeros(0)
            for name in ("attention_mask", "position_ids")
        )
        num_tokens = int(is_token.sum())
        starts = None
        if len(row.get("seq_lengths", ())):
            starts = np.append(0, np.cumsum(row["seq_lengths"]).astype(np.int64))
        for name in _CU_SEQLENS if starts is None else ():
            if len(row.get(name, ())):
                starts = row[name].astype(np.int64)
                break
        if starts is not None:
            is_whole = starts[-1] in (num_tokens, len(is_token))
            if not is_whole or starts[0] != 0 or (np.diff(starts) < 1).any():
                self.fault("boundaries", number, 0)
                return np.zeros(1, np.int64)
            starts = starts[starts < num_tokens]
        elif len(attention) and attention.max() > 1:
            starts = np.flatnonzero(np.diff(attention, prepend=-1) != 0)
        if len(positions) > 1 and (positions == positions[0]).all():  # they count nothing
            self.fault("positions", number, 0)
        elif len(positions):
            restarts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
            wrong = np.setxor1d(restarts, restarts if starts is None else starts)
            wrong = np.union1d(wrong, restarts[positions[restarts] != 0])
            if len(wrong):
                self.fault("positions", number, int(wrong[0]))
            if starts is None:
                starts = restarts
                if len(starts) > 1 and len(attention):  # of ones: then positions are not read
                    self.fault("joined", number, int(starts[1]))
        return np.zeros(1, np.int64) if starts is None else starts

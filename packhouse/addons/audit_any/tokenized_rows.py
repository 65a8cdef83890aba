"""Read rows that another tool tokenized, and flatten them for the audit.

Input can be files, folders, datasets or lists of dicts. Files are decoded in a worker process,
because a few kilobytes of Parquet can expand to gigabytes.

These columns define the mask: `labels` (negative: not trained; other negative values than -100 are
reported), `loss_mask`, `loss_weights`, `completion_mask` and `assistant_masks`. A token is trained
if all columns present agree; without any of them, every token is. Records within a row are
separated by `seq_lengths`, else `cu_seqlens`, else `position_ids` that do not increase by one, else
segment numbers in `attention_mask`; otherwise the row is one record.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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

from packhouse.auditing.token_checks import Tokens
from packhouse.errors import ConfigError, SourceError
from packhouse.pack.pack_columns import MASK_COLUMNS, published_schema, to_layout
from packhouse.read.compression import FileStream
from packhouse.read.file_formats import BOM, compression_of
from packhouse.records.arrays import Bools, Float64s, Int64s
from packhouse.system.worker import stream_from_worker
from packhouse.tokenize.encoders import Pipeline

_CU_SEQLENS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q")
_MASKS = (*MASK_COLUMNS, "loss_weights")
MASKS = frozenset(("labels", *_MASKS))
"""Columns that define which tokens are trained."""

_PER_TOKEN = ("labels", *_MASKS, "attention_mask", "position_ids")
_WHOLE = ("input_ids", "labels", "position_ids", "seq_lengths", *_CU_SEQLENS)
COLUMNS = ("input_ids", *_PER_TOKEN, "seq_lengths", *_CU_SEQLENS, "trained_ranges", "record_ids")
"""Columns that are read; `trained_ranges` belongs to packhouse's own compact layout."""


_KNOWN = (*COLUMNS, "label")
_BATCH_ROWS = 1000
_ENDINGS = (".parquet", ".arrow", ".jsonl", ".json", ".ndjson")
_COMPRESSED = (".gz", ".zst")
_EXPANDED = 20  # assumed size of rows per compressed byte; used only to size memory limits
_PATH = b"path"
"""Metadata key of a batch without ids: the file that it stands for."""


def token_batches(data: object) -> Iterator[pa.RecordBatch] | None:
    """Return the rows of some data as batches, or None if they have no `input_ids` (raw rows).

    Args:
        data: a Parquet, Arrow, JSON or JSON Lines file; a folder of them, or one written by
            `save_to_disk`; a list of these; a `datasets.Dataset`, a pandas or polars frame, an
            Arrow table, a list of dicts, or any object with `len` that returns dicts by index.

    Raises:
        SourceError: a file cannot be read.
        ConfigError: Arrow cannot represent the rows.
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
        raise SourceError(
            f"{where} no `input_ids`, but other data has them. Audit tokenized and raw rows "
            "separately."
        )
    return batch


def _read(data: Any) -> Iterable[pa.RecordBatch]:
    """Read any supported kind of data as batches; empty for other kinds."""
    if isinstance(data, str | Path):
        return chain.from_iterable(map(_read_in_worker, _files(Path(data))))
    if isinstance(data, list | tuple) and data and all(isinstance(d, str | Path) for d in data):
        return chain.from_iterable(map(_read, data))
    # Data is recognized by its methods, because datasets, polars and pandas are optional imports.
    if isinstance(data, pa.Table):
        return map(_selected, data.to_batches(_BATCH_ROWS))
    if hasattr(data, "with_format") and hasattr(data, "column_names"):  # of `datasets`
        names = data.column_names
        if isinstance(names, dict):
            raise ConfigError(
                f"data is a dict of splits. Pass one of them: data[{next(iter(names))!r:.40}]"
            )
        known = data.select_columns([name for name in names if name in _KNOWN])
        tables = known.with_format("arrow").iter(_BATCH_ROWS) if known.column_names else ()
        return chain.from_iterable(table.to_batches() for table in tables)
    if hasattr(data, "to_arrow"):  # polars
        return map(_selected, data.to_arrow().to_batches(_BATCH_ROWS))
    if hasattr(data, "iloc"):  # pandas
        known = data[[name for name in data.columns if name in _KNOWN]]
        return _of_rows(known.to_dict("records"))
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, dict):
        return _of_rows(data[number] for number in range(len(data)))
    return ()


def _selected(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select([name for name in batch.schema.names if name in _KNOWN])


def _of_rows(rows: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    rows = iter(rows)
    number = 0
    while taken := list(islice(rows, _BATCH_ROWS)):
        if not all(isinstance(row, dict) and "input_ids" in row for row in taken):
            if number:
                raise SourceError(
                    f"a row after row {number:,} is not a dict with `input_ids`. Audit "
                    "tokenized and raw rows separately."
                )
            return
        names = [name for name in _KNOWN if any(name in row for row in taken)]
        plain = [{name: _as_list(row.get(name)) for name in names} for row in taken]
        try:
            yield pa.RecordBatch.from_pylist(plain)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            problem = " ".join(map(str, error.args))[:200]
            bad = _describe_bad_value(plain, number)
            where = f"rows {number:,} to {number + len(taken) - 1:,} are not lists of numbers"
            raise SourceError(bad or f"{where} ({problem})") from None
        number += len(taken)


def _as_list(value: Any) -> Any:
    """Convert arrays and tensors to lists, nested if they have several dimensions."""
    return value if isinstance(value, int | list | None) else np.asarray(value).tolist()


def _describe_bad_value(rows: Sequence[dict[str, Any]], first_row: int) -> str:
    """Describe the first value that is not a list of numbers, if Arrow rejects the rows."""
    for number, row in enumerate(rows, first_row):
        for name, value in row.items():
            is_list = isinstance(value, list)
            bad = [v for v in value if not isinstance(v, int | float | None)] if is_list else []
            if bad or not (is_list or value is None or name == "label"):
                held = f"{bad[0] if bad else value!r}"[:40]
                what = "a list with " if bad else ""
                return f"row {number:,}: column '{name}' holds {what}{held}, not a list of numbers"
    return ""


def _files(path: Path) -> Sequence[Path]:
    """Return the files of a path or pattern in order; saved datasets list their own files."""
    if path.is_file():
        return [path]
    if not path.exists():
        found = glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no "/rows/*"
        return sorted(file for file in map(Path, found) if file.is_file())
    if (path / "dataset_dict.json").is_file():
        splits = (each for each in sorted(path.iterdir()) if each.is_dir())
        return [*chain.from_iterable(map(_files, splits))]
    if (path / "state.json").is_file():
        return sorted(path.glob("data-*.arrow"))
    return sorted(file for file in path.rglob("*") if _ending(file) in _ENDINGS)


def _ending(path: Path) -> str:
    """Return the suffix of a name, ignoring compression suffixes."""
    name = path.name.lower()
    # A compressed file must not be taken for raw rows, whose audit finds less.
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
    """Yield the rows of a file (in a worker), or one batch without `input_ids` if it has none."""
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
                for batch in map(_selected, _arrow_batches(source)):
                    yield from [batch] if "input_ids" in batch.schema.names else _without_ids(path)
        else:
            batches = _of_rows(_json_rows(path, head))
            if (first := next(batches, None)) is not None:
                yield from chain([first], batches)
            elif _ending(path) != ".json":  # tools write JSON metadata next to rows
                yield from _without_ids(path)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"'{path}' cannot be read: {error}") from None


def _without_ids(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield a batch that only names its file."""
    schema = pa.schema([("raw", pa.bool_())], {_PATH: str(path)})
    yield pa.RecordBatch.from_arrays([pa.array([True])], schema=schema)


def _arrow_batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an IPC file, or of an IPC stream, which `datasets` writes."""
    try:
        reader = pa.ipc.open_file(source)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    except pa.ArrowInvalid:
        source.seek(0)
        batches = iter(pa.ipc.open_stream(source))
    for batch in batches:
        batch.validate(full=True)  # untrusted offsets may decrease or point outside
        yield batch


def _json_rows(path: Path, head: bytes) -> Iterator[object]:
    """Yield rows of JSON Lines or of a JSON array; nothing if the file is neither."""
    compression, _ = compression_of(head, path.name)
    chunks = iter(FileStream(str(path), compression))
    first = next(chunks, b"").removeprefix(BOM)
    if first.lstrip().startswith(b"["):
        if b'"input_ids"' in first:
            with suppress(ValueError):
                yield from json.loads(b"".join(chain([first], chunks)))
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


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield lines from chunks: b"ab\nc" and b"d\n" -> b"ab" and b"cd"."""
    rest: list[bytes] = []  # joined once, as a line may span many chunks
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        for other in others:
            yield b"".join(rest)
            rest = [other]
    yield b"".join(rest)


@dataclass(frozen=True, slots=True)
class Padding:
    """Tokens used as padding: pad tokens, or end tokens repeated after the end of an answer."""

    id: int | None
    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    """If it is also the pad token, the last one at the start of a row is not padding."""
    unk_id: int | None = None
    """Often used as padding by tokenizers without a pad token."""

    def places(self, ids: Int64s, trained: Bools) -> Bools:
        """Return a mask of the padding: pad, end or unknown tokens at either end of a row.

        With end token 2 and pad token 0: [7 8 2 0 0] -> [0 0 0 1 1], and [7 8 2 2 2] -> [0 0 0 1
        1]. If only the first pad token is trained, it is used as the end token: [7 8 0 0] -> [0 0 0
        1].
        """
        found = np.zeros(len(ids), np.bool_)
        first, last = ids[0], ids[-1]
        if self._fills(first):
            # A single end token in front may belong to the text; two or more are padding.
            number = int(np.argmin(np.append(ids == first, False)))
            is_own = first == self.id or number > 1
            found[: (number - (first == self.bos_id)) * is_own] = True
        if self._fills(last) and not found[-1]:
            begin = len(ids) - int(np.argmin(np.append(ids[::-1] == last, False)))
            is_end = int(last) in self.end_ids
            is_alone = begin + 1 == len(ids)
            # A single unknown token at the end is more likely text that the tokenizer lacks.
            if is_alone and last == self.unk_id != self.id:
                return found
            follows_end = not self.end_ids.isdisjoint(ids[max(begin - 2, 0) : begin].tolist())
            stands_for_end = is_end or (trained[begin] and not trained[begin + 1 :].any())
            keeps = stands_for_end and (not follows_end or (is_end and is_alone))
            found[begin + keeps :] = True
        return found

    def _fills(self, token: np.int64) -> bool:
        return token in (self.id, self.unk_id) or int(token) in self.end_ids


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRows(Tokens):
    """Records of many rows, concatenated without padding."""

    trained: Bools
    rows: Int64s
    """Row number of each record."""
    row_lengths: Int64s
    """Number of tokens in the row of each record, without padding."""
    num_rows: int
    faults: Mapping[str, list[tuple[int, int]]]
    """Finding -> (row, index in `ids`) of each inconsistent row; index -1 if the row was left
    out."""
    joined: list[tuple[int, int]]
    """Records that an attention mask of ones joins to the previous record, as (row, index in
    `ids`)."""

    @property
    def is_last(self) -> Bools:
        """Mask of the records that are the last of their row."""
        return np.append(self.rows[1:] != self.rows[:-1], True)[: len(self.rows)]


def read_token_rows(
    batch: pa.RecordBatch, first_row: int, pad: Padding, pipeline: Pipeline
) -> TokenRows:
    """Flatten rows with `input_ids`.

    Args:
        batch: rows with some of `COLUMNS`; other columns are ignored.
        first_row: number of the first row.
        pad: tokens used as padding.
        pipeline: tokenization pipeline of the rows.

    Raises:
        SourceError: ids, labels, positions or lengths are not whole numbers.

    Example:
        >>> rows = [{"input_ids": [7, 8, 9], "labels": [-100, 8, 9], "position_ids": [0, 1, 0]}]
        >>> read = read_token_rows(pa.RecordBatch.from_pylist(rows), 0, Padding(None), None)
        >>> read.offsets.tolist(), read.rows.tolist()
        ([0, 2, 3], [0, 0])
        >>> read.range_starts.tolist(), read.range_ends.tolist()  # ranges stay within records
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
    flattened = _FlatRows(pad)
    for number in range(batch.num_rows):
        flattened.add(
            {name: values[offsets[number] : offsets[number + 1]]
             for name, (values, offsets) in read.items()},
            first_row + number,
        )  # fmt: skip
    parts = zip(*flattened.parts, strict=True)
    ids, trained, starts, rows, lengths = (np.concatenate(each) for each in parts)
    offsets = np.append(starts, len(ids))
    # Trained [0 1 1 1 0 1] with records starting at [0 3]: ranges [1, 3), [3, 4) and [5, 6).
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
        joined=flattened.faults.pop("joined", []),
        faults=flattened.faults,
    )


def _check_numbers(
    name: str, column: pa.Array, read: tuple[Float64s, Int64s] | None, first_row: int
) -> None:
    """Reject a column that would be ignored, or read as numbers that it does not contain."""
    if read is None and name in ("input_ids", *MASKS):
        held = str(column.type)[:80]
        hint = "; for the class of a whole row, use column `label`" if name == "labels" else ""
        raise SourceError(f"column '{name}' holds {held}, not a list of numbers in each row{hint}")
    if read is None or name not in _WHOLE or column.null_count == len(column):
        return
    if pa.types.is_boolean(column.type.value_type):
        raise SourceError(f"column '{name}' contains booleans, not integers")
    values, offsets = read
    broken = np.flatnonzero(np.isfinite(values) & (values % 1 != 0))
    if len(broken):
        row = first_row + int(np.searchsorted(offsets, broken[0], "right")) - 1
        value = float(values[broken[0]])
        raise SourceError(f"row {row:,}: column '{name}' holds {value}, which is not an integer")


def _numbers(column: pa.Array) -> tuple[Float64s, Int64s] | None:
    """Return values and offsets of a list column of numbers, or None if it is not one."""
    if pa.types.is_null(column.type):  # null in every row
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
    # float64 represents all token ids exactly, and can hold NaN for nulls.
    values = flat.to_numpy(zero_copy_only=False).astype(np.float64)
    return values, np.append(0, np.cumsum(lengths)).astype(np.int64)


_Part = tuple[Int64s, Bools, Int64s, Int64s, Int64s]
"""Ids of a row and their mask; starts of its records, and for each the row number and row
length."""
_NONE = np.zeros(0, np.int64)
_NO_PART: _Part = (_NONE, np.zeros(0, np.bool_), _NONE, _NONE, _NONE)


@dataclass(slots=True)
class _FlatRows:
    """Rows flattened so far."""

    pad: Padding
    parts: list[_Part] = field(default_factory=lambda: [_NO_PART])
    num_tokens: int = 0
    faults: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def fault(self, name: str, row: int, token: int) -> None:
        """Record a finding at a token of the current row; -1 if the row is left out."""
        self.faults.setdefault(name, []).append(
            (row, token + self.num_tokens if token >= 0 else -1)
        )

    def add(self, row: Mapping[str, Float64s], number: int) -> None:
        """Append a row without its padding, and check it."""
        values = row["input_ids"]
        per_token = [row[name] for name in _PER_TOKEN if name in row]
        is_even = all(len(each) in (0, len(values)) for each in per_token)
        # A row without tokens passes for any length of the others. NaN propagates through the sum.
        is_whole = is_even and all(isfinite(each.sum()) for each in (values, *per_token))
        if not is_whole or not len(values) or values.min() < 0:
            is_empty = is_even and not len(values)
            self.fault("empty" if is_empty else "uneven", number, -1)
            return
        ids = values.astype(np.int64)
        # Each mask column can only remove tokens: labels [-100 8 9], loss_mask [1 1 0] -> [0 1 0].
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
        # TRL writes seq_lengths, and its collator ignores the first label of each record.
        by_hand = not len(row.get("seq_lengths", ()))
        if by_hand and len(labels) and (crossing := starts[1:][trained[starts[1:]]]).size:
            self.fault("crossing", number, int(crossing[0]))
        own = np.full(len(starts), number), np.full(len(starts), len(ids))
        self.parts.append((ids, trained, starts + self.num_tokens, *own))
        self.num_tokens += len(ids)

    def _check_left_out(
        self, number: int, is_token: Bools, holes: Bools, trained: Bools, is_masked: Bools
    ) -> None:
        """Record tokens hidden from attention, and padding that is trained or at the start.

        Args:
            number: row number.
            is_token: mask of the row's tokens; the others are left out.
            holes: mask of tokens left out that are not pad tokens.
            trained: mask of trained tokens.
            is_masked: mask of tokens whose `attention_mask` is 0.
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

    def _boundaries(self, row: Mapping[str, Float64s], number: int, is_token: Bools) -> Int64s:
        """Return the starts of the records of a row, and record inconsistent boundaries."""
        # Two records of 3 and 2 tokens can be written as seq_lengths [3 2], cu_seqlens [0 3 5],
        # attention_mask [1 1 1 2 2] or position_ids [0 1 2 0 1]. All of them give starts [0 3].
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
        if len(positions) > 1 and (positions == positions[0]).all():  # they mark nothing
            self.fault("positions", number, 0)
        elif len(positions):
            restarts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
            wrong = np.setxor1d(restarts, restarts if starts is None else starts)
            wrong = np.union1d(wrong, restarts[positions[restarts] != 0])
            if len(wrong):
                self.fault("positions", number, int(wrong[0]))
            if starts is None:
                starts = restarts
                if len(starts) > 1 and len(attention):  # all ones: models then ignore position_ids
                    self.fault("joined", number, int(starts[1]))
        return np.zeros(1, np.int64) if starts is None else starts

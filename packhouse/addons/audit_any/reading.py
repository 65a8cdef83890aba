"""Rows that another tool tokenized, wherever they lie: files, folders, datasets, lists of dicts.

Files are decoded in a worker process: some kilobytes of Parquet may stand for gigabytes.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from glob import glob
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.addons.audit_any.token_rows import COLUMNS
from packhouse.errors import ConfigError, SourceError
from packhouse.read.file_formats import BOM, compression_of
from packhouse.read.streams import FileStream
from packhouse.system.worker import stream_from_worker

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
    except pa.ArrowInvalid:
        source.seek(0)
        yield from pa.ipc.open_stream(source)
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


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

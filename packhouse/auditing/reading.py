"""Rows that another tool tokenized, wherever they lie: files, folders, datasets, lists of dicts.

Files are decoded in a child process: some kilobytes of Parquet may stand for gigabytes.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.auditing.token_rows import COLUMNS
from packhouse.errors import ConfigError, SourceError
from packhouse.runtime.confine import stream_confined

_KNOWN = (*COLUMNS, "label")
_BATCH_ROWS = 1000
_HEAD_BYTES = 2**20  # of a JSON file, in which its first row names its fields
_ENDINGS = (".parquet", ".arrow", ".jsonl", ".json", ".ndjson")


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
    return chain([first], batches)


def _read(data: Any) -> Iterable[pa.RecordBatch]:
    if isinstance(data, str | Path):
        return chain.from_iterable(map(_read_confined, _files(Path(data))))
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
    """The files of a path, in order; those of a saved dataset as it lists them."""
    if path.is_file():
        return [path] if path.suffix in _ENDINGS else []
    if (path / "dataset_dict.json").is_file():
        return [
            file for split in sorted(path.iterdir()) if split.is_dir() for file in _files(split)
        ]
    if (path / "state.json").is_file():
        return sorted(path.glob("data-*.arrow"))
    return sorted(file for file in path.rglob("*") if file.suffix in _ENDINGS)


def _read_confined(path: Path) -> Iterator[pa.RecordBatch]:
    size = path.stat().st_size
    return stream_confined(
        partial(_read_file, path),
        what=f"file '{path}'",
        blames=SourceError,
        num_bytes=size,
        more_memory=2 * size,
    )


def _read_file(path: Path) -> Iterator[pa.RecordBatch]:
    """In a child: rows of a file."""
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                columns = [name for name in file.schema_arrow.names if name in _KNOWN]
                yield from file.iter_batches(_BATCH_ROWS, columns=columns)
        elif path.suffix == ".arrow":
            with pa.memory_map(str(path)) as source:
                yield from _selected(_arrow_batches(source))
        else:
            yield from _of_rows(_json_rows(path))
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"'{path}' cannot be read: {error}") from None


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


def _json_rows(path: Path) -> Iterator[object]:
    """Rows of JSON Lines or of an array; nothing of a file that is neither."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        file.seek(0)
        if b'"input_ids"' not in head:
            return
        if head.lstrip().startswith(b"["):
            try:
                rows = json.load(file)
            except ValueError:
                return
            yield from rows
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError:
                if number > 1:
                    raise SourceError(f"'{path}' line {number:,} is not JSON") from None
                return

"""Decode Parquet and Arrow files in a process of their own, whose memory is limited.

A page, a dictionary or a run of a few bytes may stand for gigabytes, and what a file says about
its own sizes may be a lie. So nothing is decoded in the process of a run. A child with a limit on
its address space decodes and checks, and hands over plain batches of a few megabytes. A file that
goes over a limit ends in an error that names it, and so does one that crashes the decoder.

    56 KB of Parquet, 2,000,000 rows that share one text of 1 MB:
        1,024 rows do not fit in DECODER_BYTES: the child ends, and the file is refused

The child imports pyarrow and little else, which takes 0.2 s for each shard.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq

from packhouse import errors
from packhouse.errors import PackhouseError, SourceError

__all__ = ["MAX_COLUMNS", "Request", "decode"]

DECODER_BYTES = 2**30
"""Memory of the process that decodes; it holds one record batch, or one page of each column."""

BATCH_BYTES = 8 * 2**20
"""Decoded bytes of a batch that is handed over, unless one row is larger."""

MAX_ROW_BYTES = 128 * 2**20
"""Decoded bytes of one row."""

MAX_SHARD_DECODED_BYTES = 4 * 2**30
"""Decoded bytes of one shard, which is one row group or more."""

MAX_RATIO = 100
"""Decoded bytes of a shard for each stored byte of its file, as for compressed text..."""

RATIO_FREE_BYTES = 256 * 2**20
"""... but this many are allowed whatever the size of the file."""

MAX_COLUMNS = 10_000
"""Columns of a file; a Parquet struct counts as its fields."""

_ROW_BYTES = 256  # of the objects that a row becomes, whatever is in it
_MAX_DEPTH = 32
_BATCH_ROWS = 1024

Request = dict[str, Any]
"""`uri` and `file_format` of a file, and either `rows`: [first, end), or `head`: how many rows of
the first group are wanted beside the facts about the file."""


def decode(request: Request, path: Path | None) -> Iterator[pa.RecordBatch]:
    """Yield rows of a file in batches of at most `BATCH_BYTES`; an empty one where there are none.

    Asked for its head, the file's facts are in the metadata of the batches' schema, as JSON under
    `facts`: `names` of its columns, and `sizes`, [rows, bytes] of each group.

    Args:
        request: what to read.
        path: where the file lies on this machine; None: it is opened by its uri.

    Raises:
        SourceError: the file is damaged, or over a limit, which it names.
        TransientError: the storage did not answer.
    """
    arguments = json.dumps({**request, "path": path and str(path)})
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    command = [sys.executable, "-P", __file__, arguments]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
        ) as child,
    ):
        try:
            with suppress(pa.ArrowException, StopIteration):  # the child's end says why
                reader = pa.ipc.open_stream(child.stdout)
                while True:
                    yield reader.read_next_batch()
            child.wait()
        finally:
            child.kill()
        if child.returncode:
            said.seek(0)
            raise _error_of(request, child.returncode, said.read())


def _error_of(request: Request, code: int, said: bytes) -> PackhouseError:
    if code == _EXIT_WITH_ERROR:
        kind, message = json.loads(said.splitlines()[-1])
        error: PackhouseError = getattr(errors, kind)(message, uri=request["uri"])
        return error
    how = f"signal {-code}" if code < 0 else said.decode(errors="replace").strip()[-300:]
    return SourceError(
        f"source file '{request['uri']}' ended the process that decoded it ({how}); it is damaged, "
        f"or needs more than {DECODER_BYTES:,} bytes: write it again with smaller row groups",
        uri=request["uri"],
    )


_EXIT_WITH_ERROR = 3


class _Decoder:
    """The child's side: reads a file group by group, and writes batches to stdout."""

    def __init__(self, request: Request, file: Any) -> None:
        self.uri: str = request["uri"]
        self.is_parquet = request["file_format"] == "parquet"
        self.group = 0
        self.decoded = 0
        file.seek(0, os.SEEK_END)
        ratio_bytes = MAX_RATIO * file.tell()
        self.allowed = min(MAX_SHARD_DECODED_BYTES, max(RATIO_FREE_BYTES, ratio_bytes))
        file.seek(0)
        self.reader: Any
        if self.is_parquet:
            self.reader = pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
            self.schema = self.reader.schema_arrow
            num_columns = len(self.reader.metadata.schema)
        else:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            self.reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            self.schema = self.reader.schema
            num_columns = len(self.schema)
        if num_columns > MAX_COLUMNS:
            raise self.refusal(
                f"it has {num_columns:,} columns, over {MAX_COLUMNS:,}; keep those that hold rows"
            )
        fields = [field.with_type(self.plain(field.type, field.name)) for field in self.schema]
        self.plain_schema = pa.schema(fields)

    def refusal(self, why: str) -> SourceError:
        kind = "row group" if self.is_parquet else "record batch"
        return SourceError(f"source file '{self.uri}', {kind} {self.group}: {why}")

    def plain(self, kind: Any, column: str, depth: int = 0) -> Any:
        """Type in which a value lies once for each row that has it, and in its own bytes."""
        if depth > _MAX_DEPTH:
            raise self.refusal(f"column '{column}' nests deeper than {_MAX_DEPTH}")

        def inner(field: Any) -> Any:
            return field.with_type(self.plain(field.type, column, depth + 1))

        types = pa.types
        if types.is_dictionary(kind):
            kind = self.plain(kind.value_type, column, depth + 1)
            return pa.large_string() if types.is_string(kind) else kind
        if types.is_string_view(kind):
            return pa.large_string()
        if types.is_binary_view(kind):
            return pa.large_binary()
        if types.is_struct(kind):
            return pa.struct([inner(field) for field in kind])
        if types.is_map(kind):
            return pa.map_(inner(kind.key_field), inner(kind.item_field))
        if types.is_list(kind):
            return pa.list_(inner(kind.value_field))
        if types.is_large_list(kind):
            return pa.large_list(inner(kind.value_field))
        if types.is_fixed_size_list(kind):
            return pa.list_(inner(kind.value_field), kind.list_size)
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        if storage != kind and self.plain(storage, column, depth + 1) == storage:
            return kind
        if storage != kind or types.is_nested(kind) or types.is_run_end_encoded(kind):
            raise self.refusal(
                f"column '{column}' has type {str(kind)[:60]}, which is not read; write it as "
                "plain values, lists or structs"
            )
        return kind

    def sizes(self) -> list[tuple[int, int]]:
        """(rows, uncompressed bytes) of each group."""
        if self.is_parquet:
            meta = self.reader.metadata
            groups = (meta.row_group(i) for i in range(meta.num_row_groups))
            return [(group.num_rows, group.total_byte_size) for group in groups]
        return [(batch.num_rows, batch.nbytes) for batch in self.groups()]

    def groups(self) -> Iterator[pa.RecordBatch]:
        """Record batches of an Arrow file, one by one."""
        is_stream = isinstance(self.reader, pa.ipc.RecordBatchStreamReader)
        self.group = 0
        with suppress(StopIteration):
            while is_stream or self.group < self.reader.num_record_batches:
                number = self.group
                batch = (
                    self.reader.read_next_batch() if is_stream else self.reader.get_batch(number)
                )
                batch.validate(full=True)
                yield batch
                self.group += 1

    def batches(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Rows [first, end), as they are encoded."""
        position = 0
        if not self.is_parquet:
            for batch in self.groups():
                if position >= end:
                    return
                start = max(first - position, 0)
                stop = min(end - position, batch.num_rows)
                for at in range(start, stop, _BATCH_ROWS):
                    yield batch.slice(at, min(_BATCH_ROWS, stop - at))
                position += batch.num_rows
            return
        for number, (num_rows, size) in enumerate(self.sizes()):
            self.group = number
            if first < position + num_rows and position < end:
                at_once = BATCH_BYTES * num_rows // max(size, 1)
                at = position
                for batch in self.reader.iter_batches(
                    min(max(at_once, 1), _BATCH_ROWS), row_groups=[number], use_threads=False
                ):
                    batch.validate(full=True)
                    start, stop = max(first - at, 0), min(end - at, batch.num_rows)
                    if start < stop:
                        yield batch.slice(start, stop - start)
                    at += batch.num_rows
                    if at >= end:
                        break
            position += num_rows

    def small(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Cut a plain batch until its parts are small; count them."""
        size = _ROW_BYTES * batch.num_rows + sum(map(_decoded_bytes, batch.columns))
        if size > BATCH_BYTES and batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from self.small(batch.slice(0, half))
            yield from self.small(batch.slice(half))
            return
        if size > MAX_ROW_BYTES:
            raise self.refusal(f"a row has {size:,} decoded bytes, over {MAX_ROW_BYTES:,}")
        self.count(size)
        yield batch

    def count(self, size: int) -> None:
        """Refuse the file when what was read of it comes to too much."""
        self.decoded += size
        if self.decoded > self.allowed:
            raise self.refusal(
                f"rows read together have over {self.allowed:,} decoded bytes (the limit is "
                f"{MAX_RATIO} for each stored byte, and at most {MAX_SHARD_DECODED_BYTES:,}): "
                "refused as a decompression bomb; if it is none, write it with smaller row groups, "
                "or as JSON Lines"
            )


def _decoded_bytes(array: Any) -> int:
    """Bytes of the values of a plain array, 8 for each value beside those of its text."""
    size: int = 8 * len(array)
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return size + _decoded_bytes(array.storage)
    if pa.types.is_map(kind):
        entries = pa.list_(pa.struct([kind.key_field, kind.item_field]))
        return size + _decoded_bytes(array.cast(entries))
    if pa.types.is_struct(kind):
        return size + sum(map(_decoded_bytes, array.flatten()))
    if pa.types.is_nested(kind):
        return size + _decoded_bytes(array.flatten())
    if kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        return size + (pc.sum(pc.binary_length(array)).as_py() or 0)
    return max(size, len(array) * kind.byte_width if pa.types.is_fixed_size_binary(kind) else 0)


def _answer(request: Request, file: Any) -> None:
    decoder = _Decoder(request, file)
    schema = decoder.plain_schema
    if "head" in request:
        sizes = decoder.sizes()
        first, end = 0, min(request["head"], sizes[0][0]) if sizes else 0
        facts = {"names": decoder.schema.names, "sizes": sizes}
        schema = schema.with_metadata({"facts": json.dumps(facts)})
        if not decoder.is_parquet:  # a stream is read once
            file.seek(0)
            decoder = _Decoder(request, file)
    else:
        first, end = request["rows"]
        decoder.count(_ROW_BYTES * (end - first))  # before any row of nothing is made
        decoder.decoded = 0
    out = pa.output_stream(sys.stdout.buffer)
    with pa.ipc.new_stream(out, schema) as writer:
        none = [pa.nulls(0, field.type) for field in schema]
        writer.write_batch(pa.record_batch(none, schema=schema))  # brings the facts
        for raw in decoder.batches(first, end):
            for batch in decoder.small(raw.cast(decoder.plain_schema)):
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def _main() -> None:
    request: Request = json.loads(sys.argv[1])
    with suppress(OSError, ValueError):  # no such limit on this system
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + DECODER_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    named = f"source file '{request['uri']}'"
    try:
        if request["path"] is None:
            from packhouse.sources.files import file_errors, open_file

            with file_errors(request["uri"]), open_file(request["uri"]) as file:
                _answer(request, pa.PythonFile(file, mode="r"))
        else:
            with pa.OSFile(request["path"]) as opened:
                _answer(request, opened)
        return
    except PackhouseError as raised:
        error = raised
    except MemoryError:
        error = SourceError(
            f"{named} does not decode within {DECODER_BYTES:,} bytes: refused as a decompression "
            "bomb; if it is none, write it again with smaller row groups and pages"
        )
    except (pa.ArrowException, OSError, RecursionError) as damage:
        said = str(damage).splitlines()[0] if str(damage) else type(damage).__name__
        kind = request["file_format"].capitalize()
        error = SourceError(f"{named} is damaged {kind}: {said[:500]}")
    sys.stderr.write(json.dumps([type(error).__name__, str(error)]) + "\n")
    sys.stderr.flush()
    os._exit(_EXIT_WITH_ERROR)  # at once: a large heap need not be taken apart


if __name__ == "__main__":
    _main()

"""Read a published file a row group at a time, in any order."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.errors import IntegrityError
from packhouse.loaders.copies import mapped_file, verified_file
from packhouse.store import FileEntry, OpenVersion
from packhouse.store.contracts import check_footer


class RowGroups:
    """The row groups of a published file; of an Arrow or JSON Lines file, its batches.

    Args:
        opened: the version.
        entry: one of its data files.
        cache: folder of local copies.
        verify: compare its sha256 once in this process.

    Raises:
        IntegrityError: the store's bytes are not the published ones, or no file of a run.
    """

    def __init__(self, opened: OpenVersion, entry: FileEntry, cache: Path, verify: bool) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._parquet: pq.ParquetFile | None = None
        self._uri = opened.uri(entry)
        if entry.key.endswith(".parquet"):
            path = verified_file(opened, entry, cache, verify)
            try:
                self._parquet = pq.ParquetFile(path, page_checksum_verification=True)
            except (pa.ArrowException, OSError) as error:
                raise IntegrityError(f"'{self._uri}' cannot be read: {error}") from None
            about = self._parquet.metadata
            check_footer(about, entry)
            sizes = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
        else:
            path = mapped_file(opened, entry, cache, verify)
            with pa.memory_map(str(path)) as source:
                self._batches = pa.ipc.open_stream(source).read_all().to_batches()
            sizes = [batch.num_rows for batch in self._batches]
        self.sizes: npt.NDArray[np.int64] = np.array(sizes, dtype=np.int64)
        """Rows of each group."""

    def read(self, group: int, columns: list[str] | None = None) -> pa.Table:
        """Return the rows of a group, all of their columns or some.

        Raises:
            IntegrityError: the file is damaged.
        """
        if self._parquet is None:
            table = pa.Table.from_batches([self._batches[group]])
            return table if columns is None else table.select(columns)
        try:
            table = self._parquet.read_row_group(group, columns)
        except MemoryError:  # of Arrow, too
            raise
        except (pa.ArrowException, OSError) as error:
            raise IntegrityError(f"'{self._uri}' cannot be read: {error}") from None
        return table

"""Write training receipts: which version, and how much of it, a checkpoint was trained on.

The state of a `StreamingPackedDataset` gives the number of packs of an epoch that all ranks
consumed together, and their order is a function of version, seed and epoch. The records before a
checkpoint therefore follow from the state alone, at any time and for any number of ranks. This
reads `record_ids` of the consumed packs, but no tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from packhouse.load.streaming import Reader, StreamingPackedDataset
from packhouse.system.disks import disk_errors, write_whole

RECEIPT = "packhouse-receipt.json"


def write_receipt(
    folder: str | Path,
    data: StreamingPackedDataset,
    state: Mapping[str, object],
    *,
    step: int | None = None,
) -> Path:
    """Write `packhouse-receipt.json` to a checkpoint folder; see `training_receipt`.

    Raises:
        ConfigError: the state does not belong to this dataset.
        DiskError: the folder cannot be written.

    Example:
        >>> from packhouse import StreamingPackedDataset, prepare
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     seq_len=128, format={"template": "alpaca"}, store=folder, progress=False)
        >>> data = StreamingPackedDataset(folder / "numbers", cache=folder / "cache")
        >>> write_receipt(folder / "checkpoint-7", data, data.state_dict(), step=7).name
        'packhouse-receipt.json'
    """
    path = Path(folder) / RECEIPT
    receipt = training_receipt(data, state, step=step)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(receipt, indent=2) + "\n").encode())
    return path


def training_receipt(
    data: StreamingPackedDataset, state: Mapping[str, Any], *, step: int | None = None
) -> dict[str, Any]:
    """Return what training had consumed when `state` was saved.

    Args:
        data: the training dataset, or one opened with the same arguments.
        state: result of its `state_dict` on rank 0.
        step: step of the trainer, copied into the receipt.

    Returns:
        Plain JSON: `dataset`, `version`, `content_id`, `manifest_id`, `state`, `step`; `packs` and
        `records` consumed in the current epoch, and `num_packs` per epoch; and `records_sha256`
        over the ids of these records, one per line, in training order. Earlier epochs consumed
        every pack, except those that `drop_uneven` left out.

    Raises:
        ConfigError: the state does not belong to this dataset.

    Example:
        >>> from packhouse import StreamingPackedDataset, prepare
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     seq_len=128, format={"template": "alpaca"}, store=folder, progress=False)
        >>> data = StreamingPackedDataset(folder / "numbers", cache=folder / "cache")
        >>> receipt = training_receipt(data, data.state_dict())
        >>> receipt["version"] == version.id, receipt["packs"]
        (True, 0)
    """
    digest, num_records = sha256(), 0
    for name in consumed_records(data, state):
        digest.update(f"{name}\n".encode())
        num_records += 1
    manifest = data.opened.manifest
    return {
        "dataset": manifest.dataset,
        "version": manifest.version,
        "content_id": manifest.content_id,
        "manifest_id": manifest.manifest_id,
        "step": step,
        "state": dict(state),
        "packs": min(state["packs"], data.num_rows),
        "num_packs": data.num_rows,
        "records": num_records,
        "records_sha256": digest.hexdigest(),
    }


def consumed_records(data: StreamingPackedDataset, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ids of the records that all ranks consumed in the epoch of a state, in order.

    Raises:
        ConfigError: the state does not belong to this dataset.

    Example:
        >>> from packhouse import StreamingPackedDataset, prepare
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> folder = getfixture("tmp_path")
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     seq_len=128, format={"template": "alpaca"}, store=folder, progress=False)
        >>> data = StreamingPackedDataset(folder / "numbers", cache=folder / "cache")
        >>> list(consumed_records(data, data.state_dict()))
        []
    """
    epoch, packs, _ = data.check_state(state)
    reader = _Names(data, epoch)
    return chain.from_iterable(reader.row(place) for place in range(min(packs, data.num_rows)))


class _Names(Reader):
    """Reads the record ids of packs instead of their tokens."""

    columns: ClassVar[list[str] | None] = ["record_ids"]

    @staticmethod
    @override
    def view(table: pa.Table, order: npt.NDArray[np.int64] | None) -> Sequence[list[str]]:
        names = table["record_ids"]
        rows: list[list[str]] = (
            names if order is None else names.take(pa.array(order))
        ).to_pylist()
        return rows

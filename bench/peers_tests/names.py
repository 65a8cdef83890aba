"""A pytest plugin that implements the names imported by a peer's tests with packhouse.

Test files stay unchanged. Each name only calls packhouse and converts shapes, so a test that needs
something packhouse does not do must fail.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse import pack_dataset
from packhouse.addons.exports import to_megatron, write_export
from packhouse.pack.strategies import plan_packs

_LIST = pa.list_(pa.int32())
_PACKS = pa.schema([(name, _LIST) for name in ("input_ids", "labels", "seq_lengths")])

Record = tuple[Sequence[int], Sequence[bool]]
"""Ids, and which of them are trained."""


def first_fit(
    seqlens: Sequence[Any], pack_size: int, *, item_lengths: Sequence[int] | None = None
) -> list[list[Any]]:
    return _packs("first_fit_shuffle", None, seqlens, pack_size, item_lengths)


def first_fit_decreasing(
    seqlens: Sequence[Any], pack_size: int, *, item_lengths: Sequence[int] | None = None
) -> list[list[Any]]:
    return _packs("first_fit", None, seqlens, pack_size, item_lengths)


def first_fit_shuffle(seqlens: Sequence[int], pack_size: int) -> list[list[int]]:
    return _packs("first_fit_shuffle", 0, seqlens, pack_size, None)


def create_packing_strategy(
    histogram: Sequence[int], pack_size: int, packing_algorithm: str = "first_fit"
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return packs of inputs with these lengths, and the metadata that the export writes."""
    lengths = [length for length, count in enumerate(histogram) for _ in range(count)]
    algorithm: Callable[..., list[list[int]]] = globals()[packing_algorithm]
    packs = algorithm(lengths, pack_size)
    # The export counts inputs, one less than the ids.
    rows = _pack_rows([[([7] * (n + 1), [True] * (n + 1)) for n in pack] for pack in packs])
    with tempfile.TemporaryDirectory() as folder:
        write_export(iter([rows]), "megatron", "test", Path(folder), seq_len=pack_size)
        (metadata,) = json.loads((Path(folder) / "test.metadata.json").read_text())
    return packs, metadata


def fill_packing_strategy(
    assignments: Sequence[Sequence[int]],
    sequences: dict[int, list[dict[str, Any]]],
    pack_size: int,
    pad_id: int,
) -> list[dict[str, Any]]:
    def trained(record: dict[str, Any]) -> list[bool]:
        mask: list[bool] | None = record.get("loss_mask")
        places = range(len(record["input_ids"]))
        return [n >= record["answer_start_idx"] for n in places] if mask is None else mask

    pools = {n: [(r["input_ids"], trained(r)) for r in each] for n, each in sequences.items()}
    rows = _pack_rows([[pools[length].pop() for length in pack] for pack in assignments])
    return [
        row | {"loss_mask": [bool(each) for each in row["loss_mask"]]}
        for row in to_megatron(rows).to_pylist()
    ]


def _absent(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("packhouse has no such function")


create_hist = calculate_avg_seqlen = get_seqlen_list = _absent


def _packs(
    strategy: str,
    seed: int | None,
    items: Sequence[Any],
    pack_size: int,
    lengths: Sequence[int] | None,
) -> list[list[Any]]:
    if lengths is not None and len(lengths) != len(items):
        raise ValueError("there must be the same number of entries")
    if not items:
        return []
    plan = plan_packs(np.array(items if lengths is None else lengths), pack_size, strategy, seed)
    packs = np.split(plan.order, plan.pack_offsets[1:-1])
    return [[items[number] for number in pack] for pack in packs]


def _pack_rows(packs: Sequence[Sequence[Record]]) -> pa.RecordBatch:
    rows = []
    for pack in packs:
        ids, labels = [], []
        for tokens, trained in pack:
            ids += tokens
            own = [t if m else -100 for t, m in zip(tokens, trained, strict=True)]
            labels += [-100, *own[1:]]  # the first token of a record is never trained
        rows.append({"input_ids": ids, "labels": labels, "seq_lengths": [len(r) for r, _ in pack]})
    return pa.RecordBatch.from_pylist(rows, _PACKS)


class MultiStorageClientFeature:
    """Part of Megatron-Core: reads from NVIDIA's own storage, which is off."""

    @staticmethod
    def is_enabled() -> bool:
        """Return False: it is off."""
        return False


class _StandIn(ModuleType):
    """A module in which every name is `object`, except the one that the reader of packs calls."""

    __path__: list[str] = []  # noqa: RUF012  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return globals().get(name, object)


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import modules of Megatron-Bridge from files in its checkout, if they are there.

    Packages are empty, because theirs import Megatron-Core, which is not installed. Modules missing
    from the checkout are empty too.
    """

    def __init__(self, source: Path) -> None:
        self._source = source

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "megatron":
            return None
        file = self._source.joinpath(*fullname.split(".")).with_suffix(".py")
        if file.is_file() and fullname.startswith("megatron.bridge."):
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def pytest_configure() -> None:
    """Replace the names before any test file is imported; the checkout is the current folder."""
    if Path("trl").is_dir():
        import trl.data_utils

        trl.data_utils.pack_dataset = pack_dataset
    if Path("src/megatron/bridge").is_dir():
        sys.meta_path.insert(0, _StandIns(Path("src").resolve()))
        sys.modules["megatron.bridge.data.packing.algorithms"] = sys.modules[__name__]

"""Published files that expand far beyond their size: reading them ends in an error."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from packhouse import StreamingPackedDataset, load_packed
from packhouse.addons.exports import export_version
from packhouse.cli import cli
from packhouse.errors import IntegrityError
from packhouse.pack.pack_columns import published_schema
from packhouse.records.table_schemas import QUARANTINED
from packhouse.store import LocalFile, open_store, publish_version, verify_version
from packhouse.store.version_reader import open_address

MIB = 2**20
PACKS = {
    "input_ids": [[7, 8, 9, 5, 6], [7, 8]],
    "labels": [[-100, 8, 9, -100, 6], [-100, 8]],
    "seq_lengths": [[3, 2], [2]],
    "record_ids": [["a", "b"], ["c"]],
}


def long_run() -> pa.Table:
    """100,000,000 equal ids in about 20 KB of Parquet."""
    table = pa.table(PACKS, schema=published_schema())
    ids = pa.array(np.zeros(100_000_000, np.int32))
    lists = pa.ListArray.from_arrays(pa.array([0, len(ids) - 2, len(ids)], pa.int32()), ids)
    field = table.schema.field(0)
    return table.set_column(0, field, lists.cast(field.type))


def shared_text() -> pa.Table:
    """Ten ids of 40 MB, stored as one dictionary entry."""
    text = "x" * 40 * MIB
    return pa.table({**PACKS, "record_ids": [[text] * 9, [text]]}, schema=published_schema())


def publish(folder: Path, table: pa.Table, tokens: int = 7, *, lies: bool = False) -> str:
    """Publish 2 rows with a manifest that claims 7 tokens, and return the address."""
    path = folder / "train.parquet"
    pq.write_table(table, path, compression="zstd", data_page_size=2**30)
    if lies:  # the footer counts 7 ids; numbers are varints of twice their value
        data = path.read_bytes()
        assert data.count(b"\x80\x84\xaf\x5f") > 2
        at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        footer = data[at:].replace(b"\x80\x84\xaf\x5f", b"\x8e\x80\x80\x00")
        path.write_bytes(data[:at] + footer)
    assert path.stat().st_size < MIB
    store = open_store(str(folder / "store"))
    file = LocalFile(path, "train", rows=2, tokens=tokens)
    publish_version(store, "bomb", "aaaa", [file], {"configuration": {}}, "latest")
    return f"{folder}/store/bomb"


@pytest.mark.parametrize("make", [long_run, shared_text])
def test_a_file_that_decodes_to_too_much_ends_in_an_error_that_names_it(
    make, tmp_path, monkeypatch
):
    monkeypatch.setenv("PACKHOUSE_CHILD_MEMORY_MB", "200")
    done = CliRunner().invoke(cli, ["inspect", publish(tmp_path, make())])

    assert done.exit_code not in (0, 1), done.output
    assert "needs more memory than its limit of 200 MB" in f"{done.output}{done.exception}"
    assert "train-00000-of-00001" in f"{done.output}{done.exception}"


def test_packs_with_more_tokens_than_in_the_manifest_are_not_decoded(tmp_path):
    address = publish(tmp_path, long_run())
    before = pa.default_memory_pool().max_memory()
    problem = "has 100,000,000 values, but the manifest says 7 tokens"

    (said,) = verify_version(open_address(address)).problems
    assert problem in said
    for read in (load_packed, lambda *a, **k: list(StreamingPackedDataset(*a, **k))):
        with pytest.raises(IntegrityError, match=problem):
            read(address, cache=tmp_path / "cache")
    assert pa.default_memory_pool().max_memory() - before < MIB


@pytest.mark.parametrize("told", [{"tokens": 100_000_000}, {"lies": True}])
def test_packs_are_decoded_in_a_worker_before_a_trainer_does(told, tmp_path, monkeypatch):
    """A manifest rewritten to match the file, and a footer that matches the manifest."""
    address = publish(tmp_path, long_run(), **told)
    monkeypatch.setenv("PACKHOUSE_CHILD_MEMORY_MB", "200")
    before = pa.default_memory_pool().max_memory()

    for read in (load_packed, lambda *a, **k: list(StreamingPackedDataset(*a, **k))):
        with pytest.raises(IntegrityError, match="needs more memory than its limit of 200 MB"):
            read(address, cache=tmp_path / "cache")
    too_much = "needs more memory than its limit of 200 MB"
    (said,) = verify_version(open_address(address)).problems
    assert too_much in said
    with pytest.raises(IntegrityError, match=too_much):
        export_version(open_address(address), "trl", tmp_path / "out", cache=tmp_path / "cache")
    monkeypatch.setenv("PACKHOUSE_CHILD_MEMORY_MB", "4000")
    with pytest.raises(
        IntegrityError, match=r"decodes to 400,.* the limit of a stream is 268,435,456"
    ):
        list(StreamingPackedDataset(address, cache=tmp_path / "cache"))
    assert pa.default_memory_pool().max_memory() - before < MIB


def test_a_bomb_for_a_quarantine_file_is_refused_in_little_memory(tmp_path):
    row = {name: "a" for name in QUARANTINED.names}
    row |= {"row": 0, "byte_offset": 0, "raw": b"", "raw_size": 0}
    table = pa.Table.from_pylist([row] * 2000, QUARANTINED)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), ["x" * 2**20])
    at = QUARANTINED.names.index("detail")
    pq.write_table(
        table.set_column(at, "detail", texts),
        tmp_path / "bad.parquet",
        store_schema=False,
        dictionary_pagesize_limit=2**26,
    )
    assert (tmp_path / "bad.parquet").stat().st_size < 2**20  # of 2 GB
    done = CliRunner().invoke(cli, ["quarantine", "ls", str(tmp_path / "bad.parquet")])
    assert done.exit_code == 2
    assert "memory" in done.output


def test_an_arrow_file_whose_offsets_decrease_is_reported_by_the_audit(tmp_path):
    offsets = pa.array([0, 8, 4, 6], pa.int32()).buffers()[1]
    ids = pa.array(range(10), pa.int32())
    lists = pa.Array.from_buffers(pa.list_(pa.int32()), 3, [None, offsets], children=[ids])
    batch = pa.record_batch({"input_ids": lists})
    path = tmp_path / "rows.arrow"
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, batch.schema) as writer:
        writer.write_batch(batch)
    done = CliRunner().invoke(
        cli, ["audit", str(path), "--tokenizer", "deployments/demo/tokenizer"]
    )
    assert done.exit_code == 3
    assert "rows.arrow' cannot be read: In column 0: Invalid: Offset invariant" in done.output


@pytest.mark.parametrize(
    "line",
    [
        {"source": 5, "row": 0, "step": "validate", "raw": "a"},
        {"source": "rows/x", "row": [1], "step": "validate", "raw": {}},
        {"source": "rows/x", "row": "z", "step": "validate", "raw": None},
        {"source": "rows/x", "row": 0, "step": {}, "raw": "a"},
    ],
)
def test_an_edited_line_with_other_types_is_refused(line, tmp_path):
    (tmp_path / "bad.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    recipe = {"dataset": "d", "tokenizer": "deployments/demo/tokenizer"}
    recipe |= {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    words = ["quarantine", "retry", str(tmp_path / "recipe.yaml")]
    words += ["--from", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "line 1 of the edited rows: " in done.output

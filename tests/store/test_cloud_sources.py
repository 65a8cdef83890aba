"""Sources on S3, gs:// and az://: files, folders and globs give the same rows as local ones."""

import gzip
import io

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhouse.errors import SourceError
from packhouse.read import read_shard, scan_source
from packhouse.read.source_files import find_files, pin_of
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.store import open_store

ROWS = [{"instruction": f"q{i}", "input": "", "output": "a" * 50} for i in range(200)]
LINES = b"".join(orjson.dumps(row) + b"\n" for row in ROWS)


pytestmark = pytest.mark.parametrize(
    "root", ["s3", "gcs", pytest.param("azure", marks=pytest.mark.e2e)], indirect=True
)


def validated(path):
    config = SourceConfig(path=str(path), name="rows", format="alpaca")
    shards = scan_source(config, max_shard_bytes=10_000)
    tables = [read_shard(each, config, ValidateConfig(), "prompt").validated for each in shards]
    return [(each.file, each.identity()) for each in shards], pa.concat_tables(tables)


def test_files_folders_and_globs_give_the_rows_of_local_files(root, tmp_path):
    parquet = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    files = {
        "one/rows.jsonl": LINES,
        "one/deep/more.jsonl.gz": gzip.compress(LINES),
        "one/rows.parquet": parquet.getvalue(),
        "one/README.md": b"not data",
    }
    store = open_store(root)
    for name, data in files.items():
        store.put_create(name, data)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)

    for path in ("one/rows.jsonl", "one", "one/*.parquet"):
        found, rows = validated(f"{root}/{path}")
        local, of_local = validated(tmp_path / path)
        assert (found, len(rows)) == (local, len(of_local))
        assert rows["messages"].equals(of_local["messages"])
        assert rows["record_id"].equals(of_local["record_id"])
    folder = find_files(SourceConfig(path=f"{root}/one/"))
    assert [file.name for file in folder] == ["deep/more.jsonl.gz", "rows.jsonl", "rows.parquet"]


def test_a_file_that_changed_since_the_scan_is_refused(root):
    store = open_store(root)
    tag = store.put_create("rows.jsonl", LINES)
    config = SourceConfig(path=f"{root}/rows.jsonl")
    [shard] = scan_source(config)
    [listed] = find_files(SourceConfig(path=root))
    assert pin_of(config.path) == (listed.size, listed.pin) == (len(LINES), listed.pin)
    store.put_if_match("rows.jsonl", LINES.replace(b"q1", b"Q1"), tag)

    assert pin_of(config.path)[1] != listed.pin
    with pytest.raises(SourceError, match="changed since it was scanned"):
        read_shard(shard, config, ValidateConfig(), "prompt")


def test_what_is_not_there_is_an_error_that_names_it(root):
    open_store(root).put_create("one/README.md", b"not data")
    with pytest.raises(SourceError, match=r"no/such\.jsonl. does not exist"):
        scan_source(SourceConfig(path=f"{root}/no/such.jsonl"))
    for path in ("no/*.jsonl", "one"):
        with pytest.raises(SourceError, match="matches no files"):
            scan_source(SourceConfig(path=f"{root}/{path}"))


def test_a_bucket_that_is_not_there_is_an_error_and_no_fault_to_try_again(root):
    scheme = root.partition("://")[0]
    said = r"no access to source file .*no-such/rows\.jsonl.: .*404"
    if scheme == "s3":
        said = r"no-such/rows\.jsonl. does not exist"
    with pytest.raises(SourceError, match=said):
        scan_source(SourceConfig(path=f"{scheme}://no-such/rows.jsonl"))

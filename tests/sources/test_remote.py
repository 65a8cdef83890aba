"""Sources on S3, against a server in this process; Hub paths without a network."""

import gzip

import orjson
import pytest

from packhouse.errors import SourceError
from packhouse.read import read_shard, scan_source
from packhouse.recipe import SourceConfig, ValidateConfig
from tests.moto_s3 import s3_client

ROWS = b"".join(
    orjson.dumps({"instruction": f"q{i}", "input": "", "output": "a" * 50}) + b"\n"
    for i in range(200)
)


@pytest.fixture(scope="module")
def client():
    with s3_client("raw") as client:
        yield client


def put(client, key, data):
    client.put_object(Bucket="raw", Key=key, Body=data)


def test_s3_files_give_the_rows_of_local_ones(client, tmp_path, read):
    put(client, "one/rows.jsonl", ROWS)
    put(client, "one/more.jsonl.gz", gzip.compress(ROWS))
    put(client, "one/README.md", b"not data")
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    local = read(tmp_path / "rows.jsonl", name="rows", max_shard_bytes=5000)

    file = read("s3://raw/one/rows.jsonl", max_shard_bytes=5000)
    folder = read("s3://raw/one", name="both")
    glob = read("s3://raw/one/*.jsonl", name="rows")

    assert [s.identity() for s in file.shards] == [s.identity() for s in local.shards]
    assert file.validated.equals(local.validated)
    assert [s.file for s in folder.shards] == ["both/more.jsonl.gz", "both/rows.jsonl"]
    assert glob.validated.equals(local.validated)


def test_an_s3_file_that_changed_since_the_scan_is_refused(client):
    put(client, "two/rows.jsonl", ROWS)
    config = SourceConfig(path="s3://raw/two/rows.jsonl")
    [shard] = scan_source(config)
    put(client, "two/rows.jsonl", ROWS.replace(b"q1", b"Q1"))

    with pytest.raises(SourceError, match="changed since it was scanned"):
        read_shard(shard, config, ValidateConfig(), "prompt")


def test_a_missing_object_on_s3_is_named(client):
    with pytest.raises(SourceError, match=r"s3://raw/no/such\.jsonl. does not exist"):
        scan_source(SourceConfig(path="s3://raw/no/such.jsonl"))
    with pytest.raises(SourceError, match="matches no files"):
        scan_source(SourceConfig(path="s3://raw/no/*.jsonl"))

"""Load versions from S3, with a server in this process."""

import pickle

import pytest

from packhouse import StreamingPackedDataset, load_packed
from packhouse.errors import IntegrityError
from packhouse.store import open_version
from tests.moto_s3 import s3_client


@pytest.fixture(scope="module")
def client():
    with s3_client("versions") as client:
        yield client


@pytest.fixture(scope="module")
def uri(client, make_version):
    return make_version(rows_per_file=5, root="s3://versions/store")


def test_a_version_on_s3_gives_the_rows_of_a_local_one_and_is_fetched_once(
    uri, client, make_version, tmp_path
):
    data = load_packed(uri, cache=tmp_path)

    local = load_packed(make_version(rows_per_file=5), cache=tmp_path / "local")
    assert data.to_list() == local.to_list()
    assert not list((tmp_path / "loaded").glob("*.parquet"))  # only the mapped rows are kept

    opened = open_version("s3://versions/store", "made")
    for entry in opened.files():
        client.delete_object(Bucket="versions", Key=f"store/{opened.key(entry)}")
    again = load_packed(uri, cache=tmp_path)
    assert again.to_list() == data.to_list()


def test_worker_processes_open_a_client_of_their_own(client, make_version, tmp_path):
    uri = make_version(num_records=40, rows_per_file=5, root="s3://versions/workers")
    dataset = StreamingPackedDataset(uri, cache=tmp_path / "parent")
    spawned = pickle.loads(pickle.dumps(dataset))  # noqa: S301  (as DataLoader does)
    assert [row["input_ids"].tolist() for row in spawned] == [
        row["input_ids"].tolist() for row in dataset
    ]
    held = dataset._opened.store
    iter(dataset)
    assert dataset._opened.store is held
    dataset._process += 1  # for a forked worker
    assert len(list(dataset)) == dataset.num_rows
    assert dataset._opened.store is not held


def test_a_damaged_object_is_never_read(client, make_version, tmp_path):
    uri = make_version(num_records=80, root="s3://versions/bad")
    opened = open_version("s3://versions/bad", "made")
    (entry,) = opened.files()
    key = f"bad/{opened.key(entry)}"
    body = bytearray(client.get_object(Bucket="versions", Key=key)["Body"].read())
    body[len(body) // 2] ^= 1
    client.put_object(Bucket="versions", Key=key, Body=bytes(body))

    with pytest.raises(IntegrityError, match="is damaged"):
        load_packed(uri, cache=tmp_path)
    with pytest.raises(IntegrityError, match="is damaged"):
        list(StreamingPackedDataset(uri, cache=tmp_path))

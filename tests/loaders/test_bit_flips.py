"""A failing disk: bits of files flip while their size and modification time stay the same.

Each load runs in a separate process, as a training run does.
"""

import hashlib
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from packhouse import load_packed
from packhouse.errors import IntegrityError
from tests.forked import forks_of


@pytest.fixture(scope="module")
def fresh_process():
    """Call a function in a new process; each starts with everything imported and nothing opened."""
    context = forks_of(__name__, "datasets", "packhouse.load.streaming")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def load(uri, cache, verify=True):
    return digest(load_packed(uri, cache=cache, verify=verify).to_list())


def stream(uri, cache, verify=True):
    from packhouse.load.streaming import StreamingPackedDataset

    rows = StreamingPackedDataset(uri, cache=cache, verify=verify, shuffle=False, prefetch=0)
    return digest([{name: values.tolist() for name, values in row.items()} for row in rows])


def digest(rows):
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def rot(path):
    """Flip a bit in the middle and keep size and modification time."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def stream_remote(uri, cache):
    """Stream as from s3://, where files are downloaded; here a folder plays the store."""
    from packhouse.load import mapped_rows

    mapped_rows.LocalStore = type("NoFolder", (), {})  # in this process only
    return stream(uri, cache)


@pytest.mark.parametrize(
    ("read", "pattern"),
    [(load, "*-rows*.arrow"), (load, "*-rows*.json"), (stream_remote, "*.parquet")],
    ids=["rows", "receipt", "downloaded copy"],
)
def test_a_flip_in_a_file_of_the_cache_is_repaired(
    make_version, tmp_path, fresh_process, read, pattern
):
    uri, cache = make_version(), tmp_path / "cache"
    good = fresh_process(read, uri, cache)
    (file,) = (cache / "loaded").glob(pattern)
    whole = file.read_bytes()
    rot(file)
    assert fresh_process(read, uri, cache) == good
    assert file.suffix == ".json" or file.read_bytes() == whole


@pytest.mark.parametrize("read", [load, stream])
def test_a_flip_in_a_local_store_is_named_with_a_remedy(
    make_version, tmp_path, fresh_process, read
):
    uri, cache = make_version(), tmp_path / "cache"
    good = fresh_process(read, uri, cache)
    (data,) = Path(uri).glob("v/*/data/*.parquet")
    for rows in (cache / "loaded").glob("*-rows*.arrow"):
        rows.unlink()  # otherwise the published file is not read
    rot(data)
    with pytest.raises(IntegrityError, match="does not hold the published bytes") as caught:
        fresh_process(read, uri, cache)
    assert data.name in str(caught.value)
    assert "Restore it, or publish the version again" in str(caught.value)
    rot(data)  # as it was
    assert fresh_process(read, uri, cache) == good


def test_turned_off_it_trusts_size_and_time(make_version, tmp_path, fresh_process):
    """The switch works, so the tests above really check what they claim."""
    uri, cache = make_version(), tmp_path / "cache"
    good = fresh_process(load, uri, cache)
    (rows,) = (cache / "loaded").glob("*-rows*.arrow")
    rot(rows)  # token ids
    assert fresh_process(load, uri, cache, False) != good
    assert fresh_process(load, uri, cache) == good

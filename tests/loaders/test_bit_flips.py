"""A failing disk: bits of files flip while their size and modification time stay the same.

Each load runs in a separate process, as a training run does.
"""

import hashlib
import os
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from packhouse import load_packed
from packhouse.errors import IntegrityError
from tests.forked import forks_of

FLIPS = int(os.environ.get("PACKHOUSE_FLIPS", "2"))


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


def rot(path, bit):
    """Flip a bit and keep size and modification time."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.chmod(0o644)
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def bits_of(path):
    return random.Random(0).sample(range(path.stat().st_size * 8), FLIPS)


def test_a_flip_in_the_cached_rows_is_repaired(make_version, tmp_path, fresh_process):
    uri, cache = make_version(), tmp_path / "cache"
    good = fresh_process(load, uri, cache)
    (rows,) = (cache / "loaded").glob("*-rows*.arrow")
    whole = rows.read_bytes()
    for bit in bits_of(rows):
        rot(rows, bit)
        assert fresh_process(load, uri, cache) == good, bit
        assert rows.read_bytes() == whole


@pytest.mark.parametrize("read", [load, stream])
def test_a_flip_in_a_local_store_is_named_with_a_remedy(
    make_version, tmp_path, fresh_process, read
):
    uri, cache = make_version(), tmp_path / "cache"
    good = fresh_process(read, uri, cache)
    (data,) = Path(uri).glob("v/*/data/*.parquet")
    whole, stat = data.read_bytes(), data.stat()
    for rows in (cache / "loaded").glob("*-rows*.arrow"):
        rows.unlink()  # otherwise the published file is not read
    for bit in bits_of(data):
        rot(data, bit)
        with pytest.raises(IntegrityError, match="does not hold the published bytes") as caught:
            fresh_process(read, uri, cache)
        assert data.name in str(caught.value)
        assert "Restore it, or publish the version again" in str(caught.value)
        data.write_bytes(whole)
        os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fresh_process(read, uri, cache) == good


def test_a_flip_in_a_receipt_of_the_cache_is_repaired(make_version, tmp_path, fresh_process):
    uri, cache = make_version(), tmp_path / "cache"
    good = fresh_process(load, uri, cache)
    (receipt,) = (cache / "loaded").glob("*-rows*.json")
    for bit in bits_of(receipt):
        rot(receipt, bit)
        assert fresh_process(load, uri, cache) == good, bit


def test_a_flip_in_a_downloaded_copy_is_fetched_again(make_version, tmp_path, fresh_process):
    uri, cache = make_version(), tmp_path / "cache"
    good = fresh_process(stream_remote, uri, cache)
    (copy,) = (cache / "loaded").glob("*.parquet")
    whole = copy.read_bytes()
    for bit in bits_of(copy):
        rot(copy, bit)
        assert fresh_process(stream_remote, uri, cache) == good, bit
        assert copy.read_bytes() == whole


def stream_remote(uri, cache):
    """Stream as from s3://, where files are downloaded; here a folder plays the store."""
    from packhouse.load import mapped_rows

    mapped_rows.LocalStore = type("NoFolder", (), {})  # in this process only
    return stream(uri, cache)


def test_turned_off_it_trusts_size_and_time(make_version, tmp_path, fresh_process):
    """The switch works, so the tests above really check what they claim."""
    uri, cache = make_version(), tmp_path / "cache"
    good = fresh_process(load, uri, cache)
    (rows,) = (cache / "loaded").glob("*-rows*.arrow")
    rot(rows, rows.stat().st_size * 4)  # in the middle: token ids
    assert fresh_process(load, uri, cache, False) != good
    assert fresh_process(load, uri, cache) == good

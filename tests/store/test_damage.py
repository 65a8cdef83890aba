"""Every flipped bit is found: in data, manifest, ref, and in a pulled copy."""

import hashlib
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from packhouse.errors import IntegrityError, PackhouseError
from packhouse.store import open_version, publish_version, pull_version, verify_version
from tests.store.versions import FACTS, pack_file

FLIPS = int(os.environ.get("PACKHOUSE_FLIPS", "10"))  # of each kind


@pytest.fixture
def store(store, tmp_path):
    publish_version(store, "tiny", "aaaa", [pack_file(tmp_path)], FACTS, "latest")
    return store


@pytest.mark.parametrize("place", ["data/*", "manifest.json", "card/*", "../../refs/latest.json"])
def test_every_flipped_bit_in_the_store_is_found(store, place):
    (path,) = (store.root / "tiny/v/aaaa.g0").glob(place)
    assert (
        flips_found(path, lambda: verify_version(open_version(store, "tiny"), num_threads=1))
        == FLIPS
    )


def test_every_flipped_bit_in_a_pulled_copy_is_fixed_by_another_pull(store, tmp_path):
    opened = open_version(store, "tiny")
    folder = pull_version(opened, tmp_path / "copy", num_threads=1)
    (path,) = (folder / "data").iterdir()
    whole, chooser = path.read_bytes(), random.Random(0)
    for _ in range(FLIPS):
        path.write_bytes(flipped(whole, chooser.randrange(len(whole) * 8)))
        pull_version(opened, folder, num_threads=1)
        assert path.read_bytes() == whole


def test_a_damaged_manifest_of_a_pulled_copy_shows_how_to_fix_it(store, tmp_path):
    opened = open_version(store, "tiny")
    folder = pull_version(opened, tmp_path / "copy")
    (folder / "manifest.json").write_bytes(b'{"half')
    with pytest.raises(IntegrityError, match="Delete it and pull again"):
        pull_version(opened, folder)
    (folder / "manifest.json").unlink()
    pull_version(opened, folder)


def test_pulls_to_one_folder_at_once_do_not_mix_their_bytes(store, tmp_path, monkeypatch):
    """Each pull resumes a partial download; without a lock, both append to the same file."""
    download = type(store).download
    together = threading.Barrier(2)

    def slow(self, key, path, offset=0, end=None):
        with suppress(threading.BrokenBarrierError):  # alone, as it should be
            together.wait(timeout=0.2)
        download(self, key, path, offset, end)
        with suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.2)

    monkeypatch.setattr(type(store), "download", slow)
    opened, dest = open_version(store, "tiny"), tmp_path / "copy"
    with ThreadPoolExecutor(4) as pool:
        pulls = [pool.submit(pull_version, opened, dest, num_threads=1) for _ in range(4)]
        assert [pull.result() for pull in pulls] == [dest] * 4
    left = sorted(path.name for path in dest.rglob("*") if path.is_file())
    assert left == ["README.md", "manifest.json", opened.files()[0].key.rpartition("/")[2]]
    for entry in opened.manifest.files:
        assert hashlib.sha256((dest / entry.path).read_bytes()).hexdigest() == entry.sha256


def flips_found(path, look):
    """Return how many of `FLIPS` different single-bit changes a check of the version finds."""
    whole, found = path.read_bytes(), 0
    bits = random.Random(0).sample(range(len(whole) * 8), FLIPS)
    for bit in bits:
        path.write_bytes(flipped(whole, bit))
        try:
            found += not look().is_intact
        except PackhouseError:
            found += 1
    path.write_bytes(whole)
    assert look().is_intact
    return found


def flipped(whole, bit):
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)

"""Reading columns of published files: the bytes fetched, and files that cannot be parsed."""

import io
import os
import random
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhouse.addons.ask import duckdb_queries as questions
from packhouse.addons.ask.duckdb_queries import fetch_columns, read
from packhouse.errors import DiskError, IntegrityError, PackhouseError, VersionNotFoundError
from packhouse.store import LocalFile, OpenVersion, open_version, publish_version
from packhouse.store.local_folder import LocalStore
from packhouse.store.object_store import ObjectStore, Part
from tests.prepared import python
from tests.store.versions import FACTS, pack_file

ROWS = 40_000
TAIL = 2**16


def records(seed: int = 0) -> pa.Table:
    """A column of 40 incompressible bytes per row, between two small ones."""
    chosen = np.random.default_rng(seed)
    return pa.table(
        {
            "source": ["a/a.jsonl"] * ROWS,
            "record_id": [chosen.bytes(20).hex() for _ in range(ROWS)],
            "outcome": ["kept", "duplicate"] * (ROWS // 2),
            "num_tokens": pa.array(np.arange(ROWS) % 100, pa.int32()),
        }
    )


@pytest.fixture(scope="module")
def content() -> bytes:
    written = io.BytesIO()
    pq.write_table(records(), written, row_group_size=10_000, write_page_checksum=True)
    return written.getvalue()


@pytest.fixture
def publish(tmp_path: Path) -> Callable[[bytes], OpenVersion]:
    def publish(content: bytes, rows: int = ROWS) -> OpenVersion:
        path = tmp_path / "records.parquet"
        path.write_bytes(content)
        files = [pack_file(tmp_path), LocalFile(path, "all", rows=rows, tokens=0, kind="records")]
        publish_version(LocalStore(tmp_path / "store"), "tiny", "aaaa", files, FACTS, "latest")
        return open_version(str(tmp_path / "store"), "tiny")

    return publish


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Start and length of each range requested from a folder."""
    requests = []
    get_range = LocalStore.get_range

    def noted(self: LocalStore, key: str, start: int, length: int) -> Part:
        requests.append((start, length))
        return get_range(self, key, start, length)

    monkeypatch.setattr(LocalStore, "get_range", noted)
    return requests


def place(opened: OpenVersion) -> Path:
    (entry,) = opened.files("records")
    return LocalStore(Path(opened.store.uri)).path(opened.key(entry))


def chunks(content: bytes, *names: str) -> list[tuple[int, int]]:
    """Return the positions of columns, as bytes [start, end)."""
    footer, found = pq.read_metadata(io.BytesIO(content)), []
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for chunk in map(group.column, range(footer.num_columns)):
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            if chunk.path_in_schema in names:
                found.append((start, start + chunk.total_compressed_size))
    return found


def test_every_store_gives_ranges_and_tells_when_an_object_changed(any_store: ObjectStore) -> None:
    any_store.put_create("d/x", bytes(range(200)))
    first, second = any_store.get_range("d/x", 0, 7), any_store.get_range("d/x", 190, 10)
    assert (first.data, second.data) == (bytes(range(7)), bytes(range(190, 200)))
    assert (first.size, second.size) == (200, 200)
    assert first.tag == second.tag
    assert any_store.get_range("d/x", 190, 50).data == bytes(range(190, 200))

    any_store.delete("d/x")
    any_store.put_create("d/x", bytes(100))
    short = any_store.get_range("d/x", 0, 7)
    assert (short.size, short.tag == first.tag) == (100, False)


def test_only_the_requested_columns_are_fetched(publish, asked, content, tmp_path):
    opened = publish(content)
    files, num_bytes = fetch_columns(opened, {"records": ["num_tokens"]}, tmp_path / "copies")

    wanted = chunks(content, "num_tokens")
    ((path, split),) = files["records"]
    assert split == "all"
    assert asked == [(len(content) - TAIL, TAIL), *((a, b - a) for a, b in wanted[:-1])]
    assert wanted[-1][0] > len(content) - TAIL  # came with the footer
    assert num_bytes == sum(length for _, length in asked) < len(content) / 8
    held = np.frombuffer(path.read_bytes(), np.uint8)
    due = np.frombuffer(content, np.uint8).copy()
    for start, end in chunks(content, "record_id"):
        due[start : min(end, len(content) - TAIL)] = 0
    for start, end in chunks(content, "source", "outcome"):
        assert not held[start : min(end, len(content) - TAIL)].any()
        due[start : min(end, len(content) - TAIL)] = 0
    assert (held == due)[4:].all()  # `PAR1` at the start was not requested


def test_small_files_are_fetched_whole_with_their_digest(publish, asked, content, tmp_path):
    opened = publish(content)
    data = opened.files("data")[0]
    _, num_bytes = fetch_columns(opened, {"data": ["seq_lengths"]}, tmp_path / "copies")
    assert asked == []
    assert num_bytes == data.size
    path = LocalStore(Path(opened.store.uri)).path(opened.key(data))
    path.write_bytes(bytes(data.size))
    with pytest.raises(IntegrityError, match="SHA-256"):
        fetch_columns(opened, {"data": ["seq_lengths"]}, tmp_path / "others")


def test_large_columns_are_read_in_parts_that_memory_holds(publish, asked, content, monkeypatch):
    monkeypatch.setattr(questions, "_PART_BYTES", 100_000)
    found = read(publish(content), "SELECT record_id FROM records")
    assert max(length for _, length in asked) == 100_000
    assert found["record_id"].to_pylist() == records()["record_id"].to_pylist()


def test_a_footer_longer_than_the_tail_is_fetched_to_its_beginning(publish, asked, tmp_path):
    written = io.BytesIO()
    pq.write_table(records(), written, row_group_size=100, write_page_checksum=True)
    content = written.getvalue()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    assert footer > TAIL
    found = read(publish(content), "SELECT outcome FROM records")
    assert asked[:2] == [(len(content) - TAIL, TAIL), (len(content) - footer, footer - TAIL)]
    assert found["outcome"].to_pylist() == ["kept", "duplicate"] * (ROWS // 2)


def test_a_damaged_page_of_a_column_asked_for_names_the_file(publish, content):
    opened = publish(content)
    (_, end), *_ = chunks(content, "num_tokens")
    damaged = bytearray(content)
    damaged[end - 9] ^= 1
    place(opened).write_bytes(damaged)
    with pytest.raises(IntegrityError, match=r"'all-00000-of-00001-\w+\.parquet' cannot be"):
        read(opened, "SELECT num_tokens FROM records")
    assert read(opened, "SELECT outcome FROM records").num_rows == ROWS


def test_no_damaged_bit_gives_another_answer(publish, content):
    """Damage to parts without a checksum too: the footer, and the headers of pages."""
    opened = publish(content)
    due = read(opened, "SELECT outcome, num_tokens FROM records")
    footer = len(content) - int.from_bytes(content[-8:-4], "little") - 8
    places = list(range(footer, len(content)))
    for start, _ in chunks(content, "outcome", "num_tokens"):
        places += range(start, start + 40)
    chosen = random.Random(0)
    refused = 0
    for at in chosen.sample(places, 10):
        damaged = bytearray(content)
        damaged[at] ^= 1 << chosen.randrange(8)
        place(opened).write_bytes(damaged)
        try:
            assert read(opened, "SELECT outcome, num_tokens FROM records").equals(due), at
        except IntegrityError:
            refused += 1
    assert 2 < refused < 9  # statistics, names of writers and other columns are not read


@pytest.mark.parametrize(
    ("before", "size", "message"),
    [(0, 40_000, "has 40,000 bytes"), (1, 40_000, "has 40,000"), (1, 2**30, "was replaced")],
)
def test_an_object_that_changes_while_it_is_read_is_an_error(
    publish, content, monkeypatch, before, size, message
):
    opened = publish(content)
    path, get_range, calls = place(opened), LocalStore.get_range, []

    def changed(self: LocalStore, key: str, start: int, length: int) -> Part:
        if len(calls) == before:
            path.write_bytes(content[-size:])
        calls.append(start)
        return get_range(self, key, start, length)

    monkeypatch.setattr(LocalStore, "get_range", changed)
    monkeypatch.setattr(questions, "_THREADS", 1)
    with pytest.raises(IntegrityError, match=message):
        read(opened, "SELECT num_tokens FROM records")


def test_a_store_that_gives_less_than_it_was_asked_for_is_named(publish, content, monkeypatch):
    opened, get_range = publish(content), LocalStore.get_range

    def short(self: LocalStore, key: str, start: int, length: int) -> Part:
        return replace(get_range(self, key, start, length), data=b"PAR1")

    monkeypatch.setattr(LocalStore, "get_range", short)
    with pytest.raises(IntegrityError, match="returned 4 of the 65,536 requested bytes"):
        read(opened, "SELECT num_tokens FROM records")


def test_a_disk_that_cannot_take_a_copy_is_named_and_nothing_is_left(publish, content, tmp_path):
    opened = publish(content)
    (tmp_path / "tmp").mkdir()
    ask = "import sys; from packhouse.cli import cli; cli(['stats', sys.argv[1]])"
    done = python(
        *("-c", ask, f"{opened.store.uri}/tiny"),
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2**16, 2**16)),
    )
    assert done.returncode == DiskError.exit_code, done.stderr
    assert "File too large" in done.stderr
    assert "set TMPDIR to another folder" in done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_object_that_is_gone_is_named(publish, content):
    opened = publish(content)
    place(opened).unlink()
    with pytest.raises(VersionNotFoundError, match="is missing"):
        read(opened, "SELECT num_tokens FROM records")


def test_footers_of_other_rows_are_refused(publish, content):
    opened = publish(content, ROWS - 1)
    with pytest.raises(IntegrityError, match="40,000 rows; the manifest says 39,999"):
        read(opened, "SELECT num_tokens FROM records")


@pytest.mark.parametrize("end", [b"\xff\xff\xff\xffPAR1", b"\xff\xff\xff\x7fPAR1", b"\0\0\0\0PARE"])
def test_an_end_that_is_no_footer_is_refused(publish, asked, content, end):
    opened = publish(content[:-8] + end)
    with pytest.raises(IntegrityError, match="has no Parquet footer"):
        read(opened, "SELECT num_tokens FROM records")
    assert asked == [(len(content) - TAIL, TAIL)]


def test_footers_are_parsed_in_the_child_alone(publish, content, monkeypatch):
    def parsed(*_: object) -> None:
        raise AssertionError("the parent parses an untrusted footer")

    monkeypatch.setattr(pq, "read_metadata", parsed)
    monkeypatch.setattr(pq, "ParquetFile", parsed)
    opened = publish(content)
    assert read(opened, "SELECT num_tokens FROM records").num_rows == ROWS
    noise = bytearray(content)
    noise[-3000:-8] = random.Random(0).randbytes(2992)
    place(opened).write_bytes(noise)
    with pytest.raises(PackhouseError):
        read(opened, "SELECT num_tokens FROM records")

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from packhouse import load_packed
from packhouse.errors import ConfigError, DiskError, IntegrityError, VersionNotFoundError
from packhouse.store import pull_version
from packhouse.store.version_reader import open_address
from packhouse.system import worker
from packhouse.system.plugins import pip_install

COLUMNS = ["input_ids", "labels", "seq_lengths", "record_ids", "position_ids"]


def test_a_version_loads_mapped_with_positions_that_the_files_do_not_hold(make_version, tmp_path):
    data = load_packed(make_version(rows_per_file=5), cache=tmp_path)

    assert data.column_names == COLUMNS
    assert data.num_rows == 16
    row = data[0]
    assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"])
    assert row["position_ids"] == [p for n in row["seq_lengths"] for p in range(n)]
    assert data.info.description.startswith("packhouse made ")
    assert len(data.cache_files) == 4  # mapped, not read into memory


@pytest.mark.parametrize(
    "publish",
    [
        {"layout": "compact"},
        {"position_ids": True},
        {"file_format": "arrow"},
        {"file_format": "jsonl", "layout": "compact"},
    ],
)
def test_every_layout_and_format_gives_the_same_rows(make_version, tmp_path, publish):
    plain = load_packed(make_version(), cache=tmp_path)

    assert load_packed(make_version(**publish), cache=tmp_path).to_list() == plain.to_list()


def test_versions_are_named_by_ref_version_or_id(make_version, tmp_path):
    root = tmp_path / "store"
    make_version(num_records=20, root=root)
    uri = make_version(num_records=30, root=root)

    assert sum(map(len, load_packed(uri, cache=tmp_path)["record_ids"])) == 30
    for name in ("00000014", "00000014.g0"):
        assert sum(map(len, load_packed(uri, name, cache=tmp_path)["record_ids"])) == 20
    assert sum(map(len, load_packed(f"{uri}@00000014", cache=tmp_path)["record_ids"])) == 20
    with pytest.raises(VersionNotFoundError, match="has no split 'eval'"):
        load_packed(uri, split="eval", cache=tmp_path)
    with pytest.raises(VersionNotFoundError, match="prod"):
        load_packed(uri, "prod", cache=tmp_path)


def test_an_address_and_a_version_that_differ_are_refused_and_paths_are_taken(
    make_version, tmp_path
):
    uri = make_version(num_records=20)

    with pytest.raises(ConfigError, match="has version '00000014', but version is 'prod'"):
        load_packed(f"{uri}@00000014", version="prod", cache=tmp_path)
    assert load_packed(Path(uri), "00000014", cache=tmp_path).num_rows


def test_ranks_that_start_at_once_do_the_work_once_and_agree(make_version, tmp_path):
    uri = make_version()
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        found = pool.starmap(_load, [(uri, tmp_path)] * 4)

    assert len({json.dumps(rows) for rows in found}) == 1
    assert len(list((tmp_path / "loaded").glob("*.arrow"))) == 1
    assert not list((tmp_path / "loaded").glob(".*"))


def test_loading_needs_neither_torch_nor_prefect(make_version, tmp_path):
    script = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "prefect"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from packhouse import load_packed
print(load_packed({make_version()!r}, cache={str(tmp_path)!r}).num_rows)
assert not {{"torch", "prefect"}} & set(sys.modules)
try:
    from packhouse import PackedCollator
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"USE_TORCH": "0"},
    )
    needs = f"packhouse.PackedCollator needs torch: {pip_install('torch')}"
    assert done.stdout == f"16\n{needs}\n", done.stderr


def _load(uri: str, cache: Path) -> list:
    return load_packed(uri, cache=cache).to_list()


def test_a_pulled_folder_loads_verified(make_version, tmp_path):
    uri = make_version(rows_per_file=5)
    copy = pull_version(open_address(uri), tmp_path / "copy")
    from_store = load_packed(uri, cache=tmp_path / "one").to_list()

    assert load_packed(str(copy), cache=tmp_path / "two").to_list() == from_store
    with pytest.raises(VersionNotFoundError, match=r"is a copy of .*, not of 'prod'"):
        load_packed(str(copy), "prod", cache=tmp_path / "two")
    file = next(copy.glob("data/*"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="does not hold the published bytes"):
        load_packed(str(copy), cache=tmp_path / "three")


def test_a_full_disk_is_reported_in_a_sentence_and_leaves_nothing(make_version, tmp_path):
    uri = make_version()
    worker.end_idle_workers()  # a new file inherits the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        with pytest.raises(DiskError, match=r"cannot write to the cache '.*': .* Free some space"):
            load_packed(uri, cache=tmp_path)
    finally:
        worker.end_idle_workers()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.rglob("*.arrow"))
    assert len(load_packed(uri, cache=tmp_path)) > 0


def test_packs_are_warned_of_until_a_model_is_guarded(make_version, tmp_path, monkeypatch):
    """The warning does not depend on imports or their order."""
    pytest.importorskip("torch")
    from packhouse import PackedDataset, StreamingPackedDataset, enable_packing
    from packhouse.addons.torch import enable_packing as guard
    from packhouse.load import known_packs as loaded

    guards = set()  # none from other tests
    for module in (loaded, guard):
        monkeypatch.setattr(module, "GUARDS", guards)
    monkeypatch.setattr(loaded, "_WARNED", set())
    packs, records = make_version(), make_version(num_records=20, strategy="none")
    said = r"several records, .*Call enable_packing\(model\) before training.*padding_free=True"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_packed(records, cache=tmp_path)
        with enable_packing("llama"):
            load_packed(packs, cache=tmp_path)
    with pytest.warns(UserWarning, match=said):
        data = load_packed(packs, cache=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PackedDataset(data)  # already warned above
        PackedDataset([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}], seq_len=2)
    with pytest.warns(UserWarning, match=said):
        PackedDataset([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}], seq_len=4)
    other = make_version(num_records=30)
    with pytest.warns(UserWarning, match=said):
        next(iter(StreamingPackedDataset(other, cache=tmp_path, prefetch=0)))


def test_files_of_a_killed_process_are_removed_by_the_next_one(make_version, tmp_path):
    uri = make_version()
    load_packed(uri, cache=tmp_path)
    (mapped,) = (tmp_path / "loaded").glob("*.arrow")
    mapped.unlink()
    left = mapped.with_name(f".{mapped.name}.0123456789abcdef")
    left.write_bytes(b"half")

    assert load_packed(uri, cache=tmp_path).num_rows
    assert mapped.exists()
    assert not left.exists()

"""Full, read-only and inode-exhausted real file systems each give one clear message with a fix."""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from packhouse.errors import DiskError
from packhouse.system.disks import temporary_folder
from tests.cache.conftest import steps_in


def test_a_cache_on_a_full_disk(project, mount):
    project.cache = mount("disk", "size=64k")
    with pytest.raises(
        DiskError, match=r"No space left on device \(.* bytes free\). Free some space"
    ):
        project.prepare()
    done = steps_in(project.cache)
    assert not list((project.cache / "steps" / "tmp").glob("*"))
    remount(project.cache, "size=8m")
    again = project.prepare()
    assert again.created
    assert done <= {(receipt.step, receipt.key) for receipt in again.receipts if receipt.cached}


def test_a_cache_on_a_disk_without_inodes(project, mount):
    project.cache = mount("disk", "size=8m,nr_inodes=20")
    with pytest.raises(DiskError, match="has no free inodes"):
        project.prepare()
    remount(project.cache, "nr_inodes=1000")
    assert project.prepare().created


def test_a_cache_on_a_disk_that_is_read_only(project, mount):
    project.cache = mount("disk", "size=8m")
    project.prepare()
    project.write_rows(range(70))
    remount(project.cache, "ro")
    with pytest.raises(DiskError, match=r"read-only. Make it writable"):
        project.prepare()
    remount(project.cache, "rw")
    assert project.prepare().created


def test_a_store_on_a_full_disk(project, mount):
    store = mount("store", "size=20k")
    with pytest.raises(DiskError, match=r"the store '.*': .*Free some space there or publish to"):
        project.prepare()
    assert not list((store / ".packhouse" / "tmp").glob("*"))
    remount(store, "size=8m,nr_inodes=1000")
    assert project.prepare().created


def test_a_store_on_a_disk_that_is_read_only(project, mount):
    store = mount("store", "size=8m")
    remount(store, "ro")
    with pytest.raises(DiskError, match=r"the store '.*': its file system is read-only"):
        project.prepare()
    remount(store, "rw")
    assert project.prepare().created


def test_temporary_files_on_a_full_disk(mount, monkeypatch):
    place = mount("disk", "size=64k,nr_inodes=8")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with (
        pytest.raises(DiskError, match=r"temporary files '.*': No space left .* set TMPDIR"),
        temporary_folder("test") as folder,
    ):
        (folder / "a").write_bytes(b"x" * 2**20)
    with (
        pytest.raises(DiskError, match="has no free inodes"),
        temporary_folder("test") as folder,
    ):
        _ = [(folder / str(number)).touch() for number in range(20)]
    assert list(place.iterdir()) == []
    remount(place, "ro")
    with pytest.raises(DiskError, match="read-only"), temporary_folder("test"):
        pass


def test_files_of_a_killed_process_are_removed_by_the_next(tmp_path, monkeypatch):
    makes = (
        "from packhouse.system.disks import temporary_folder\n"
        "with temporary_folder('test') as folder:\n"
        "    (folder / 'rows').touch()\n"
        "    print(folder, flush=True)\n"
        "    input()\n"
    )
    with ExitStack() as stack:
        processes, folders = [], []
        for _ in range(2):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", makes],
                    env={**os.environ, "TMPDIR": str(tmp_path)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            processes.append(process)
            folders.append(Path(process.stdout.readline().strip()))
        processes[0].kill()
        processes[0].wait()
        others = [tmp_path / "packhouse-other-x", tmp_path / "packhouse-test-link"]
        others[0].mkdir()
        others[1].symlink_to(others[0])
        just_made = tmp_path / "packhouse-test-new"  # its process may be about to lock it
        just_made.mkdir()
        for folder in (*folders, others[0]):
            os.utime(folder, (0, 0))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with temporary_folder("test") as own:
            left = {*tmp_path.iterdir()}
        processes[1].communicate("")

    assert left == {own, folders[1], just_made, *others}
    assert {*tmp_path.iterdir()} == {just_made, *others}


def remount(place, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)

"""A real S3 server for tests: Ceph's object gateway, one node on loopback, from Debian packages.

    apt-get install --no-install-recommends radosgw ceph-mon ceph-mgr ceph-osd     (about 290 MB)
    python -m tests.store.ceph FOLDER [PORT]     # runs until interrupted

The first start takes about 20 s. All data is in the folder; nothing outside it is touched.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-mgr", "ceph-osd", "monmaptool", "radosgw")
ACCESS_KEY = "PACKHOUSETESTS000000"
SECRET_KEY = "packhouse-tests-only-secret"
DAEMONS = ("client.gateway", "osd.0", "mgr.a", "mon.a")

# One copy of everything on one disk, no autoscaling, no telemetry: the minimum that serves S3. The
# monitor waits 0.02 s instead of 1 s for further changes of its map; making pools changes it often.
_CONFIG = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = {folder}/keyring
admin socket = {folder}/run/$name.sock
pid file = {folder}/run/$name.pid
log file = {folder}/log/$name.log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
auth allow insecure global id reclaim = false
[mon]
mon data = {folder}/mon
paxos propose interval = 0.02
paxos min wait = 0.01
mon data avail warn = 1
mon data avail crit = 1
[mgr]
mgr data = {folder}/mgr
[osd]
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block create = true
bluestore block size = 4294967296
bluestore fsck on mkfs = false
osd memory target = 939524096
osd mclock skip benchmark = true
[client.gateway]
rgw data = {folder}/gateway
"""

_KEYS = {
    "mon.": ("mon", "allow *"),
    "client.admin": ("mon", "allow *", "osd", "allow *", "mgr", "allow *"),
    "mgr.a": ("mon", "allow profile mgr", "osd", "allow *"),
    "osd.0": ("mon", "allow profile osd", "mgr", "allow profile osd", "osd", "allow *"),
    "client.gateway": ("mon", "allow rw", "osd", "allow rwx", "mgr", "allow rw"),
}


def is_installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(folder: Path, port: int) -> Iterator[str]:
    """Start a cluster in an empty folder, return its endpoint, and stop it afterwards."""
    try:
        _start(folder, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        _stop(folder)


def _start(folder: Path, port: int) -> None:
    for name in ("mon", "mgr", "osd", "run", "log", "gateway"):
        (folder / name).mkdir(parents=True)
    config = _CONFIG.format(
        fsid=uuid.uuid4(), folder=folder, mon_v2=(v2 := free_port()), mon_v1=(v1 := free_port())
    )
    (folder / "ceph.conf").write_text(config)
    _make_keys(folder)
    _start_monitor(folder, f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]")
    _call(folder, "ceph-mgr", "-i", "a")
    _start_disk(folder)
    _call(folder, "radosgw-admin", "user", "create", "--uid=tests", "--display-name=tests",
          f"--access-key={ACCESS_KEY}", f"--secret={SECRET_KEY}")  # fmt: skip
    frontend = f"beast endpoint=127.0.0.1:{port}"
    _call(folder, "radosgw", "-n", "client.gateway", f"--rgw-frontends={frontend}")
    _wait(lambda: _accepts(port), f"gateway on port {port}")


def _make_keys(folder: Path) -> None:
    ring = folder / "keyring"
    for number, (name, rights) in enumerate(_KEYS.items()):
        pairs = zip(rights[::2], rights[1::2], strict=True)
        caps = [part for who, what in pairs for part in ("--cap", who, what)]
        create = ["--create-keyring"] if number == 0 else []
        _plain("ceph-authtool", *create, str(ring), "--gen-key", "-n", name, *caps)


def _start_monitor(folder: Path, address: str) -> None:
    fsid = next(
        line.split("= ")[1]
        for line in (folder / "ceph.conf").read_text().splitlines()
        if line.startswith("fsid")
    )
    monmap = str(folder / "monmap")
    _plain("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
    ring = str(folder / "keyring")
    _call(folder, "ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", ring)
    _call(folder, "ceph-mon", "-i", "a")


def _start_disk(folder: Path) -> None:
    disk = str(uuid.uuid4())
    _call(folder, "ceph", "osd", "new", disk)
    _call(folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
    _call(folder, "ceph-osd", "-i", "0")
    _wait(lambda: "1 up" in _call(folder, "ceph", "osd", "stat"), "disk")


def _stop(folder: Path) -> None:
    """Kill the daemons by the process IDs that they wrote to our folder; nobody needs the data."""
    for name in DAEMONS:
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int((folder / "run" / f"{name}.pid").read_text()), signal.SIGKILL)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(is_ready: object, what: str, timeout_s: float = 600) -> None:
    assert callable(is_ready)
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ceph: no {what} after {timeout_s:.0f} s")
        time.sleep(0.1)


def _call(folder: Path, program: str, *args: str) -> str:
    return _plain(program, "-c", str(folder / "ceph.conf"), *args)


def _plain(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # stops the servers we started
    folder = Path(sys.argv[1]).resolve()
    port = int(sys.argv[2]) if len(sys.argv) > 2 else free_port()
    with running(folder, port) as endpoint:
        sys.stdout.write(
            f"export AWS_ENDPOINT_URL={endpoint} AWS_ACCESS_KEY_ID={ACCESS_KEY} "
            f"AWS_SECRET_ACCESS_KEY={SECRET_KEY}\n"
        )
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()

"""Chaos with real processes: kills, races and collections, with readers that verify throughout.

Every function ends with `check`: every acknowledged version exists, is complete, and is in the
history of the ref, and no reader ever saw anything else. Returns counts for `soak` and for
docs/reliability.md.
"""

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packhouse.addons.gc import collect_garbage
from packhouse.store import load_ref, open_store, open_version, verify_version
from packhouse.store.manifest import Manifest
from tests.forked import forks_of
from tests.store import victim
from tests.store.versions import list_versions

Counts = dict[str, int]


@contextmanager
def readers(environment: dict[str, str], root: str, folder: Path, number: int) -> Iterator[None]:
    """Run readers while the body runs; fail if any of them saw something wrong."""
    started = [spawn(victim.read_forever, environment, root, str(folder)) for _ in range(number)]
    try:
        yield
    finally:
        (folder / "stop").touch()
        for reader in started:
            reader.join(60)
    _, problems = victim.readings(folder)
    assert problems == [], problems[:5]


def spawn(target: Any, *args: Any) -> Any:
    process = forks_of("tests.store.victim").Process(target=target, args=args, daemon=True)
    process.start()
    return process


def race(
    environment: dict[str, str],
    root: str,
    folder: Path,
    *,
    num_publishers: int,
    num_versions: int,
    identical: bool,
    num_readers: int = 1,
    grace_s: float | None = None,
    linger_s: float = 0,
) -> Counts:
    """Run publishers at the same time, with different versions or all with the same ones."""
    plans = [
        [f"v{n if identical else p * num_versions + n:04x}" for n in range(num_versions)]
        for p in range(num_publishers)
    ]
    started = time.monotonic()
    with readers(environment, root, folder, num_readers):
        collector = None
        if grace_s is not None:
            collector = spawn(victim.collect_forever, environment, root, str(folder), grace_s)
        publishers = [
            spawn(
                victim.publish_many, environment, root, str(folder), plan, "latest", None, linger_s
            )
            for plan in plans
        ]
        for publisher in publishers:
            publisher.join()
        errors = sum(publisher.exitcode != 0 for publisher in publishers)
        elapsed_s = time.monotonic() - started
        (folder / "stop").touch()
        if collector is not None:
            collector.join(60)
    expected = sorted({vid for plan in plans for vid in plan})
    counts = check(environment, root, folder, expected)
    assert errors == 0
    deleted = sum(int(path.read_text()) for path in folder.glob("collector-*"))
    return counts | {
        "publishers": num_publishers,
        "publications": num_publishers * num_versions,
        "errors": errors,
        "collected_objects": deleted,
        "seconds": round(elapsed_s),
    }


def linger_s(environment: dict[str, str]) -> float:
    """Longest wait of publishers before a commit; S3's clock has a resolution of one second."""
    return 2.0 if environment else 0.3


def kill_at_random(
    environment: dict[str, str],
    root: str,
    folder: Path,
    *,
    num_kills: int,
    seed: int,
    max_delay_s: float,
) -> Counts:
    """Kill pairs of publishers of the same versions at random moments, and restart them."""
    chooser = random.Random(seed)
    kills = started = 0
    with readers(environment, root, folder, 1):
        while kills < num_kills:
            vids = [f"v{started + n:04x}" for n in range(5)]
            started += len(vids)
            is_done = False
            while not is_done:
                running = [start_ready(environment, root, folder, vids) for _ in range(2)]
                if kills < num_kills:
                    time.sleep(chooser.uniform(0, max_delay_s))
                    kills += sum(kill(publisher) for publisher in running)
                for publisher in running:
                    publisher.join()
                assert all(p.exitcode in (0, -signal.SIGKILL) for p in running)
                is_done = set(vids) <= set(victim.acknowledged(folder))
    return check(environment, root, folder, None) | {"kills": kills}


def start_ready(environment: dict[str, str], root: str, folder: Path, vids: list[str]) -> Any:
    """A publisher that has opened its store, so that a kill meets it at work."""
    ready = forks_of("tests.store.victim").Event()
    plan = (environment, root, str(folder), vids, "latest", ready)
    publisher = spawn(victim.publish_many, *plan)
    ready.wait(60)
    return publisher


def kill(process: Any) -> bool:
    if not process.is_alive():
        return False
    os.kill(process.pid, signal.SIGKILL)
    return True


def check(
    environment: dict[str, str], root: str, folder: Path, expected: list[str] | None
) -> Counts:
    os.environ.update(environment)
    store = open_store(root)
    done = victim.acknowledged(folder)
    assert expected is None or done == expected
    manifests = list_versions(store, "tiny")
    live = {manifest.vid: manifest for manifest in manifests}
    assert len(live) == len(manifests), "a version ID is committed twice"
    lost = [vid for vid in done if vid not in live]
    assert lost == [], f"acknowledged and lost: {lost}"
    ref = load_ref(store, "tiny", "latest")
    assert ref is not None
    _check_history(ref, [live[vid] for vid in done])
    for vid in done:
        assert verify_version(open_version(store, "tiny", vid), num_threads=1).problems == ()
    reads, _ = victim.readings(folder)
    return {"acknowledged": len(done), "lost": len(lost), "verified_reads": reads}


def _check_history(ref: Any, manifests: list[Manifest]) -> None:
    moves = [ref.version, *(move.version for move in ref.past)]
    assert len(moves) == len(set(moves)), "the ref moved back"
    assert ref.seq >= len(moves)
    if ref.seq == len(moves):  # the whole history is still in the ref
        missing = [m.version for m in manifests if m.version not in moves]
        assert missing == [], f"acknowledged and not in the ref: {missing}"


def reclaim(environment: dict[str, str], root: str) -> Counts:
    """Check that one collection removes all garbage from the store and damages nothing."""
    os.environ.update(environment)
    store = open_store(root)
    if environment:
        # S3 gives times in whole seconds, so garbage of this second may still look new.
        time.sleep(1.1)
    before = list_versions(store, "tiny")
    report = collect_garbage(store, "tiny", grace_s=0, dry_run=False)
    assert list_versions(store, "tiny") == before
    live = {f"tiny/v/{version.version}/{file.key}" for version in before for file in version.files}
    live.add(".packhouse/probe")
    kept = re.compile(r"tiny/(v/[a-z0-9.]+/manifest|refs/[a-z0-9]+)\.json")  # tombstones too
    others = [info.key for info in store.list("") if info.key not in live]
    left = [key for key in others if not kept.fullmatch(key)]
    assert left == []
    return {"dead_bytes": report.num_bytes, "probes": report.num_probes, "dead_bytes_left": 0}

"""Long runs of the store's chaos, with counts at the end. Not collected by pytest.

python -m tests.store.soak --minutes 20         # a folder, and Ceph if it is installed; every part
                                                # runs at least once
python -m tests.store.soak --schedules 1 --seed 7
"""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from packhouse.store import load_ref, open_store, open_version, publish_version, verify_version
from packhouse.store.s3 import make_client
from tests.store import ceph, chaos
from tests.store.conftest import s3_environment
from tests.store.proxy import FaultyProxy, at_random
from tests.store.simulation import simulate
from tests.store.versions import FACTS, list_versions, pack_file

Place = tuple[dict[str, str], str, Path]
"""Environment and root of an empty store, and a folder for the run."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def schedules(seed: int, number: int, minutes: float) -> None:
    """Run this many schedules; if 0, as many as fit into the minutes."""
    started, done, requests, faults = time.monotonic(), 0, 0, 0
    while done < number if number else time.monotonic() - started < minutes * 60:
        block = range(seed + done, seed + done + (min(1000, number - done) if number else 1000))
        more_requests, more_faults = simulate(block)
        done, requests, faults = done + len(block), requests + more_requests, faults + more_faults
    seconds = time.monotonic() - started
    say(
        f"schedules: {done:,} from seed {seed}, {requests:,} requests, {faults:,} faults, "
        f"0 violations, {seconds:.0f} s"
    )


def faults(place: Place, number: int, share: float = 0.25) -> None:
    """Publish and verify through the proxy until it has caused `number` faults."""
    environment, root, folder = place
    server = environment["AWS_ENDPOINT_URL"]
    seed = random.randrange(2**32)
    published = 0
    with FaultyProxy(server, at_random(share, seed)) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        store = open_store(root)
        while proxy.counts.total() < number:
            vid = f"v{published:04x}"
            file = pack_file(folder, 1 + published)
            done = publish_version(store, "tiny", vid, [file], FACTS, "latest")
            assert done.ref is not None
            assert done.ref.version == f"{vid}.g0"
            assert verify_version(open_version(store, "tiny", vid), num_threads=1).is_intact
            published += 1
    os.environ["AWS_ENDPOINT_URL"] = server
    store = open_store(root)
    assert len(list_versions(store, "tiny")) == published
    ref = load_ref(store, "tiny", "latest")
    assert ref is not None
    assert ref.seq == published
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(proxy.counts.items()))
    say(
        f"faults: {proxy.counts.total():,} of {proxy.requests:,} requests (seed {seed}: {kinds}); "
        f"{published:,} versions published, 0 lost, 0 doubled, 0 errors"
    )


def kills(place: Place, number: int) -> None:
    seed = random.randrange(2**32)
    counts = chaos.kill_at_random(*place, num_kills=number, seed=seed, max_delay_s=0.4)
    left = chaos.reclaim(*place[:2])
    say(f"kills: seed {seed}: {counts | left}")


def races(place: Place, num_versions: int) -> None:
    for identical in (False, True):
        counts = chaos.race(
            *fresh(place), num_publishers=16, num_versions=num_versions, identical=identical
        )
        say(f"races, {'identical' if identical else 'distinct'}: {counts}")


def collections(place: Place, num_versions: int) -> None:
    counts = chaos.race(
        *place,
        num_publishers=4,
        num_versions=num_versions,
        identical=False,
        grace_s=0.02,
        linger_s=chaos.linger_s(place[0]),
    )
    say(f"collections: {counts | chaos.reclaim(*place[:2])}")


def fresh(place: Place) -> Place:
    environment, root, folder = place
    name = f"run{random.randrange(2**32)}"
    (folder / name).mkdir(parents=True)
    return environment, f"{root}/{name}", folder / name


@contextlib.contextmanager
def places(only: str) -> Iterator[list[tuple[str, Place]]]:
    """Use a folder, and start Ceph if it is installed."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="packhouse-soak-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        found = []
        if only in ("", "folder"):
            found.append(("folder", ({}, str(folder / "store"), folder / "work")))
        if only in ("", "ceph") and ceph.is_installed():
            port = ceph.free_port()
            endpoint = stack.enter_context(ceph.running(folder / "ceph", port))
            environment = s3_environment(endpoint, ceph.ACCESS_KEY, ceph.SECRET_KEY)
            os.environ.update(environment)
            make_client().create_bucket(Bucket="soak")
            found.append(("ceph", (environment, "s3://soak/root", folder / "work-ceph")))
        yield found


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that servers we started are stopped
    started = time.monotonic()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    schedules(seed, options.schedules, options.minutes * 0.2)  # of the time
    if options.schedules:
        return
    # Small parts, repeated, so that a short run ends soon.
    rounds = [(kills, 20), (races, 5), (collections, 5), (faults, 100)]
    with places(options.store) as found:
        rounds_of = [
            (f"{part.__name__}, {name}", part, number, place)
            for part, number in rounds
            for name, place in found
            if part is not faults or name == "ceph"
        ]
        for done, (what, part, number, place) in enumerate(itertools.cycle(rounds_of), 1):
            say(f"-- {what}")
            part(fresh(place), number)
            is_late = time.monotonic() - started >= options.minutes * 60
            if is_late and done >= len(rounds_of):
                break
    say(f"{done} of {len(rounds_of)} parts, {time.monotonic() - started:.0f} s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", choices=["folder", "ceph"], default="")
    parser.add_argument("--minutes", type=float, default=10, help="repeat for so long")
    parser.add_argument("--seed", type=int, help="of the first schedule")
    parser.add_argument("--schedules", type=int, default=0, help="only simulate so many schedules")
    return parser.parse_args()


if __name__ == "__main__":
    main()

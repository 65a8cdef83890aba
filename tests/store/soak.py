"""Long runs of the store's chaos, with counts at the end. Not collected by pytest.

python -m tests.store.soak all --minutes 20            # a folder, and Ceph if it is installed;
                                                       # every part runs at least once
python -m tests.store.soak schedules --minutes 5       # simulation from a new seed
python -m tests.store.soak schedules --seed 7 --schedules 1
python -m tests.store.soak faults --faults 1000        # publishers through the faulty proxy
python -m tests.store.soak kills --kills 200
python -m tests.store.soak races --versions 50         # 16 publishers, distinct and identical
python -m tests.store.soak collections --versions 50
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
    """Run this many schedules, or as many as fit into the minutes."""
    started, done, requests, faults = time.monotonic(), 0, 0, 0
    while time.monotonic() - started < minutes * 60 if minutes else done < number:
        block = range(seed + done, seed + done + (1000 if minutes else min(1000, number - done)))
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
    if options.minutes:  # small parts, repeated, so that a short run ends soon
        options.kills, options.faults, options.versions = 20, 100, 5
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that servers we started are stopped
    started = time.monotonic()
    if options.what in ("all", "schedules"):
        seed = random.randrange(2**32) if options.seed is None else options.seed
        share = 1 if options.what == "schedules" else 0.2  # of the time
        schedules(seed, options.schedules, options.minutes * share)
    if options.what == "schedules":
        return
    rounds = {
        "kills": lambda place: kills(place, options.kills),
        "races": lambda place: races(place, options.versions),
        "collections": lambda place: collections(place, options.versions),
        "faults": lambda place: faults(place, options.faults),
    }
    chosen = rounds if options.what == "all" else {options.what: rounds[options.what]}
    with places(options.store) as found:
        rounds_of = [
            (f"{what}, {name}", once, place)
            for what, once in chosen.items()
            for name, place in found
            if what != "faults" or name == "ceph"
        ]
        for number, (what, once, place) in enumerate(itertools.cycle(rounds_of), 1):
            say(f"-- {what}")
            once(fresh(place))
            is_late = time.monotonic() - started >= options.minutes * 60
            if is_late and number >= len(rounds_of):
                break
    say(f"{number} of {len(rounds_of)} parts, {time.monotonic() - started:.0f} s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "what", choices=["all", "schedules", "faults", "kills", "races", "collections"]
    )
    parser.add_argument("--store", choices=["folder", "ceph"], default="")
    parser.add_argument("--minutes", type=float, default=0, help="repeat for so long")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--versions", type=int, default=50, help="of each publisher")
    return parser.parse_args()


if __name__ == "__main__":
    main()

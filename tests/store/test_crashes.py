"""kill -9 at every named point, in a folder and on S3, and at random moments."""

import signal

from packhouse.store import load_ref, open_store, open_version, verify_version
from tests.store import chaos, victim
from tests.store.versions import list_versions

# A request is the same to all stores, so S3 has only those that leave something there.
POINTS_ON_S3 = ["after data", "after manifest", *victim.S3_POINTS]


def points_of(environment):
    return POINTS_ON_S3 if environment else victim.REQUEST_POINTS + victim.FOLDER_POINTS


def test_a_publisher_that_dies_anywhere_leaves_nothing_torn_and_can_start_again(place, tmp_path):
    environment, root = place
    store = open_store(root)
    publish(environment, root, tmp_path, "v0fff", ref="latest", point="", code=0)
    for number, point in enumerate(points_of(environment)):
        vid, folder = f"v{number:04x}", tmp_path / f"run{number}"
        folder.mkdir()
        # The first move of a ref is a create; all others are swaps.
        ref = f"ref{number}" if point.endswith("ref-create") else "latest"
        publish(environment, root, folder, vid, ref=ref, point=point, code=-signal.SIGKILL)

        seen = [manifest for manifest in list_versions(store, "tiny") if manifest.vid == vid]
        assert_complete(store, seen)
        before = load_ref(store, "tiny", "latest")

        publish(environment, root, folder, vid, ref=ref, point="", code=0)
        opened = open_version(store, "tiny", ref)
        assert (opened.version, verify_version(opened).problems) == (f"{vid}.g0", ()), point
        after = load_ref(store, "tiny", ref)
        if ref == "latest":
            assert after.seq == before.seq + (before.version != f"{vid}.g0"), point
    assert_complete(store, list_versions(store, "tiny"))
    assert chaos.reclaim(environment, root)["dead_bytes_left"] == 0


def assert_complete(store, manifests):
    """Everything that readers can see is complete."""
    for manifest in manifests:
        assert verify_version(open_version(store, "tiny", manifest.version)).problems == ()


def publish(environment, root, folder, vid, *, ref, point, code):
    child = chaos.spawn(victim.publish_one, environment, root, str(folder), vid, ref, point)
    child.join(60)
    assert child.exitcode == code, f"{point or 'no crash'}: exit code {child.exitcode}"


def test_a_killed_holder_frees_the_lock_of_a_ref(tmp_path):
    root = str(tmp_path / "store")
    folder = tmp_path / "run"
    folder.mkdir()
    for vid, point, code in [("v0001", "", 0), ("v0002", "locked", -signal.SIGKILL)]:
        publish({}, root, folder, vid, ref="latest", point=point, code=code)
    publish({}, root, folder, "v0003", ref="latest", point="", code=0)
    assert open_version(root, "tiny").version == "v0003.g0"


def test_nothing_acknowledged_is_lost_under_random_kills(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    root = str(tmp_path / "store")
    counts = chaos.kill_at_random({}, root, folder, num_kills=4, seed=7, max_delay_s=0.3)
    assert counts["kills"] >= 4
    assert counts["lost"] == 0
    assert counts["verified_reads"] > 0

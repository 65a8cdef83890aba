"""Many publishers at once, with verifying readers and collections that come far too early."""

import pytest

from tests.store import chaos


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_publishers_of_the_same_versions_do_not_conflict(tmp_path, folder):
    place = ({}, str(tmp_path / "store"))
    counts = chaos.race(*place, folder, num_publishers=4, num_versions=2, identical=True)
    assert counts["acknowledged"] == 2


def test_collections_during_publications_harm_nothing(place, folder):
    environment, root = place
    num_versions = 2 if environment else 4
    # On a busy machine, no collection may fall between two writes.
    for attempt in range(5):
        own, store = folder / str(attempt), f"{root}/{attempt}"
        own.mkdir()
        counts = chaos.race(
            environment,
            store,
            own,
            num_publishers=4,
            num_versions=num_versions,
            identical=False,
            grace_s=0.02,
            linger_s=chaos.linger_s(environment),
        )
        assert counts["acknowledged"] == 4 * num_versions
        assert chaos.reclaim(environment, store)["dead_bytes_left"] == 0
        if counts["collected_objects"]:
            return
    raise AssertionError("no collection removed an object")

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
    num_versions = 2 if place[0] else 4
    counts = chaos.race(
        *place,
        folder,
        num_publishers=4,
        num_versions=num_versions,
        identical=False,
        grace_s=0.02,
        linger_s=chaos.linger_s(place[0]),
    )
    assert counts["acknowledged"] == 4 * num_versions
    assert counts["collected_objects"] > 0
    assert chaos.reclaim(*place)["dead_bytes_left"] == 0

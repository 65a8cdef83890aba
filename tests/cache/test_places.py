"""Where finished steps lie: a folder, a mirror or both, by one rule; no folder called `s3:`."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.errors import ConfigError
from packhouse.workspace import CachePlace, Workspace, check_cache, default_cache, find_cache

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "recipe.yaml"


@pytest.mark.parametrize(
    ("setting", "cache", "mirror", "expected"),
    [
        (None, None, None, (".packhouse", None)),
        (None, "/a", None, ("/a", None)),
        ("/b", "/a", None, ("/b", None)),
        (None, "s3://a/x", None, (".packhouse", "s3://a/x")),
        ("s3://b/x", "/a", None, ("/a", "s3://b/x")),
        ("/b", "s3://a/x", None, ("/b", "s3://a/x")),
        (None, "/a", "gs://a/x", ("/a", "gs://a/x")),
        ("file:///m", "/a", "gs://a/x", ("/a", "file:///m")),
        ("", "", "", (".packhouse", None)),
    ],
)
def test_folder_and_mirror_are_each_the_first_that_is_named(
    setting, cache, mirror, expected, monkeypatch
):
    for name, value in (("PACKHOUSE_CACHE", cache), ("PACKHOUSE_CACHE_MIRROR", mirror)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    folder, uri = expected
    assert find_cache(setting) == CachePlace(folder=Path(folder), mirror=uri)
    if setting is None:
        assert default_cache() == Path(folder)


def test_a_mirror_that_is_a_folder_is_refused(monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE_MIRROR", "/a")
    with pytest.raises(ConfigError, match=r"give a URI such as s3://"):
        find_cache()


@pytest.mark.parametrize("uri", ["s3://b/x", "gs://b/x", "az://b/x", "file:///x", "s3:/b/x"])
def test_no_uri_ever_becomes_a_folder(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (Path(uri), Path(uri).absolute()):
        with pytest.raises(ConfigError, match="is a URI, and a folder of this machine is needed"):
            check_cache(folder)
        with pytest.raises(ConfigError, match="is a URI"):
            Workspace(cache=folder)
    for command in (["plan", str(DEMO)], ["explain", str(DEMO)], ["cache", "ls"], ["cache", "gc"]):
        done = CliRunner().invoke(cli, [*command, "--cache", uri])
        assert done.exit_code == 2, done.output
        assert "is a URI" in done.output
    assert list(tmp_path.iterdir()) == []

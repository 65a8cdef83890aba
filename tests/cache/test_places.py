"""Location of finished steps: a folder, a mirror or both, and never a folder called `s3:`."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.errors import ConfigError
from packhouse.run.step_cache import Workspace
from packhouse.system.disks import CachePlace, check_cache, default_cache, find_cache

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "recipe.yaml"


USERS = "/home/ann/.cache/packhouse"


@pytest.mark.parametrize(
    ("setting", "cache", "mirror", "expected"),
    [
        (None, None, None, (USERS, None)),
        (None, "/a", None, ("/a", None)),
        ("/b", "/a", None, ("/b", None)),
        (None, "s3://a/x", None, (USERS, "s3://a/x")),
        ("s3://b/x", "/a", None, ("/a", "s3://b/x")),
        ("/b", "s3://a/x", None, ("/b", "s3://a/x")),
        (None, "/a", "gs://a/x", ("/a", "gs://a/x")),
        ("file:///m", "/a", "gs://a/x", ("/a", "file:///m")),
        ("", "", "", (USERS, None)),
    ],
)
def test_folder_and_mirror_are_each_the_first_that_is_named(
    setting, cache, mirror, expected, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/ann/.cache")
    for name, value in (("PACKHOUSE_CACHE", cache), ("PACKHOUSE_CACHE_MIRROR", mirror)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    folder, uri = expected
    assert find_cache(setting) == CachePlace(folder=Path(folder), mirror=uri)
    if setting is None:
        assert default_cache() == Path(folder)


def test_a_run_says_which_cache_it_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    done = CliRunner().invoke(cli, ["prepare", str(DEMO), "--store", "store"])
    assert done.exit_code == 0, done.output
    assert f"\ncache: {tmp_path / 'user' / 'packhouse'}\n" in done.stdout
    assert not Path(".packhouse").exists()


def test_a_mirror_that_is_a_folder_is_refused(monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE_MIRROR", "/a")
    with pytest.raises(ConfigError, match=r"not a URI\. Set it to s3://"):
        find_cache()


@pytest.mark.parametrize("uri", ["s3://b/x", "s3:/b/x", "S3:b/x"])
def test_no_uri_ever_becomes_a_folder(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (Path(uri), Path(uri).absolute()):
        with pytest.raises(ConfigError, match=r"is a URI, but a local folder .* pass its URI"):
            check_cache(folder)
        with pytest.raises(ConfigError, match="is a URI"):
            Workspace(cache=folder)
    commands = (["plan", str(DEMO)], ["explain", str(DEMO)], ["cache", "ls"], ["cache", "gc"])
    for command in commands:
        done = CliRunner().invoke(cli, [*command, "--cache", uri])
        assert done.exit_code == 2, done.output
        assert "is a URI" in done.output
    if "://" not in uri:  # otherwise it is a mirror
        monkeypatch.setenv("PACKHOUSE_CACHE", uri)
        for command in (*commands, ["ci", str(DEMO)]):
            done = CliRunner().invoke(cli, command)
            assert done.exit_code == 2, done.output
            assert "pass its URI, such as s3://" in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []

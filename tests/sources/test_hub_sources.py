"""Sources on the Hub, read by its own client from a fake server."""

import gzip

import orjson
import pytest

from packhouse.errors import SourceError, TransientError
from packhouse.read import read_shard, scan_source
from packhouse.recipe import SourceConfig, ValidateConfig
from tests.sources.hub_files import TOKEN, HubFiles

ROWS = b"".join(
    orjson.dumps({"instruction": f"q{i}", "output": f"a{i}"}) + b"\n" for i in range(300)
)
MORE = ROWS.replace(b"q", b"Q")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    with HubFiles() as server:
        server.repos["acme/talks"] = {
            "main": {
                "README.md": b"# talks",
                "data/train.jsonl": ROWS,
                "data/more.jsonl.gz": gzip.compress(MORE, mtime=0),
                "data/deep/eval.jsonl": ROWS[:500].rpartition(b"\n")[0] + b"\n",
            },
            "v1": {"data/train.jsonl": MORE},
        }
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


def test_a_file_gives_the_rows_and_keys_of_a_local_one(hub, tmp_path, read):
    (tmp_path / "train.jsonl").write_bytes(ROWS)

    local = read(tmp_path / "train.jsonl", max_shard_bytes=3000)
    remote = read("hf://datasets/acme/talks/data/train.jsonl", max_shard_bytes=3000)

    assert [s.identity() for s in remote.shards] == [s.identity() for s in local.shards]
    assert remote.validated.equals(local.validated)
    assert hub.requests.count("from 0") == 1  # downloaded once for all shards


def test_folders_and_globs_name_the_files_below(hub, read):
    folder = read("hf://datasets/acme/talks", name="all")
    names = ["all/data/deep/eval.jsonl", "all/data/more.jsonl.gz", "all/data/train.jsonl"]
    assert [s.file for s in folder.shards] == names
    below = read("hf://datasets/acme/talks/data", name="all")
    assert [s.file for s in below.shards] == [n.replace("/data/", "/", 1) for n in names]
    glob = read("hf://datasets/acme/talks/data/*.jsonl*", name="all")
    assert [s.file for s in glob.shards] == ["all/more.jsonl.gz", "all/train.jsonl"]
    deep = read("hf://datasets/acme/talks/**/*.jsonl", name="all")
    assert [s.file for s in deep.shards] == ["all/data/deep/eval.jsonl", "all/data/train.jsonl"]


def test_a_push_between_scan_and_read_changes_nothing(hub):
    config = SourceConfig(path="hf://datasets/acme/talks/data/train.jsonl")
    shards = scan_source(config, 3000)
    commit = hub.commit_of("acme/talks", "main")
    assert f"@{commit}/" in shards[0].uri
    hub.repos["acme/talks"]["old"] = hub.repos["acme/talks"]["main"]
    hub.repos["acme/talks"]["main"] = {"data/train.jsonl": MORE}

    rows = read_shard(shards[-1], config, ValidateConfig(), "prompt").validated

    assert rows["messages"][-1].as_py()[0]["content"] == "q299"
    assert scan_source(config, 3000)[0].identity() != shards[0].identity()


def test_revisions_are_branches_tags_and_commits(hub, read):
    commit = hub.commit_of("acme/talks", "v1")
    for revision in ("v1", commit):
        source = read(f"hf://datasets/acme/talks@{revision}/data/train.jsonl")
        assert source.texts[0][0] == ("user", "Q0")


def test_a_broken_download_is_gone_on_with(hub, read, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut_after = 2500

    source = read("hf://datasets/acme/talks/data/train.jsonl")

    starts = [int(line.split()[1]) for line in hub.requests if line.startswith("from")]
    assert starts == [0, 2000]
    assert source.validated.num_rows == 300


def test_a_commit_in_the_cache_needs_no_network(hub, read, monkeypatch):
    commit = hub.commit_of("acme/talks", "main")
    uri = f"hf://datasets/acme/talks@{commit}/data/train.jsonl"
    first = read(uri)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    assert read(uri).validated.equals(first.validated)
    with pytest.raises(TransientError, match=r"cannot be reached.*HF_ENDPOINT"):
        read("hf://datasets/acme/talks/data/train.jsonl")


def test_offline_mode_is_named(hub, read, monkeypatch):
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()  # which checks once whether it is offline
    try:
        with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set"):
            read("hf://datasets/acme/talks/data/train.jsonl")
    finally:
        monkeypatch.undo()
        close_session()


@pytest.mark.parametrize(
    ("uri", "match"),
    [
        ("acme/talks/data/none.jsonl", "no such file"),
        ("acme/talks@v9/data/train.jsonl", "has no revision 'v9'"),
        ("acme/talks/data/*.csv", "matches no files"),
        (
            "acme/gone/a.jsonl",
            r"private or does not exist \(401\)\. To read a private one, set HF_TOKEN",
        ),
    ],
)
def test_a_missing_repository_or_file_is_reported(hub, uri, match):
    with pytest.raises(SourceError, match=match):
        scan_source(SourceConfig(path=f"hf://datasets/{uri}"))


def test_private_and_missing_are_told_apart_by_a_token(hub, read, monkeypatch):
    hub.repos["acme/secret"] = {"main": {"a.jsonl": ROWS}}
    hub.private.add("acme/secret")
    uri = "hf://datasets/acme/secret/a.jsonl"
    with pytest.raises(SourceError, match="To read a private one, set HF_TOKEN"):
        read(uri)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SourceError, match=r"HF_TOKEN is invalid.*\(401\)") as caught:
        read(uri)
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read(uri).validated.num_rows == 300
    with pytest.raises(SourceError, match="hf://datasets/acme/gone does not exist"):
        read("hf://datasets/acme/gone/a.jsonl")


def test_gated_repositories_say_whom_to_ask(hub, read):
    hub.repos["acme/gated"] = {"main": {"a.jsonl": ROWS}}
    hub.gated.add("acme/gated")
    with pytest.raises(SourceError, match="is gated"):
        read("hf://datasets/acme/gated/a.jsonl")


def test_a_hub_in_trouble_is_worth_another_try(hub, read):
    hub.status = 503
    with pytest.raises(TransientError, match="503"):
        read("hf://datasets/acme/talks/data/train.jsonl")


@pytest.mark.parametrize(
    "uri", ["hf://acme/talks/a.jsonl", "hf://datasets/talks", "hf://models/a/b"]
)
def test_other_forms_are_refused_with_the_right_one(uri):
    with pytest.raises(SourceError, match=r"Expected hf://datasets/ORG/NAME"):
        scan_source(SourceConfig(path=uri))

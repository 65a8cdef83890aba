"""W&B's own client, offline; tables and manifest are read back from the run's files."""

import json
import time

import pytest

from packhouse.addons.mirrors import log_to_wandb, text_rows
from packhouse.errors import ConfigError
from packhouse.store import open_store, open_version, publish_version
from tests.store.versions import FACTS, pack_file, pack_table, write_file


@pytest.fixture
def opened(tmp_path):
    store = open_store(str(tmp_path / "store"))
    files = [pack_file(tmp_path), write_file(tmp_path, pack_table(9), "e", split="eval")]
    publish_version(store, "tiny", "aaaa", files, FACTS, "latest")
    return open_version(store, "tiny")


def decode(ids):
    return " ".join(map(str, ids))


def test_rows_of_tables_are_records_as_text(opened):
    assert list(text_rows(opened, "train", decode)) == [
        ("a", "1 2 3", "2", 3, 1),
        ("b", "4 5", "5", 2, 1),
        ("c", "6 7", "7", 2, 1),
    ]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="W&B is not installed: pip install 'packhouse[wandb]'")
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_DATA_DIR": str(tmp_path / "staging"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_SILENT": "true",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_artifact_is_logged_offline_with_a_table_a_split(opened, tmp_path, offline):
    done = log_to_wandb(opened, "tests", decode=decode, num_rows=2)

    assert done["rows"] == {"train": 2, "eval": 2}
    (log,) = tmp_path.rglob("offline-run-*/*.wandb")
    ends = time.monotonic() + 60  # W&B's own process may write it after the run has ended
    while b"/tiny/v/aaaa.g0" not in log.read_bytes() and time.monotonic() < ends:
        time.sleep(0.1)
    assert b"/tiny/v/aaaa.g0" in log.read_bytes()
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*") if is_table(path)]
    assert {row[1] for table in tables for row in table["data"]} == {"1 2 3", "4 5", "9 2 3"}


def test_a_missing_account_is_reported(opened, monkeypatch, offline):
    import wandb

    wandb.teardown()  # it keeps the mode of the first run
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    with pytest.raises(ConfigError, match=r"wandb://tests: No API key .*WANDB_MODE=offline"):
        log_to_wandb(opened, "tests", decode=decode)
    wandb.teardown()


def is_table(path):
    return path.is_file() and path.read_bytes().startswith(b'{"_type": "table"')

"""The oracle lists differences, shows the first row that differs, and accepts explained changes."""

import json
from pathlib import Path

import pytest

from tests import oracle

GOLDEN = Path(__file__).parent / "golden" / "oracle.json"
SEED = "seed0.json+demo"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the tool on seeds only; return its exit code and output."""
    monkeypatch.setenv("PACKHOUSE_SHARED", str(tmp_path / "nothing"))

    def command(*arguments):
        monkeypatch.setattr("sys.argv", ["oracle", *map(str, arguments)])
        return oracle.main(), capsys.readouterr().out

    return command


@pytest.fixture
def made(monkeypatch):
    """Replace the parts of a run with parts that every combination has."""
    parts = {
        "outcome": [{"exit": 0, "error": "", "message": "one wording"}],
        "tokens": [{"record_id": name, "input_ids": [1, 2, 3]} for name in "ab"],
    }
    monkeypatch.setattr(oracle.Workplace, "make", lambda *_: parts)
    return parts


def test_the_demo_and_a_seed_are_unchanged(run):
    for name in ("demo+demo", SEED):
        assert run("compare", GOLDEN, "--only", name)[0] == 0
        parts = json.loads(GOLDEN.read_bytes())["made"][name]
        assert len(parts) == len(oracle.PARTS)


def test_rows_with_labels_are_unchanged(shared, monkeypatch):
    # The names of records depend on their labels.
    monkeypatch.setattr("sys.argv", ["oracle", "compare", str(GOLDEN), "--only", "sst2-bert+bert"])
    assert oracle.main() == 0


def test_a_difference_is_named_and_shown(run, made, tmp_path):
    out = tmp_path / "before.json"
    run("record", out, "--only", SEED)
    made["outcome"][0]["message"] = "other words"

    assert run("compare", out, "--only", SEED)[0] == 0

    made["tokens"].reverse()  # only the packs fix the order of sequences
    assert run("compare", out, "--only", SEED)[0] == 0

    made["tokens"][0]["input_ids"] = [1, 2, 4]
    code, printed = run("compare", out, "--only", SEED)
    assert code == 1
    assert f"{SEED}: tokens 2:" in printed
    assert "outcome" not in printed
    code, printed = run("compare", out, "--show", SEED)
    assert code == 1
    assert "record_id: b\n" in printed
    assert "[1, 2, 3]\n    [1, 2, 4]" in printed

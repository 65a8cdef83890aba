"""What `python -m bench.peers_tests` calls a surprise; the peers themselves are fetched by hand."""

import subprocess
import sys

import pytest

from bench.peers_tests.__main__ import ROOT, find_surprises, main

EXPECTED = {
    "tests": 2,
    "refused": [{"why": "too long", "says": "SequenceTooLongError", "tests": ["t.long"]}],
}
FINE = {"t.fits": ("passed", ""), "t.long": ("failed", "SequenceTooLongError: 9 tokens")}


@pytest.mark.parametrize(
    ("said", "surprise"),
    [
        ({}, None),
        ({"t.long": ("skipped", "no GPU")}, None),
        ({"t.long": ("passed", "")}, "t.long passes, expected 'SequenceTooLongError'"),
        ({"t.long": ("failed", "KeyError: 'ids'")}, "t.long fails: KeyError: 'ids'"),
        ({"t.fits": ("failed", "SequenceTooLongError")}, "t.fits fails: SequenceTooLongError"),
        ({"t.new": ("passed", "")}, "3 tests, expected 2"),
    ],
)
def test_whatever_is_not_as_recorded_is_a_surprise(said, surprise):
    assert find_surprises(FINE | said, EXPECTED) == ([surprise] if surprise else [])


def test_a_test_that_is_gone_is_a_surprise():
    assert find_surprises({"t.fits": ("passed", "")}, EXPECTED) == [
        "1 tests, expected 2",
        "t.long is gone",
    ]


def test_tests_of_a_checkout_get_packhouse_s_function_by_the_name_of_trl_s(tmp_path, capsys):
    """A checkout made here, of a test that passes and one that wants another packing."""
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").touch()
    (tmp_path / "trl" / "data_utils.py").write_text("pack_dataset = None\n")
    (tmp_path / "VERSION").write_text("1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_data_utils.py").write_text(
        "from datasets import Dataset\n"
        "from trl.data_utils import pack_dataset\n"
        "class TestPackDataset:\n"
        "    def test_packs(self):\n"
        "        rows = Dataset.from_dict({'input_ids': [[1, 2], [3]]})\n"
        "        packs = pack_dataset(rows, 3, strategy='bfd')\n"
        "        assert packs['input_ids'][0] == [1, 2, 3]\n"
        "    def test_wants_a_cut(self):\n"
        "        pack_dataset(Dataset.from_dict({'input_ids': [[1, 2]]}), 1)\n"
        "def test_something_else():\n"
        "    assert False\n"
    )

    assert main(["--trl", str(tmp_path)]) == 1

    told = capsys.readouterr()
    assert "1 of 2" in told.out
    assert "test_wants_a_cut fails: packhouse.errors.SequenceTooLongError: " in told.err
    assert "2 tests, expected 9" in told.err


def test_a_folder_that_is_no_checkout_is_named(tmp_path):
    command = [sys.executable, "-m", "bench.peers_tests", "--dart-math", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"'{tmp_path}' has no dart_math; is it the right checkout?" in done.stderr

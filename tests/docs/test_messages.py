"""Each reason code of a bad row has a test."""

from pathlib import Path

from packhouse.records.reasons import QUARANTINE_REASONS

ROOT = Path(__file__).parents[2]


def test_every_reason_of_a_bad_row_is_expected_by_a_test():
    folders = ("sources", "records", "chain")
    files = [path for folder in folders for path in (ROOT / "tests" / folder).glob("test_*.py")]
    text = "\n".join(path.read_text() for path in files)
    assert [why for why in QUARANTINE_REASONS["validate"] if f'"{why}"' not in text] == []

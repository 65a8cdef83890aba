"""Two versions side by side: changes in numbers, rows and masks."""

import re
from pathlib import Path
from typing import Any

import packhouse
from packhouse.addons.report.command import diff_report
from packhouse.store.version_reader import open_address
from tests.prepared import prepare_in

ROWS = [{"instruction": f"Say <b>{n}</b>.", "output": f"{n}!"} for n in range(60)]


def made(folder: Path, rows: list[dict[str, str]], **settings: Any) -> packhouse.Version:
    return prepare_in(folder, rows, dataset="numbers", **settings)


def test_rows_added_and_removed_and_masks_changed_are_shown(tmp_path):
    old = made(tmp_path, ROWS[:50], format={"template": "alpaca"})
    new = made(
        tmp_path,
        ROWS[10:],
        format={"template": "alpaca", "train_on": "all"},
        audit={"max_trained_prompts": 1.0, "max_leaked_headers": 1.0},
    )
    tokenizers = tmp_path / "cache" / "tokenizers"
    html = diff_report(open_address(old.uri), open_address(new.uri), tokenizers)
    cells = dict(re.findall(r"<tr><td>([a-z ]+)</td><td class=number>(\d+)</td>", html))

    assert (cells["added"], cells["removed"], cells["changed masks"]) == ("10", "10", "40")
    assert "<td>format.train_on</td><td>assistant</td><td>all</td>" in html
    assert "<span class=gain>" in html
    assert "&lt;b&gt;5" in html
    assert "<b>5" not in html

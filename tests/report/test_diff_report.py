"""Two versions side by side: what changed in numbers, rows and masks."""

import re
from pathlib import Path
from typing import Any

import packhouse
from packhouse.addons.report.command import diff_report, mask_runs
from packhouse.store.read import open_address
from tests.report.conftest import TOKENIZER

ROWS = [{"instruction": f"Say <b>{n}</b>.", "output": f"{n}!"} for n in range(60)]


def made(folder: Path, rows: list[dict[str, str]], **settings: Any) -> packhouse.Version:
    """Publish some rows."""
    return packhouse.prepare(
        rows,
        tokenizer=TOKENIZER,
        dataset="numbers",
        store=folder / "store",
        cache=folder / "cache",
        progress=False,
        **settings,
    )


def test_rows_added_and_removed_and_masks_changed_are_shown(tmp_path: Path) -> None:
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
    assert diff_report(open_address(old.uri), open_address(new.uri), tokenizers) == html


def test_the_same_version_twice_differs_in_nothing(tmp_path: Path) -> None:
    opened = open_address(made(tmp_path, ROWS, format={"template": "alpaca"}).uri)
    html = diff_report(opened, opened, tmp_path)

    assert "All settings are the same." in html
    assert "The rows of both versions are the same." in html
    assert "class=gain>" not in html.replace("<i class=gain>", "")


def test_tokens_of_one_version_only_are_marked() -> None:
    old = {"input_ids": [1, 2, 3, 9], "trained": [False, True, True, True]}
    new = {"input_ids": [1, 5, 6, 3, 9], "trained": [False, True, True, False, True]}
    runs = mask_runs(old, new, list("abcz"), list("axyCz"))

    assert runs == [("", "a"), ("del", "b"), ("ins", "xy"), ("loss", "C"), ("t", "z")]
    assert mask_runs(None, new, [], list("axyCz")) == [
        ("", "a"),
        ("t", "xy"),
        ("", "C"),
        ("t", "z"),
    ]
    assert mask_runs(None, None, [], []) == []


def test_weights_that_changed_are_told(tmp_path: Path) -> None:
    """A message weighs 0.5, then 1: the tokens and the mask are the same."""
    turns = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "a b"}]
    pages = []
    for weight in (0.5, 1):
        rows = [{"messages": [turns[0], {**turns[1], "weight": w}]} for w in (0.25, weight)]
        pages.append(open_address(made(tmp_path, rows).uri))
    html = diff_report(pages[0], pages[1], tmp_path / "cache" / "tokenizers")

    cells = "<td class=number>0.375</td><td class=number>0.625</td>"
    assert f"<td>mean loss weight</td>{cells}" in html
    assert "loss weight 0.5 -&gt; 1 (record" in html

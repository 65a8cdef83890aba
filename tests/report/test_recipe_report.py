"""`packhouse report` of a version, of two versions, and of recipes with and without a run."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import packhouse
from packhouse.addons.report.recipe_report import FramedPage
from packhouse.cli import cli
from tests.prepared import TOKENIZER
from tests.report.test_version_report import island


@pytest.fixture
def recipe(tmp_path):
    rows = [{"instruction": f"Say {n} </script>", "output": f"{n}!"} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"dataset: numbers\ntokenizer: {TOKENIZER}\nsources: [{{path: rows.jsonl}}]\n"
        "format: {template: alpaca}\npack: {seq_len: 256}\n"
        f"publish: {{store: {tmp_path / 'store'}}}\n"
    )
    return path


def report(*arguments: str | Path) -> str:
    done = CliRunner().invoke(cli, ["report", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return Path(arguments[arguments.index("-o") + 1]).read_text("utf-8")


def test_a_recipe_is_shown_before_it_ran_and_its_version_afterwards(recipe, tmp_path):
    page, cache = tmp_path / "page.html", tmp_path / "cache"
    before = report(recipe, "-o", page, "--cache", cache)
    (front,) = island(before, "samples-data")

    assert "Estimated from a sample. This recipe has no version yet." in before
    size = (tmp_path / "rows.jsonl").stat().st_size / 1e6
    said = f"estimated from 200 rows: the first {size:.2f} MB of 1 file with {size:.2f} MB"
    assert said in before
    assert "The run would fail" not in before
    assert front["packs"][0]["records"][0]["texts"]
    assert "Other seq_len" in before
    assert not (tmp_path / "store").exists()

    version = packhouse.prepare(recipe, cache=cache, progress=False)
    after = report(recipe, "-o", page, "--cache", cache)
    assert version.id in after
    assert "Estimated from a sample" not in after
    assert after == report(version.uri, "-o", page, "--cache", cache) == version.report()


def test_rows_of_a_recipe_are_shown_by_side_and_with_their_label(tmp_path):
    rows = [{"prompt": "Go", "chosen": "now", "rejected": "no", "completion": "now", "label": 0}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    shown = {}
    for row_format in ("pairs", "kto"):
        path = tmp_path / f"{row_format}.yaml"
        path.write_text(
            f"dataset: {row_format}\ntokenizer: {TOKENIZER}\npack: {{strategy: none}}\n"
            f"sources: [{{path: rows.jsonl, format: {row_format}}}]\n"
        )
        page = report(path, "-o", tmp_path / "page.html", "--cache", tmp_path / "cache")
        (pack,) = island(page, "samples-data")[0]["packs"]
        assert pack["num_records"] == 1
        shown[row_format] = [(each["side"], "".join(each["texts"])) for each in pack["records"]]
    (chosen, text), (rejected, other) = shown["pairs"]
    assert (chosen, rejected) == ("chosen", "rejected")
    assert text.endswith("now<|im_end|>")
    assert other.endswith("no<|im_end|>")
    assert [side for side, _ in shown["kto"]] == ["bad"]


def test_a_recipe_that_would_be_refused_says_so(recipe, tmp_path):
    with recipe.open("a") as file:
        file.write("validate: {max_quarantined: 0.0}\n")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("not json\n")
    html = report(recipe, "-o", tmp_path / "page.html", "--cache", tmp_path / "cache")

    assert "The run would fail: 1 of 201 rows (0.50%) are bad" in html


def test_a_notebook_shows_the_report_in_a_frame_of_its_own(hostile):
    shown = hostile.version.show(height=500)._repr_html_()

    assert shown.startswith('<iframe title="packhouse report" sandbox="allow-scripts"')
    assert shown.count("<") == 2  # the frame and its end
    assert "height:500px" in shown
    assert FramedPage("<b>\"'")._repr_html_().count('"') == 8


def test_diff_takes_two_versions(hostile, tmp_path):
    page = tmp_path / "page.html"
    html = report("--diff", hostile.version.uri, "latest", "-o", page)
    refused = CliRunner().invoke(cli, ["report", "--diff", hostile.version.uri])

    assert "All settings are the same." in html
    assert "Both versions contain the same rows." in html
    assert "class=gain>" not in html.replace("<i class=gain>", "")
    assert refused.exit_code == 2
    assert "--diff with two versions" in refused.output

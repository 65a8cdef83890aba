"""Notebook displays: a version, a recipe, and a progress bar during a run."""

import re
import sys
from types import SimpleNamespace

import packhouse
from packhouse.system.progress import (
    is_notebook,
    job_done,
    notebook_progress,
    say,
    show_progress,
    start_phase,
    step_progress,
)
from tests.prepared import prepare_in

DEMO = "deployments/demo/tokenizer"


def test_a_version_shows_numbers_lengths_and_three_records_as_text(tmp_path):
    text = "<script>alert('x')</script>\x1b]0;\u202e"
    rows = [{"instruction": f"Say {text} {n}.", "output": f"{text} {n}!"} for n in range(60)]
    rows += [{"instruction": "no answer"}, {"instruction": "none either"}]
    version = prepare_in(
        tmp_path,
        rows,
        dataset="demo",
        format={"template": "alpaca"},
        seq_len=256,
        split={"eval_fraction": 0.1},
        validate={"max_quarantined": 0.2},
    )
    html = version._repr_html_()

    assert version.id in html
    assert "<td>rows read</td><td>62</td>" in html
    assert "<td>quarantined</td><td>2 rows: fields 2</td>" in html
    for split in ("train", "eval"):
        counts = version.statistics[split]
        assert f"{counts['num_packs']:,} packs" in html
        assert f"{counts['num_sequences']:,} records by length" in html
    assert html.count("<pre>") == 3
    assert re.search(r'<span class="trained">\s*&lt;script&gt;.* \d+!</span>', html)
    recipe = packhouse.Recipe.model_validate(
        {"dataset": "demo", "tokenizer": DEMO, "sources": [{"path": "<img src=x onerror=a()>"}]}
    )
    for page in (html, recipe._repr_html_()):
        assert not [part for part in ("<script", "<img", "\x1b", "\u202e") if part in page]
    assert "&lt;img src=x" in recipe._repr_html_()


def test_progress_in_a_notebook_is_one_output_that_changes(monkeypatch):
    shown = []

    class Handle:
        def update(self, page):
            shown.append(page.data)

    def display(page, display_id):
        assert display_id
        shown.append(page.data)
        return Handle()

    # IPython itself draws only in a kernel, so the test looks at what it is asked to draw.
    shell = SimpleNamespace(kernel=object())
    of_display = SimpleNamespace(display=display, HTML=lambda html: SimpleNamespace(data=html))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", of_display)
    assert is_notebook()
    with show_progress():
        start_phase("planning <it>")
        with step_progress("tokenize", 4):
            job_done(2)
            say("3/8 tokenize", 1.5)
    assert any("planning &lt;it&gt; ..." in page for page in shown)
    assert "<progress" not in shown[-1]
    assert "3/8 tokenize" in shown[-1]

    bars = notebook_progress()
    task = bars.add_task("pack", total=None)
    bars.update(task, completed=1.0, total=4.0, visible=True)
    assert 'pack <progress value="0.250" max="1">' in shown[-1]

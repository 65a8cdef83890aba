"""A row format is one file: adding one or deleting one needs no other change."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import packhouse
from packhouse.read import row_formats

LIBRARY = Path(packhouse.__file__).parent
TOKENIZER = LIBRARY.parent / "deployments" / "demo" / "tokenizer"
SCRIPT = """
import json, sys
from pathlib import Path
import packhouse
from packhouse.addons.ci.refresh import planned_version
from packhouse.recipe import parse_recipe

def plan(**source):
    try:
        raw = {"dataset": "rows", "tokenizer": sys.argv[1], "sources": [source]}
        return planned_version(parse_recipe(raw), Path("cache")).version_id
    except packhouse.PackhouseError as error:
        return str(error)

files = {"path": "faq.jsonl"}, {"path": "qa.jsonl"}
named = [{"path": "qa.jsonl", "format": name} for name in ("question_answer", "fag")]
print(json.dumps([plan(**source) for source in (*files, *named)]))
if Path("packhouse/read/faq_format.py").exists():
    packhouse.prepare("faq.jsonl", tokenizer=sys.argv[1], store="store", cache="cache",
                      seq_len=128, progress=False)
"""


@pytest.fixture
def results_of(tmp_path):
    """Run the script with a copy of the library; return its four results."""
    shutil.copytree(
        LIBRARY, tmp_path / "packhouse", ignore=shutil.ignore_patterns("__pycache__", "faq_*")
    )
    faq = [{"faq": f"What is {n} + 1?", "reply": str(n + 1)} for n in range(20)]
    qa = [{"question": each["faq"], "answer": each["reply"]} for each in faq]
    for name, rows in (("faq", faq), ("qa", qa)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)

    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(TOKENIZER)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[0])

    return run


def test_a_format_is_one_file(results_of, tmp_path):
    """The example in the docstring of `row_formats`, as its own file."""
    text = inspect.getdoc(row_formats) or ""
    example = text[text.index('    """Questions') : text.index("`auto` and `mixed`")]
    folder = tmp_path / "packhouse" / "read"

    unknown, *before, near = results_of()
    (folder / "faq_format.py").write_text(inspect.cleandoc(example) + "\n")
    (tmp_path / "packhouse" / "addons" / "tokenized_rows.py").unlink()
    known, *after, near_new = results_of()

    assert "match no known format" in unknown
    assert "match" not in known
    assert list((tmp_path / "store").glob("faq/v/*/manifest.json"))
    # A source whose format is detected could now be read in the new one.
    assert before[0] != after[0]
    assert before[1] == after[1]
    assert "did you mean 'faq'" in near_new
    assert "did you mean" not in near

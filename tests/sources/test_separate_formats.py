"""A row format is one file: adding one or deleting one needs no other change."""

import inspect
import json
import os
import shutil
from pathlib import Path
from typing import Any

import packhouse
from packhouse.read import row_formats
from tests.prepared import TOKENIZER, python

LIBRARY = Path(packhouse.__file__).parent
PLANS = """
import json, sys
from pathlib import Path
import packhouse
from packhouse.addons.ci.refresh import planned_version
from packhouse.recipe import parse_recipe

def plan(tokenizer, **source):
    try:
        raw = {"dataset": "rows", "tokenizer": tokenizer, "sources": [source]}
        return planned_version(parse_recipe(raw), Path("cache")).version_id
    except packhouse.PackhouseError as error:
        return str(error)

def plans(tokenizer):
    files = {"path": "faq.jsonl"}, {"path": "qa.jsonl"}
    named = [{"path": "qa.jsonl", "format": name} for name in ("question_answer", "fag")]
    return [plan(tokenizer, **source) for source in (*files, *named)]
"""
RUN = """
print(json.dumps(plans(sys.argv[1])))
packhouse.prepare("faq.jsonl", tokenizer=sys.argv[1], store="store", cache="cache",
                  seq_len=128, progress=False)
"""


def test_a_format_is_one_file(tmp_path, monkeypatch):
    """The example in the docstring of `row_formats`, as its own file in a copy of the library."""
    text = inspect.getdoc(row_formats) or ""
    example = text[text.index('    """Questions') : text.index("`auto` and `mixed`")]
    faq = [{"faq": f"What is {n} + 1?", "reply": str(n + 1)} for n in range(20)]
    qa = [{"question": each["faq"], "answer": each["reply"]} for each in faq]
    for name, rows in (("faq", faq), ("qa", qa)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    here: dict[str, Any] = {}
    exec(PLANS, here)
    shutil.copytree(LIBRARY, "packhouse", ignore=shutil.ignore_patterns("__pycache__"))
    Path("packhouse/read/faq_format.py").write_text(inspect.cleandoc(example) + "\n")
    Path("packhouse/addons/tokenized_rows.py").unlink()

    unknown, *before, near = here["plans"](str(TOKENIZER))
    alone = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = python("-c", PLANS + RUN, TOKENIZER, env=alone)
    assert done.returncode == 0, done.stderr
    known, *after, near_new = json.loads(done.stdout.splitlines()[0])

    assert "match no known format" in unknown
    assert "match" not in known
    assert list((tmp_path / "store").glob("faq/v/*/manifest.json"))
    # A source whose format is detected could now be read in the new one.
    assert before[0] != after[0]
    assert before[1] == after[1]
    assert "did you mean 'faq'" in near_new
    assert "did you mean" not in near

"""`prepare` refuses text that no setting reads, and names the option that ignores it."""

import json
import shlex

import pyarrow.parquet as pq
import pytest

from packhouse import plan
from packhouse.errors import QuarantineLimitError, SourceError

LONG = "The sky is blue because of the air."


def test_the_option_works_as_printed(project):
    project.write([question(n) | {"it's so": LONG, "id": f"q {n} of a test"} for n in range(40)])
    given = 'sources.0.ignored_fields=["id"]'
    with pytest.raises(SourceError) as refused:
        project.prepare(given)
    message = str(refused.value)
    assert plan(project.recipe(given), cache=project.cache).refusals == (message,)
    assert message.startswith(
        "source 'rows': no setting reads the text in 'it's so' (40 of 40 rows, as in "
        "rows/rows.jsonl line 1). Read it with `fields` or `select`, or ignore it: --set "
    )
    assert not (project.root / "store" / "sums").exists()
    option = shlex.split(message.partition("--set ")[2].partition(" (in Python")[0])[0]
    assert project.prepare(option).version
    assert json.loads(message.partition('"ignored_fields": ')[2][:-2]) == ["id", "it's so"]


def test_text_next_to_token_ids_is_refused(project):
    rows = [{"input_ids": [n + 1, 5], "labels": [-100, 5], "text": LONG} for n in range(20)]
    project.write(rows)
    with pytest.raises(SourceError, match="no setting reads the text in 'text'"):
        project.prepare("sources.0.format=tokenized")
    ignored = 'sources.0.ignored_fields=["text"]'
    recipe = project.recipe("sources.0.format=tokenized", ignored)
    assert plan(recipe, cache=project.cache).refusals == ()


@pytest.mark.parametrize(
    ("rows", "with_text", "is_refused"),
    [(20, 2, False), (20, 3, True), (100, 4, False)],
)
def test_three_rows_and_a_twentieth_of_the_rows_are_enough(project, rows, with_text, is_refused):
    project.write([question(n) | ({"note": LONG} if n < with_text else {}) for n in range(rows)])
    if is_refused:
        with pytest.raises(SourceError, match=f"'note' .{with_text} of {rows} rows"):
            project.prepare()
    else:
        assert project.prepare().version


def test_images_are_refused_with_the_setting_that_drops_them(project):
    project.write([question(n) | ({"photo": "a.jpg"} if n % 2 else {}) for n in range(20)])
    with pytest.raises(QuarantineLimitError, match=r"--set sources\.0\.media=drop_rows"):
        project.prepare()
    prepared = project.prepare("sources.0.media=drop_rows")
    assert prepared.ledger[0].dropped == {"media": 10}
    (file,) = (project.folder(prepared) / "dropped").iterdir()
    assert pq.read_table(file)["reason"].to_pylist() == ["media"] * 10


def question(number):
    return {"instruction": f"Double {number}.", "output": f"{2 * number}"}

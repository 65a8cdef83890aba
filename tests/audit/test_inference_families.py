"""Audit every chat template that TRL ships: no false alarms, and every planted fault is found."""

from functools import cache

import pyarrow as pa
import pytest

pytest.importorskip("trl", reason="TRL is not installed")

from packhouse.auditing.inference import audit_inference
from packhouse.auditing.tokens import Side
from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.render.sandbox import pinned_date
from packhouse.tokenize import tokenize_table
from tests.templates.families import (
    SHAPES,
    answers_of,
    family,
    names,
    rendered_by_packhouse,
    snapshot_of,
    tools_of,
)

pytestmark = pytest.mark.usefixtures("shared")


@cache
def rendered(name, turns):
    """Output of packhouse for the shapes that it accepts."""
    made = []
    # DeepSeek's prompts open a thinking block that the template never writes.
    config = {"thought_end": "\n</think>\n\n"} if name.startswith("deepseek") else {}
    for shape in SHAPES:
        try:
            one = rendered_by_packhouse(
                family(name), SHAPES[shape], tools_of(shape), turns=turns, **config
            )
        except TemplateError:
            continue
        if not one.quarantined.num_rows:
            made.append(one)
    assert made
    return made


def audited(name, turns, change=lambda formatted: formatted):
    snapshot = snapshot_of(family(name))
    sides = []
    for made in rendered(name, turns):
        formatted = change(made.formatted)
        tokenized = tokenize_table(formatted, snapshot, TokenizeConfig()).tokenized
        sides.append(Side(made.examples, formatted, tokenized))
    date = pinned_date().isoformat()
    return audit_inference(sides, snapshot, FormatConfig(turns=turns), date=date)


@pytest.mark.parametrize("turns", ["joined", "exact", "alone"])
@pytest.mark.parametrize("name", names())
def test_the_rule_raises_no_false_alarm(name, turns):
    found = audited(name, turns)
    counts = found["counts"]
    num_answers = sum(
        len(answers_of(made, number))
        for made in rendered(name, turns)
        for number in range(made.formatted.num_rows)
    )
    assert not found["worst"]
    assert counts["answers_checked"] + counts["partly_trained"] == num_answers
    assert counts["answers_after_prompt"] == counts["answers_checked"] > 0
    assert counts["completions_stopped"] == counts["answers_checked"]


def shifted(by_start, by_end):
    def change(formatted):
        rows = formatted.to_pylist()
        for row in rows:
            row["trained_spans"][-1]["start"] += by_start
            row["trained_spans"][-1]["end"] += by_end
        return pa.Table.from_pylist(rows, formatted.schema)

    return change


@pytest.mark.parametrize("name", names())
def test_a_shifted_span_is_never_right(name):
    for by_start, by_end in ((1, 0), (-1, 0), (0, -1)):
        counts = audited(name, "alone", shifted(by_start, by_end))["counts"]
        assert counts["answers_checked"]
        assert counts["answers_after_prompt"] == (0 if by_start else counts["answers_checked"])
        assert counts["completions_stopped"] == (0 if by_end else counts["answers_checked"])

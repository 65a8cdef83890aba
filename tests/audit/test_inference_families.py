"""Audit every chat template that TRL ships: no false alarms, and every planted fault is found."""

import json
from collections import Counter
from functools import cache, lru_cache

import pyarrow as pa
import pytest

pytest.importorskip("trl", reason="TRL is not installed")

from packhouse.addons.audit_any import template_turns as audit_turns
from packhouse.addons.audit_any.token_audit import audit_token_rows, batches_of
from packhouse.auditing.inference_prompts import audit_inference
from packhouse.auditing.plain_template import PlainTemplate
from packhouse.auditing.token_checks import Side
from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.render.jinja_sandbox import pinned_date
from packhouse.tokenize import tokenize_table
from packhouse.tokenize.encoders import read_pipeline
from tests.templates.families import (
    SHAPES,
    answers_of,
    family,
    rendered_by_packhouse,
    snapshot_of,
    tools_of,
)

WITHOUT_PROMPT = {
    "diffusion_gemma": {"tools", "parallel", "lookthink"},
    "gemma4": {"textcall"},
}
"""Shapes in which a template writes no generation prompt after a tool result, so that the model has
to write the header, or nothing shows where its answer begins."""

FAULTY = ["gemma4_v5", "glm4moe", "gptoss", "idefics3", "nemotron_3_nano", "qwen3_8"]
"""Templates whose audit is given faults: stop tokens, headers and thoughts of every kind."""

JOINED = ("deepseek_r1_distill", "diffusion_gemma", "gemma", "lfm2_2_5_v2", "llama3_2")
JOINED += ("muse_glimmer", "qwen3")
SOUND = [(f"{name}.jinja", "alone") for name in FAULTY]
SOUND += [(f"{name}.jinja", "joined") for name in JOINED]
"""Templates of several vendors, with one answer in a record or with all."""

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture(scope="module", autouse=True)
def one_table_of_bytes_for_all_shapes():
    """Read the bytes of 150,000 ids once per template, not for each of its shapes."""
    with pytest.MonkeyPatch.context() as patch:
        of = lru_cache(2)(audit_turns.TokenBytes.of)
        patch.setattr(audit_turns.TokenBytes, "of", staticmethod(of))
        yield


@cache
def rendered(name, turns):
    made = {}
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
            made[shape] = one
    assert made
    return made


@cache
def learned(name):
    """Learn about a template like `packhouse audit`."""
    of, rows = family(name), []
    snapshot, config = snapshot_of(of), FormatConfig()
    for probe in audit_turns.PROBES:
        tools = json.loads(probe.get("tools", "[]"))
        try:
            made = rendered_by_packhouse(of, probe["messages"], tools, turns="whole")
        except TemplateError:
            continue
        tokenized = tokenize_table(made.formatted, snapshot, TokenizeConfig()).tokenized
        rows += tokenized["input_ids"].to_pylist()
    template = PlainTemplate(config, snapshot, pinned_date().isoformat())
    texts = audit_turns.template_texts(template)
    return audit_turns.turns_of(rows, snapshot, read_pipeline(snapshot.backend), texts)


def audited_as_given(name, turns, change=lambda tokenized: tokenized):
    """Audit ids and masks alone, and return findings by shape, and totals."""
    snapshot, findings, totals = snapshot_of(family(name)), {}, []
    pipeline = read_pipeline(snapshot.backend)
    for shape, made in rendered(name, turns).items():
        if shape in WITHOUT_PROMPT.get(name.removesuffix(".jinja").removesuffix("_training"), ()):
            continue
        tokenized = tokenize_table(
            made.formatted, snapshot, TokenizeConfig(), cut_at_spans=True
        ).tokenized
        found = audit_token_rows(batches_of(change(tokenized)), snapshot, learned(name), pipeline)
        findings[shape] = +Counter({name: each.number for name, each in found.findings.items()})
        totals.append(found.totals)
    return findings, totals


def audited(name, turns, change=lambda formatted: formatted):
    snapshot = snapshot_of(family(name))
    sides = []
    for made in rendered(name, turns).values():
        formatted = change(made.formatted)
        tokenized = tokenize_table(formatted, snapshot, TokenizeConfig()).tokenized
        sides.append(Side(made.examples, formatted, tokenized))
    config = FormatConfig(turns=turns)
    template = PlainTemplate(config, snapshot, pinned_date().isoformat())
    return audit_inference(sides, snapshot, config, template)


@pytest.mark.parametrize(("name", "turns"), SOUND)
def test_the_rule_raises_no_false_alarm(name, turns):
    found = audited(name, turns)
    counts = found["counts"]
    num_answers = sum(
        len(answers_of(made, number))
        for made in rendered(name, turns).values()
        for number in range(made.formatted.num_rows)
    )
    assert not found["worst"]
    assert counts["answers_checked"] + counts["partly_trained"] == num_answers
    assert counts["answers_after_prompt"] == counts["answers_checked"] > 0
    assert counts["completions_stopped"] == counts["answers_checked"]


def shifted(by_start, by_end, column="trained_spans"):
    def change(table):
        rows = table.to_pylist()
        for row in rows:
            row[column][-1]["start"] += by_start
            row[column][-1]["end"] += by_end
        return pa.Table.from_pylist(rows, table.schema)

    return change


@pytest.mark.parametrize("name", FAULTY)
def test_a_shifted_span_is_never_right(name):
    for by_start, by_end in ((1, 0), (-1, 0), (0, -1)):
        counts = audited(f"{name}.jinja", "alone", shifted(by_start, by_end))["counts"]
        assert counts["answers_checked"]
        assert counts["answers_after_prompt"] == (0 if by_start else counts["answers_checked"])
        assert counts["completions_stopped"] == (0 if by_end else counts["answers_checked"])


@pytest.mark.parametrize(("name", "turns"), SOUND)
def test_ids_and_masks_alone_raise_no_false_alarm(name, turns):
    findings, totals = audited_as_given(name, turns)
    assert not any(findings.values()), findings
    assert all(total.spans for total in totals)
    for total in totals:
        agree = total.spans_stopped, total.spans_of_one_stop, total.spans_after_header
        assert agree == (total.spans,) * 3


@pytest.mark.parametrize("name", ["deepseek_r1_distill.jinja", "qwen3_8.jinja"])
def test_ids_and_masks_alone_show_a_trained_thinking_tag(name):
    tags = snapshot_of(family(name)).added_tokens["<think>"]

    def early(tokenized):
        rows = tokenized.to_pylist()
        for row in rows:
            for span in row["trained_ranges"]:
                before = row["input_ids"][: span["start"]]
                span["start"] = len(before) - 1 - before[::-1].index(tags)
        return pa.Table.from_pylist(rows, tokenized.schema)

    findings, _ = audited_as_given(name, "alone", early)
    assert all(found["other_prompts"] for found in findings.values())


@pytest.mark.parametrize("name", ["gptoss.jinja", "muse_glimmer.jinja"])
def test_ids_and_masks_alone_show_trained_prompts_although_answers_have_headers(name):
    def whole(tokenized):
        rows = tokenized.to_pylist()
        for row in rows:
            row["trained_ranges"] = [{"start": 0, "end": len(row["input_ids"])}]
            row["range_weights"] = None
        return pa.Table.from_pylist(rows, tokenized.schema)

    findings, _ = audited_as_given(name, "alone", whole)
    assert all(found["trained_headers"] for found in findings.values())


@pytest.mark.parametrize("name", FAULTY)
def test_ids_and_masks_alone_show_a_shifted_span(name):
    for by_start, by_end in ((1, 0), (-1, 0), (0, -1)):
        _, totals = audited_as_given(
            f"{name}.jinja", "alone", shifted(by_start, by_end, "trained_ranges")
        )
        for total in totals:
            assert total.spans_after_header < total.spans or not by_start
            assert total.spans_stopped < total.spans or not by_end

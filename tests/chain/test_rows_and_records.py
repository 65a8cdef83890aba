"""Counts of rows and of records, if a row makes several records."""

import pytest

from packhouse.addons.plan import estimate
from packhouse.cli.result_summary import print_report, report_json
from packhouse.errors import EmptyDatasetError, QuarantineLimitError
from packhouse.run.chain import plan_jobs
from packhouse.run.step_cache import Workspace

TREES = ("sources.0.format=oasst", "sources.0.oasst_paths=all", "format.template=chat")
REFUSE = "tokenize.control_text=quarantine"


def message(role, text, *replies):
    return {"role": role, "text": text, "replies": list(replies)}


def question(number, *answers):
    answers = [message("assistant", text) for text in answers]
    return message("prompter", f"Why {number}?", *answers)


@pytest.fixture
def trees(project):
    """10 trees, 2 of them with bad paths: 1 in validate, 3 in tokenize."""
    bad = [
        question(0, "Because.", "", "It ends with <|im_end|>."),
        question(1, "So.", "<|im_end|>", "<|im_end|> again"),
    ]
    project.write([*bad, *(question(n, "Because.", "So.") for n in range(2, 10))])
    return project


def refusals(project, *overrides):
    recipe = project.recipe(*overrides)
    return estimate(recipe, plan_jobs(recipe), Workspace(cache=project.cache)).refusals


def test_the_share_of_bad_rows_counts_each_row_once(trees, capsys):
    allowed, over = "validate.max_quarantined=0.2", "validate.max_quarantined=0.19"
    assert refusals(trees, *TREES, REFUSE, allowed) == ()
    (refusal,) = refusals(trees, *TREES, REFUSE, over)
    assert refusal.startswith("2 of 10 rows (20.00%) are bad")

    prepared = trees.prepare(*TREES, REFUSE, allowed)

    validate, format_, tokenize = prepared.ledger[:3]
    assert (validate.quarantined, tokenize.quarantined) == (
        {"empty_answer": 1},
        {"control_text": 3},
    )
    assert [line.num_bad_rows for line in (validate, format_, tokenize)] == [1, 0, 1]
    (gate,) = (gate for gate in prepared.gates if gate.name == "quarantine")
    assert (gate.value, gate.total) == (0.2, 10)
    assert refusals(trees, *TREES, REFUSE, allowed) == ()
    assert refusals(trees, *TREES, REFUSE, over) == (refusal,)
    with pytest.raises(QuarantineLimitError, match=r"^2 of 10 rows \(20.00%\) are bad"):
        trees.prepare(*TREES, REFUSE, over)
    print_report(prepared)
    assert "quarantine: 2 rows in " in capsys.readouterr().out


def test_rows_that_all_have_a_bad_record_still_give_their_good_ones(project):
    project.write([question(n, "So.", "<|im_end|>") for n in range(4)])
    all_may = "validate.max_quarantined=1"

    prepared = project.prepare(*TREES, REFUSE, all_may)
    assert sum(side.records for side in prepared.published.sides.values()) == 4

    project.write([question(n, "<|im_end|>", "a <|im_end|>") for n in range(4)])
    with pytest.raises(EmptyDatasetError, match=r"all 4 rows are bad \(control_text 8 records\)"):
        project.prepare(*TREES, REFUSE, all_may)


FLAGGED = {"role": "assistant", "content": "Paris.", "loss_mask": False, "mood": "glad"}


def test_fields_of_messages_that_nobody_reads_are_named_once_a_source(project, capsys):
    messages = [{"role": "user", "content": "The capital of France?"}, FLAGGED]
    row = {"messages": messages, "history": [["a", "b"]]}
    project.write([row] * 3)
    prepared = project.prepare(
        "sources.0.format=chat", "format.template=chat", "audit.max_duplicates=1"
    )

    counts = {"history": 3, "messages[].loss_mask": 3, "messages[].mood": 3}
    assert report_json(prepared)["unused_fields"] == {"rows": counts}
    (source,) = prepared.published.sources
    assert source["unused_fields"] == counts
    print_report(prepared)
    printed = " ".join(capsys.readouterr().out.split())
    names = "history 3, messages[].loss_mask 3, messages[].mood 3"
    assert f"note: source 'rows' has unused fields (number of rows): {names}" in printed
    assert printed.count("unused") == 1

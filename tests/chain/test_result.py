"""Printed results and JSON of a run, by source."""

import json

from packhouse.cli.result_summary import print_report, report_json

FLAGGED = {"role": "assistant", "content": "Paris.", "loss_mask": False, "mood": "glad"}


def test_fields_of_messages_that_nobody_reads_are_named_once_a_source(project, capsys):
    messages = [{"role": "user", "content": "The capital of France?"}, FLAGGED]
    row = {"messages": messages, "history": [["a", "b"]]}
    project.rows.write_text("".join(json.dumps(row) + "\n" for row in [row] * 3))
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

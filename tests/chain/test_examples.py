"""Rows split into windows or into single-turn examples, through the whole chain."""

import pyarrow.parquet as pq
import pytest

WINDOWS = ("pack.over_length=window", "pack.seq_len=64")
TURNS = ("format.turns=alone", "split.group_by=record")
MORE = "Thanks a lot for that, and now tell me how I can say so to all of my old friends at once."
SAID = "You say thank you to each of them, one by one, and you mean it whenever you say it aloud."


def chats(number):
    """A short conversation, and a longer one that begins (or ends) the same way."""
    asked, told = f"What is {number} and {number} and so on?", f"It is {2 * number} or more."
    turns = [("user", asked), ("assistant", told), ("user", MORE), ("assistant", SAID)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return [{"messages": messages[:2]}, {"messages": messages}]


CHATS = (
    "sources.0.format=chat",
    "format.template=chat",
    "pack.strategy=none",
    "split.eval_fraction=0.5",
)


@pytest.mark.parametrize("options", [TURNS, ("split.group_by=record", *WINDOWS)])
def test_equal_parts_of_different_conversations_are_on_one_side_and_counted(project, options):
    rows = [chat for number in range(12) for chat in chats(number)]
    if options is not TURNS:  # the last exchange is a separate conversation too
        rows.append({"messages": rows[1]["messages"][2:]})
    project.write(rows)
    prepared = project.prepare(
        *CHATS,
        "audit.max_duplicates=1",
        *options,
    )

    sides = sides_of_tokens(project, prepared)
    assert all(len(set(found)) == 1 for found in sides.values())
    repeated = sum(len(found) - 1 for found in sides.values())
    assert repeated >= 12
    audits = [receipt.facts for receipt in prepared.receipts if receipt.step == "audit"]
    (records,) = (facts.found for facts in audits if facts.of == "records")
    assert records["duplicates"] == repeated


def sides_of_tokens(project, prepared):
    sides = {}
    for path in sorted(project.folder(prepared).glob("data/*.parquet")):
        side = "eval" if path.name.startswith("eval") else "train"
        for ids in pq.read_table(path)["input_ids"].to_pylist():
            sides.setdefault(tuple(ids), []).append(side)
    return sides


def thought(number, thinking, later="And then?"):
    answer = {"role": "assistant", "content": f"It is {number}.", "reasoning_content": thinking}
    asked = {"role": "user", "content": f"What is {number}?"}
    more = [{"role": "user", "content": later}, {"role": "assistant", "content": "Nothing."}]
    return {"messages": [asked, answer, *more]}


def test_rows_that_differ_in_their_thinking_alone_are_on_one_side(project):
    rows = [thought(number, f"{way} {number}") for number in range(30) for way in "abc"]
    project.write(rows)
    prepared = project.prepare(
        *CHATS,
        "split.group_by=record",
        "audit.max_duplicates=1",
        "format.reasoning=strip",
        *WINDOWS,
    )

    sides = sides_of_tokens(project, prepared)
    assert {side for found in sides.values() for side in found} == {"train", "eval"}
    assert all(len(set(found)) == 1 for found in sides.values())


@pytest.mark.usefixtures("real_reports")
def test_an_eval_that_shrinks_by_equal_windows_is_reported(project, capsys):
    from packhouse.cli.result_summary import print_report

    turns = [{"role": "user", "content": MORE}, {"role": "assistant", "content": SAID}]
    rows = [{"messages": [*chats(n)[0]["messages"], *turns]} for n in range(60)]  # same end
    project.write(rows)
    base = ["sources.0.format=chat", "format.template=chat", "split.eval_fraction=0.5"]
    prepared = project.prepare(*base, *WINDOWS, "audit.max_duplicates=1")

    facts = prepared.published.split
    assert sum(side.records for side in prepared.published.sides.values()) == 120
    assert facts.rows == 60
    assert facts.asked == 30
    assert facts.eval == 0
    assert facts.joined == 59  # all except the conversation that represents them
    print_report(prepared)
    said = "eval has 0 of 60 rows instead of 30, because groups are not split, and dedup merged 59"
    assert said in " ".join(capsys.readouterr().out.split())  # at any terminal width

    whole = project.prepare(*base, "pack.seq_len=512")
    assert whole.published.split.joined == 0
    print_report(whole)
    assert "instead of" not in capsys.readouterr().out

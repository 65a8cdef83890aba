"""Rows that are split, to windows or to examples of one turn, through the whole chain."""

import json

import pyarrow.parquet as pq
import pytest

WINDOWS = ("pack.over_length=window", "pack.seq_len=64")
TURNS = ("format.one_example_per_turn=true", "split.group_by=record")
MORE = "Thanks a lot for that, and now tell me how I can say so to all of my old friends at once."
SAID = "You say thank you to each of them, one by one, and you mean it whenever you say it aloud."


def chats(number):
    """A short conversation, and a longer one that begins (or ends) like it."""
    asked, told = f"What is {number} and {number} and so on?", f"It is {2 * number} or more."
    turns = [("user", asked), ("assistant", told), ("user", MORE), ("assistant", SAID)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return [{"messages": messages[:2]}, {"messages": messages}]


@pytest.mark.parametrize("options", [WINDOWS, TURNS, ("split.group_by=record", *WINDOWS)])
@pytest.mark.parametrize("exact", ["keep", "same_side"])
def test_equal_parts_of_different_conversations_are_on_one_side_and_counted(house, options, exact):
    rows = [chat for number in range(12) for chat in chats(number)]
    if "window" in options[0]:  # the last exchange of all, too, is a conversation of its own
        rows.append({"messages": rows[1]["messages"][2:]})
    house.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = house.prepare(
        "sources.0.format=chat",
        "format.template=chat",
        "pack.strategy=none",
        "split.eval_fraction=0.5",
        f"dedup.exact={exact}",
        "audit.max_duplicates=1",
        *options,
    )

    sides = {}
    for path in sorted(house.folder(prepared).glob("data/*.parquet")):
        side = "eval" if path.name.startswith("eval") else "train"
        for ids in pq.read_table(path)["input_ids"].to_pylist():
            sides.setdefault(tuple(ids), []).append(side)
    assert all(len(set(found)) == 1 for found in sides.values())
    repeated = sum(len(found) - 1 for found in sides.values())
    assert repeated >= 12
    audits = [receipt.facts for receipt in prepared.receipts if receipt.step == "audit"]
    (records,) = (facts["found"] for facts in audits if facts["of"] == "records")
    assert records["duplicates"] == repeated

"""`packhouse diff` compares rows, copies, splits and masks."""

import json

import pytest
from click.testing import CliRunner

from packhouse.api import prepare
from packhouse.cli import cli
from tests.prepared import TOKENIZER, prepare_in

ROWS = [{"instruction": f"Say {n}.", "output": f"It is {n}!"} for n in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("diff")


@pytest.fixture(scope="module")
def publish(folder):
    """Publish rows with some settings once."""
    published: dict[str, str] = {}

    def publish(rows, source=(), **settings) -> str:
        key = json.dumps([rows, source, settings])
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if key not in published:
            version = prepare_in(
                folder,
                {"path": str(folder / "rows.jsonl"), **dict(source)},
                dataset="numbers",
                **{"format": {"template": "alpaca"}, "pack": {"seq_len": 128}} | settings,
            )
            published[key] = version.uri
        return published[key]

    return publish


def printed(*words: str) -> list[str]:
    done = CliRunner().invoke(cli, ["diff", *words], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    text = done.stdout
    assert max(map(len, text.split("records: ")[0].splitlines())) <= 80
    return text.splitlines()


def test_settings_that_decide_which_records_are_packed_are_named(publish, folder):
    (folder / "benchmark.jsonl").write_text('{"text": "one two three four five six"}')
    benchmark = {"path": str(folder / "benchmark.jsonl")}
    searched = {"benchmarks": [benchmark], "benchmark_ngram": 5}
    plain = publish(ROWS)
    weighted = publish(ROWS, {"weight": 2.5, "mix_seed": 4})
    without = publish(ROWS, audit={**searched, "on_match": "drop"})
    lines = [" ".join(line.split()) for line in printed(plain, weighted)]
    assert lines[lines.index("configuration old new") + 1 :][:3] == [
        "mix.rows.mix_seed - 4",
        "mix.rows.weight - 2.5",
        "",
    ]
    lines = [" ".join(line.split()) for line in printed(without, publish(ROWS, {"weight": 2.0}))]
    assert lines[lines.index("configuration old new") + 1 :][:4] == [
        "mix.rows.weight - 2.0",
        "audit.benchmark_ngram 5 -",
        "audit.on_match drop -",
        "",
    ]


def test_records_that_occur_twice_are_no_changed_tokens(publish):
    rows = [*ROWS, *ROWS[:2]]
    once, twice = publish(rows, dedup={"exact": "drop"}), publish(rows, dedup={"exact": "keep"})
    lines = printed(once, twice)
    assert "records: 18 are the same" in lines
    assert "        2 different number of copies" in lines
    assert "          rows/rows.jsonl row 0: 1 -> 2 copies" in lines
    assert not any("other text" in line for line in lines)


def test_edited_added_and_removed_rows_are_told_apart(publish):
    old = publish(ROWS)
    edited = [*ROWS[:3], {**ROWS[3], "output": "It is three!"}, *ROWS[4:19]]
    new = publish([*edited, {**ROWS[3], "instruction": "Count up."}, {**ROWS[4], "input": "x"}])
    text = "\n".join(printed(old, new))
    assert "        1 added\n          rows/rows.jsonl row 20\n" in text
    assert "        2 edited (the row changed)\n" in text
    assert "            - ... " in text
    assert "{+It is three!" in text
    assert "removed" not in text


WINDOWS = {"format": {"template": "chat"}, "pack": {"seq_len": 256, "over_length": "window"}}


def talk(word: str, num_turns: int) -> list[dict[str, object]]:
    messages = []
    for number in range(num_turns):
        messages.append({"role": "user", "content": f"{word} {number}."})
        messages.append({"role": "assistant", "content": f"It is {number}!"})
    return [{"messages": messages}]


def test_an_edited_row_with_as_many_tokens_shows_the_difference(publish):
    def rows(ids: list[int], labels: list[int]) -> list[dict[str, object]]:
        return [{"input_ids": ids, "labels": labels}]

    settings = {
        "format": {"template": "chat"},
        "audit": {"max_unterminated_turns": 1, "max_cut_sequences": 1},
    }
    old, mask, text = (
        publish(rows(*row), **settings)
        for row in (
            ([5, 6, 7], [-100, 6, 7]),
            ([5, 6, 7], [-100, -100, 7]),
            ([5, 6, 8], [-100, 6, 8]),
        )
    )
    assert "          rows/rows.jsonl row 0: 2 -> 1 trained" in printed(old, mask)
    assert "          rows/rows.jsonl row 0: different text of 3 tokens" in printed(old, text)


def test_windows_of_an_edited_row_are_paired_in_their_order(publish):
    old, new = (publish(talk(word, 24), **WINDOWS) for word in ("Say", "Tell"))
    lines = printed(old, new)
    (said,) = [line for line in lines if "edited" in line]
    number = int(said.split()[0])
    assert number > 1
    assert not [line for line in lines if line.endswith((" added", " removed"))]
    shorter = printed(old, publish(talk("Say", 6), **WINDOWS))
    assert f"        {number - 1} removed" in shorter
    assert "          rows/rows.jsonl row 0: now split to fewer records" in shorter


def test_a_row_that_is_split_differently_is_not_shown_as_changed(publish):
    smaller = WINDOWS | {"pack": {"seq_len": 128, "over_length": "window"}}
    lines = printed(publish(talk("Say", 24), **WINDOWS), publish(talk("Say", 24), **smaller))
    (said,) = [line for line in lines if "edited" in line]
    assert said.endswith(" edited (same row, read or split differently)")


def test_a_window_that_another_takes_the_place_of_is_edited(publish):
    def windows(*words: str) -> list[dict[str, object]]:
        turns = [talk(" ".join([word] * 50), 1)[0]["messages"] for word in words]
        return [{"messages": [message for turn in turns for message in turn]}]

    settings = WINDOWS | {"pack": {"seq_len": 128, "over_length": "window"}}
    old = publish(windows("a", "b", "c"), **settings)
    new = publish(windows("b", "x", "c"), **settings)
    lines = printed(old, new)
    assert "records: 2 are the same" in lines
    assert "        1 edited (the row changed)" in lines
    assert not [line for line in lines if line.endswith((" added", " removed"))]


def test_a_row_equal_to_another_one_is_not_shown_as_split(publish):
    """Content that another row shares is not paired with the row's content in the other version."""
    keep = {"dedup": {"exact": "keep"}}
    twice = publish([ROWS[0], *ROWS], **keep)
    once = publish([{**ROWS[0], "output": "It is nothing!"}, *ROWS], **keep)
    lines = printed(twice, once)
    assert "          rows/rows.jsonl row 0: was equal to another record" in lines
    assert "          rows/rows.jsonl row 1: 2 -> 1 copy" in lines
    back = printed(once, twice)
    assert "          rows/rows.jsonl row 0: now equal to another record" in back


def test_a_row_that_is_dropped_now_has_a_reason(publish):
    long = {"instruction": "Count.", "output": " ".join(map(str, range(200)))}
    old = publish([*ROWS, long], pack={"seq_len": 2048, "over_length": "drop"})
    new = publish([*ROWS, long], pack={"seq_len": 128, "over_length": "drop"})
    lines = printed(old, new)
    assert "        1 removed" in lines
    assert "          rows/rows.jsonl row 20: now over_seq_len" in lines


def test_a_changed_filter_is_named_with_the_rows_it_leaves_out(publish, folder):
    pytest.importorskip("duckdb")
    publish(ROWS)
    uris = []
    for least in (7, 8):
        recipe = folder / "recipe.yaml"
        recipe.write_text(
            f"dataset: filtered\ntokenizer: {TOKENIZER}\nformat: {{template: alpaca}}\n"
            "sources:\n  - path: rows.jsonl\n"
            f"    where: [output != 'It is 3!', length(output) > {least}]\n"
        )
        made = prepare(recipe, store=folder / "store", cache=folder / "cache", progress=False)
        uris.append(made.uri)
    text = "\n".join(printed(*uris))
    assert "settings.where.1" in text
    assert "ledger.tokenize.rows_out" not in text  # as many as validate returns
    assert "        9 removed\n" in text  # 0 to 9, except the 3 that neither has
    assert text.count(": now filtered: length(output) > 8") == 5
    back = "\n".join(printed(*uris[::-1]))
    assert back.count(": was filtered: length(output) > 8") == 5


def test_another_mask_is_no_other_text(publish):
    old, new = publish(ROWS), publish(ROWS, format={"template": "alpaca", "train_on": "all"})
    text = "\n".join(printed(old, new))
    assert "20 same text, different tokens trained" in text
    assert "different text" not in text


def test_records_that_are_cut_elsewhere_are_the_same(publish):
    def packed(seq_len: int, exact: str, **settings) -> str:
        how = {"pack": {"seq_len": seq_len, "strategy": "concat"}, "dedup": {"exact": exact}}
        return publish([*ROWS, ROWS[0]], **how, **settings)

    once = packed(72, "drop")
    lines = printed(packed(96, "drop"), once)
    assert "records: 19 are the same" in lines
    assert "          rows/rows.jsonl row 14: 4 -> 5 trained" in lines  # its answer began a pack
    assert not any("other text" in line for line in lines)
    text = "\n".join(printed(once, packed(72, "keep", split={"eval_fraction": 0.3})))
    assert "different text" not in text
    assert "1 -> 2 copies" in text

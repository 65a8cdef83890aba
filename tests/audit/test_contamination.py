"""Rows that share a run of words with a benchmark."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from packhouse.addons.ask.duckdb_queries import read
from packhouse.addons.contamination import (
    combine_contamination,
    match_benchmarks,
    read_benchmarks,
)
from packhouse.errors import AuditError, ConfigError
from packhouse.recipe import SourceConfig
from packhouse.store import open_version
from tests.audit.conftest import SUMS, Sums, turns, validated_table

QUESTION = "A farmer has 17 sheep and all but nine die. How many are left?"


def benchmark_file(folder, *pairs):
    path = folder / "exam.jsonl"
    rows = [{"question": question, "answer": answer} for question, answer in pairs]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return SourceConfig(path=str(path), format="question_answer")


@pytest.fixture
def exam(tmp_path):
    return read_benchmarks([benchmark_file(tmp_path, ("Short one?", "Yes."), (QUESTION, "9"))], 8)


def test_case_and_punctuation_do_not_hide_a_copy(exam):
    copied = "a FARMER has 17 sheep,\nand all -- but nine die"
    chats = [turns("Name a river.", "The Elbe."), turns(f"Riddle: {copied}!", "Nine.")]
    found, matches = match_benchmarks(validated_table(chats), exam)
    assert (found["rows"], found["contaminated"]) == (2, 1)
    assert found["by_benchmark"] == {"exam/exam.jsonl": 1}
    (worst,) = found["worst"]
    assert (worst["source"], worst["row"], worst["value"]) == ("chats/chats.jsonl", 1, 3)
    assert worst["benchmark"] == "exam/exam.jsonl row 1"
    assert worst["words"] == "a farmer has 17 sheep and all but"
    assert matches.to_pylist() == [{"row": 1, "benchmark": "exam/exam.jsonl row 1"}]


def test_a_run_stays_within_one_message(exam):
    chats = [turns("A farmer has 17 sheep and", "all but nine die.")]
    assert match_benchmarks(validated_table(chats), exam)[0]["contaminated"] == 0


def called(arguments, name="book"):
    calls = json.dumps([{"type": "function", "function": {"name": name, "arguments": arguments}}])
    return {"role": "assistant", "content": "", "tool_calls": calls}


COPY = "A farmer has 17 sheep and all but nine die."


@pytest.mark.parametrize(
    ("answer", "due"),
    [
        ({"role": "assistant", "content": "Nine.", "reasoning": COPY}, 1),
        (called({"text": COPY}), 1),
        (called({"list": [{"deep": {"text": f'So:\n"{COPY}"\n'}}]}), 1),
        (called({"a": {"farmer": "has 17"}, "sheep": ["and", "all but nine"]}), 1),
        (called({"farmer": "has", "number": 17, "sheep": "and all but nine"}), 0),
        (called({"has": "17 sheep and all but nine"}, name="a farmer"), 1),
        (called({"text": "A farmer has 18 sheep and all but nine die."}), 0),
        ({"role": "assistant", "content": "Nine.", "reasoning": "Some sheep die."}, 0),
    ],
)
def test_reasoning_and_tool_calls_are_looked_at(exam, answer, due):
    found, _ = match_benchmarks(validated_table([[*turns("Which?"), answer]]), exam)
    assert found["contaminated"] == due


def test_texts_too_short_to_search_for_are_counted(exam):
    found = combine_contamination([], exam)
    assert found["benchmark_rows"] == 2
    assert found["benchmark_short_texts"] == 3  # all contents except one
    assert found["benchmark_unread_rows"] == 0


def test_a_benchmark_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no text of at least 13 words in 1 row"):
        read_benchmarks([benchmark_file(tmp_path, ("Short?", "Yes."))], 13)


words = st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join)


def runs(text, ngram):
    parts = text.split()
    return {tuple(parts[i : i + ngram]) for i in range(len(parts) - ngram + 1)}


@settings(max_examples=25)
@given(
    exam=st.lists(st.tuples(words, words), min_size=1, max_size=4),
    chats=st.lists(st.tuples(words, words), min_size=1, max_size=6),
)
def test_equals_a_search_one_by_one(tmp_path_factory, exam, chats):
    folder = tmp_path_factory.mktemp("exam")
    held = set().union(*(runs(text, 5) for pair in exam for text in pair))
    if not held:
        return
    benchmarks = read_benchmarks([benchmark_file(folder, *exam)], 5)
    due = [any(runs(text, 5) & held for text in pair) for pair in chats]
    table = validated_table([turns(*pair) for pair in chats])
    assert match_benchmarks(table, benchmarks)[0]["contaminated"] == sum(due)


SEARCHED = {
    "benchmarks": [{"path": "exam.jsonl", "format": "question_answer"}],
    "benchmark_ngram": 10,
}


@pytest.fixture
def project(tmp_path):
    benchmark_file(tmp_path, (QUESTION, "9"))
    rows = [{"instruction": QUESTION, "output": "Nine."}, {"instruction": "Hi", "output": "Yes."}]
    return Sums(tmp_path, rows, audit=SEARCHED)


def test_a_recipe_names_benchmarks_and_is_stopped_by_their_questions(project):
    with pytest.raises(AuditError) as caught:
        project.prepare()
    assert str(caught.value).startswith(
        "the audit stopped publication: 1 of 2 rows (50.00%) share 10 consecutive words with a "
        "benchmark: sums/sums.jsonl row 0 matches exam/exam.jsonl row 0 ('a farmer has 17 sheep and"
    )
    published = project.prepare("audit.max_contaminated=0.5")
    manifest = open_version(published.store, "sums").manifest
    assert manifest.audit["contamination"]["contaminated"] == 1

    # The search terms are part of the version; the allowed number of matches is not.
    other = project.prepare("audit.max_contaminated=0.7")
    assert (other.version, other.created) == (published.version, False)
    without = project.prepare("audit.benchmarks=[]")
    assert without.version != published.version
    assert without.published.content_id == published.published.content_id


def test_gsm8k_asks_some_of_its_test_questions_in_train(shared):
    """Shared runs of 13 words, one of them only after stripping punctuation: 10 of 7,473 rows."""
    path = shared / "data" / "gsm8k_test.jsonl"
    exam = read_benchmarks([SourceConfig(path=str(path), format="question_answer")], 13)
    train = SourceConfig(path=str(shared / "data" / "gsm8k_train.jsonl"), format="question_answer")
    from packhouse.read import read_shard, scan_source
    from packhouse.recipe import ValidateConfig

    (shard,) = scan_source(train)
    rows = read_shard(shard, train, ValidateConfig(), "prompt").validated
    found, _ = match_benchmarks(rows, exam)
    assert found["contaminated"] == 10
    assert found["worst"][0]["row"] == 20
    assert found["worst"][0]["benchmark"] == "gsm8k_test/gsm8k_test.jsonl row 632"


OTHER = "Which river begins in Bohemia, flows through Dresden and ends in the North Sea?"


@pytest.fixture
def dropping(tmp_path):
    rows = [*SUMS]
    rows[5] = {"instruction": QUESTION, "output": "Nine."}
    rows[9] = {"instruction": QUESTION, "output": "There are nine of them."}
    rows[30] = {"instruction": f"Riddle: {QUESTION}", "output": "9."}
    benchmark_file(tmp_path, (QUESTION, "9"))
    return Sums(tmp_path, rows, audit={**SEARCHED, "on_match": "drop"})


def matched(dropping, published, outcome="contaminated"):
    return [r for r in dropping.records(published) if r["outcome"] == outcome]


def test_matching_rows_are_left_out_counted_and_listed(dropping):
    published = dropping.prepare()
    (packed,) = [line for line in published.ledger if line.step == "pack"]
    assert packed.dropped == {"contaminated": 3}
    rows = matched(dropping, published)
    assert [row["row"] for row in rows] == [5, 9, 30]
    assert {row["repeats"] for row in rows} == {"exam/exam.jsonl row 0"}
    assert all(row["times"] == 0 < row["num_tokens"] for row in rows)
    opened = open_version(published.store, "sums")
    dropped = read(opened, "SELECT detail FROM dropped").to_pylist()
    assert dropped == [{"detail": "shares words with exam/exam.jsonl row 0"}] * 3
    manifest = opened.manifest
    found = manifest.audit["contamination"]
    assert (found["contaminated"], found["on_match"]) == (3, "drop")
    assert found["by_benchmark"] == {"exam/exam.jsonl": 3}
    with pytest.raises(AuditError, match=r"change audit.max_contaminated or audit.on_match"):
        dropping.prepare("audit.on_match=stop")


def test_the_benchmark_decides_pack_and_no_step_before(dropping):
    published = dropping.prepare()
    again = dropping.prepare()
    assert (again.version, again.created) == (published.version, False)
    benchmark_file(dropping.root, (OTHER, "9"))
    other = dropping.prepare()
    assert other.version != published.version
    assert matched(dropping, other) == []
    done = dropping.cached_steps(other)
    assert "tokenize" in done
    assert "pack" not in done


def test_matching_rows_go_to_eval_with_all_of_their_prompt(dropping):
    """Rows 5 and 9 ask the same; 30 asks it in other words. Copies of a row stay with it."""
    with (dropping.root / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"instruction": "Add 1 to 3.", "output": f"{QUESTION} Four!"}))
    settings = ["audit.on_match=same_side", "split.eval_fraction=0.01"]
    published = dropping.prepare(*settings, "sources.0.weight=3")
    in_eval = [row for row in dropping.records(published) if row["split"] == "eval"]
    assert [row["row"] for row in in_eval] == [3, 5, 9, 30, 40]  # 3 has the same prompt as 40
    assert {row["times"] for row in in_eval} == {3}
    assert published.published.statistics["eval"].num_sequences == 15
    assert published.published.audit["contamination"]["on_match"] == "same_side"


def test_a_side_must_be_there(dropping):
    with pytest.raises(ConfigError, match="has no eval split"):
        dropping.prepare("audit.on_match=same_side")


def test_windows_of_a_matching_row_all_go(dropping):
    talk = turns(*(f"{QUESTION if n == 8 else 'Go on.'} {n}" for n in range(40)))
    dropping.write(SUMS[:3], "sums.jsonl")
    dropping.write([{"messages": talk}], "chat.jsonl")
    published = dropping.prepare(
        'sources=[{"path": "sums.jsonl", "format": "alpaca"}, {"path": "chat.jsonl"}]',
        "pack.over_length=window",
        "pack.seq_len=64",
    )
    rows = [row for row in dropping.records(published) if row["source"] == "chat/chat.jsonl"]
    assert len(rows) > 2
    assert {row["outcome"] for row in rows} == {"contaminated"}

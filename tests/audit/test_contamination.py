"""Rows that share a run of words with a benchmark."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from packhouse.addons.contamination import (
    combine_contamination,
    match_benchmarks,
    read_benchmarks,
)
from packhouse.errors import AuditError, ConfigError
from packhouse.recipe import SourceConfig
from packhouse.store import open_version
from tests.audit.conftest import turns, validated_table
from tests.audit.test_audit_gate import Project

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
    with pytest.raises(ConfigError, match="no text of 13 words in 1 row"):
        read_benchmarks([benchmark_file(tmp_path, ("Short?", "Yes."))], 13)


words = st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join)


def runs(text, ngram):
    parts = text.split()
    return {tuple(parts[i : i + ngram]) for i in range(len(parts) - ngram + 1)}


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


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    rows = [{"instruction": QUESTION, "output": "Nine."}, {"instruction": "Hi", "output": "Yes."}]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    benchmark_file(tmp_path, (QUESTION, "9"))
    recipe = yaml.safe_load(project.path.read_text())
    recipe["format"]["template"] = "sound.jinja"
    recipe["audit"] = {
        "benchmarks": [{"path": "exam.jsonl", "format": "question_answer"}],
        "benchmark_ngram": 10,
    }
    project.path.write_text(yaml.safe_dump(recipe))
    return project


def test_a_recipe_names_benchmarks_and_is_stopped_by_their_questions(project):
    with pytest.raises(AuditError) as caught:
        project.prepare()
    assert str(caught.value).startswith(
        "the audit stopped publication: 1 of 2 rows (50.00%) share 10 words in a row with a "
        "benchmark: sums/sums.jsonl row 0 with exam/exam.jsonl row 0 ('a farmer has 17 sheep and"
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

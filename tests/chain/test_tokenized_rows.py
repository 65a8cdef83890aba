"""Pretokenized rows through the whole chain: their IDs are published unchanged."""

import json
from collections import Counter
from typing import Any

import pyarrow.parquet as pq
import pytest

from packhouse.addons.golden import pin
from packhouse.errors import AuditError
from packhouse.recipe import parse_recipe
from packhouse.run.chain import plan_jobs
from packhouse.tokenize import load_snapshot
from tests.chain.conftest import DEMO, question

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def made():
    return make()


def make(*before):
    """Rows of another tool: chats with the demo's tokenizer, answers with their end token."""
    recipe = parse_recipe(
        {
            "dataset": "given",
            "tokenizer": str(DEMO / "tokenizer"),
            "sources": [{"path": "rows"}],
            "format": {"template": "chat"},
        },
        where="test",
    )
    asked = [question(number) for number in range(40)]
    chats = [
        {
            "messages": [
                *before,
                {"role": "user", "content": each["instruction"]},
                {"role": "assistant", "content": each["output"]},
            ]
        }
        for each in asked
    ]
    rows = []
    for item in pin(chats, recipe):
        labels = [-100] * len(item["input_ids"])
        for start, end in item["trained"]:
            labels[start:end] = item["input_ids"][start:end]
        rows.append({"input_ids": item["input_ids"], "labels": labels})
    return rows


def prepared(project, rows, *overrides):
    project.write(rows, "given.jsonl")
    sources = 'sources=[{"path": "given.jsonl"}]'
    return project.prepare(sources, "format.template=chat", *overrides)


def published(project, done):
    found: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for path in sorted((project.folder(done) / "data").glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            at = 0
            for length in row["seq_lengths"]:
                part = slice(at, at + length)
                found[tuple(row["input_ids"][part]), tuple(row["labels"][part])] += 1
                at += length
    return found


def as_given(rows):
    return Counter((tuple(row["input_ids"]), tuple(row["labels"])) for row in rows)


def test_a_published_version_is_a_source_and_has_the_ids_given(project, made):
    """Rows with a mask of weights in Hugging Face's format, then the published Parquet files."""
    from datasets import Dataset

    weighted = [
        {"input_ids": row["input_ids"], "loss_mask": [0.5 * (x >= 0) for x in row["labels"]]}
        for row in made
    ]
    Dataset.from_list(weighted).save_to_disk(project.root / "saved")
    first = project.prepare('sources=[{"path": "saved"}]', "format.template=chat")
    assert published(project, first) == as_given(made)
    assert first.published.audit["dataset"]["turns"] == 40
    for path in (project.folder(first) / "data").glob("*.parquet"):
        for row in pq.read_table(path).to_pylist():
            assert row["loss_weights"] == [0.5 if label >= 0 else 0 for label in row["labels"]]
    (project.root / "packs").mkdir()
    for path in (project.folder(first) / "data").glob("*.parquet"):
        (project.root / "packs" / path.name).write_bytes(path.read_bytes())

    done = project.prepare(
        'sources=[{"path": "packs/*.parquet"}]', "format.template=chat", "pack.seq_len=512"
    )

    assert published(project, done) == as_given(made)
    (line,) = [line for line in done.ledger if line.step == "validate"]
    assert line.rows_out == 40 == line.rows_in + line.added["extra_paths"]


def test_bad_rows_are_quarantined_with_their_bytes(project, made):
    vocab = load_snapshot(str(DEMO / "tokenizer")).vocab_size
    snapshot = load_snapshot(str(DEMO / "tokenizer"))
    pad = snapshot.added_tokens[snapshot.special_tokens["pad_token"]]
    rows = [dict(row) for row in made]
    rows[3] = {"input_ids": [*rows[3]["input_ids"], vocab], "labels": [*rows[3]["labels"], -100]}
    rows[5] = {"input_ids": [*rows[5]["input_ids"], *[pad] * 3],
               "labels": [*rows[5]["labels"], *[-100] * 3]}  # fmt: skip
    rows[7] = {"input_ids": rows[7]["input_ids"], "labels": [-100] * len(rows[7]["labels"])}
    rows[9] = {"input_ids": rows[9]["input_ids"], "labels": [*rows[9]["labels"][1:], -100]}

    done = prepared(project, rows, "validate.max_quarantined=0.2")

    (path,) = (project.folder(done) / "quarantine").glob("*.parquet")
    bad = pq.read_table(path).to_pylist()
    assert [(row["row"], row["reason"]) for row in bad] == [
        (3, "vocabulary"),
        (5, "padding"),
        (7, "nothing_trained"),
        (9, "labels"),
    ]
    assert [json.loads(row["raw"]) for row in bad] == [rows[n] for n in (3, 5, 7, 9)]
    assert f"its ids are below {vocab:,}" in bad[0]["detail"]
    good = [row for number, row in enumerate(rows) if number not in (3, 5, 7, 9)]
    assert published(project, done) == as_given(good)


def _end_untrained(row):
    last = max(n for n, label in enumerate(row["labels"]) if label >= 0)
    row["labels"][last] = -100


def _prompt_trained(row):
    first = next(n for n, label in enumerate(row["labels"]) if label >= 0)
    row["labels"][first - 6] = row["input_ids"][first - 6]


def _prompt_cut(row):
    first = next(n for n, label in enumerate(row["labels"]) if label >= 0)
    for column in row.values():
        del column[first - 4 : first]


def _mask_late(row):
    first = next(n for n, label in enumerate(row["labels"]) if label >= 0)
    row["labels"][first] = -100


@pytest.mark.parametrize(
    ("spoil", "limit"),
    [
        (_end_untrained, "max_unterminated_turns"),
        (_prompt_trained, "max_trained_prompts"),
        (_prompt_cut, "max_missing_headers"),
        (_mask_late, "max_untrained_starts"),
    ],
)
def test_mistakes_of_another_tool_stop_publication(project, made, spoil, limit):
    rows = [{name: list(values) for name, values in row.items()} for row in made]
    spoil(rows[11])

    with pytest.raises(AuditError, match=limit) as stopped:
        prepared(project, rows)
    named = [row["row"] for breach in stopped.value.facts["breaches"] for row in breach["rows"]]
    assert set(named) == {11}
    lifted = (f"audit.{name}=1" for name in (limit, "max_unterminated_turns", "max_cut_sequences"))
    done = prepared(project, rows, *lifted)
    assert published(project, done) == as_given(rows)


@pytest.mark.usefixtures("real_reports")
def test_records_that_were_joined_without_a_mark_stop_publication(project):
    """Published as one record, the second conversation would see the first."""
    rows = make({"role": "system", "content": "Answer with one number and nothing else."})
    joined = {name: rows[11][name] + rows[12][name] for name in ("input_ids", "labels")}
    lengths = [len(rows[number]["input_ids"]) for number in (11, 12)]
    others = [row for number, row in enumerate(rows) if number not in (11, 12)]

    with pytest.raises(AuditError, match="max_leaks") as stopped:
        prepared(project, [*others, joined])
    (breach,) = stopped.value.facts["breaches"]
    assert [row["row"] for row in breach["rows"]] == [38]
    done = prepared(project, [*others, joined | {"seq_lengths": lengths}])
    assert published(project, done) == as_given(rows)


def test_only_keys_of_pretokenized_rows_include_the_tokenizer(project, made, tmp_path):
    project.write(made, "given.jsonl")
    other = tmp_path / "tokenizer"
    other.mkdir()
    for file in (DEMO / "tokenizer").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 77}))

    def keys(source, *overrides):
        plan = plan_jobs(project.recipe(f'sources=[{{"path": "{source}"}}]', *overrides))
        return [job.key for job in plan.validate]

    of_other = f"tokenizer={other}"
    assert keys("rows.jsonl") == keys("rows.jsonl", of_other)
    assert keys("given.jsonl") != keys("given.jsonl", of_other)

"""Rows that vanish, packs that train nothing, answers that never end: defects of other tools."""

import json
import shutil

import pyarrow.parquet as pq
import pytest

from packhouse.store import open_version
from tests.chain.conftest import DEMO, Project, question

IGNORED = -100


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    project.write_rows(range(40))
    return project


def published(project: Project, prepared, split: str | None = None) -> list[dict]:
    opened = open_version(prepared.store, prepared.dataset, prepared.version)
    tables = [pq.read_table(project.folder(prepared) / e.key) for e in opened.files("data", split)]
    return [row for table in tables for row in table.to_pylist()]


def sequences(rows: list[dict]) -> list[tuple[str, list[int], list[int]]]:
    found = []
    for row in rows:
        start = 0
        for record, length in zip(row["record_ids"], row["seq_lengths"], strict=True):
            part = slice(start, start + length)
            found.append((record, row["input_ids"][part], row["labels"][part]))
            start += length
    return found


def write(project: Project, rows: list) -> None:
    project.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))


def end_token(project: Project) -> int:
    tokens = json.loads((DEMO / "tokenizer" / "tokenizer.json").read_text())["added_tokens"]
    return next(token["id"] for token in tokens if token["content"] == "<|im_end|>")


def chat(*turns: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def test_no_row_and_no_pack_without_a_trained_token_and_none_in_the_place_of_a_bad_one(project):
    # Axolotl's filter for rows without a trained token compares a list with a number and drops
    # none; TRL drops such rows only without packing, and publishes packs with only -100.
    # ms-swift's lazy dataset replaces a failing row by a random one, so some rows train twice.
    rows = [question(n) for n in range(40)]
    rows += [{"instruction": f"{n} " * 100, "output": "Never seen."} for n in range(3)]
    write(project, rows)
    with project.rows.open("a") as file:
        file.write('{"instruction": "half a')

    prepared = project.prepare(
        "validate.max_quarantined=0.1", "pack.seq_len=96", "pack.over_length=truncate_turns"
    )

    records = [record for record, _, _ in sequences(published(project, prepared))]
    assert len(records) == len(set(records)) == 40
    assert all(max(row["labels"]) >= 0 for row in published(project, prepared))
    assert all(max(labels) >= 0 for _, _, labels in sequences(published(project, prepared)))
    (pack,) = [line for line in prepared.ledger if line.step == "pack"]
    assert sum(pack.dropped.values()) == 3


def test_the_end_token_is_trained_where_it_is_the_pad_token_too(project, tmp_path):
    # trl issues 1623, 2059 and 3091: pad and end token were the same, so masking pads masked the
    # end, and models never stopped. Megatron-LM drops the loss of labels equal to the pad token.
    folder = tmp_path / "tokenizer"
    shutil.copytree(DEMO / "tokenizer", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<|im_end|>"}))

    prepared = project.prepare(f"tokenizer={folder}", "format.template=chat")

    found = sequences(published(project, prepared))
    end = end_token(project)
    assert len(found) == 40
    for _, ids, labels in found:
        assert end in ids
        assert [label for label in labels if label != IGNORED][-1] == end

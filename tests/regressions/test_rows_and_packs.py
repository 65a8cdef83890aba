"""Rows that vanish, packs that train nothing, answers that never end: defects of other tools."""

import json
import shutil

import pyarrow.parquet as pq
import pytest

from packhouse.store import open_version
from tests.chain.conftest import DEMO, Project

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


def end_token(project: Project) -> int:
    tokens = json.loads((DEMO / "tokenizer" / "tokenizer.json").read_text())["added_tokens"]
    return next(token["id"] for token in tokens if token["content"] == "<|im_end|>")


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

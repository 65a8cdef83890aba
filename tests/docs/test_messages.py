"""A literal message of each error class, to read on one page; each reason code has a test."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import packhouse
from packhouse import PackedDataset, errors
from packhouse.api import open_version
from packhouse.read import scan_source
from packhouse.recipe import SourceConfig
from packhouse.records.reasons import QUARANTINE_REASONS
from packhouse.records.table_schemas import check

ROOT = Path(__file__).parents[2]

MESSAGES = {
    "ConfigError": "prepare: unknown key 'pack.seqlen'; did you mean 'seq_len'?",
    "SourceError": "source file 'TMP/rows.jsonl' does not exist. Check the path",
    "EmptyDatasetError": (
        "no record fits in seq_len 16, so there is nothing to publish. Raise pack.seq_len, "
        "or set pack.over_length to truncate_turns."
    ),
    "QuarantineLimitError": (
        "2 of 32 rows (6.25%) are bad (type 2); the limit is 1.00%. Fix the rows, or "
        "raise validate.max_quarantined; first 'type': rows/rows.jsonl line 31, instruction "
        "is a number, not text; to convert it to text, use `select: {instruction: "
        "'\"instruction\"::VARCHAR', output: '\"output\"::VARCHAR'}` instead of `fields`. "
        "Remedy: use strings for text fields (in `select`: `cast(... as varchar)`) and integers "
        "for IDs and labels. To see the bad rows, run `packhouse quarantine show "
        "TMP/cache/steps/validate/KEY/quarantined.arrow`."
    ),
    "AuditError": (
        "the audit stopped publication: source 'rows': 29 of 30 rows (96.67%, limit 0.00%) "
        "repeat an earlier row, worst: rows/rows.jsonl row 0 (30). Fix the rows or the "
        "template, or change audit.max_duplicates or dedup.exact (drop keeps one copy of each row)"
    ),
    "TokenizerError": (
        "tokenizer folder 'TMP/empty' has no vocabulary file (no tokenizer file). It needs "
        "tokenizer.json, vocab.json + merges.txt, vocab.txt, tokenizer.model or tekken.json"
    ),
    "TemplateError": "template 'TMP/chat.jinja', line 1: unexpected '}'",
    "SequenceTooLongError": (
        "record '23d78dc7ba5b30a8f4ca' has 69 tokens, more than seq_len 16 (rows/rows.jsonl, row "
        "0). Set pack.over_length to 'drop', 'truncate_turns' or 'window', or raise "
        "pack.seq_len."
    ),
    "ContractError": "dropped: column 'source' must have type 'string not null', but it is missing",
    "EmptyRowError": "row 0 has no tokens. Remove empty rows.",
    "VersionNotFoundError": (
        "store 'TMP/store' has no datasets. Pass STORE/DATASET, where STORE is the recipe's "
        "publish.store"
    ),
    "IntegrityError": (
        "numbers/v/KEY/manifest.json is damaged: its digest, manifest_id or format does not "
        "match its content. Restore it from a copy made with `packhouse pull`, or delete it and "
        "publish the "
        "version again"
    ),
    "StoreError": "store TMP/store: 'TMP/store' is a file. Move the file, or use another store",
}
"""Error class -> message of the call in `CALLS`; TMP and KEY stand for a folder and a key."""

ELSEWHERE = {
    "PluginError": "tests/chain/test_plugins.py",
    "ConflictError": "tests/store/test_publish.py",
    "StoreRefusedError": "tests/store/test_stores.py",
    "DiskError": "tests/cache/test_full_disks.py",
    "TransientError": "tests/store/test_retries.py",
}
"""Error classes that need a plug-in, or a failing store or disk -> tests that have one."""


def prepare(folder: Path, rows: Any = None, **settings: Any) -> Any:
    """Prepare rows, by default 30 good ones, in a temporary folder."""
    good = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(30)]
    defaults = {
        "tokenizer": "deployments/demo/tokenizer",
        "dataset": "numbers",
        "format": {"template": "alpaca"},
        "store": folder / "store",
        "cache": folder / "cache",
        "progress": False,
    }
    return packhouse.prepare(good if rows is None else rows, **(defaults | settings))


def open_damaged(folder: Path) -> None:
    prepare(folder)
    (manifest,) = (folder / "store").rglob("manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b'"rows"', b'"rowz"', 1))
    open_version(folder / "store" / "numbers")


def publish_into_a_file(folder: Path) -> None:
    (folder / "store").write_text("not a folder")
    prepare(folder)


def prepare_with_a_folder(folder: Path) -> None:
    (folder / "empty").mkdir()
    prepare(folder, tokenizer=str(folder / "empty"))


def prepare_with_a_template(folder: Path) -> None:
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }")
    prepare(folder, format={"template": str(folder / "chat.jinja")})


def prepare_with_bad_rows(folder: Path) -> None:
    good = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(30)]
    prepare(folder, [*good, *({"instruction": n, "output": "?"} for n in range(2))])


CALLS: dict[str, Callable[[Path], Any]] = {
    "ConfigError": lambda folder: prepare(folder, pack={"seqlen": 512}),
    "SourceError": lambda folder: scan_source(SourceConfig(path=f"{folder}/rows.jsonl")),
    "EmptyDatasetError": lambda folder: prepare(folder, seq_len=16),
    "QuarantineLimitError": prepare_with_bad_rows,
    "AuditError": lambda folder: prepare(folder, audit={"max_duplicates": 0.0}, rows=REPEATED),
    "TokenizerError": prepare_with_a_folder,
    "TemplateError": prepare_with_a_template,
    "SequenceTooLongError": lambda folder: prepare(
        folder, seq_len=16, pack={"over_length": "error"}
    ),
    "ContractError": lambda folder: check("dropped", pa.table({"row": [1]})),
    "EmptyRowError": lambda folder: PackedDataset([{"input_ids": []}])[0],
    "VersionNotFoundError": lambda folder: open_version(folder / "store" / "numbers"),
    "IntegrityError": open_damaged,
    "StoreError": publish_into_a_file,
}
REPEATED = [{"instruction": "Say 1.", "output": "1!"}] * 30


def message_of(name: str, folder: Path) -> str:
    """Return the message of the error that a call raises, which must have exactly this class."""
    with pytest.raises(errors.PackhouseError) as caught:
        CALLS[name](folder)
    assert type(caught.value).__name__ == name
    message = str(caught.value).replace(str(folder), "TMP")
    return re.sub(r"/([0-9a-f]{64}|[0-9a-f]{16}\.g0)/", "/KEY/", message)


@pytest.mark.parametrize("name", CALLS)
def test_an_error_has_this_message(name, tmp_path):
    assert message_of(name, tmp_path) == MESSAGES[name]


def test_every_error_class_is_here_or_elsewhere():
    classes = {*errors.__all__} - {"HELD_BACK", "PackhouseError"}
    assert {*MESSAGES} | {*ELSEWHERE} == classes
    assert [name for name, file in ELSEWHERE.items() if name not in (ROOT / file).read_text()] == []


def test_every_reason_of_a_bad_row_is_expected_by_a_test():
    folders = ("sources", "records", "chain")
    files = [path for folder in folders for path in (ROOT / "tests" / folder).glob("test_*.py")]
    text = "\n".join(path.read_text() for path in files)
    assert [why for why in QUARANTINE_REASONS["validate"] if f'"{why}"' not in text] == []

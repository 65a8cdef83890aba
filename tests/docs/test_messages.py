"""One literal message for each reason code and error class, to be read on one page."""

import json
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
from tests.sources.conftest import read_source

ROOT = Path(__file__).parents[2]

DETAILS = {
    "json": "not JSON: unexpected end of data",
    "csv": "a quote opened in the row is never closed",
    "encoding": "byte 0xff at offset 10 of the row is not UTF-8",
    "control": "a string contains the NUL character (\\u0000)",
    "number": "NaN is not JSON",
    "duplicate_key": "the key 'text' occurs twice in one object",
    "depth": "nested more than 32 levels deep",
    "too_many_fields": "the row has 1,001 fields; at most 1,000 are read",
    "row_too_long": "the row has 1,112 bytes, more than validate.max_row_bytes (1,024)",
    "not_an_object": "the row is a number, not an object",
    "fields": "no field 'answer'; the row has 'question'",
    "type": (
        "text is a number, not text; to convert it to text, use `select: {text: "
        "'\"text\"::VARCHAR'}` instead of `fields`"
    ),
    "media": "message 0: a content part has type 'image_url', not text",
    "label": "the label 'good' is text, but `label_names` is not set",
    "token_ids": "token 1 is -1, which is not a token id",
    "uneven": "labels has 2 values for 3 tokens",
    "labels": (
        "label 0 is 6, but token 0 is 5 (labels are shifted: each is the next token); set each "
        "label to its own token or to -100, since trainers shift them"
    ),
    "boundaries": "seq_lengths do not add up to the row's 3 tokens",
    "nothing_trained": "no token in the record is trained",
    "arguments": (
        "documents is not a list of objects, such as {title, text}; if it is not for the "
        "chat template, list it in `ignored_fields`"
    ),
    "loss_weight": "w is '-1', not a weight from 1e-06 to 1e+06",
    "tools": "tools is not a list of objects",
    "tool_calls": "message 1: a tool call has no function name",
    "empty_conversation": "the conversation has no messages",
    "unknown_role": "message 0 has an unknown role (known: system, user, assistant, tool)",
    "system_not_first": "message 1 is a system turn but not the first message",
    "starts_with_assistant": "the first turn (message 0) is from the assistant",
    "tool_result_without_call": "message 1 is a tool result, but no tool call precedes it",
    "consecutive_user": "message 1 is a user turn right after another user turn",
    "consecutive_assistant": "message 2 is an assistant turn right after another assistant turn",
    "call_without_result": "message 2 follows a tool call that has no result",
    "no_assistant": "there is no assistant turn, so there is nothing to train",
    "expression": (
        "where `cast(text as integer) > 1`: Conversion error: Could not convert string 'a' "
        "to INT32 when casting from source column text"
    ),
    "orphan": "its parent is not in the file",
    "tree": "message_id 'b' is already used by an earlier row",
    "transcript": "the text does not begin with `Human:` or `Assistant:`",
    "ends_on_user": "the last message is a user turn; set allow_ends_on_user to keep such rows",
    "ends_on_tool": "the last message is a tool result, so the answer to it is missing",
    "no_prompt": "chosen has no prompt",
    "prompt_differs": "chosen is a conversation whose prompt differs from the row's prompt",
    "not_one_answer": "completion must have one assistant turn after the prompt; its roles: user",
    "same_answers": "the chosen and rejected answers are identical",
    "weight": "the answer in chosen has a loss weight",
    "empty_prompt": "the prompt (message 0) is empty: a user turn without text",
    "empty_answer": "the answer (message 1) is empty: no text, reasoning or tool call",
    "too_many_chars": "message 1 has more characters than validate.max_chars",
}
"""Reason code of the validate step -> detail of the row in `ROWS`."""

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
    "cell": "tests/sources/test_workbooks.py",
    "no_messages": "tests/chain/test_plugins.py",
    "padding": "tests/chain/test_tokenized_rows.py",
    "vocabulary": "tests/chain/test_tokenized_rows.py",
    "PluginError": "tests/chain/test_plugins.py",
    "ConflictError": "tests/store/test_publish.py",
    "StoreRefusedError": "tests/store/test_stores.py",
    "DiskError": "tests/cache/test_full_disks.py",
    "TransientError": "tests/store/test_retries.py",
}
"""Codes that need a workbook, a plug-in, or a failing store or disk -> tests that have one."""

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
}
RESULT, SYSTEM = {"role": "tool", "content": "1"}, {"role": "system", "content": "Be kind."}
IMAGE = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": "a.jpg"}}],
}
IDS = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
REPLY = {"message_id": "b", "text": "Hi"}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [*messages], **fields}


ROWS: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("json", "text", b'{"text": \n', {}),
    ("csv", "text", b'text\n"Hi\n', {"file_format": "csv"}),
    ("encoding", "text", b'{"text": "\xff"}\n', {}),
    ("control", "text", b'{"text": "a\\u0000"}\n', {}),
    ("number", "text", b'{"text": "a", "n": NaN}\n', {}),
    ("duplicate_key", "text", b'{"text": "a", "text": "b"}\n', {}),
    ("depth", "text", b'{"text": "a", "n": ' + b"[" * 40 + b"]" * 40 + b"}\n", {}),
    ("too_many_fields", "text", {"text": "a"} | {f"f{n}": n for n in range(1000)}, {}),
    ("row_too_long", "text", {"text": "a" * 1100}, {"max_row_bytes": 1024}),
    ("not_an_object", "text", b"7\n", {}),
    ("fields", "question_answer", {"question": "Hi"}, {}),
    ("type", "text", {"text": 7}, {}),
    ("media", "chat", chat(IMAGE, ANSWER), {}),
    ("label", "classification", {"text": "a", "label": "good"}, {}),
    ("token_ids", "tokenized", {"input_ids": [5, -1], "labels": [-100, -1]}, {}),
    ("uneven", "tokenized", IDS | {"labels": [6, 7]}, {}),
    ("labels", "tokenized", IDS | {"labels": [6, 7, -100]}, {}),
    ("boundaries", "tokenized", IDS | {"seq_lengths": [1, 1]}, {}),
    ("nothing_trained", "tokenized", IDS | {"labels": [-100] * 3}, {}),
    ("arguments", "chat", chat(USER, ANSWER, documents=[7]), {}),
    ("loss_weight", "chat", chat(USER, ANSWER, w=-1), {"fields": {"loss_weight": "w"}}),
    ("tools", "chat", chat(USER, ANSWER, tools=[7]), {}),
    ("tool_calls", "chat", chat(USER, CALL | {"tool_calls": [{"arguments": {}}]}), {}),
    ("empty_conversation", "chat", chat(), {}),
    ("unknown_role", "chat", chat(USER | {"role": "Customer"}, ANSWER), {}),
    ("system_not_first", "chat", chat(USER, SYSTEM, ANSWER), {"refused_orders": True}),
    ("starts_with_assistant", "chat", chat(ANSWER, USER, ANSWER), {"refused_orders": True}),
    ("tool_result_without_call", "chat", chat(USER, RESULT, ANSWER), {}),
    ("consecutive_user", "chat", chat(USER, USER, ANSWER), {"refused_orders": True}),
    ("consecutive_assistant", "chat", chat(USER, ANSWER, ANSWER), {"refused_orders": True}),
    ("call_without_result", "chat", chat(USER, CALL, USER, ANSWER), {}),
    ("no_assistant", "chat", chat(SYSTEM), {}),
    ("expression", "text", {"text": "a"}, {"where": "cast(text as integer) > 1"}),
    ("orphan", "oasst_flat", REPLY | {"parent_id": "a", "role": "assistant"}, {}),
    ("tree", "oasst_flat", REPLY | {"parent_id": None, "role": "prompter"}, {"times": 2}),
    ("transcript", "transcript", {"transcript": "Hi"}, {}),
    ("ends_on_user", "chat", chat(USER, ANSWER, USER), {}),
    ("ends_on_tool", "chat", chat(USER, CALL, RESULT), {}),
    ("no_prompt", "pairs", {"chosen": "a", "rejected": "b"}, {}),
    ("prompt_differs", "pairs", {"prompt": "?", "chosen": [USER, ANSWER], "rejected": "b"}, {}),
    ("not_one_answer", "kto", {"prompt": "?", "completion": [ANSWER, USER], "label": True}, {}),
    ("same_answers", "pairs", {"prompt": "?", "chosen": "a", "rejected": "a"}, {}),
    ("weight", "pairs", {"prompt": "?", "chosen": [ANSWER | {"weight": 2}], "rejected": "b"}, {}),
    ("empty_prompt", "chat", chat(USER | {"content": " "}, ANSWER), {}),
    ("empty_answer", "chat", chat(USER, ANSWER | {"content": " "}), {}),
    ("too_many_chars", "chat", chat(USER, ANSWER), {"max_chars": 4}),
]


def detail_of(
    reason: str, row_format: str, rows: Any, settings: dict[str, Any], folder: Path
) -> tuple[str, str]:
    """Return reason and detail of the last bad row of a file with these rows."""
    settings = dict(settings)
    data = rows if isinstance(rows, bytes) else json.dumps(rows).encode() + b"\n"
    path = folder / "rows.jsonl"
    path.write_bytes(data * settings.pop("times", 1))
    if settings.pop("refused_orders", False):
        settings["refused_orders"] = [reason]
    rules = {
        name: settings.pop(name)
        for name in ("max_row_bytes", "max_chars", "refused_orders")
        if name in settings
    }
    source = read_source(path, rules=rules, format=row_format, **settings)
    return source.reasons[-1], source.quarantined["detail"][-1].as_py()


@pytest.mark.parametrize(
    ("reason", "row_format", "rows", "settings"), ROWS, ids=[row[0] for row in ROWS]
)
def test_a_bad_row_has_this_detail(reason, row_format, rows, settings, tmp_path):
    assert detail_of(reason, row_format, rows, settings, tmp_path) == (reason, DETAILS[reason])


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


def test_every_reason_and_error_class_is_here_or_elsewhere():
    reasons, classes = set(QUARANTINE_REASONS["validate"]), {*errors.__all__} - {"HELD_BACK"}
    assert {*DETAILS} | ({*ELSEWHERE} & reasons) == reasons
    assert {*MESSAGES} | ({*ELSEWHERE} & classes) == classes - {"PackhouseError"}
    assert not ({*DETAILS, *MESSAGES} & {*ELSEWHERE})
    tests = {name: (ROOT / file).read_text() for name, file in ELSEWHERE.items()}
    assert [name for name, text in tests.items() if name not in text] == []

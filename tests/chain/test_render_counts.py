"""Counts of rows and records are the same in `plan`, the report, the manifest and after a run."""

import html
import json
import shutil

import pytest
import yaml
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.records.ledger import RenderCounts
from tests.prepared import TOKENIZER

# Like Qwen3's: earlier reasoning is dropped from history, and a prompt without it opens no block.
TEMPLATE = """\
{%- set last = namespace(at=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > last.at %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def turns(*contents, thoughts):
    for n, content in enumerate(contents):
        yield {"role": "user", "content": f"{content}?"}
        yield {"role": "assistant", "content": content} | (
            {"reasoning_content": f"Thinking of {n}."} if thoughts else {}
        )


@pytest.fixture
def recipe(tmp_path):
    """Rows with two answers: two rows with reasoning, three without, and one that is refused."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER, tokenizer)
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    ids = ids_of(tokenizer)
    (tokenizer / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    rows = [[*turns(f"One {n}", "Two", thoughts=True)] for n in range(2)]
    rows += [[*turns(f"Plain {n}", "Two", thoughts=False)] for n in range(3)]
    bad = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "<|im_end|>"}]
    lines = [json.dumps({"messages": row}) for row in [*rows, bad]]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "dataset": "chats",
        "sources": [{"path": "chats.jsonl", "format": "chat"}],
        "tokenizer": str(tokenizer),
        "validate": {"max_quarantined": 0.5},
        "tokenize": {"control_text": "quarantine"},
        "pack": {"seq_len": 256},
        "publish": {"store": str(tmp_path / "store")},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "recipe.yaml"


def ids_of(tokenizer):
    added = json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]
    return [token["id"] for token in added if token["content"] == "<|im_end|>"]


def call(*arguments):
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_plan_the_report_and_a_run_say_the_same(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")  # no note is wrapped
    lines = [
        "generation stops at <|im_end|> (generation_config.json)",
        "4 answers follow the thinking prompt",
        "7 answers follow the non-thinking prompt",
        "3 prompts differ from the previous record, but only in text that the template adds",
    ]
    pages = tmp_path / "before.html", tmp_path / "after.html"

    plans = [call("plan", str(recipe))]
    call("report", str(recipe), "--output", str(pages[0]))
    run = call("prepare", str(recipe))
    plans.append(call("plan", str(recipe)))
    call("report", str(tmp_path / "store" / "chats"), "--output", str(pages[1]))

    for said in plans:
        assert "5 rows (7 records)" in said
        assert notes_of(said)[-5:] == [*lines, "quarantined: control_text 1"]
    assert notes_of(run)[0] == "6 rows became 8 records"
    assert set(lines) < set(notes_of(run))
    assert "tokenize quarantined: control_text 1" in run
    for page in pages:
        text = html.unescape(page.read_text())
        assert all(f"<li>{line}</li>" in text for line in lines)
    assert "<li>quarantined: control_text 1</li>" in pages[0].read_text()
    assert "<li>6 rows became 8 records</li>" in pages[1].read_text()

    planned = json.loads(call("plan", str(recipe), "--json"))
    assert planned["quarantined"] == {"control_text": 1}
    (manifest,) = (tmp_path / "store").glob("chats/v/*/manifest.json")
    counts = json.loads(manifest.read_text())["counts"]["rendering"]
    assert planned["rendering"] == counts
    assert (counts["rows"], counts["records"]) == (6, 8)
    assert counts["stop_tokens"] == {"<|im_end|>": "generation_config.json"}


def test_a_refused_run_shows_once_how_to_fix_a_row(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "cache"))
    row = {"messages": [{"role": "assistant", "content": "Hi."}, *turns("One", thoughts=False)]}
    rows = [row, row, {"messages": [*turns("Two", thoughts=False)]}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = CliRunner().invoke(cli, ["prepare", str(recipe)])
    assert done.exit_code == 4
    assert "first 'starts_with_assistant': chats/chats.jsonl line 1, message 0" in done.output
    assert done.output.count('Add the question before it, or set "weight": 0') == 1
    assert "remedy:" not in done.output


def notes_of(said):
    notes = (line.partition("  note: ") for line in said.splitlines())
    return [note for _, is_note, note in notes if is_note]


def test_a_stop_token_that_no_file_names_is_one_to_tell_the_engine():
    stops = {"<a>": "tokenizer", "<b>": "template", "<c>": "template"}
    named, not_named = RenderCounts(stop_tokens=stops).lines()
    assert named == "generation stops at <a> (tokenizer)"
    assert not_named.startswith("generation stops at <b> or <c> (template); none of the model")
    assert not_named.endswith("stop_token_ids in the inference engine")


def test_a_run_and_a_plan_say_how_much_text_split_rows_repeat(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")
    rows = [{"messages": [*turns(f"One {n}", "Two", "Three", thoughts=True)]} for n in range(3)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    note = "records contain 2.13 times as much text as one rendering per row, because the template"
    for command in ("plan", "prepare", "plan"):  # with a sample, and with all rows
        assert note in call(command, str(recipe))


def test_the_ledger_counts_answers_of_long_rows_that_fit_no_pack(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "cache"))
    long = [*turns(*(f"{n} {'word ' * 1200}" for n in range(20)), thoughts=True)]
    rows = [{"messages": [*turns("Short", thoughts=True)]}, {"messages": long}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    said = call("prepare", str(recipe))

    (manifest,) = (tmp_path / "store").glob("chats/v/*/manifest.json")
    lines = json.loads(manifest.read_text())["counts"]["ledger"]
    (line,) = [each for each in lines if each["step"] == "format"]
    left_out = line["dropped"]["over_seq_len"]
    assert 0 < left_out < 20
    assert line["rows_out"] == 2 + line["added"]["turns"] - left_out == 21 - left_out
    assert f"format dropped: over_seq_len {left_out} records" in said

import json
import re
import shlex

import orjson
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.errors import QuarantineLimitError
from packhouse.recipe import load_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from tests.prepared import DEMO

GOOD = [{"instruction": f"Add {n} and 1.", "input": "", "output": str(n + 1)} for n in range(40)]
BAD = [
    '{"instruction": "Name a bird.", "input": "", "output": "Wren"',  # 40: no closing brace
    '{"instruction": "Name a fish.", "input": "", "answer": "Pike"}',  # 41: no output
    '{"instruction": "A", "input": "", "output": "B", "output": "C"}',  # 42: a duplicate key
    b'{"instruction": "Caf\xe9?", "input": "", "output": "Yes"}',  # 43: latin-1
]


CHAT = {"path": "chat.jsonl", "format": "chat"}


@pytest.fixture
def desk(home):
    """A folder with a recipe whose sources contain bad rows, and its cache and store."""
    lines = [orjson.dumps(row) for row in GOOD]
    lines += [row if isinstance(row, bytes) else row.encode() for row in BAD]
    (home / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (home / "labels.tsv").write_text("sentence\tlabel\nfine film\t1\nawful\tx\nno label\n")
    recipe = {
        "dataset": "birds",
        "sources": [{"path": "rows.jsonl", "format": "alpaca"}],
        "tokenizer": str(DEMO / "tokenizer"),
        "format": {"template": "alpaca"},
        "validate": {"max_quarantined": 0.5},
        "publish": {"store": str(home / "store")},
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return home


def edit(desk, **sections):
    """Replace sections of the recipe; `more` is a source to add."""
    recipe = yaml.safe_load((desk / "recipe.yaml").read_text())
    if more := sections.pop("more", None):
        recipe["sources"].append(more)
    (desk / "recipe.yaml").write_text(yaml.safe_dump(recipe | sections))


def run_recipe(folder, *overrides):
    recipe = load_recipe(folder / "recipe.yaml", overrides)
    workspace = Workspace(cache=folder / "cache")
    return prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), folder / "cache")


def call(*arguments, code=0):
    result = CliRunner().invoke(cli, ["quarantine", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout


def test_ls_counts_reasons_of_a_version_a_file_and_a_refused_run_alike(desk):
    with pytest.raises(QuarantineLimitError) as caught:
        run_recipe(desk, "validate.max_quarantined=0")
    (named,) = caught.value.places
    of_recipe = call("ls", desk / "recipe.yaml", "--cache", desk / "cache", "--json")
    run_recipe(desk)
    of_version = call("ls", desk / "store" / "birds", "--json")

    assert json.loads(of_version)["rows"] == 4
    reasons = {line["reason"]: line for line in json.loads(of_version)["reasons"]}
    assert set(reasons) == {"json", "fields", "duplicate_key", "encoding"}
    assert reasons["json"]["samples"][0]["row"] == 40
    assert call("ls", named, "--json") == of_version == of_recipe
    assert "validate / json: 1 row\n  rows/rows.jsonl row 40: " in call("ls", named)


def test_rows_of_a_recipe_are_numbered_by_their_lines_as_an_editor_does(desk):
    rows = desk / "rows.jsonl"
    rows.write_bytes(b"\n\n" + rows.read_bytes())
    run_recipe(desk)

    listed = call("ls", desk / "recipe.yaml", "--cache", desk / "cache")
    shown = call("show", desk / "recipe.yaml", "--cache", desk / "cache", "--reason", "json")

    assert "validate / json: 1 row\n  rows/rows.jsonl line 43: " in listed
    assert rows.read_bytes().split(b"\n")[42].decode() in shown
    assert "rows/rows.jsonl line 43, row 40, byte " in shown


@pytest.mark.parametrize("command", ["ls", "show"])
def test_it_is_said_how_rows_are_numbered_where_lines_are_not_known(desk, command):
    run_recipe(desk)

    targets = [desk / "store" / "birds"], [desk / "recipe.yaml", "--cache", desk / "cache"]
    said = [CliRunner().invoke(cli, ["quarantine", command, *map(str, t)]).stderr for t in targets]

    assert ["Rows are numbered from 0" in each for each in said] == [True, False]


def test_show_prints_place_and_bytes_without_control_characters(desk):
    run_recipe(desk)
    output = call("show", desk / "store" / "birds", "--reason", "encoding")
    assert "rows/rows.jsonl row 43, byte " in output
    assert r"Caf\xe9?" in output
    assert "\xe9" not in output
    (line,) = call("show", desk / "store" / "birds", "--row", 41, "--json").splitlines()
    assert json.loads(line)["raw"] == BAD[1]
    raw = call("show", desk / "store" / "birds", "--row", 41, "--bytes", 14, "--json")
    assert json.loads(raw)["raw"] == BAD[1][:14]


def mend(line):
    if line["reason"] == "json":
        line["raw"] += "}"
    if line["reason"] == "fields":
        line["raw"]["output"] = line["raw"].pop("answer")
    return line


@pytest.mark.parametrize("option", ["--reason", "--source"])
def test_a_filter_that_is_not_utf8_matches_nothing(desk, option):
    version = run_recipe(desk)
    target = f"{desk / 'store'}/birds@{version.version}"
    result = CliRunner().invoke(cli, ["quarantine", "show", target, option, "json\udcff"])

    assert (result.exit_code, result.stdout) == (2, "")
    assert "ConfigError: no quarantined row of" in result.stderr


def test_fixed_rows_become_a_source_that_the_recipe_can_add(desk):
    run_recipe(desk)
    target = [desk / "recipe.yaml", "--cache", desk / "cache"]
    call("retry", *target, "--edit", "bad.jsonl")
    lines = [mend(json.loads(line)) for line in (desk / "bad.jsonl").read_text().splitlines()]
    (desk / "bad.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    output = call("retry", *target, "--from", "bad.jsonl", "--out", "fixed", "--json", code=4)

    done = json.loads(output)
    assert done["passed"] == 2
    assert [(line["row"], line["reason"]) for line in done["still_bad"]] == [
        (43, "encoding"),
        (42, "duplicate_key"),
    ]
    (source,) = done["sources"]
    assert source.pop("rows") == 2
    edit(desk, more=source)
    again = run_recipe(desk)
    assert again.ledger[0].rows_out == 42
    left = json.loads(call("ls", "recipe.yaml", "--json", "--cache", str(desk / "cache")))
    assert left["rows"] == 2  # rows fixed elsewhere are not shown
    assert {sample["row"] for why in left["reasons"] for sample in why["samples"]} == {42, 43}


def test_a_row_with_a_duplicate_key_does_not_pass_unless_fixed(desk):
    """Parsing the row for the editor would keep the last value and lose the first."""
    run_recipe(desk)
    call("retry", "store/birds", "--reason", "duplicate_key", "--edit", "bad.jsonl")
    (line,) = (desk / "bad.jsonl").read_text().splitlines()
    assert json.loads(line)["raw"] == BAD[2]


def test_bytes_that_are_no_text_do_not_pass_as_replacement_characters(desk):
    run_recipe(desk)
    arguments = ["store/birds", "--recipe", "recipe.yaml", "--reason", "encoding", "--out", "out"]
    output = call("retry", *arguments, code=4)
    assert "0 rows passed, 1 still bad" in output
    assert "still contains U+FFFD" in output
    assert json.loads((desk / "out" / "_still-bad.jsonl").read_text())["row"] == 43


def test_unedited_rows_pass_when_the_rules_changed(desk):
    lines = [*GOOD[:4], {"instruction": "x" * 200, "input": "", "output": "long"}]
    (desk / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run_recipe(desk, "validate.max_chars=100")
    output = call("retry", "store/birds", "--recipe", "recipe.yaml", "--out", "out")
    assert "1 row passed, 0 still bad" in output
    assert "name: rows-fixed" in output
    assert not (desk / "out" / "_still-bad.jsonl").exists()


def test_tsv_rows_are_read_by_their_header(desk):
    source = {
        "path": "labels.tsv",
        "format": "classification",
        "fields": {"text": "sentence"},
        "label_names": ["bad", "good"],
    }
    template = {"template": "classification", "prompt": "{text}\nLabel:\n"}
    edit(desk, sources=[source], format=template, validate={"max_quarantined": 0.9})
    run_recipe(desk)
    call("retry", "recipe.yaml", "--cache", "cache", "--edit", "bad.jsonl")
    lines = [json.loads(line) for line in (desk / "bad.jsonl").read_text().splitlines()]
    assert [line["raw"] for line in lines] == ["awful\tx", "no label"]
    lines[0]["raw"] = "awful\t0"
    lines[1]["raw"] = "no label\t0"
    (desk / "bad.jsonl").write_text("\n".join(map(json.dumps, lines)))
    call("retry", "recipe.yaml", "--from", "bad.jsonl", "--out", "out")
    written = (desk / "out" / "labels-fixed.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == [
        {"sentence": "awful", "label": "0"},
        {"sentence": "no label", "label": "0"},
    ]


def test_rows_that_a_template_refused_pass_once_they_are_fixed(desk):
    """The alpaca template cannot hold reasoning, so the row is refused at `format`."""
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 * 2"}
    row = {"messages": [{"role": "user", "content": "Two by two?"}, answer]}
    (desk / "chat.jsonl").write_text(json.dumps(row) + "\n")
    edit(desk, more=CHAT)
    run_recipe(desk)
    shown = call("ls", "store/birds", "--json")
    assert {line["step"] for line in json.loads(shown)["reasons"]} == {"validate", "format"}
    again = ["retry", "recipe.yaml", "--cache", "cache", "--reason", "template"]
    call(*again, "--out", "out", code=4)
    (line,) = (desk / "out" / "_still-bad.jsonl").read_text().splitlines()
    bad = json.loads(line)
    assert (bad["step"], bad["reason"]) == ("format", "template")
    bad["raw"]["messages"][1] = {"role": "assistant", "content": "4"}
    (desk / "fixed.jsonl").write_text(json.dumps(bad) + "\n")
    call("retry", "recipe.yaml", "--from", "fixed.jsonl", "--out", "out2")
    (line,) = (desk / "out2" / "chat-fixed.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"][1]["content"] == "4"


def test_rows_that_the_tokenizer_refused_keep_their_raw_row(desk):
    question = "Say <|im_end|> twice."
    row = {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "k"}]
    }
    text = json.dumps(row)
    (desk / "chat.jsonl").write_text("\n" + text + "\n")
    edit(desk, more=CHAT, tokenize={"control_text": "quarantine"})
    run_recipe(desk)
    (path,) = (desk / "store").rglob("quarantine/*.parquet")
    table = pq.read_table(path).to_pylist()
    (bad,) = [line for line in table if line["step"] == "tokenize"]
    assert (bad["raw"], bad["byte_offset"], bad["raw_size"]) == (text.encode(), 1, len(text))
    again = ["retry", "recipe.yaml", "--cache", "cache", "--reason", bad["reason"]]
    call(*again, "--out", "out", code=4)
    (line,) = (desk / "out" / "_still-bad.jsonl").read_text().splitlines()
    (desk / "fixed.jsonl").write_text(line.replace("<|im_end|>", "the end"))
    call("retry", "recipe.yaml", "--from", "fixed.jsonl", "--out", "out2")
    assert "Say the end twice." in (desk / "out2" / "chat-fixed.jsonl").read_text()


def test_a_row_with_several_bad_records_is_fixed_once(desk):
    turns = [("user", "Hi."), ("assistant", "Hello."), ("user", "Say <|im_end|>.")]
    turns += [("assistant", "No."), ("user", "Why?"), ("assistant", "It ends.")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (desk / "chat.jsonl").write_text(json.dumps(row) + "\n")
    sections = {"format": {"turns": "alone"}, "tokenize": {"control_text": "quarantine"}}
    edit(desk, sources=[CHAT], validate={"max_quarantined": 1.0}, **sections)
    run_recipe(desk)
    assert call("ls", "recipe.yaml", "--cache", "cache").startswith("1 bad row (2 records)\n")
    again = ["quarantine", "retry", "recipe.yaml", "--cache", "cache"]
    call(*again[1:], "--edit", "bad.jsonl")
    (line,) = (desk / "bad.jsonl").read_text().splitlines()
    (desk / "bad.jsonl").write_text(line.replace("<|im_end|>", "the end"))
    done = CliRunner().invoke(cli, [*again, "--from", "bad.jsonl", "--out", "out"])
    assert done.stdout.startswith("1 row passed, 0 still bad\n")
    assert "`dedup.exact: drop` removes the duplicates" in done.stderr  # the first answer's
    assert len((desk / "out" / "chat-fixed.jsonl").read_text().splitlines()) == 1


def test_a_file_that_holds_something_else_is_refused(desk):
    run_recipe(desk)
    (records,) = (desk / "store").rglob("records/*.parquet")
    result = CliRunner().invoke(cli, ["quarantine", "ls", str(records)])
    assert result.exit_code == 2
    assert "is not a quarantine file" in result.stderr


def test_rows_of_a_file_in_another_encoding_are_fixed_as_utf8(desk):
    rows = [{"ask": f"\u95ee\u9898 {n}?", "say": f"\u7b54\u6848 {n}"} for n in range(9)]
    lines = [json.dumps([row], ensure_ascii=False) for row in rows]
    (desk / "rows.jsonl").write_bytes("\n".join([*lines, lines[0][:-1]]).encode("gb18030"))
    fields = {"prompt": "ask", "completion": "say"}
    odd = {"encoding": "gb18030", "unwrap": True, "format": "prompt_completion", "fields": fields}
    edit(desk, sources=[{"path": "rows.jsonl", **odd}])
    run_recipe(desk)
    call("retry", "recipe.yaml", "--cache", desk / "cache", "--edit", desk / "bad.jsonl")
    (bad,) = map(json.loads, (desk / "bad.jsonl").read_text().splitlines())
    (desk / "bad.jsonl").write_text(json.dumps({**bad, "raw": bad["raw"] + "]"}))

    said = call("retry", "recipe.yaml", "--from", desk / "bad.jsonl", "--out", desk / "fixed")

    assert "1 row passed, 0 still bad" in said
    (line,) = (desk / "fixed" / "rows-fixed.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == [rows[0]]
    snippet = yaml.safe_load(said.partition("sources:\n")[2])
    assert "encoding" not in snippet[0]


def test_rows_that_are_still_bad_are_not_added_to_a_source(desk):
    run_recipe(desk)
    call("retry", "store/birds", "--recipe", "recipe.yaml", "--out", "out", code=4)
    assert (desk / "out" / "_still-bad.jsonl").is_file()
    (desk / "out" / "good.jsonl").write_text(json.dumps(GOOD[0]))
    edit(desk, sources=[{"path": "out", "format": "alpaca"}])
    assert run_recipe(desk).ledger[0].rows_in == 1


def test_the_command_in_the_message_of_prepare_finds_a_run_with_another_cache(desk):
    edit(desk, validate={"max_quarantined": 0.01})
    recipe, cache = desk / "recipe.yaml", desk / "other cache"
    failed = CliRunner().invoke(cli, ["prepare", str(recipe), "--cache", str(cache)])
    (command,) = re.findall(r"run `packhouse (quarantine show .+)`", failed.stderr)

    shown = CliRunner().invoke(cli, shlex.split(command))

    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.count(": validate / ") == len(BAD)

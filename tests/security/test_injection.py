"""Text from rows, file names and manifests is harmless in terminals, logs and pages."""

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from markdown_it import MarkdownIt

import packhouse
from packhouse.addons.ci.command import (
    PlanFacts,
    all_gates,
    failed_gate,
    outcome_markdown,
    plan_markdown,
    to_junit,
)
from packhouse.addons.plan import Estimate
from packhouse.cli import cli
from packhouse.errors import SourceError
from packhouse.records.table_schemas import QUARANTINED
from packhouse.store import open_store, publish_version
from packhouse.store.commit import dataset_card
from packhouse.store.manifest import Manifest
from packhouse.system.escaping import for_terminal
from packhouse.system.fingerprint import digest
from tasks import EscapedRecord
from tests.security.test_escaping import ACTIVE, HOSTILE, hostile
from tests.store.versions import FACTS, pack_table, write_file

REPOSITORY = Path(packhouse.__file__).parents[1]
TOKENIZER = REPOSITORY / "deployments" / "demo" / "tokenizer"
FILE_NAMES = [text.replace("/", "|") for text in HOSTILE if "\ud800" not in text]

writable = hostile.map(lambda text: text.encode(errors="replace").decode())


def call(*arguments: object, code: int | None = 0) -> str:
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert code is None or done.exit_code == code, done.output
    assert done.exit_code in (0, 1, 2, 3, 4, 5), done.output
    assert not ACTIVE.search(done.output), repr(ACTIVE.search(done.output))
    return done.output


def test_a_hostile_version_is_shown_as_text(tmp_path: Path) -> None:
    text = "|".join(text for text in HOSTILE if "\ud800" not in text)
    store = open_store(str(tmp_path / "store"))
    for vid, first in (("aaaa", 1), ("bbbb", 2)):
        table = pack_table(first)
        table = table.set_column(3, "record_ids", pa.array([[text, "b"], [text]]))
        facts: dict[str, Any] = {
            "content_id": vid,
            "configuration": {"pack": {"seq_len": 8, text: first}, text: [text, first]},
            "lineage": {
                "sources": [{"file": text, "rows": first, "sha256": vid}],
            },
            "engines": {text: first},
            "libraries": {text: text, "x": f"{first}{text}"},
        }
        publish_version(
            store, "tiny", vid, [write_file(tmp_path, table, vid)], FACTS | facts, "latest"
        )
    place = f"{tmp_path}/store/tiny"

    for code, *arguments in (
        (0, "ls", place),
        (0, "show", place),
        (0, "inspect", place),
        (0, "diff", f"{place}@aaaa.g0", "latest"),
        (0, "verify", place),
    ):
        call(*arguments, code=code)
        for line in call(*arguments, "--json", code=code).splitlines():
            assert line.isascii()
    assert text in json.loads(call("show", place, "--json"))["engines"]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writable)
def test_hostile_bad_rows_are_shown_as_text(tmp_path: Path, text: str) -> None:
    raw = text.encode()
    row = ("rows/" + text, 0, 0, "validate", "json", text, raw, len(raw), "0" * 64)
    columns = {name: [value] for name, value in zip(QUARANTINED.names, row, strict=True)}
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table(columns, schema=QUARANTINED), path)

    for command in ("ls", "show"):
        shown = call("quarantine", command, path)
        # A narrow terminal breaks lines between words.
        assert "".join(for_terminal(text).split()) in "".join(shown.split())
        assert call("quarantine", command, path, "--json").isascii()


@pytest.mark.parametrize("name", FILE_NAMES[::4])
def test_errors_repeat_file_and_field_names_as_text(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.jsonl").write_bytes(
        b"".join(json.dumps({f"{name}{n}": 1}).encode() + b"\n" for n in range(2))
    )
    recipe = {"dataset": "d", "sources": [{"path": f"{name}.jsonl"}], "tokenizer": str(TOKENIZER)}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))

    said = call("plan", tmp_path / "recipe.yaml", "--cache", tmp_path / "cache", code=3)
    assert said.startswith("SourceError: ")
    call("show", tmp_path / name, code=None)
    call("ls", name, name, name, code=2)
    call("plan", tmp_path / f"{name}.yaml", code=2)


@given(hostile)
def test_logs_and_errors_hold_text(text: str) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    error = SourceError(f"file {text}", name=text)
    try:
        raise ValueError(text) from error
    except ValueError as raised:
        info = type(raised), raised, raised.__traceback__
    record = EscapedRecord("x", logging.ERROR, "f", 1, "row %s\nforged", (text,), info)
    handler.emit(record)

    assert not ACTIVE.search(out.getvalue())
    assert "\n    forged" in out.getvalue()
    assert not ACTIVE.search(str(error))


def kinds_on(page: str) -> set[str]:
    parser = MarkdownIt("commonmark").enable("table")
    blocks = parser.parse(re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL))
    return {inline.type for block in blocks for inline in (block, *(block.children or ()))}


FORBIDDEN = {"link_open", "image", "html_inline", "html_block"}


@given(writable)
def test_pages_hold_no_link_image_or_html_of_data(text: str) -> None:
    schema = {"fields": [{"name": text, "type": text, "nullable": True}]}
    manifest = Manifest(
        dataset="tiny",
        vid="abcd",
        generation=0,
        files=(),
        schema=schema,
        schema_fingerprint=digest(schema),
        lineage={"sources": [{"file": text, "rows": 1}]},
        configuration={"format": {"template": text}},
    )
    estimate = Estimate(
        rows=1,
        records=1,
        tokens=1,
        packs=1,
        bytes=1,
        is_exact=True,
        sources={text: {"rows": 1, "records": 1, "tokens": 1}},
        notes=(),
    )
    plan = PlanFacts(
        dataset="d",
        version_id="v",
        current="c",
        estimate=estimate,
        cached={},
        settings={text: (text, text)},
        sources={text: "added"},
    )
    gates = all_gates(failed_gate(SourceError(text), is_planned=False), text)

    for page in (dataset_card(manifest), plan_markdown(plan), outcome_markdown(gates, None)):
        assert not FORBIDDEN & kinds_on(page), page
    assert not ACTIVE.search(to_junit("d", gates))


def test_a_file_name_cannot_pass_for_lines_of_a_command(tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(4)] + [{"a": "b"}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("a\nfaked: 1.jsonl", "b\nfaked: 1.jsonl"):
        (tmp_path / name).write_text(text.replace("Say", f"Say {name[0]}"))
    settings = {
        "sources": [{"path": str(tmp_path / "*.jsonl"), "name": "names", "format": "alpaca"}],
        "validate": {"max_quarantined": 0.5},
    }
    (tmp_path / "recipe.yaml").write_text(
        json.dumps({"dataset": "tiny", "tokenizer": str(TOKENIZER), **settings})
    )
    place, recipe = tmp_path / "store" / "tiny", tmp_path / "recipe.yaml"
    cache = ("--cache", tmp_path / "cache")
    call("prepare", recipe, "--set", f"publish.store={tmp_path / 'store'}", *cache)
    for code, *words in (
        (0, "trace", place, "--pack", "0", "--token", "3"),
        (0, "trace", place, "--file", tmp_path / "a\nfaked: 1.jsonl", "--row", "1"),
        (0, "inspect", place, "--row", "1", *cache),
        (0, "inspect", recipe, "--row", "1", *cache),
        (0, "quarantine", "show", place),
        (4, "quarantine", "retry", recipe, "--out", tmp_path / "out", "--recipe", recipe, *cache),
        (0, "plan", recipe, *cache),
    ):
        shown = call(*words, code=code)
        assert not [line for line in shown.split("\n") if line.lstrip().startswith("faked")]
        assert "nfaked: 1.jsonl" in shown or words[0] == "quarantine"
    (line,) = json.loads(call("stats", place, "--json"))["sources"]
    assert (line["source"], line["records"]) == ("names", 8)


def test_commands_print_through_one_module() -> None:
    """A command that prints by itself could forget to escape."""
    calls = r"click\.s?echo\(|\bConsole\(|sys\.std(out|err)\.write|(?<![.\w])(?<!def )print\("
    printing = re.compile(calls)
    own = {"packhouse/system/terminal.py"}
    found = [
        f"{path.relative_to(REPOSITORY)}: {line.strip()}"
        for package in ("packhouse", "flows", "tasks", "schemas")
        for path in (REPOSITORY / package).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if printing.search(line) and not line.lstrip().startswith((">>> ", "... "))
        if str(path.relative_to(REPOSITORY)) not in own
    ]
    assert found == []

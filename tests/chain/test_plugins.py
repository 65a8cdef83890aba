"""Plug-ins from a real distribution on sys.path, with the code shown in docs/plugins.md."""

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

import packhouse
from packhouse.cli import cli
from packhouse.errors import (
    AuditError,
    ConfigError,
    PluginError,
    SourceError,
)
from packhouse.pack.strategies import plan_packs
from packhouse.run.chain import plan_jobs
from packhouse.store import open_version
from packhouse.system import plugins
from packhouse.system.plugins import PluginFunction, find_plugin
from tests.prepared import TOKENIZER, prepare_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text()
CODE, PROJECT, RECIPE = (
    re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("python", "toml", "yaml")
)
CALL = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]


def row(number, answers=("Paris",)):
    text = f"Fact {number}: the capital of France is Paris."
    question = f"What is the capital in fact {number}?"
    return {"context": text, "question": question, "answers": {"text": list(answers)}}


ROWS = [row(number) for number in range(40)]


class Acme:
    """A distribution in a separate folder, as pip installs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.install()

    def install(self, code=CODE, version="1.0", name="acme-data"):
        """Install the distribution, or another release of it over the current one."""
        told = tomllib.loads(PROJECT)["project"]
        info = self.folder / f"{name.replace('-', '_')}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        lines = [f"Metadata-Version: 2.1\nName: {name}", f"Version: {version}" if version else ""]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = told["entry-points"].items()
        (info / "entry_points.txt").write_text(
            "\n".join(
                f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in names.items())
                for group, names in groups
            )
        )
        (self.folder / "acme_data.py").write_text(code)
        sys.modules.pop("acme_data", None)
        importlib.invalidate_caches()
        plugins.installed.cache_clear()

    def replace(self, old, new, version="1.0"):
        code = (self.folder / "acme_data.py").read_text()
        assert old in code
        self.install(code.replace(old, new), version)


@pytest.fixture
def acme(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two releases in one second
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield Acme(tmp_path / "site")
    sys.modules.pop("acme_data", None)
    plugins.installed.cache_clear()


@pytest.fixture
def prepare(tmp_path):
    def run(rows=ROWS, pack=None, **settings):
        (tmp_path / "faq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return prepare_in(
            tmp_path,
            {"path": str(tmp_path / "faq.jsonl"), "format": "faq"},
            pack={"seq_len": 512, **(pack or {})},
            **settings,
        )

    return run


def test_the_recipe_of_the_page_runs_in_processes_of_their_own(acme, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rows = [row(99, answers=()), *(row(number) for number in range(199))]
    (tmp_path / "faq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["prepare", "recipe.yaml", "--set", f"tokenizer={TOKENIZER}", "--workers", "2"]
    monkeypatch.chdir(tmp_path)

    done = CliRunner().invoke(cli, [*command, "--cache", "cache"])

    assert done.exit_code == 0, done.output
    assert "no_answer 1" in done.stdout
    assert "check 'no_emails' of acme-data 1.0: 0 of 199 rows" in done.stdout
    manifest = open_version(str(tmp_path / "store"), "faq").manifest
    assert manifest.libraries["acme-data"] == "1.0"
    assert manifest.configuration["pack"]["strategy"] == "in_order"


def test_the_metadata_of_installed_packages_is_read_once_per_process(acme, monkeypatch):
    found = find_plugin("row_formats", "faq")
    monkeypatch.setattr(sys, "path", [])  # reading again would find nothing

    assert find_plugin("row_formats", "faq") == found
    assert plugins.plugin_names("checks") == ["no_emails"]


def test_the_version_of_a_plug_in_is_part_of_the_id_and_nothing_else_of_it_is(acme, tmp_path):
    (tmp_path / "faq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = {"path": str(tmp_path / "faq.jsonl"), "format": "faq"}

    def versions():
        base = {"dataset": "faq", "sources": [source], "tokenizer": str(TOKENIZER)}
        own = ({}, {"pack": {"strategy": "in_order"}}, {"audit": {"checks": ["no_emails"]}})
        return {plan_jobs(packhouse.Recipe.model_validate(base | each)).version_id for each in own}

    first = versions()
    assert len(first) == 3
    acme.replace("Find rows", "Look for rows")
    assert versions() == first
    acme.install(version="1.1")
    assert not versions() & first


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("return packs[1:]", "packed sequence 0 0 times; expected once"),
        ("return [*packs, [0]]", "packed sequence 0 2 times; expected once"),
        ("return [*packs, [40]]", "packed sequence 40, but there are only 40"),
        ("return [*packs, []]", "returned an empty pack"),
        ("return [list(range(40))]", "more than seq_len 512"),
        ("return [['a']]", "failed on 40 lengths: ValueError"),
        ("return 1 / 0", "failed on 40 lengths: ZeroDivisionError: division by zero"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_by_name(acme, new, message):
    acme.replace("return packs", new)
    with pytest.raises(PluginError, match=message) as caught:
        plan_packs(np.full(40, 30, np.int32), 512, "in_order", 0)
    assert str(caught.value).startswith("packing strategy 'in_order' of acme-data 1.0 ")


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ('"text": question', "returned the fields 'text', 'rest'. Return a dict with"),
        ('"messages": 1 / 0', "failed on a row: ZeroDivisionError"),
    ],
)
def test_a_row_format_that_fails_is_named(acme, prepare, new, message):
    acme.replace('"messages": [', f'{new}, "rest": [')
    with pytest.raises(PluginError, match=message) as caught:
        prepare()
    assert str(caught.value).startswith("row format 'faq' of acme-data 1.0 ")


def test_rows_without_a_conversation_are_quarantined(acme, prepare):
    acme.replace('"role": "user"', '"role": "judge" if "fact 7?" in question else "user"')
    rows = [row(99, answers=()), *ROWS]
    acme.replace("    return {", '    return [] if "fact 5?" in question else {')
    version = prepare(rows, validate={"max_quarantined": 0.1})
    found = {row["row"]: (row["reason"], row["detail"]) for row in version.quarantined.to_pylist()}
    assert {row: reason for row, (reason, _) in found.items()} == {
        0: "no_answer",
        6: "no_messages",
        8: "unknown_role",
    }
    assert found[6][1] == "row format 'faq' of acme-data 1.0 found no conversation"


@pytest.mark.parametrize("taken", ["row.get('note')", "{**row}", "row.items()"])
def test_text_that_a_plug_in_does_not_take_is_refused(acme, prepare, tmp_path, taken):
    rows = [each | {"note": "The sky is blue because of the air."} for each in ROWS]
    with pytest.raises(SourceError, match=r"no setting reads the text in 'note' \(40 of 40 rows"):
        prepare(rows)
    acme.replace("    return {", f"    {taken}\n    return {{", version="2.0")
    data = {"path": str(tmp_path / "faq.jsonl"), "format": "faq"}
    assert not packhouse.plan(data, tokenizer=TOKENIZER, cache=tmp_path).refusals


def test_a_check_that_finds_fault_stops_publication(acme, prepare):
    rows = [*ROWS, row(40, answers=["ask me@here.org"])]
    with pytest.raises(
        AuditError, match=r"check 'no_emails' of acme-data 1.0 .* 1 of 41 rows"
    ) as e:
        prepare(rows, audit={"checks": ["no_emails"]})
    assert "row 40 (holds an e-mail address)" in str(e.value)
    assert "audit.max_failed_checks" in str(e.value)
    allowed = prepare(rows, audit={"checks": ["no_emails"], "max_failed_checks": 0.05})
    assert allowed.audit["checks"]["no_emails"]["failed"] == 1


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("return [1]", "did not return a dict of row number -> text"),
        ("return {40: 'bad'}", "returned row 40, but the table has 40"),
        ("return found.missing", "failed on 40 conversations: AttributeError"),
    ],
)
def test_a_check_that_fails_is_named(acme, prepare, new, message):
    acme.replace("return found", new)
    with pytest.raises(PluginError, match=f"check 'no_emails' of acme-data 1.0 {message}"):
        prepare(audit={"checks": ["no_emails"]})


def test_two_packages_that_offer_one_name_are_refused(acme, prepare):
    acme.install(name="other-data")
    with pytest.raises(ConfigError, match="'faq' is provided by acme-data and other-data"):
        prepare()


def test_an_unknown_name_is_refused_with_a_suggestion(acme, prepare):
    with pytest.raises(ConfigError, match=r"'pack.strategy' cannot be 'inorder'.*'in_order'\?"):
        prepare(pack={"strategy": "inorder"})
    with pytest.raises(ConfigError, match=r"unknown row format 'x'. Known: faq"):
        find_plugin("row_formats", "x")


def test_nothing_is_imported_that_no_recipe_names(acme, tmp_path):
    acme.install(code="raise SystemExit('imported')")
    rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(9)]
    packhouse.plan(rows, tokenizer=TOKENIZER, cache=tmp_path, pack={"strategy": "first_fit"})
    assert "acme_data" not in sys.modules
    assert find_plugin("checks", "no_emails").version == "1.0"
    assert "acme_data" not in sys.modules


@pytest.fixture
def functions():
    """Registered functions stay for the whole process; remove those of these tests."""
    yield
    plugins._given.clear()


def test_the_call_of_the_page_runs_with_functions_in_place_of_names(
    tmp_path, monkeypatch, functions
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "deployments").symlink_to(ROOT / "deployments")
    rows = [row(99, answers=()), *ROWS, *(row(n) for n in range(100, 200))]
    (tmp_path / "faq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {}
    exec(CODE + CALL, names)

    version = names["version"]
    assert version.ledger[0]["quarantined"] == {"no_answer": 1}
    manifest = open_version(str(tmp_path / "store"), "faq").manifest
    assert manifest.configuration["pack"]["strategy"] == "in_order"
    used = {name: manifest.libraries[name] for name in ("read_faq", "in_order", "no_emails")}
    assert used == dict.fromkeys(used, "1")

    exec(CODE + CALL.replace('in_order, version="1"', 'in_order, version="2"'), names)
    assert names["version"].id != version.id
    with pytest.raises(ConfigError, match="registered only in this process"):
        exec(CALL.replace("audit=", "workers=2, audit="), names)


def test_a_function_needs_a_version_and_a_name_of_its_own(functions):
    with pytest.raises(ConfigError, match="needs a function and a non-empty version"):
        PluginFunction(len, version="")
    with pytest.raises(ConfigError, match="needs a function and a non-empty version"):
        PluginFunction("len", version="1")
    with pytest.raises(
        ConfigError, match=r"format': is a function\. Pass a name, or PluginFunction\("
    ):
        packhouse.prepare({"path": "x", "format": len}, tokenizer="t", progress=False)
    with pytest.raises(ConfigError, match="'concat' is a built-in packing strategy"):
        packhouse.Recipe(
            dataset="x",
            sources=[{"path": "x"}],
            tokenizer="t",
            pack={"strategy": PluginFunction(len, version="1", name="concat")},
        )


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'packhouse[s3]'"),
        ({"url": "file:///a/b%20c", "dir_info": {"editable": True}}, "pip install -e '/a/b c[s3]'"),
        ({"url": "file:///a/p.whl"}, "pip install 'packhouse[s3] @ file:///a/p.whl'"),
        (
            {"url": "https://h/p", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            "pip install 'packhouse[s3] @ git+https://h/p@1f'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_packhouse_came(origin, command, monkeypatch):
    text = origin and json.dumps(origin)
    monkeypatch.setattr(plugins, "distribution", lambda _: Mock(read_text=lambda _: text))
    assert plugins.pip_install("s3") == command

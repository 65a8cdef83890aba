"""Query a version with SQL."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from packhouse.addons.ask.duckdb_queries import ask
from packhouse.api import Version
from packhouse.cli import cli
from packhouse.errors import ConfigError, IntegrityError
from packhouse.store import open_store, open_version, publish_version
from tests.prepared import prepare_in
from tests.store.versions import FACTS, write_file


def rows() -> list[dict[str, str]]:
    """60 rows: rows 50 to 54 repeat rows 0 to 4, row 55 is too long, row 56 has no answer."""
    made = [{"instruction": f"Say {n}.", "output": f"It is {n}!"} for n in range(50)]
    made += [dict(row) for row in made[:5]]
    made += [{"instruction": "Count.", "output": " ".join(map(str, range(400)))}]
    made += [{"instruction": "Say nothing.", "output": ""}]
    return made + [{"instruction": f"Sing {n}.", "output": f"La {n}."} for n in range(3)]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sql")
    made: dict[str, Version] = {}

    def make(name: str = "plain", **settings) -> Version:
        if name not in made:
            made[name] = prepared(name, settings)
        return made[name]

    def prepared(name: str, settings: dict[str, Any]) -> Version:
        return prepare_in(
            folder,
            rows(),
            dataset="numbers",
            store=folder / name,
            **{
                "pack": {"seq_len": 128, "over_length": "drop"},
                "dedup": {"exact": "drop"},
                "split": {"eval_fraction": 0.2},
                "format": {"template": "alpaca"},
                "validate": {"max_quarantined": 0.1},
            }
            | settings,
        )

    return make


def test_counts_of_the_views_are_those_of_the_ledger(make):
    version = make()
    outcomes = version.sql("select outcome, count(*) as n from records group by 1").to_pylist()
    assert {row["outcome"]: row["n"] for row in outcomes} == {
        "kept": 53,
        "duplicate": 5,
        "over_seq_len": 1,
    }
    (bad,) = version.sql("select source, row, reason from quarantine").to_pylist()
    assert (bad["row"], bad["reason"]) == (56, "empty_answer")
    dropped = version.sql("select row, reason, detail from dropped order by row").to_pylist()
    assert [row["row"] for row in dropped] == [50, 51, 52, 53, 54, 55]
    assert dropped[0]["detail"].endswith("row 0")
    assert dropped[5]["detail"] == "longer than seq_len (128 tokens)"
    (total,) = version.sql("select sum(num_trained) as n from records").to_pylist()
    assert total["n"] == sum(side["num_trained"] for side in version.statistics.values())
    steps = version.sql("select number, unit from ledger where step = 'pack' and event = 'out'")
    assert steps.to_pylist() == [{"number": 53, "unit": "rows"}]


def test_only_columns_in_a_query_are_read(make, tmp_path):
    version = make("bare")
    opened = version._opened
    for entry in opened.files("data"):
        (Path(opened.store.uri) / opened.key(entry)).unlink()

    (row,) = version.sql(
        "select count(*) as n, sum(num_trained), max(pack) from records"
    ).to_pylist()
    assert row["n"] == 59
    assert "text" not in make().sql("select * from records").column_names
    with pytest.raises(Exception, match="is missing"):
        version.sql("select sum(length(text)) from records")


@pytest.mark.parametrize(
    "query",
    [
        "select count(distinct records) from records",
        'select count(distinct "R") from (select r from records as r)',
        "select count(distinct main.records) from records",
        "select count(distinct b) from records as r(a, r, b)",
        "select count(distinct #3) from records",
        "select count(*) from (select distinct columns(*) from records)",
        "select count(*) from records natural join (select distinct row, source from records)",
        "select count(*) from (with t as (from records) select distinct t from t)",
    ],
)
def test_columns_that_a_question_means_without_naming_them_are_there(make, query):
    """59 rows with different row numbers, from 54 records."""
    (answer,) = make().sql(query).to_pylist()
    assert list(answer.values()) == [59]


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("select 1; select 2", "only one read-only query"),
        ("drop table records", "only one read-only query"),
        ("copy records to '/tmp/x'", "only one read-only query"),
        ("select * from read_csv('/etc/passwd')", "disabled by configuration"),
        ("select * from 'records.parquet'", "disabled by configuration"),
        ("select nme from records", r'column "nme" not found.*\nrecords has record_id, source'),
        ("select * from record", r"record does not exist!\nTables: records, packs, contents,"),
        ("select lenght(source) from records", 'lenght does not exist!\nDid you mean "length"'),
        ("select sum(source) from records", r"sum\(VARCHAR\)'.*\nSignature: sum\("),
        ("select is_refusal(source, 3) from records", r"is_refusal\(col0 VARCHAR\)$"),
        ("selec 1", "invalid SQL"),
        ("select sum(a.range * b.range) from range(10000000) a, range(10000000) b", "CPU"),
    ],
)
def test_a_failed_query_is_reported_in_plain_words(make, monkeypatch, query, problem):
    monkeypatch.setenv("PACKHOUSE_CHILD_SECONDS", "2")
    with pytest.raises(ConfigError, match=problem):
        make().sql(query)


def test_packs_that_do_not_add_up_are_damage(tmp_path):
    table = pa.table(
        {
            "input_ids": [[1, 2, 3]],
            "labels": [[1, 2]],
            "seq_lengths": [[9]],
            "record_ids": [["a", "b"]],
        }
    )
    store = open_store(str(tmp_path / "store"))
    publish_version(store, "tiny", "aaaa", [write_file(tmp_path, table, "x")], FACTS, "latest")
    with pytest.raises(IntegrityError, match="no packs of records"):
        ask(open_version(store, "tiny"), "select num_trained from packs", tmp_path)


def test_the_command_prints_a_table_json_and_csv(make):
    uri = make().uri

    def call(*options: str) -> str:
        query = "select row, text from records where outcome = 'kept' order by row limit 2"
        done = CliRunner().invoke(cli, ["sql", uri, query, *options], env={"COLUMNS": "80"})
        assert done.exit_code == 0, done.output
        return done.stdout

    table = call("--limit", "1")
    assert max(map(len, table.splitlines())) <= 80
    assert "1 of 2 rows; --limit 0 shows all" in table
    lines = [json.loads(line) for line in call("--json").splitlines()]
    assert [line["row"] for line in lines] == [0, 1]
    assert list(csv.DictReader(io.StringIO(call("--csv"))))[1]["text"] == lines[1]["text"]
    returns = CliRunner().invoke(cli, ["sql", uri, "select 'a' || chr(13) || 'b' as x", "--csv"])
    assert returns.stdout == 'x\n"a\rb"\n'  # without quotes, it would be two rows


def test_stats_are_those_of_the_ledger_and_the_manifest(make):
    version = make("stats", dedup={"exact": "keep"})
    done = CliRunner().invoke(cli, ["stats", version.uri, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    for side in found["splits"]:
        counts = version.statistics[side["split"]]
        assert side["packs"] == counts["num_packs"]
        assert side["fill"] == pytest.approx(counts["fill"], abs=1e-4)
        assert side["records"] == counts["num_sequences"]
        of_split = [each for each in found["sources"] if each["split"] == side["split"]]
        assert sum(each["tokens"] for each in of_split) == side["tokens"] == counts["num_tokens"]
        trained = sum(each["tokens"] * each["trained"] for each in of_split)
        assert trained == pytest.approx(counts["num_trained"], rel=1e-3)
    lengths = sorted(
        row["num_tokens"]
        for row in version.sql("select num_tokens from records where outcome = 'kept'").to_pylist()
    )
    assert max(each["longest"] for each in found["sources"]) == lengths[-1]
    assert {each["source"] for each in found["sources"]} == {"rows"}
    lines = CliRunner().invoke(cli, ["stats", version.uri], env={"COLUMNS": "80"}).stdout
    assert max(map(len, lines.splitlines())) <= 80
    assert lines.split()[:4] == ["source", "split", "records", "tokens"]


def test_quality_functions_are_known(make):
    (kept,) = (
        make()
        .sql("select count(*) as n from records where not is_empty(text) and not has_email(text)")
        .to_pylist()
    )
    assert kept["n"] == 53

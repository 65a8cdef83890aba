"""Tables of SQLite and DuckDB files as sources."""

import os
import sqlite3
from pathlib import Path

import pytest

from packhouse.errors import SourceError
from packhouse.read import scan_source
from packhouse.recipe import SourceConfig
from tests.prepared import python

QA = [[("user", "q0"), ("assistant", "a0")], [("user", "q1"), ("assistant", "a1")]]


@pytest.fixture
def sqlite(tmp_path):
    def make(*statements: str) -> Path:
        path = tmp_path / "rows.sqlite"
        database = sqlite3.connect(path)
        for statement in statements:
            database.execute(statement)
        database.commit()
        database.close()
        return path

    return make


ROWS = (
    "CREATE TABLE rows (question TEXT, answer TEXT, score)",
    "INSERT INTO rows VALUES ('q0', 'a0', 1), ('q1', 'a1', 2.5)",
)


def test_a_table_of_sqlite_is_read_in_order_of_rowid(sqlite, read):
    path = sqlite(
        "CREATE TABLE rows (question TEXT, answer TEXT, id INTEGER PRIMARY KEY)",
        "INSERT INTO rows VALUES ('q1', 'a1', 9), ('q0', 'a0', 4)",
        "CREATE TABLE other (x)",
    )
    before = path.read_bytes()

    found = read(path, table="rows")

    assert found.texts == QA
    assert found.validated["row"].to_pylist() == [0, 1]
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["rows.sqlite"]


def test_a_table_without_rowid_is_read_in_order_of_its_key(sqlite, read):
    path = sqlite(
        "CREATE TABLE rows (question TEXT PRIMARY KEY, answer TEXT) WITHOUT ROWID",
        "INSERT INTO rows VALUES ('q1', 'a1'), ('q0', 'a0')",
    )

    assert read(path).texts == QA


@pytest.mark.parametrize("value", ["x'61ff'", "cast(x'61ff' as text)"])
def test_a_value_that_is_not_utf8_quarantines_its_row(value, sqlite, read):
    path = sqlite(
        "CREATE TABLE rows (question TEXT, answer TEXT)",
        *(f"INSERT INTO rows VALUES ('q{n}', 'a\u00e9{n}')" for n in range(1500)),
        f"INSERT INTO rows VALUES ('q', {value}), ('q1501', 'a1501')",
    )

    found = read(path)

    assert found.validated["row"].to_pylist() == [*range(1500), 1501]
    (bad,) = found.quarantined.to_pylist()
    assert (bad["row"], bad["reason"]) == (1500, "encoding")
    assert bad["detail"].startswith("column 'answer': byte 0xff is not UTF-8, in b'a\\xff'. Fix")
    assert bad["raw"] == b'{"question":"q","answer":null}'


def test_such_a_value_is_found_with_where_and_in_messages_of_a_tree(sqlite, read):
    where = sqlite(*ROWS, "INSERT INTO rows VALUES ('q2', cast(x'ff' as text), 3)")
    assert read(where, where="score > 2").reasons == ["encoding"]
    where.unlink()
    tree = sqlite(
        "CREATE TABLE rows (message_id TEXT, parent_id TEXT, text TEXT, role TEXT)",
        "INSERT INTO rows VALUES ('a', NULL, 'q', 'prompter'), ('b', 'a', 'a', 'assistant'), "
        "('c', NULL, cast(x'ff' as text), 'prompter'), ('d', NULL, 'q2', 'prompter'), "
        "('e', 'd', 'a2', 'assistant')",
    )

    found = read(tree)

    assert found.texts == [
        [("user", "q"), ("assistant", "a")],
        [("user", "q2"), ("assistant", "a2")],
    ]
    assert [(row["row"], row["reason"]) for row in found.quarantined.to_pylist()] == [
        (2, "encoding")
    ]


def test_conversion_of_sqlite_values(sqlite, read):
    path = sqlite(
        "CREATE TABLE rows (text TEXT, whole, number, mixed, day DATE, flag BOOLEAN)",
        "INSERT INTO rows VALUES ('t0', 9007199254740993, 9007199254740993, 9007199254740993, "
        "'2024-01-31', true), ('t1', 1, 0.5, 'x', '2024-02-01', false)",
    )

    conditions = (
        "whole = 9007199254740993",
        "number = 9007199254740992",  # with 0.5 in its column, it has 53 bits
        "mixed = '9007199254740993'",
        "day < '2024-02-01'",
        "flag = 1",
    )
    for where in (" and ".join(conditions), " or ".join(conditions)):  # none is true in row 1
        assert read(path, where=where).validated["row"].to_pylist() == [0], where


def test_bytes_are_no_text(sqlite, read):
    path = sqlite(
        "CREATE TABLE rows (question TEXT, answer BLOB)",
        "INSERT INTO rows VALUES ('q0', x'6130'), ('q1', x'ff')",
    )

    found = read(path)

    assert found.reasons == ["type", "type"]
    assert found.quarantined["detail"][0].as_py() == "answer is bytes, not text"


def test_conversion_of_duckdb_values(tmp_path, read):
    import duckdb

    path = tmp_path / "rows.duckdb"
    with duckdb.connect(str(path)) as database:
        database.execute(
            "CREATE TABLE rows AS SELECT 't' AS text, 9007199254740993::BIGINT whole, "
            "9007199254740993::HUGEINT huge, 1.10::DECIMAL(38, 2) price, true flag, "
            "DATE '2024-01-31' due, TIMESTAMPTZ '2024-01-31 10:30:00+02' moment, 'ab'::BLOB bytes"
        )

    conditions = (
        "whole = 9007199254740993",
        "huge = 9007199254740992",  # and decimals: 53 bits
        "price = 1.1",
        "flag",
        "due = '2024-01-31'",
        "moment = '2024-01-31 08:30:00+00:00'",
    )
    assert read(path, where=" and ".join(conditions)).validated.num_rows == 1
    assert read(path, select={"question": "text", "answer": "bytes"}).reasons == ["type"]
    code = (
        "from packhouse.read.parquet_files import parse_tables\n"
        f"(rows,) = parse_tables({str(path)!r}, 'duckdb', 0, 1)\n"
        "print(rows.rows[0]['moment'])"
    )
    environment = {**os.environ, "TZ": "Asia/Tokyo"}  # of another machine
    assert python("-c", code, env=environment).stdout == "2024-01-31 08:30:00+00:00\n"


def test_a_file_of_duckdb_whose_text_was_changed_is_refused(tmp_path, read):
    import duckdb

    path = tmp_path / "rows.duckdb"
    with duckdb.connect(str(path)) as database:
        database.execute("CREATE TABLE rows AS SELECT 'a text to change' AS text")
    data = path.read_bytes()
    assert data.count(b"a text to change") == 1
    path.write_bytes(data.replace(b"a text to change", b"a text to chang\xff"))

    with pytest.raises(SourceError, match=r"rows\.duckdb' cannot be read as DuckDB: .*checksum"):
        read(path)


def test_changes_that_are_not_in_the_file_yet_are_refused(sqlite, tmp_path):
    path = sqlite(*ROWS)
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("INSERT INTO rows VALUES ('q2', 'a2', 3)")
    writer.commit()

    with pytest.raises(SourceError, match=r"rows\.sqlite-wal' contains changes that are not in"):
        scan_source(SourceConfig(path=str(path)))
    writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert scan_source(SourceConfig(path=str(path)))[0].num_rows == 3
    writer.close()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("CREATE VIEW evil AS SELECT * FROM rows", "'evil' is a view or a virtual table"),
        ("CREATE VIRTUAL TABLE evil USING fts5(text)", "'evil' is a view or a virtual table"),
        (
            "CREATE TABLE evil (a, b AS (abs(a)) VIRTUAL)",
            "column 'b' of table 'evil' is computed",
        ),
    ],
)
def test_objects_that_would_run_code_are_not_tables(statement, says, sqlite):
    path = sqlite(*ROWS, statement)

    with pytest.raises(SourceError, match=says):
        scan_source(SourceConfig(path=str(path), table="evil"))


def test_the_table_is_named_where_there_are_several(sqlite):
    path = sqlite(*ROWS, "CREATE TABLE other (x)")

    with pytest.raises(SourceError, match=r"several tables. Name one.*tables: other, rows"):
        scan_source(SourceConfig(path=str(path)))
    with pytest.raises(SourceError, match="no table 'row'; did you mean 'rows'"):
        scan_source(SourceConfig(path=str(path), table="row"))


@pytest.mark.parametrize("place", [16, 4096])
def test_a_damaged_file_is_an_error_that_names_it(place, sqlite):
    path = sqlite(*ROWS)
    data = bytearray(path.read_bytes())
    data[place : place + 40] = b"\xff" * 40
    path.write_bytes(data)

    with pytest.raises(SourceError, match=r"rows\.sqlite"):
        scan_source(SourceConfig(path=str(path)))


def test_a_table_of_duckdb_is_read(tmp_path, read):
    import duckdb

    path = tmp_path / "rows.duckdb"
    with duckdb.connect(str(path)) as database:
        database.execute(
            "CREATE TABLE rows AS SELECT 'q' || i question, 'a' || i answer, "
            "[i] l FROM range(2) t(i)"
        )
        database.execute("CREATE VIEW v AS SELECT * FROM rows")
        database.execute("CREATE MACRO length(x) AS 0")

    found = read(path, where="l[1] < 5")

    assert found.texts == QA
    with pytest.raises(SourceError, match="'v' is a view"):
        read(path, table="v")
    (tmp_path / "text.duckdb").write_text("hello")
    with pytest.raises(SourceError, match="is not a database: it is text"):
        read(tmp_path / "text.duckdb")


@pytest.mark.parametrize(
    ("statement", "table", "says"),
    [
        (
            "CREATE TABLE evil (a INT, b AS (random()))",
            "evil",
            "column of table 'evil' is computed",
        ),
        (
            "CREATE MACRO duckdb_tables() AS TABLE "
            "SELECT 'evil' AS table_name, 'main' AS schema_name; "
            "CREATE VIEW evil AS SELECT random()::VARCHAR AS text",
            "evil",
            "'evil' is a view",
        ),
    ],
)
def test_views_that_would_run_code_are_not_tables_of_duckdb(statement, table, says, tmp_path):
    import duckdb

    path = tmp_path / "rows.duckdb"
    with duckdb.connect(str(path)) as database:
        database.execute(f"CREATE TABLE rows (text VARCHAR); {statement}")

    with pytest.raises(SourceError, match=says):
        scan_source(SourceConfig(path=str(path), table=table))


def test_a_folder_is_not_searched_for_databases(sqlite, read, tmp_path):
    sqlite(*ROWS)
    (tmp_path / "a.jsonl").write_text('{"text": "t"}\n')

    assert read(tmp_path).texts == [[("assistant", "t")]]

"""Expressions of `where` and `select`, which run forms may contain, can only access the row."""

import orjson
import pytest

from packhouse.addons import where_select
from packhouse.addons.where_select import FUNCTIONS
from packhouse.errors import ConfigError, SourceError
from packhouse.read import read_shard, scan_source
from packhouse.recipe import SourceConfig, ValidateConfig

duckdb = pytest.importorskip("duckdb")

REFUSED = """
read_text('/etc/passwd') = ''
"read_text"('/etc/passwd') = ''
text = (select content from read_text('/etc/passwd'))
text in (select 1)
exists (from 'rows.jsonl')
(from '/etc/passwd')
1) from read_text('/etc/passwd') where (1 = 1
1) union select (2
1), (2
true) or (true
true; attach '/tmp/x.duckdb' as x
true; copy (select 1) to '/tmp/x'
attach '/tmp/x.duckdb'
copy (select 1) to '/tmp/x'
install httpfs
load httpfs
set threads = 8
pragma version
call pragma_version()
select 1
with a as (select 1) select * from a
create table a (b int)
current_setting('threads') = ''
query('select 1')
glob('/*')
random() < 0.5
now() > '2020-01-01'
current_date > '2020-01-01'
current_timestamp is null
current_database() = ''
list_transform([1], lambda current_date: 1)[1] = 1 and current_date is null
current_date -> '$.a' is null
sleep_ms(100000) is null
json_serialize_plan('select 1') = ''
main.length(text) > 1
system.main.length(text) > 1
count(*) > 1
list_aggregate([1], 'sum') = 1
length(text) over () > 1
unnest([true])
range(1000000000000) = []
repeat('x', 10000000000) = ''
*
columns('t.*') = ''
#1 = ''
$1 = ''
? = ''
:a = ''
text collate nocase = 'a'
text::uuid is null
text::secret is null
default
text = 'a
text = $$a
text = "a
text /* a
true -- a
  ) or (true
text, text
--
\uff54ext = 'a'
text\u00a0; select 1
text = 'a'\u2028; select 1
""".strip().split("\n")


@pytest.mark.parametrize("expression", REFUSED)
def test_expressions_that_reach_beyond_the_row_are_refused_before_any_work(expression, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(orjson.dumps({"text": "t"}) + b"\n")

    if expression == "true -- a":  # a comment ends with its line and does not close a bracket
        assert scan_source(SourceConfig(path=str(path), where=expression))
        return
    for settings in ({"where": expression}, {"select": {"text": expression}}):
        with pytest.raises(ConfigError):
            scan_source(SourceConfig(path=str(path), **settings))


@pytest.mark.parametrize(
    "expression",
    ["(" * 1900 + "true" + ")" * 1900, "not " * 990 + "true", "[" * 1000 + "]" * 1000 + " is null"],
)
def test_deep_nesting_ends_in_an_error(expression, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(orjson.dumps({"text": "t"}) + b"\n")

    with pytest.raises((ConfigError, SourceError)):
        scan_source(SourceConfig(path=str(path), where=expression))


def test_no_allowed_function_is_volatile_or_an_aggregate():
    """A version must not depend on the clock, on chance, or on other rows."""
    found = duckdb.sql(
        "SELECT function_name, function_type, stability FROM duckdb_functions() "
        "WHERE function_type <> 'pragma'"
    ).fetchall()
    kinds = {name: (kind, stability) for name, kind, stability in found if name in FUNCTIONS}

    assert len(kinds) > 150
    assert {kind for kind, _ in kinds.values()} == {"scalar", "macro"}
    assert {stability for _, stability in kinds.values()} <= {"CONSISTENT", None}


@pytest.fixture
def evaluate(tmp_path):
    """Read one row with an expression; return the number of rows kept and quarantined."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes((orjson.dumps({"text": "a" * 100}) + b"\n") * 3)

    def read(**settings: object) -> tuple[int, int]:
        config = SourceConfig(path=str(path), **settings)
        (shard,) = scan_source(config)
        rows = read_shard(shard, config, ValidateConfig(), "prompt")
        return rows.validated.num_rows, rows.quarantined.num_rows

    return read


GROWS = "replace({}, 'a', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa')"


def test_text_that_grows_without_end_is_stopped_by_the_limit_on_memory(evaluate):
    text = "text"
    for _ in range(7):  # 40 ** 7 * 100 bytes
        text = GROWS.format(text)

    with pytest.raises(SourceError, match=r"expressions of source 'rows'|memory|Memory"):
        evaluate(where=f"length({text}) > 1")


def test_a_result_that_is_much_larger_than_the_rows_is_refused(evaluate):
    text = GROWS.format(GROWS.format(GROWS.format("text")))  # 6.4 MB per row

    with pytest.raises(SourceError, match=r"bytes into .*, more than 16 times as many"):
        evaluate(select={"text": " || ".join([text] * 5)})


def test_time_is_limited(evaluate, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CHILD_SECONDS", "2")
    million = GROWS.format(GROWS.format(GROWS.format("text")))

    with pytest.raises(
        SourceError, match=r"takes more CPU time than its limit of .* Simplify the expression"
    ):
        evaluate(where=f"levenshtein({million}, reverse({million}) || 'b') > 1")


@pytest.mark.parametrize(
    ("pattern", "rows"), [("(a+)+$", (3, 0)), ("(a|a)*b", (0, 0)), ("(.*)*(.*)*c", (0, 0))]
)
def test_patterns_that_blow_up_elsewhere_take_no_time(pattern, rows, evaluate):
    assert evaluate(where=f"text ~ '.*{pattern}'") == rows


def test_huge_numbers_are_the_rows_fault_or_the_expressions(evaluate):
    assert evaluate(where="cast(length(text) + 200 as tinyint) > 0") == (0, 3)
    for wrong in (f"{'9' * 300} > length(text)", "cast(text[1] as decimal(99, 98)) > 0"):
        with pytest.raises(ConfigError):
            evaluate(where=wrong)


def test_expressions_that_pass_the_check_still_cannot_reach_files():
    """Second line of defence: DuckDB itself must not read files, attach, or change its settings."""
    connection = where_select._connection.__wrapped__()

    for statement in (
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "ATTACH '/tmp/packhouse.duckdb'",
        "COPY (SELECT 1) TO '/tmp/packhouse.csv'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
        "SET lock_configuration = false",
        "SELECT * FROM duckdb",  # Python variables are not tables
    ):
        with pytest.raises(duckdb.Error):
            connection.execute(statement).fetchall()

"""Source settings `where` and `select`: rows kept, dropped, quarantined and changed."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from packhouse.addons import quality, where_select
from packhouse.addons.where_select import expression_key
from packhouse.errors import ConfigError, SourceError
from packhouse.read import scan_source
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.recipe.recipe_file import parse_recipe
from packhouse.run.steps.validate import ValidateParameters
from tests.sources.conftest import delimited, lines, parquet

pytest.importorskip("duckdb")

ROWS: list[dict[str, Any]] = [
    {"title": "One", "body": "b1", "answer": "a long answer", "lang": "en", "score": 3},
    {"title": "Two", "body": "b2", "answer": "short", "lang": "en", "score": 0.5},
    {"title": "Drei", "body": "b3", "answer": "eine lange Antwort", "lang": "de", "score": None},
    {"title": "Four", "body": "b4", "answer": "another long answer"},
]


SELECT = {"instruction": "title || chr(10) || body", "output": "answer"}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.jsonl", lines(ROWS)),
        ("rows.json", json.dumps(ROWS).encode()),
        ("rows.parquet", parquet(ROWS)),
    ],
)
def test_rows_are_kept_by_where_and_get_the_fields_of_select(name, data, read_bytes):
    found = read_bytes(data, name, where="length(answer) > 5 and lang = 'en'", select=SELECT)

    assert found.texts == [[("user", "One\nb1"), ("assistant", "a long answer")]]
    assert found.validated["row"].to_pylist() == [0]
    assert found.dropped.to_pylist() == [
        {
            "source": f"rows/{name}",
            "row": row,
            "reason": "filtered",
            "detail": "length(answer) > 5 and lang = 'en'",
        }
        for row in (1, 2, 3)  # too short; other language; null, because the row has no `lang`
    ]
    assert found.extra_fields == {}  # names outside select are not fields


def test_json_gives_values_with_the_keys_and_the_order_of_the_file(read_bytes):
    rows = [
        {"q": "1", "tool": "add", "args": {"z": 1, "a": [2]}},
        {"q": "2", "tool": None, "args": "as it is"},
    ]
    select = {"prompt": "json(tool, args)", "completion": "json(args)"}

    found = read_bytes(lines(rows), select=select)

    assert found.texts == [
        [("user", '{"tool":"add","args":{"z":1,"a":[2]}}'), ("assistant", '{"z":1,"a":[2]}')],
        [("user", '{"tool":null,"args":"as it is"}'), ("assistant", "as it is")],
    ]
    for text in ("json(lower(q))", "json()", "json(DISTINCT q)", "main.json(q)"):
        with pytest.raises(ConfigError, match="function 'json'"):
            read_bytes(lines(rows), select={"prompt": text, "completion": "q"})


def test_json_inside_an_expression_keeps_the_keys_and_types_of_each_row(read_bytes):
    # A struct column would write [{"n":"1","of":null}] and [{"n":"one","of":[2]}].
    rows = [
        {"q": "1", "args": [{"n": 1.0}]},
        {"q": "2", "args": [{"n": "one", "of": [2]}]},
        {"q": "3", "args": "as it is"},
    ]
    select = {"prompt": "q", "completion": "'call ' || json(args)"}

    found = read_bytes(lines(rows), select=select)

    answers = [messages[1][1] for messages in found.texts]
    assert answers == ['call [{"n":1.0}]', 'call [{"n":"one","of":[2]}]', "call as it is"]
    for text, why in (
        ("json(args) || length(args)", "Read it only as json"),
        ("list_transform([1], lambda x: json(x))", "Read it only as json"),
        ("json(q, args) || 'a'", "function 'json'"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_bytes(lines(rows), select={"prompt": "q", "completion": text})
    with pytest.raises(ConfigError, match="with and without json"):
        read_bytes(lines(rows[:2]), where="length(args) > 0", select=select)


@pytest.mark.parametrize(
    ("expression", "fix"),
    [
        ("concat_ws(' ', q, Args)", "json(Args)"),
        ("q || args.inner", "to_json(args.inner)"),
        ("format('{}', list)", "json(list)"),
    ],
)
def test_an_object_is_not_joined_to_text_unless_it_is_json(expression, fix, read_bytes):
    """DuckDB joins `{'a': 1, 'inner': {'b': x y}}`, which answers of a public file would train."""
    rows = [{"q": "1 + 1?", "args": {"a": 1, "inner": {"b": "x y"}}, "list": [{"c": "z"}]}]
    select = {"question": "q", "answer": expression}
    with pytest.raises(ConfigError, match=rf"would become text that is not JSON.*{re.escape(fix)}"):
        read_bytes(lines(rows), select=select)

    path = fix.partition("(")[2].removesuffix(")")
    select["answer"] = expression.replace(path, fix)
    ((_, (_, answer)),) = read_bytes(lines(rows), select=select).texts
    whole = {"json(Args)": rows[0]["args"], "json(list)": rows[0]["list"]}
    told = whole.get(fix, rows[0]["args"]["inner"])
    assert json.loads(answer.removeprefix("1 + 1?").strip()) == told


def test_an_object_without_keys_in_all_rows_is_joined_as_json(read_bytes):
    select = {"question": "q", "answer": "concat_ws(' ', q, args)"}
    assert read_bytes(lines([{"q": "1 + 1?", "args": {}}]), select=select).texts == [
        [("user", "1 + 1?"), ("assistant", "1 + 1? {}")]
    ]


def test_columns_of_csv_are_text(read_bytes):
    data = delimited([{"q": "1+1", "a": "2", "votes": "10"}, {"q": "2+2", "a": "4", "votes": "9"}])
    select = {"prompt": "q", "completion": "a"}

    found = read_bytes(data, "r.csv", where="cast(votes as int) > 9", select=select)

    assert found.texts == [[("user", "1+1"), ("assistant", "2")]]
    with pytest.raises(ConfigError, match=r"`votes \+ 1 > 9`.*No function matches.*votes text"):
        read_bytes(data, "r.csv", where="votes + 1 > 9")


def test_a_row_on_which_an_expression_fails_is_quarantined_and_the_others_go_on(read_bytes):
    rows = [{"text": f"t{n}", "n": str(n)} for n in range(200)]
    rows[7]["n"], rows[150]["n"] = "seven", ""
    where = "cast(n as int) % 2 = 1"

    found = read_bytes(lines(rows), where=where)

    assert found.validated["row"].to_pylist() == [n for n in range(1, 200, 2) if n != 7]
    bad = found.quarantined.to_pylist()
    assert [(row["row"], row["reason"]) for row in bad] == [(7, "expression"), (150, "expression")]
    assert bad[0]["raw"] == orjson.dumps(rows[7])
    assert bad[0]["detail"].startswith(f"where `{where}`: Conversion error: Could not convert")
    assert "'seven'" in bad[0]["detail"]


def test_a_row_that_select_fails_on_is_shown_as_it_is_in_the_file(read_bytes):
    rows = [{"q": "1", "a": "x"}, {"q": "one", "a": "y"}]
    select = {"prompt": "cast(cast(q as int) as varchar)", "completion": "a"}

    found = read_bytes(parquet(rows), "rows.parquet", select=select)

    assert found.texts == [[("user", "1"), ("assistant", "x")]]
    assert found.reasons == ["expression"]
    assert orjson.loads(found.quarantined["raw"][0].as_py()) == rows[1]


def test_select_is_not_evaluated_for_rows_that_where_drops(read_bytes):
    rows = [{"q": "1", "a": "x"}, {"q": "one", "a": "y"}]
    select = {"prompt": "cast(cast(q as int) as varchar)", "completion": "a"}

    found = read_bytes(lines(rows), where="q <> 'one'", select=select)

    assert found.reasons == []
    assert found.dropped.num_rows == 1


def test_each_row_is_counted_by_the_first_expression_that_leaves_it_out(read_bytes):
    rows = [
        {"text": "kept", "n": "5", "lang": "en"},
        {"text": "both", "n": "1", "lang": "de"},  # by the first only
        {"text": "lang", "n": "5", "lang": "de"},
        {"text": "null", "n": "5"},
        {"text": "fails", "n": "five", "lang": "de"},  # the language test is not reached
        {"text": "kept too", "n": "6", "lang": "en"},
    ]
    number, lang = "cast(n as int) > 3", "lang = 'en'"

    found = read_bytes(lines(rows), where=[number, lang], select={"text": "upper(text)"})
    turned = read_bytes(lines(rows), where=[lang, number])

    assert found.texts == [[("assistant", "KEPT")], [("assistant", "KEPT TOO")]]
    assert found.validated["row"].to_pylist() == [0, 5]
    assert [(row["row"], row["detail"]) for row in found.dropped.to_pylist()] == [
        (1, number),
        (2, lang),
        (3, lang),
    ]
    (bad,) = found.quarantined.to_pylist()
    assert bad["row"] == 4
    assert bad["detail"].startswith(f"where `{number}`: Conversion error")
    assert turned.validated["row"].to_pylist() == [0, 5]
    assert [row["detail"] for row in turned.dropped.to_pylist()] == [lang] * 4
    assert turned.quarantined.num_rows == 0


def test_a_list_of_where_whose_first_expression_keeps_no_row(read_bytes):
    rows = [{"text": "t0"}, {"text": "t1"}]

    found = read_bytes(lines(rows), where=["false", "cast(text as int) > 0"])

    assert [row["detail"] for row in found.dropped.to_pylist()] == ["false", "false"]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ([], "must have at least 1 item"),
        (["true", "n > 1", "true"], "`true` is listed twice"),
        ([1], "must be text"),
        ({"long": "n > 1"}, "must be text"),
        (["n > 1"] * 60, "must have at most 50 items"),
        ("", "'sources.0.where' must have at least 1 character"),
    ],
)
def test_a_list_of_where_that_is_none(where, says):
    raw = {"dataset": "d", "tokenizer": "t", "sources": [{"path": "r.jsonl", "where": where}]}

    with pytest.raises(ConfigError) as caught:
        parse_recipe(raw, where="recipe")

    assert says in str(caught.value)
    assert "mistakes" not in str(caught.value)


def test_an_expression_alone_in_a_list_is_that_expression():
    assert SourceConfig(path="r", where=["n > 1"]) == SourceConfig(path="r", where="n > 1")


def test_names_that_sql_reserves_are_read_in_quotes_as_the_error_says(read_bytes):
    rows = lines([{"order": "Why?", "end": "So."}])
    with pytest.raises(ConfigError, match=r'such as "order", in double quotes'):
        read_bytes(rows, select={"prompt": "order", "completion": '"end"'})

    found = read_bytes(rows, select={"prompt": '"order"', "completion": '"end"'})

    assert found.texts == [[("user", "Why?"), ("assistant", "So.")]]


@pytest.mark.parametrize(
    ("values", "where", "kept"),
    [
        ([1, 2.5, None, 2**53 + 1], "v >= 2", [1, 3]),  # integers and others: DOUBLE
        (["a", 1, ["b"], {"c": 1}, True], "v in ('a', '1', '[\"b\"]', 'true')", [0, 1, 2, 4]),
        ([{"a": {"b": 1}}, {"a": {}}, {}, None], "v.a.b = 1", [0]),
        ([{"a": {"b": 1}}, {"a": {}}, {}, None], "v.a.b is null", [1, 2, 3]),
        ([["x", "y"], [], None], "len(v) > 1 and v[1] = 'x'", [0]),
        (
            [[{"r": "u"}, {"r": "s", "x": 1}], []],
            "len(list_filter(v, lambda m: m.r = 's')) = 1",
            [0],
        ),
        ([{"a b": 1}, {"A B": 1}], "v like '%\"a b\"%'", [0]),  # equal keys in SQL: JSON
        ([{}, {"a": 1}], "v.a = 1", [1]),
        ([{}, {}], "v = '{}'", [0, 1]),
        ([2**63, 1], "v > 9e18", [0]),
        ([True, False, None], "v", [0]),
    ],
)
def test_types_of_json_values(values, where, kept, read_bytes):
    rows = [{"text": "t", "v": value} for value in values]

    found = read_bytes(lines(rows), where=where)

    assert found.validated["row"].to_pylist() == kept
    assert found.reasons == []


def test_a_field_that_is_only_renamed_stays_as_it_is(read_bytes):
    call = {"name": "f", "arguments": {"a": None, "b": 1.0}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
    ]

    found = read_bytes(lines([{"Talk": messages}]), select={"messages": "talk"})

    (row,) = found.messages
    assert '"arguments": {"a": null, "b": 1.0}' in row[1]["tool_calls"] or (
        '"arguments":{"a":null,"b":1.0}' in row[1]["tool_calls"]
    )


@pytest.mark.parametrize(("max_shard_bytes", "block_bytes"), [(300, 64), (2**25, 2**21)])
def test_shards_and_blocks_change_nothing(max_shard_bytes, block_bytes, read_bytes, monkeypatch):
    monkeypatch.setattr("packhouse.read.record_boundaries.BLOCK_BYTES", block_bytes)
    rows = [{"text": f"t{n}", "n": n if n % 3 else str(n)} for n in range(100)]
    where = "try_cast(n as int) % 5 = 0 or cast(n as double) > 97"

    found = read_bytes(lines(rows), where=where, max_shard_bytes=max_shard_bytes)

    wanted = sorted({*range(0, 100, 5), 98, 99})
    assert found.validated["row"].to_pylist() == wanted
    assert found.dropped["row"].to_pylist() == sorted(set(range(100)) - set(wanted))
    assert {json.dumps(shard.columns) for shard in found.shards} == {'{"n": "text"}'}


def test_files_of_a_source_have_one_type_for_a_column(tmp_path: Path, read):
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "t", "n": 10}]))
    (tmp_path / "b.jsonl").write_bytes(lines([{"text": "t", "n": "9"}]))

    found = read(tmp_path, where="n < '2'")  # as texts: '10' < '2' < '9'

    assert found.validated["source"].to_pylist() == [f"{tmp_path.name}/a.jsonl"]


def test_a_row_that_is_no_object_is_quarantined(read_bytes):
    found = read_bytes(lines([{"text": "t"}, [1], 7]), where="text = 't'", format="text")

    assert found.reasons == ["not_an_object", "not_an_object"]


def test_where_filters_before_the_shape_of_rows_is_looked_for(read_bytes):
    rows = [{"kind": "comment", "by": "me"}, {"kind": "row", "question": "q", "answer": "a"}]

    found = read_bytes(lines(rows), where="kind = 'row'")

    assert found.texts == [[("user", "q"), ("assistant", "a")]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"where": "length(answr) > 5"},
            r"where `length\(answr\) > 5`: no row has a field 'answr'. "
            r"The fields are: title, body, answer, lang, score; did you mean 'answer'\?",
        ),
        ({"select": {"text": "answr"}}, r"select.text `answr`: no row has a field 'answr'"),
        ({"where": "length(answer)"}, "is int64, not true or false. Compare it"),
        ({"where": "answer + 1 > 2"}, "No function matches .* Its columns: answer text"),
        ({"where": "score.x = 1"}, "`score.x = 1`: .*score"),
        ({"select": {"text": "0.1 * score + 0.2"}, "where": "lower(score) = 'x'"}, "lower"),
        ({"select": {"text": "cast(answer as date)"}}, "is date32.*Cast it to VARCHAR"),
        ({"where": "answer ~ '('"}, r"missing \)"),
        ({"where": "lengthh(answer) > 5"}, "'lengthh' is not allowed: .*; did you mean 'length'"),
        ({"where": "random() > 0.5"}, "'random' is not allowed: .* than the row. docs"),
    ],
)
def test_a_mistake_is_an_error_before_any_row_is_read(settings, says, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))

    with pytest.raises(ConfigError, match=says):
        scan_source(SourceConfig(path=str(tmp_path / "rows.jsonl"), **settings))


@pytest.mark.parametrize(("name", "data"), [("r.jsonl", b""), ("r.json", b"[]"), ("r.jsonl", b"{")])
def test_a_file_without_rows_misses_no_field(name, data, read_bytes):
    found = read_bytes(data, name, where="length(output) > 2", select={"text": "title"})

    assert found.texts == []
    assert found.reasons == (["json"] if data == b"{" else [])


def test_names_that_differ_in_case_alone_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines([{"text": "t", "Lang": "a", "lang": "b"}]))

    with pytest.raises(
        ConfigError, match="'LANG' is ambiguous; SQL does not distinguish 'Lang' and 'lang'"
    ):
        scan_source(SourceConfig(path=str(tmp_path / "rows.jsonl"), where="LANG = 'a'"))


def test_expressions_are_part_of_the_key_and_nothing_of_them_is_where_there_are_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS))

    def parts(**settings: Any) -> dict[str, Any]:
        source = SourceConfig(path=str(path), format="question_answer", **settings)
        (shard,) = scan_source(source)
        told = ValidateParameters(
            shard=shard, source=source, rules=ValidateConfig(), group_by="prompt"
        )
        return told.to_json()

    plain, filtered = parts(), parts(where="lang = 'en'")

    assert not plain["source"]["where"]
    assert not plain["source"]["select"]
    assert {"columns", "table"}.isdisjoint(plain["shard"])
    assert "duckdb" not in plain
    assert filtered["source"]["where"] == "lang = 'en'"
    assert filtered["shard"]["columns"] == {"lang": "text"}
    assert "duckdb" in filtered


def test_too_many_failing_rows_are_refused(read_bytes):
    rows = [{"text": "t", "n": "x"}] * 10_001

    with pytest.raises(SourceError, match=r"fails on 10,001 of 10,001 rows.*TRY_CAST"):
        read_bytes(lines(rows), where="cast(n as int) = 1")


def test_functions_that_packhouse_adds_are_known(read_bytes, tmp_path):
    rows = [{"text": "mail me@example.org"}, {"text": "I am an AI, I cannot."}, {"text": None}]

    found = read_bytes(lines(rows), where="not has_email(text)", select={"text": "text"})

    assert found.validated["row"].to_pylist() == [1]
    assert found.dropped["row"].to_pylist() == [0, 2]
    path = tmp_path / "rows.jsonl"
    added = expression_key(SourceConfig(path=str(path), where="has_email(text)"))
    assert sorted(added) == ["duckdb", "text_functions"]


def test_a_function_whose_package_is_missing_is_an_error_before_any_row_is_read(monkeypatch):
    for name in ("py3langid", "py3langid.langid"):
        monkeypatch.setitem(sys.modules, name, None)
    quality._identifier.cache_clear()

    with pytest.raises(ConfigError, match=r"py3langid"):
        where_select.analyse(["language(text) = 'en'"])

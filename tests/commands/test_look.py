"""`packhouse inspect` and `packhouse trace`: rows, records and tokens."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from packhouse.api import Version, prepare
from packhouse.cli import cli
from tests.prepared import TOKENIZER


def talk(number: int) -> dict[str, object]:
    turns = [("user", f"Say {number}."), ("assistant", f"It is {number}!")] * 2
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    folder = tmp_path_factory.mktemp("look")
    rows = [talk(n) for n in range(20)] + [talk(4), {"messages": []}]
    (folder / "talks.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (folder / "recipe.yaml").write_text(
        f"dataset: talks\nsources: [{{path: talks.jsonl}}]\ntokenizer: {TOKENIZER}\n"
        "validate: {max_quarantined: 0.1}\ndedup: {exact: drop}\npack: {seq_len: 256}\n"
        "publish: {store: ./store}\n"
    )
    return prepare(
        folder / "recipe.yaml", store=folder / "store", cache=folder / "cache", progress=False
    )


@pytest.fixture
def call(version, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE", str(version._cache))

    def call(command: str, *words: str) -> str:
        done = CliRunner().invoke(cli, [command, *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    return call


def test_records_are_chosen_by_row_id_and_text(version, call):
    (by_row,) = map(json.loads, call("inspect", version.uri, "--row", "7", "--json").splitlines())
    assert next(run["text"] for run in by_row["runs"] if run["trained"]).startswith("It is 7!")
    by_id = call("inspect", version.uri, "--record", by_row["record_id"], "--json")
    by_text = call("inspect", version.uri, "--grep", "Say 7.", "--source", "talks", "--json")
    assert json.loads(by_id) == json.loads(by_text) == by_row
    assert call("inspect", version.uri, "--source", "other") == ""
    assert call("inspect", version.uri, "--records", "3").count("talks/talks.jsonl row") == 3


def test_a_recipe_is_looked_at_before_anything_is_prepared(version, call, tmp_path):
    recipe = str(Path(version._cache).parent / "recipe.yaml")
    elsewhere = ("--cache", str(tmp_path / "cache"))
    shown = call("inspect", recipe, "--records", "2", *elsewhere)
    assert shown.count("{+It is 1!") == 2
    assert "talks/talks.jsonl row 0" in shown
    assert "Say 9." in call("inspect", recipe, "--grep", "is 9!", *elsewhere)
    assert not (tmp_path / "cache" / "steps").exists()
    done = CliRunner().invoke(cli, ["inspect", recipe, "--grep", "no such text", *elsewhere])
    assert "checked the first rows of each source" in done.stderr


def test_every_token_of_a_pack_is_traced_to_its_row_and_back(version, call):
    pack = version.train[1]
    starts = [sum(pack["seq_lengths"][:n]) for n in range(len(pack["seq_lengths"]))]
    last = len(starts) - 1
    for number, token in ((0, starts[0]), (last, starts[last])):
        place = ("--pack", "1", "--token", str(token + 2))
        found = json.loads(call("trace", version.uri, *place, "--json"))
        assert found["record"] == pack["record_ids"][number]
        assert found["trained"] == "no"
        row = ("--file", "talks.jsonl", "--row", str(found["row"]))
        back = json.loads(call("trace", version.uri, *row, "--json"))
        assert (back["split"], back["pack"], back["position"]) == ("train", 1, token)
        lines = Path(version._cache).parent / "talks.jsonl"  # every second one is blank
        line = ("--file", str(lines), "--line", str(2 * found["row"] + 1))
        assert json.loads(call("trace", version.uri, *line, "--json")) == back
    for file, number in ((lines, "2"), (lines, "99"), ("talks.jsonl", "1")):
        words = ["trace", version.uri, "--file", str(file), "--line", number]
        assert CliRunner().invoke(cli, words).exit_code == 2


def test_trace_names_the_answer_and_the_rule(version, call):
    pack = version.train[0]
    trained = [at for at, label in enumerate(pack["labels"]) if label != -100]
    first = pack["seq_lengths"][0]
    last = max(at for at in trained if at < first)
    found = call("trace", version.uri, "--pack", "0", "--token", str(last))
    assert "trained answer 2 of 2" in found
    start = call("trace", version.uri, "--pack", "0", "--token", str(trained[0]))
    assert " trained answer 1 of 2" in start
    assert "before trained" not in start
    assert "format.train_on: assistant (answers are trained)" in found
    assert "row (0-based)" in found


def test_a_row_is_traced_in_each_source_and_to_each_window(tmp_path, call):
    long = {
        "messages": [turn for number in range(100, 124) for turn in talk(number)["messages"][:2]]
    }
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps(talk(0))}\n{json.dumps(long)}\n")
    (tmp_path / "recipe.yaml").write_text(
        "dataset: talks\nsources:\n"
        "  - {path: talks.jsonl, name: all}\n"
        "  - {path: talks.jsonl, name: short, where: len(messages) < 9}\n"
        f"tokenizer: {TOKENIZER}\ndedup: {{exact: drop}}\n"
        "pack: {seq_len: 256, over_length: window}\n"
    )
    pytest.importorskip("duckdb")
    made = prepare(
        tmp_path / "recipe.yaml", store=tmp_path / "store", cache=tmp_path / "c", progress=False
    )

    def traced(file: str, row: str) -> list[dict[str, object]]:
        lines = call("trace", made.uri, "--file", file, "--row", row, "--json").splitlines()
        return [json.loads(line) for line in lines]

    windows = traced("all/talks.jsonl", "1")
    assert len(windows) > 1
    assert {each["outcome"] for each in windows} == {"kept"}
    assert len({(each["pack"], each["position"]) for each in windows}) == len(windows)
    filtered = {"source": "short/talks.jsonl", "row": 1, "outcome": "filtered"}
    (gone,) = traced("short/talks.jsonl", "1")
    assert gone == {**filtered, "reason": "filtered", "detail": "len(messages) < 9"}
    assert traced("talks.jsonl", "1") == [*windows, gone]
    first, again = traced("talks.jsonl", "0")
    assert [first["outcome"], again["outcome"]] == ["kept", "duplicate"]
    assert again["detail"] == "repeats all/talks.jsonl row 0"


@pytest.fixture
def publish(tmp_path):
    def publish(rows, more: str = "", **source: object) -> Version:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        recipe = {"dataset": "rows", "sources": [{"path": "rows.jsonl", **source}]}
        settings = "".join(f"{name}: {json.dumps(value)}\n" for name, value in recipe.items())
        (tmp_path / "recipe.yaml").write_text(f"{settings}tokenizer: {TOKENIZER}\n{more}")
        return prepare(
            tmp_path / "recipe.yaml", store=tmp_path / "store", cache=tmp_path / "c", progress=False
        )

    return publish


def test_a_token_of_a_record_that_packs_cut_is_counted_from_the_records_start(publish, call):
    rows = [talk(number) for number in range(6)]
    more = "pack: {seq_len: 32, strategy: concat}\naudit: {max_untrained_packs: 1}\n"
    made = publish(rows, more, weight=2)
    query = "select record_id, input_ids from records"
    lines = map(json.loads, call("sql", made.uri, query, "--json").splitlines())
    ids = {line["record_id"]: line["input_ids"] for line in lines}
    for pack in (1, 2, 5):
        found = json.loads(call("trace", made.uri, "--pack", str(pack), "--token", "1", "--json"))
        assert ids[found["record"]][found["token of the record"]] == found["token id"]
        assert found["turn"].endswith("tokens in this pack)")
    row = json.loads(call("trace", made.uri, "--file", "rows.jsonl", "--row", "3", "--json"))
    assert row["times"] == 2


def test_equal_windows_of_a_row_are_no_rows_of_equal_content(publish, call):
    more = "pack: {seq_len: 128, over_length: window}\naudit: {max_duplicates: 1}\n"
    made = publish([{"messages": talk(1)["messages"] * 20}], more)
    found = json.loads(call("trace", made.uri, "--pack", "0", "--token", "3", "--json"))
    assert found["other rows with this content"] == 0


def test_rows_of_a_recipe_have_their_labels_and_bad_rows_their_source(tmp_path, call):
    rows = [{"text": f"It is {word}.", "label": n} for n, word in enumerate(("bad", "good"))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": "?"}])))
    source = {"path": "rows.jsonl", "format": "classification"}
    sources = [
        {**source, "name": "one", "label_names": ["negative", "positive"]},
        {**source, "name": "two", "label_names": ["no", "yes"]},
    ]
    (tmp_path / "recipe.yaml").write_text(
        f"dataset: rows\ntokenizer: {TOKENIZER}\nsources: {json.dumps(sources)}\n"
        "format: {template: sequence_classification}\npack: {strategy: none, seq_len: 64}\n"
    )
    words = ["inspect", str(tmp_path / "recipe.yaml"), "--source", "two"]
    done = CliRunner().invoke(cli, words)
    assert "; no\n" in done.stdout
    assert "; yes\n" in done.stdout
    assert "positive" not in done.stdout
    (note,) = done.stderr.splitlines()
    assert note.startswith("note: 1 of the first rows of 'two/rows.jsonl' is bad; row 2: ")
    lines = CliRunner().invoke(cli, [*words, "--json"]).stdout.splitlines()
    assert [json.loads(line)["label"] for line in lines] == [0, 1]


def test_a_token_of_a_classifier_is_traced_to_its_label(publish, call):
    rows = [{"text": f"It is {word}.", "label": n} for n, word in enumerate(("bad", "good"))]
    how = {"format": "classification", "label_names": ["negative", "positive"]}
    more = "format: {template: sequence_classification}\npack: {strategy: none, seq_len: 64}\n"
    made = publish(rows, more, **how)
    found = json.loads(call("trace", made.uri, "--pack", "0", "--token", "0", "--json"))
    assert found["label"] == ["negative", "positive"][found["row"]]
    assert found["turn"] == "no token is trained"
    assert found["rule"].startswith("classification: only the record's label")


def test_rows_that_went_elsewhere_are_traced(version, call):
    gone = call("trace", version.uri, "--file", "talks.jsonl", "--row", "20")
    assert "repeats talks/talks.jsonl row 4" in gone
    path = str(Path(version._cache).parent / "talks.jsonl")
    assert call("trace", version.uri, "--file", path, "--row", "20") == gone
    bad = call("trace", version.uri, "--file", "talks/talks.jsonl", "--row", "21")
    assert "quarantined" in bad
    done = CliRunner().invoke(cli, ["trace", version.uri, "--file", "talks.jsonl", "--row", "99"])
    assert done.exit_code == 2


def test_rows_that_cannot_be_shown_are_reported(version, call, publish):
    def said(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["inspect", version.uri, *words])
        return done.exit_code, done.stderr

    number, mistake = said("--split", "evil", "--row", "3")
    assert (number, "no split 'evil'" in mistake) == (2, True)
    number, mistake = said("--skip", "99")
    assert (number, "train has no pack 99. Its last pack is " in mistake) == (2, True)
    for words in (("--records", "0"), ("--packs", "0"), ("--skip", "-1"), ("--row", "-1")):
        assert said(*words)[0] == 2
    assert "more than 5 records match. Raise --records to see more." in said("--grep", "Say")[1]
    assert said("--grep", "Say", "--records", "2") == (0, "")
    recipe = str(Path(version._cache).parent / "recipe.yaml")
    done = CliRunner().invoke(cli, ["inspect", recipe, "--grep", "Say"])
    assert "talks.jsonl'. Raise --records to see more." in done.stderr


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"prompt": f"Say {n}.", "chosen": f"It is {n}!", "rejected": "No."} for n in range(5)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "recipe.yaml").write_text(
        "dataset: pairs\nsources: [{path: pairs.jsonl, format: pairs}]\n"
        f"tokenizer: {TOKENIZER}\npack: {{seq_len: 256}}\n"
    )
    return prepare(
        folder / "recipe.yaml", store=folder / "store", cache=folder / "cache", progress=False
    )


def test_the_sides_of_a_pair_are_told_apart_in_a_version_and_in_a_recipe(pairs, call):
    recipe = str(Path(pairs._cache).parent / "recipe.yaml")
    of_version, of_recipe = (
        [json.loads(line) for line in call("inspect", of, "--row", "3", "--json").splitlines()]
        for of in (pairs.uri, recipe)
    )
    for found in (of_version, of_recipe):
        assert [side["side"] for side in found] == ["chosen", "rejected"]
        trained = [[run["text"] for run in side["runs"] if run["trained"]] for side in found]
        assert [[text[:8] for text in texts] for texts in trained] == [["It is 3!"], ["No.<|im_"]]
        assert all("Say 3." in side["runs"][0]["text"] for side in found)
    assert call("inspect", pairs.uri, "--row", "3").count("chosen") == 1


def test_a_pair_is_one_record_of_its_pack(pairs, call):
    (split,) = json.loads(call("stats", pairs.uri, "--json"))["splits"]
    assert split["records"] == 5
    (packs,) = pairs.sql("select sum(num_records)::int as n from packs").to_pylist()
    assert packs == {"n": 5}


def test_columns_without_room_stand_below_one_another(version, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("sql", version.uri, "from records order by row limit 2").splitlines()
    assert lines[0] == "-- 1 of 2 --"
    assert sum(line.split() == ["source", "talks/talks.jsonl"] for line in lines) == 2
    few = call("sql", version.uri, "select row, num_tokens from records order by row limit 2")
    assert few.splitlines()[0].split() == ["row", "num_tokens"]

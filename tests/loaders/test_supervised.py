import json
import pickle

import pytest

from packhouse import (
    PackedCollator,
    PackedDataset,
    TokenizedDataset,
    load_packed,
    make_supervised_dataset,
)
from packhouse.errors import (
    ConfigError,
    EmptyDatasetError,
    QuarantineLimitError,
    SourceError,
)
from packhouse.recipe import FormatConfig, parse_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from tests.prepared import DEMO

TOKENIZER = str(DEMO / "tokenizer")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [{"query": f"What is {n} + {n}?", "response": f"It is {n + n}."} for n in range(60)]
    other = [{"q": f"Name number {n}.", "a": f"number {n} " * (n % 7 + 1)} for n in range(30)]
    for name, lines in (("sums", rows), ("names", other)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return folder / "sums.jsonl", folder / "names.jsonl"


def fields(**settings):
    return {"query_field": "query", "resp_field": "response"} | settings


def rows_of(dataset):
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


def by_the_flow(folder, sources, template, pack):
    """Prepare sources with a recipe; return the run, and the packs that are loaded from it."""
    recipe = parse_recipe(
        {
            "dataset": "same",
            "sources": sources,
            "tokenizer": TOKENIZER,
            "format": template,
            "pack": {"seq_len": 128, "seed": 7} | pack,
            "audit": {"max_duplicates": 1},
            "publish": {"store": str(folder / "store")},
        }
    )
    workspace = Workspace(cache=folder / "other")
    done = prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), cache=workspace.cache)
    return done, load_packed(f"{folder}/store/same", cache=folder)


def test_packs_are_those_of_the_flow(files, cache, tmp_path):
    packs = make_supervised_dataset(
        TOKENIZER,
        list(files),
        query_field=["query", "q"],
        resp_field=["response", "a"],
        pack_len=128,
        shuffle_seed=7,
        cache=cache,
    )
    fields = [{"instruction": "query", "output": "response"}, {"instruction": "q", "output": "a"}]
    sources = [
        {"path": str(file), "format": "alpaca", "fields": names}
        for file, names in zip(files, fields, strict=True)
    ]
    _, published = by_the_flow(tmp_path, sources, {"template": "alpaca"}, {})

    assert isinstance(packs, PackedDataset)
    assert len(packs) == len(published)
    for item, row in zip(packs, published, strict=True):
        assert {len(values) for values in item.values()} == {128}
        batch = PackedCollator()([item])
        for name in ("input_ids", "labels", "position_ids"):
            assert batch[name].tolist() == [row[name]]
    assert packs.stat().num_records == 90
    assert packs.stat().seq_len == 128
    assert [(line.step, line.rows_out) for line in packs.ledger] == [
        ("validate", 90),
        ("format", 90),
        ("tokenize", 90),
        ("pack", 90),
    ]
    assert rows_of(pickle.loads(pickle.dumps(packs))) == rows_of(packs)  # noqa: S301


LONG = [
    {"role": role, "content": f"{role} says {number} and {number} again, and that was all."}
    for number in range(12)
    for role in ("user", "assistant")
]


def test_over_long_rows_are_handled_as_in_the_flow(tmp_path):
    path = tmp_path / "talks.jsonl"
    talks = [LONG[start:] for start in range(0, 24, 2)]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    settings = FormatConfig(template="chat", turns="alone")
    packs = make_supervised_dataset(
        TOKENIZER,
        str(path),
        prompt_template=settings,
        pack_len=128,
        shuffle_seed=7,
        over_length="window",
        cache=tmp_path / "cache",
    )
    done, published = by_the_flow(
        tmp_path, [{"path": str(path)}], settings.model_dump(), {"over_length": "window"}
    )

    assert [line.to_json() for line in packs.ledger] == [
        line.to_json() for line in done.ledger if line.step != "split"
    ]
    assert "windows" in packs.ledger[1].added
    ids = [item["input_ids"][item["attention_mask"] > 0].tolist() for item in packs]
    assert ids == [row["input_ids"] for row in published]


def test_without_pack_len_records_are_tokenized_in_an_order_of_the_seed(files, cache):
    plain = make_supervised_dataset(TOKENIZER, files[0], **fields(shuffle_seed=None), cache=cache)
    shuffled = make_supervised_dataset(TOKENIZER, files[0], **fields(), cache=cache)

    assert isinstance(plain, TokenizedDataset)
    assert len(plain) == 60
    assert rows_of(plain) != rows_of(shuffled)
    assert sorted(rows_of(plain)) == sorted(rows_of(shuffled))
    assert rows_of(plain.shuffle(42)) == rows_of(shuffled)
    for settings in ({"shuffle_seed": -1, "pack_len": 0}, {"shuffle_seed": -1, "pack_len": -5}):
        as_dart_math = make_supervised_dataset(
            TOKENIZER, files[0], **fields(**settings), cache=cache
        )
        assert rows_of(as_dart_math) == rows_of(plain)
    assert rows_of(pickle.loads(pickle.dumps(shuffled))) == rows_of(shuffled)  # noqa: S301
    item = plain[0]
    assert item["attention_mask"].tolist() == [1] * len(item["input_ids"])
    trained = [t for t, label in zip(item["input_ids"], item["labels"], strict=True) if label >= 0]
    text = _tokenizer().decode(trained)
    assert text.startswith("It is 0.")


def test_concat_and_pad_are_views_and_refuse_parts_that_are_padded_differently(files, cache):
    sums = make_supervised_dataset(TOKENIZER, files[0], **fields(), cache=cache)
    names = make_supervised_dataset(
        TOKENIZER, files[1], query_field="q", resp_field="a", cache=cache
    )
    both = sums.concat(names)
    assert rows_of(both) == rows_of(sums) + rows_of(names)
    assert rows_of(sums.concat([names])) == rows_of(both)
    assert rows_of(both.pad()) == rows_of(both.pad(_tokenizer().pad_token_id))
    assert both.num_tokens.tolist() == [len(row) for row in rows_of(both)]

    for side, padded in (("right", both.pad(3)), ("left", both.pad(3, side="left"))):
        longest = max(both.num_tokens)
        for before, after in zip(both, padded, strict=True):
            pads = longest - len(before["input_ids"])
            fill = {"input_ids": [3] * pads, "labels": [-100] * pads, "attention_mask": [0] * pads}
            for name, extra in fill.items():
                values = before[name].tolist()
                expected = values + extra if side == "right" else extra + values
                assert after[name].tolist() == expected
    with pytest.raises(ConfigError, match="length is 5"):
        both.pad(0, length=5)
    with pytest.raises(ConfigError, match="Concatenate them first"):
        sums.pad(0, length=300).concat(sums)
    with pytest.raises(ConfigError, match="Concatenate them first"):
        sums.concat(sums.pad(0, length=300))
    with pytest.raises(ConfigError, match="argument 2 is a dict"):
        sums.concat(sums, [{"input_ids": [1]}])
    wide = sums.pad(0, length=300).concat(sums.pad(0, length=300))
    assert rows_of(wide) == rows_of(sums.concat(sums).pad(0, length=300))
    assert {len(row) for row in rows_of(wide.shuffle(1))} == {300}
    packed = PackedDataset(both.pad(0), seq_len=128)  # padding is removed again
    assert packed.stat().num_tokens == sum(both.num_tokens)
    PackedCollator()([packed[0]])


def _tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER)


def test_bad_rows_are_counted_and_too_many_refused(cache, tmp_path):
    file = tmp_path / "rows.jsonl"
    good = "".join(f'{{"query": "q{n}", "response": "r{n}"}}\n' for n in range(9))
    file.write_text(good + '{"query": "x", "response": ""}\n' * 2)

    said = r"2 of 11 rows .*rows\.jsonl line 10, .*`packhouse quarantine show .*quarantined\.arrow`"
    with pytest.raises(QuarantineLimitError, match=said):
        make_supervised_dataset(TOKENIZER, file, **fields(), cache=cache)
    dataset = make_supervised_dataset(TOKENIZER, file, **fields(max_quarantined=0.2), cache=cache)
    assert len(dataset) == 9
    assert dataset.ledger[0].quarantined == {"empty_answer": 2}
    with pytest.raises(EmptyDatasetError, match="no record fits in pack_len 16"):
        make_supervised_dataset(
            TOKENIZER, file, **fields(max_quarantined=0.2, pack_len=16), cache=cache
        )


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ([], {}, "empty list"),
        (["a", "b"], {"query_field": ["x"], "resp_field": "y"}, "lists 1 columns for 2 sources"),
        (["a"], {"query_field": "x"}, "both, or neither"),
    ],
)
def test_invalid_arguments_are_refused(cache, data, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_supervised_dataset(TOKENIZER, data, cache=cache, **settings)


def test_text_that_nothing_reads_is_refused_unless_columns_are_named(tmp_path, cache):
    note = {"note": "The sky is blue because of the air."}
    rows = [{"query": f"What is {n} + {n}?", "response": f"It is {2 * n}."} for n in range(9)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row | note) + "\n" for row in rows))
    with pytest.raises(SourceError, match="no setting reads the text in 'note'"):
        make_supervised_dataset(TOKENIZER, file, cache=cache)
    for data, named in (({"path": str(file), "ignored_fields": ["note"]}, {}), (file, fields())):
        assert len(make_supervised_dataset(TOKENIZER, data, cache=cache, **named)) == 9


def test_columns_enter_prompts_only_where_they_are_named(tmp_path, cache):
    plain = [{"query": f"Say {n}", "response": f"{n}"} for n in range(9)]
    column = {"system": "linux", "history": [["before", "answer"]], "input": "words"}

    def made(rows, **settings):
        file = tmp_path / f"{len(rows[0])}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = fields(prompt_template="chat", shuffle_seed=None) | settings
        data = make_supervised_dataset(TOKENIZER, file, cache=cache, **settings)
        return "".join(_tokenizer().decode(ids) for ids in rows_of(data))

    more = [row | column for row in plain]
    assert made(more) == made(plain)
    for name, text in (("system", "linux"), ("history", "before"), ("input", "words")):
        named = made(more, **{f"{name}_field": name})
        found = [each for each in ("linux", "before", "words") if named.count(each) == len(plain)]
        assert found == [text]
    with pytest.raises(ConfigError, match="system_field requires query_field and resp_field"):
        made(more, query_field=None, resp_field=None, system_field="system")


# As dart-math does: rows of `query` and `response`, a template of texts.
TEXTS = {"query_prompt": "User:\n", "prompt_after_query": "\n\n", "resp_prompt": "Assistant:\n"}


def test_a_template_of_texts_is_a_dict_or_a_file_of_it(files, cache, tmp_path):
    file = tmp_path / "texts.json"
    file.write_text(json.dumps(TEXTS))
    by_file, by_dict = (
        make_supervised_dataset(
            TOKENIZER, files[0], **fields(prompt_template=texts, pack_len=1024), cache=cache
        )
        for texts in (str(file), TEXTS)
    )
    assert len(by_file) > 1
    assert rows_of(by_file) == rows_of(by_dict)
    text = _tokenizer().decode(by_file[0]["input_ids"])
    assert "User:\nWhat is " in text


@pytest.mark.parametrize(
    "texts", [{"query_prompt": 7}, {"question": "Q: "}, {"id": "qa", "resp_prompt": None}]
)
def test_a_template_of_other_names_or_values_is_refused(tmp_path, texts):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "a", "response": "b"}')

    with pytest.raises(ConfigError, match="it takes texts named sys_prompt, query_prompt"):
        make_supervised_dataset(TOKENIZER, path, prompt_template=texts, cache=tmp_path / "cache")

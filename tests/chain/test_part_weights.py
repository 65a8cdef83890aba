"""Parts of a content with their own weights: `train`, `weight` or `loss` of a part."""

import json

import pytest

from packhouse import load_packed
from packhouse.recipe import FormatConfig
from packhouse.render import make_renderer
from tests.chain.conftest import DEMO, Project
from tests.templates.toys import CHATML, chat_renderer, make_snapshot, make_table, pieces


def part(text, **flags):
    return {"type": "text", "text": text, **flags}


def row(number, *parts):
    asked = {"role": "user", "content": f"What is {number} plus 1?"}
    return {"messages": [asked, {"role": "assistant", "content": list(parts)}]}


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def publish(project, rows, **sections):
    project.write(rows)
    (project.root / "chatml.jinja").write_text(CHATML)
    base = {
        "sources": [{"path": "rows.jsonl"}],
        "format": {"template": "chatml.jinja"},
        "split": {"eval_fraction": 0},
    }
    project.write_recipe(**base | sections)
    return project.prepare()


def trained_texts(project, prepared, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "tokenizer")
    found = {}
    for each in load_packed(project.uri(prepared), cache=tmp_path / "copies"):
        weights = each.get("loss_weights") or [float(label != -100) for label in each["labels"]]
        for token, weight in zip(each["input_ids"], weights, strict=True):
            if weight:
                found.setdefault(weight, []).append(token)
    return {weight: tokenizer.decode(tokens) for weight, tokens in found.items()}


def test_a_part_that_is_not_trained_is_not_and_the_end_token_is(project, tmp_path):
    rows = [row(n, part("Let me see.\n", train=False), part(f"It is {n + 1}.")) for n in range(30)]
    prepared = publish(project, rows)

    (text,) = trained_texts(project, prepared, tmp_path).values()
    assert sorted(text.split("<|im_end|>")) == sorted(["", *(f"It is {n + 1}." for n in range(30))])


@pytest.mark.usefixtures("real_reports")
def test_weights_of_parts_are_factors_of_the_weight_of_their_row(project, tmp_path):
    rows = [row(n, part("So:\n", weight=0.5), part(f"{n + 1}.")) | {"q": 0.5} for n in range(10)]
    sources = [{"path": "rows.jsonl", "fields": {"loss_weight": "q"}}]
    texts = trained_texts(project, publish(project, rows, sources=sources), tmp_path)
    assert set(texts) == {0.25, 0.5}
    assert texts[0.25].replace("\n", "") == "So:" * 10
    assert "So" not in texts[0.5]


def talk(weights, answer="Hm. Four.", **fields):
    asked = {"role": "user", "content": "2 + 2?"}
    said = {"role": "assistant", "content": answer, "part_weights": weights, **fields}
    return [
        asked,
        said,
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "A"},
    ]


@pytest.mark.parametrize(
    ("parts", "due", "weights"),
    [
        ([[4, 0.0], [5, None]], ["Four.<|im_end|>", "A<|im_end|>"], None),
        ([[4, None], [5, 0.0]], ["Hm. ", "<|im_end|>", "A<|im_end|>"], None),
        (
            [[1, None], [2, 0.0], [6, 2.0]],
            ["H", " Four.", "<|im_end|>", "A<|im_end|>"],
            [1, 2, 1, 1],
        ),
        ([[4, 0.5], [5, 0.5]], ["Hm. Four.", "<|im_end|>", "A<|im_end|>"], [0.5, 1, 1]),
    ],
)
def test_spans_are_cut_where_a_part_of_another_weight_begins(parts, due, weights):
    table = make_table([talk(json.dumps(parts))] * 3)
    rendered = chat_renderer(CHATML).render(table)
    assert pieces(rendered.formatted) == [due] * 3
    assert rendered.formatted["span_weights"].to_pylist() == [weights] * 3


def test_characters_are_counted_and_not_bytes():
    table = make_table([talk("[[4,0.0],[5,null]]", "Hé中\n😀 ok!")])
    assert pieces(chat_renderer(CHATML).render(table).formatted)[0][0] == "😀 ok!<|im_end|>"


def test_train_on_all_leaves_the_part_out():
    table = make_table([talk("[[4,0.0],[5,null]]")])
    (spans,) = pieces(chat_renderer(CHATML, {"train_on": "all"}).render(table).formatted)
    assert "Hm" not in "".join(spans)
    assert "".join(spans).startswith("2 + 2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>")


def test_parts_that_the_template_or_the_recipe_rewrites_are_refused():
    table = make_table([talk("[[4,0.0],[5,null]]"), talk("[[3,0.0],[9,null]]")])
    bad = chat_renderer(CHATML).render(table).quarantined.to_pylist()
    assert [each["row"] for each in bad] == [1]
    assert "the template changes its text" in bad[0]["detail"]
    rendered = make_renderer(FormatConfig(template="alpaca"), make_snapshot()).render(table)
    assert rendered.formatted.num_rows == 0
    assert "part weights" in rendered.quarantined["detail"][0].as_py()

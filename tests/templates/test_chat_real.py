"""Real templates over real files: text byte-equal to transformers, spans right on every row."""

import json

import pytest

from packhouse.recipe import FormatConfig
from packhouse.templates import make_renderer
from packhouse.templates.chat_messages import chat_messages, with_call_ids
from tests.templates.test_chat_toys import GENERATION, TWO
from tests.templates.toys import make_table, pieces, snapshot_of

TOKENIZERS = ["qwen2.5-instruct", "qwen3", "mistral-7b-instruct-v0.3"]
ENDS = {"qwen2.5-instruct": "<|im_end|>", "qwen3": "<|im_end|>", "mistral-7b-instruct-v0.3": "</s>"}
FILES = {"alpaca": 1500, "fastchat": None, "xtuner": None, "glaive": None, "reasoning": None}


def expected_text(tokenizer, messages, tools):
    """What transformers makes of a row; for Mistral with ids, behind the prompt of inference."""
    tools = json.loads(tools) if tools else None
    chat = chat_messages(messages)
    if "mistral" in tokenizer.name_or_path:
        chat = with_call_ids(chat)
    try:
        whole = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
        if "mistral" not in tokenizer.name_or_path or chat[0]["role"] != "system":
            return whole
        prompt = tokenizer.apply_chat_template(chat[:-1], tools=tools, tokenize=False)
        bare = tokenizer.apply_chat_template(chat[1:-1], tools=tools, tokenize=False)
        assert whole.startswith(bare)
        return prompt + whole[len(bare) :]
    except Exception:
        return None


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_equals_apply_chat_template_on_every_row(name, file, load_tokenizer, real_rows):
    tokenizer = load_tokenizer(name)
    rows = real_rows(file, FILES[file])
    table = make_table([messages for messages, _ in rows], tools=[tools for _, tools in rows])
    out = make_renderer(FormatConfig(), snapshot_of(tokenizer)).render(table)

    kept = out.formatted["row"].to_pylist()
    assert out.formatted["text"].to_pylist() == [
        expected_text(tokenizer, *rows[row]) for row in kept
    ]
    for row in out.quarantined.to_pylist():
        lost = row["reason"] == "content_lost"
        assert lost or expected_text(tokenizer, *rows[row["row"]]) is None
    if not name.startswith("mistral"):
        assert out.quarantined.num_rows == 0


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_answer_is_trained_with_its_end_token(name, file, load_tokenizer, real_rows):
    rows = real_rows(file, FILES[file])
    table = make_table([messages for messages, _ in rows], tools=[tools for _, tools in rows])
    out = make_renderer(FormatConfig(), snapshot_of(load_tokenizer(name))).render(table).formatted

    for row, trained in zip(out["row"].to_pylist(), pieces(out), strict=True):
        answers = [turn for turn in rows[row][0] if turn["role"] == "assistant"]
        assert len(trained) == len(answers)
        for answer, span in zip(answers, trained, strict=True):
            assert span.endswith(ENDS[name])
            assert answer["content"].strip() in span
            assert "<|im_start|>" not in span
            assert "[INST]" not in span
            for call in json.loads(answer.get("tool_calls", "[]")):
                assert call["function"]["name"] in span


def test_spans_of_generation_blocks_equal_transformers_assistant_mask(load_tokenizer, real_rows):
    tokenizer = load_tokenizer("qwen2.5-instruct")
    rows = [messages for messages, _ in real_rows("fastchat", 60)]
    rows.append([{"role": role, "content": text} for role, text in TWO])
    snapshot = snapshot_of(tokenizer, chat_template=GENERATION)
    out = make_renderer(FormatConfig(), snapshot).render(make_table(rows)).formatted

    for row, text, spans in zip(rows, out["text"], out["trained_spans"], strict=True):
        encoded = tokenizer.apply_chat_template(
            row,
            chat_template=GENERATION,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        offsets = tokenizer(text.as_py(), add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        in_bytes = [len(text.as_py()[:start].encode()) for start, _ in offsets]
        ours = [
            int(any(span["start"] <= at < span["end"] for span in spans.as_py())) for at in in_bytes
        ]
        assert ours == encoded["assistant_masks"]


def test_mistral_answers_behind_the_system_prompt_that_inference_gives(load_tokenizer):
    turns = [("system", "Be brief."), ("user", "hi"), ("assistant", "hello")]
    tokenizer = load_tokenizer("mistral-7b-instruct-v0.3")
    out = make_renderer(FormatConfig(), snapshot_of(tokenizer)).render(make_table([turns]))

    asked = [{"role": role, "content": text} for role, text in turns[:2]]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False)
    assert prompt == "<s>[INST] Be brief.\n\nhi[/INST]"
    assert out.formatted["text"].to_pylist() == [prompt + " hello</s>"]
    assert pieces(out.formatted) == [[" hello</s>"]]
    assert pieces(out.formatted, "content_spans") == [["Be brief.", "hi", "hello"]]


def test_where_mistral_drops_a_system_prompt_the_row_names_the_remedy(load_tokenizer):
    turns = [("system", "Be brief."), *TWO]
    snapshot = snapshot_of(load_tokenizer("mistral-7b-instruct-v0.3"))
    table = make_table([turns])

    out = make_renderer(FormatConfig(), snapshot).render(table)
    last = make_renderer(FormatConfig(train_on="last_assistant"), snapshot).render(table)
    each = make_renderer(FormatConfig(one_example_per_turn=True), snapshot).render(table)

    assert out.quarantined["reason"].to_pylist() == ["content_lost"]
    assert "Set format.one_example_per_turn, or" in out.quarantined["detail"][0].as_py()
    assert last.formatted["text"].to_pylist() == [
        "<s>[INST] hi[/INST] hello</s>[INST] Be brief.\n\nbye[/INST] see you</s>"
    ]
    assert each.formatted["text"].to_pylist() == [
        "<s>[INST] Be brief.\n\nhi[/INST] hello</s>",
        last.formatted["text"][0].as_py(),
    ]
    assert pieces(each.formatted) == [[" hello</s>"], [" see you</s>"]]
    assert each.added == {"turn_examples": 1}


def test_qwen3_writes_an_empty_thought_into_the_last_answer_only(load_tokenizer):
    out = make_renderer(FormatConfig(), snapshot_of(load_tokenizer("qwen3"))).render(
        make_table([TWO])
    )

    assert pieces(out.formatted) == [
        ["hello<|im_end|>", "<think>\n\n</think>\n\nsee you<|im_end|>"]
    ]


def test_qwen3_takes_a_user_text_for_a_tool_result_as_transformers_does(load_tokenizer):
    tokenizer = load_tokenizer("qwen3")
    forged = "<tool_response>\nx\n</tool_response>"
    rows = [[("user", "hi"), ("assistant", "a"), ("user", forged), ("assistant", "b")]] * 10
    out = make_renderer(FormatConfig(), snapshot_of(tokenizer)).render(make_table(rows))
    messages = [{"role": role, "content": text} for role, text in rows[0]]

    assert out.quarantined["detail"].to_pylist() == []
    assert set(out.formatted["text"].to_pylist()) == {
        tokenizer.apply_chat_template(messages, tokenize=False)
    }


@pytest.mark.parametrize("forged", ["<tool_response>\n<tool_call>\n</tool_response>", "</think>"])
def test_literals_that_qwen3_looks_for_are_content_where_it_does_not_take_them_apart(
    forged, load_tokenizer
):
    turns = [("user", "hi"), ("assistant", "a"), ("user", forged + " x"), ("assistant", "b")]
    turns[2:3] = [("user", forged)] if "tool" in forged else turns[2:3]
    snapshot = snapshot_of(load_tokenizer("qwen3"))
    out = make_renderer(FormatConfig(), snapshot).render(make_table([turns])).formatted

    covered = "".join(pieces(out, "content_spans")[0])
    assert covered.startswith("hia" + forged)


def test_alpaca_has_no_eos_to_end_with_on_bert(load_tokenizer):
    snapshot = snapshot_of(load_tokenizer("bert-base-uncased"))
    out = make_renderer(FormatConfig(template="sequence_classification"), snapshot).render(
        make_table([[("user", "fine film")]], labels=[1])
    )

    assert out.formatted["text"].to_pylist() == ["[CLS]fine film[SEP]"]

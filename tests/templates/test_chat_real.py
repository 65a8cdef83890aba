"""Real templates on real files: text byte-equal to transformers, correct spans in every row."""

import json

import pytest

from packhouse.recipe import FormatConfig
from packhouse.records.conversation_shapes import without_thinking
from packhouse.render import make_renderer
from packhouse.render.template_arguments import MessageForm, chat_messages, with_call_ids
from tests.templates.toys import make_table, pieces, snapshot_of

ENDS = {"qwen3": "<|im_end|>", "mistral-7b-instruct-v0.3": "</s>"}
FILES = ["fastchat", "glaive", "reasoning"]  # plain chats, calls, reasoning


def messages_and_tools(table):
    return [
        ([{k: v for k, v in m.items() if v is not None} for m in row["messages"]], row["tools"])
        for row in table.to_pylist()
    ]


def as_given(tokenizer, messages):
    """Return messages as a client sends them; Mistral's calls have ids."""
    chat = chat_messages(messages)
    if "mistral" in tokenizer.name_or_path:
        chat = with_call_ids(chat, MessageForm(has_ids=True))
    return chat


def expected_text(tokenizer, messages, tools):
    tools = json.loads(tools) if tools else None
    try:
        return tokenizer.apply_chat_template(
            as_given(tokenizer, messages), tools=tools, tokenize=False
        )
    except Exception:
        return None


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", ENDS)
def test_whole_text_equals_apply_chat_template_on_every_row(name, file, load_tokenizer, real_table):
    tokenizer = load_tokenizer(name)
    rows = messages_and_tools(real_table(file))
    table = make_table([messages for messages, _ in rows], tools=[tools for _, tools in rows])
    out = make_renderer(FormatConfig(turns="whole"), snapshot_of(tokenizer)).render(table)

    kept = out.formatted["row"].to_pylist()
    assert out.formatted["text"].to_pylist() == [
        expected_text(tokenizer, *rows[row]) for row in kept
    ]
    for row in out.quarantined.to_pylist():
        lost = row["reason"] == "content_lost"
        assert lost or expected_text(tokenizer, *rows[row["row"]]) is None
    if not name.startswith("mistral"):
        assert out.quarantined.num_rows == 0
    elif file == "reasoning":  # each row has a system prompt, which the template would leave out
        assert kept == []


def without_reasoning(message):
    if message["role"] != "assistant":
        return message
    content = without_thinking(message["content"])
    return {k: v for k, v in message.items() if k != "reasoning"} | {"content": content}


def trained_answers(out, rows):
    """Text before each trained span, the span, the row and the number of its answer."""
    answers = {
        number: [at for at, turn in enumerate(messages) if turn["role"] == "assistant"]
        for number, (messages, _) in enumerate(rows)
    }
    for record in out.select(["row", "text", "trained_spans"]).to_pylist():
        text = record["text"].encode()
        for span in record["trained_spans"]:
            before, trained = text[: span["start"]], text[span["start"] : span["end"]]
            yield before.decode(), trained.decode(), record["row"], answers[record["row"]].pop(0)
    kept = set(out["row"].to_pylist())
    assert [number for number in kept if answers[number]] == []  # each answer is trained once


def prompt_at_inference(tokenizer, messages, tools, answer):
    """Return a client's request for an answer; it thinks if an answer to the same question does."""
    roles = [message["role"] for message in messages]
    first = max(at for at in range(answer) if roles[at] == "user")
    last = next((at for at in range(answer, len(roles)) if roles[at] == "user"), len(roles))
    return tokenizer.apply_chat_template(
        as_given(tokenizer, messages)[:answer],
        tools=json.loads(tools) if tools else None,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=any("reasoning" in message for message in messages[first:last]),
    )


@pytest.mark.parametrize(
    ("name", "turns"), [*((name, "joined") for name in ENDS), ("qwen3", "exact")]
)
@pytest.mark.parametrize("file", FILES)
def test_every_answer_follows_the_prompt_of_inference_and_ends_with_its_stop_token(
    name, file, turns, load_tokenizer, real_table
):
    tokenizer, options = load_tokenizer(name), {}
    rows = messages_and_tools(real_table(file))
    if name.startswith("mistral"):  # its template never writes reasoning
        options = {"reasoning": "strip"}
        rows = [([without_reasoning(m) for m in messages], tools) for messages, tools in rows]
    table = make_table([messages for messages, _ in rows], tools=[tools for _, tools in rows])
    out = make_renderer(FormatConfig(turns=turns, **options), snapshot_of(tokenizer)).render(table)

    for before, trained, row, number in trained_answers(out.formatted, rows):
        messages, tools = rows[row]
        prompt = prompt_at_inference(tokenizer, messages, tools, number)
        if turns == "exact":
            assert before == prompt
        else:  # the template may write other text in history: an empty thinking block
            empty = "<think>\n\n</think>\n\n"
            assert before.replace(empty, "") == prompt.replace(empty, "")
        assert trained.endswith(ENDS[name])
        assert trained.count(ENDS[name]) == 1
        assert "<|im_start|>" not in trained
        assert "[INST]" not in trained
        answer = messages[number]
        assert answer["content"].strip() in trained
        assert answer.get("reasoning", "").strip("\n") in trained
        for call in json.loads(answer.get("tool_calls", "[]")):
            assert call["function"]["name"] in trained


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

"""Compare trained answers with libraries that render conversations without Jinja.

`openai-harmony` with OpenAI's vocabulary, and `mistral-common` with Mistral's. Their authors wrote
them from the models, not from the templates.
"""

import functools
import json
import re
import struct
from importlib.resources import files
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

from packhouse.addons import renderers
from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.render import make_renderer
from packhouse.render.template_arguments import chat_messages
from packhouse.tokenize import load_snapshot, tokenize_table
from tests.templates.families import SHAPES, Messages, client_messages, family, tools_of
from tests.templates.toys import make_snapshot, make_table, pieces, refusals

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture(scope="module", autouse=True)
def one_harmony():
    """Read the 200,000 tokens of gpt-oss's tokenizer once, not for each renderer (3 s)."""
    with pytest.MonkeyPatch.context() as patch:
        made = functools.cache(renderers.Harmony)
        patch.setattr(renderers, "Harmony", lambda folder: made(folder))
        yield


MOVED = [{"role": "system", "content": "Be kind."}, *SHAPES["chat2"]]
"""Mistral writes the system prompt into the last user turn: history changes with each question."""


def test_ids_of_mistral_are_those_of_mistral_common(tekken):
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    snapshot = load_snapshot(tekken)
    renderer = make_renderer(FormatConfig(template="mistral"), snapshot, folder=tekken)
    asked, told = (
        MistralTokenizer.from_file(str(tekken / "tekken.json"), mode=mode)
        for mode in (ValidationMode.test, ValidationMode.finetuning)
    )
    rows = {name: SHAPES[name] for name in ("chat2", "sys", "tools", "parallel", "callast")}
    num_compared = 0
    rows["tools"] = [*rows["tools"]]  # the library parses a result and writes it with spaces
    rows["tools"][2] = {**rows["tools"][2], "content": '{"t":20}'}
    for shape, messages in {**rows, "moved": MOVED}.items():
        tools = tools_of(shape) if shape in SHAPES else None
        table = make_table([messages], tools=[json.dumps(tools)] if tools else None)
        done = renderer.render(table)
        assert not done.quarantined.num_rows, done.quarantined.to_pylist()
        made = tokenize_table(done.formatted, snapshot, TokenizeConfig()).tokenized.to_pylist()
        assert len(made) == (2 if shape == "moved" else 1)
        given = client_messages(family("llama3.jinja"), messages)
        answers = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        spans = [(row["input_ids"], span) for row in made for span in row["trained_ranges"]]
        for k, (ids, span) in zip(answers, spans, strict=True):
            before = ChatCompletionRequest.from_openai(given[:k], tools)
            after = ChatCompletionRequest.from_openai(given[: k + 1], tools)
            assert ids[: span["start"]] == asked.encode_chat_completion(before).tokens, shape
            assert ids[: span["end"]] == told.encode_chat_completion(after).tokens, shape
            num_compared += 1
    assert num_compared == 10


def test_harmony_parses_the_trained_text(harmony, gptoss):
    """Reasoning, text and calls, also all three in one turn, which the template cannot write."""
    messages, tools = SHAPES["agent"], tools_of("agent")
    done = gptoss.render(make_table([messages], tools=[json.dumps(tools)]))
    assert not done.quarantined.num_rows, done.quarantined.to_pylist()
    encoding, role = harmony._encoding, harmony._library.Role.ASSISTANT
    read = []
    for (trained,) in pieces(done.formatted):
        sampled = encoding.encode(trained, allowed_special="all")
        assert sampled[-1] in encoding.stop_tokens_for_assistant_actions()
        parsed = encoding.parse_messages_from_completion_tokens(sampled, role)
        read.append([(m.channel, m.recipient, m.content[0].text) for m in parsed])
    look = "functions.get_weather"
    assert read == [
        [
            ("analysis", None, "Must look."),
            ("commentary", None, "Let me look."),
            ("commentary", look, '{"city": "Rome"}'),
        ],
        [("analysis", None, "And Oslo."), ("commentary", look, '{"city": "Oslo"}')],
        [("analysis", None, "Both known."), ("final", None, "Sun and snow.")],
        [("analysis", None, "They thank."), ("final", None, "Welcome.")],
    ]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A folder with the vocabulary of gpt-oss, from the copy that quicktok ships."""
    pytest.importorskip("openai_harmony")
    pytest.importorskip("quicktok")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    data = (files("quicktok") / "data" / "o200k.vocab").read_bytes()
    char_of, tokens, at = bytes_to_unicode(), {}, 4
    while at < len(data):  # after a count, for each token: its length, its bytes, its rank
        (size,) = struct.unpack_from("<H", data, at)
        (rank,) = struct.unpack_from("<I", data, at + 2 + size)
        tokens["".join(char_of[byte] for byte in data[at + 2 : at + 2 + size])] = rank
        at += 6 + size
    folder = tmp_path_factory.mktemp("o200k")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    return folder


@pytest.fixture(scope="module")
def harmony(vocabulary):
    """The renderer with OpenAI's own encoding, which refuses a vocabulary with another hash."""
    return renderers.Harmony(vocabulary)


@pytest.fixture(scope="module")
def gptoss(vocabulary, harmony):
    """A renderer for the control tokens of gpt-oss."""
    encoding = harmony._encoding
    special = sorted(encoding.special_tokens_set)
    snapshot = make_snapshot(
        added_tokens={t: encoding.encode(t, allowed_special="all")[0] for t in special},
        special_tokens={"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
        adds_bos=False,
    )
    config = FormatConfig(template="harmony", turns="alone")
    return make_renderer(config, snapshot, folder=vocabulary)


def parts_of(row: dict[str, Any]) -> list[Messages]:
    """Return the messages up to each answer, as a renderer gets them."""
    keys = ("role", "content", "context", "reasoning", "tool_calls", "tool_call_id", "name")
    chat = chat_messages([{k: m[k] for k in keys if m.get(k) is not None} for m in row["messages"]])
    return [chat[: n + 1] for n, message in enumerate(chat) if message["role"] == "assistant"]


def test_a_tool_result_has_the_name_of_the_call_before_it(harmony):
    # Some data numbers the calls of each answer from 0, so an id occurs again.
    messages = [{"role": "user", "content": "Hi"}]
    for name in ("look", "add"):
        call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": "1"})

    text = harmony.render([*messages, {"role": "user", "content": "So?"}], None, {}, True)

    assert re.findall(r"<\|start\|>functions\.(\w+)", text) == ["look", "add"]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["glaive", "reasoning"])  # with calls, and with reasoning
def test_harmony_writes_real_rows_as_its_library_does(file, gptoss, harmony, real_table):
    library, encoding = harmony._library, harmony._encoding
    table = real_table(file, 8)  # the library takes 0.1 s for all prompts of a row
    done = gptoss.render(table)
    rows = {row["row"]: row for row in table.to_pylist()}

    assert done.formatted.num_rows > 8
    for record in done.formatted.to_pylist():
        row = rows[record["row"]]
        tools = row["tools"] and json.loads(row["tools"])
        part = next(
            part
            for part in parts_of(row)
            if harmony.render(part, tools, {}, False) == record["text"]
        )
        known = harmony._messages(part[:-1], tools, {})
        conversation = library.Conversation.from_messages(known)
        role = library.Role.ASSISTANT
        prompt = encoding.render_conversation_for_completion(conversation, role)
        ids = encoding.encode(record["text"], allowed_special="all")
        assert ids[: len(prompt)] == prompt
    assert all(said.startswith("stop_inside: ") for said in refusals(done))
    assert done.quarantined.num_rows == sum(map(has_parallel_calls, rows.values()))


def has_parallel_calls(row: dict[str, Any]) -> bool:
    return any(len(json.loads(message["tool_calls"] or "[]")) > 1 for message in row["messages"])


@pytest.mark.parametrize(
    ("template", "library", "said"),
    [
        ("harmony", "openai_harmony", r"is not the gpt-oss tokenizer\. Use that one"),
        ("mistral", "mistral_common", r"has no tekken\.json\. Use the tokenizer of a"),
    ],
)
def test_the_tokenizer_of_another_model_is_refused(template, library, said, shared):
    pytest.importorskip(library)
    folder = shared / "tokenizers" / "qwen3"
    with pytest.raises(TemplateError, match=said):
        make_renderer(FormatConfig(template=template), make_snapshot(), folder=folder)


def test_a_folder_with_tekken_names_the_renderer_for_it(tekken):
    snapshot = load_snapshot(tekken)
    with pytest.raises(TemplateError, match=r"Set format\.template to mistral"):
        make_renderer(FormatConfig(), snapshot, folder=tekken)
    talk = [[("user", "Hi"), ("assistant", "Hello!")]]
    renderer = make_renderer(FormatConfig(template="mistral"), snapshot, folder=tekken)
    assert pieces(renderer.render(make_table(talk)).formatted) == [["Hello!</s>"]]

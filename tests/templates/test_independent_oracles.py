"""Compare trained answers with libraries that render conversations without Jinja.

`openai-harmony` with OpenAI's vocabulary, and `mistral-common` with Mistral's. Their authors wrote
them from the models, not from the templates.
"""

import base64
import functools
import json
import struct
from importlib.resources import files
from pathlib import Path
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
from tests.templates.toys import make_table, pieces, refusals

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


def test_harmony_parses_the_trained_tokens(vocabulary, harmony, gptoss):
    """Reasoning, text and calls, also all three in one turn, which the template cannot write."""
    library = pytest.importorskip("openai_harmony")
    messages, tools = SHAPES["agent"], tools_of("agent")
    config = FormatConfig(template="harmony", turns="alone")
    renderer = make_renderer(config, gptoss, folder=vocabulary / "tokenizer")
    done = renderer.render(make_table([messages], tools=[json.dumps(tools)]))
    assert not done.quarantined.num_rows, done.quarantined.to_pylist()
    read = []
    for row in tokenize_table(done.formatted, gptoss, TokenizeConfig()).tokenized.to_pylist():
        (span,) = row["trained_ranges"]
        sampled = row["input_ids"][span["start"] : span["end"]]
        assert sampled[-1] in harmony.stop_tokens_for_assistant_actions()
        parsed = harmony.parse_messages_from_completion_tokens(sampled, library.Role.ASSISTANT)
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


O200K = r"""
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
\p{N}{1,3}
 ?[^\s\p{L}\p{N}]+[\r\n/]*
\s*[\r\n]+
\s+(?!\S)
\s+
""".strip("\n").replace("\n", "|")
"""The pattern that splits texts for gpt-oss's vocabulary, from tiktoken's `o200k_base`."""


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A folder with `o200k_base.tiktoken`, from the copy that quicktok ships."""
    pytest.importorskip("openai_harmony")
    pytest.importorskip("quicktok")
    data = (files("quicktok") / "data" / "o200k.vocab").read_bytes()
    tokens, at = {}, 4  # a count, then for each token: its length, its bytes, its rank
    while at < len(data):
        (size,) = struct.unpack_from("<H", data, at)
        (rank,) = struct.unpack_from("<I", data, at + 2 + size)
        tokens[rank] = data[at + 2 : at + 2 + size]
        at += 6 + size
    lines = [b"%s %d\n" % (base64.b64encode(tokens[rank]), rank) for rank in sorted(tokens)]
    folder = tmp_path_factory.mktemp("o200k")
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    return folder


@pytest.fixture(scope="session")
def harmony(vocabulary):
    """OpenAI's own encoding of gpt-oss; it refuses a vocabulary with another hash."""
    import openai_harmony

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(vocabulary))
        name = openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS
        yield openai_harmony.load_harmony_encoding(name)


@pytest.fixture(scope="session")
def gptoss(vocabulary, harmony):
    """gpt-oss's tokenizer as in transformers: the real vocabulary and the stock template."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(str(vocabulary / "o200k_base.tiktoken"), pattern=O200K)
    converted = converter.converted()
    ids = {harmony.encode(t, allowed_special="all")[0]: t for t in harmony.special_tokens_set}
    assert sorted(ids) == list(range(converted.get_vocab_size(), max(ids) + 1))
    converted.add_special_tokens([ids[number] for number in sorted(ids)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=converted, bos_token="<|startoftext|>", eos_token="<|return|>"
    )
    made.chat_template = family("gptoss.jinja").source
    folder = vocabulary / "tokenizer"
    made.save_pretrained(folder)
    return load_snapshot(folder)


def parts_of(row: dict[str, Any]) -> list[Messages]:
    """Return the messages up to each answer, as a renderer gets them."""
    keys = ("role", "content", "context", "reasoning", "tool_calls", "tool_call_id", "name")
    chat = chat_messages([{k: m[k] for k in keys if m.get(k) is not None} for m in row["messages"]])
    return [chat[: n + 1] for n, message in enumerate(chat) if message["role"] == "assistant"]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["glaive", "reasoning"])  # with calls, and with reasoning
def test_harmony_writes_real_rows_as_its_library_does(file, gptoss, vocabulary, real_table):
    harmony = renderers.Harmony(vocabulary / "tokenizer")
    library, encoding = harmony._library, harmony._encoding
    table = real_table(file, 8)  # the library takes 0.1 s for all prompts of a row
    config = FormatConfig(template="harmony", turns="alone")
    done = make_renderer(config, gptoss, folder=vocabulary / "tokenizer").render(table)
    tokens = tokenize_table(done.formatted, gptoss, TokenizeConfig(encoder="hf")).tokenized
    rows = {row["row"]: row for row in table.to_pylist()}

    assert tokens.num_rows > 8
    for record, ids in zip(
        done.formatted.to_pylist(), tokens["input_ids"].to_pylist(), strict=True
    ):
        row = rows[record["row"]]
        tools = row["tools"] and json.loads(row["tools"])
        part = next(
            part
            for part in parts_of(row)
            if harmony.render(part, tools, {}, False) == record["text"]
        )
        known = harmony._messages(part[:-1], tools, {}, harmony._call_names(part))
        conversation = library.Conversation.from_messages(known)
        role = library.Role.ASSISTANT
        prompt = encoding.render_conversation_for_completion(conversation, role)
        assert ids[: len(prompt)] == prompt
    assert all(said.startswith("stop_inside: ") for said in refusals(done))
    assert done.quarantined.num_rows == sum(map(has_parallel_calls, rows.values()))


def has_parallel_calls(row: dict[str, Any]) -> bool:
    return any(len(json.loads(message["tool_calls"] or "[]")) > 1 for message in row["messages"])


def test_harmony_refuses_the_tokenizer_of_another_model(shared):
    pytest.importorskip("openai_harmony", reason="openai-harmony is not installed")
    folder = shared / "tokenizers" / "qwen3"
    config = FormatConfig(template="harmony")
    with pytest.raises(TemplateError, match=r"is not the gpt-oss tokenizer\. Use that one"):
        make_renderer(config, load_snapshot(folder), folder=folder)


def test_mistral_needs_tekken_json(shared):
    pytest.importorskip("mistral_common", reason="mistral-common is not installed")
    folder = shared / "tokenizers" / "qwen3"
    config = FormatConfig(template="mistral")
    with pytest.raises(TemplateError, match=r"has no tekken\.json\. Use the tokenizer of a"):
        make_renderer(config, load_snapshot(folder), folder=folder)


@pytest.fixture(scope="module")
def tekken(tmp_path_factory):
    """A folder with one of Mistral's vocabularies, cut to its first 20,000 tokens.

    All of it is read in tests/tokenization/test_loading.py.
    """
    common = pytest.importorskip("mistral_common", reason="mistral-common is not installed")
    whole = Path(common.__path__[0]) / "data" / "tekken_240911.json"
    vocabulary = json.loads(whole.read_bytes())
    vocabulary["vocab"] = vocabulary["vocab"][:20_000]
    vocabulary["config"] |= {"num_vocab_tokens": 20_000, "default_vocab_size": 21_000}
    folder = tmp_path_factory.mktemp("tekken")
    (folder / "tekken.json").write_text(json.dumps(vocabulary))
    return folder


def test_a_folder_with_tekken_names_the_renderer_for_it(tekken):
    snapshot = load_snapshot(tekken)
    with pytest.raises(TemplateError, match=r"Set format\.template to mistral"):
        make_renderer(FormatConfig(), snapshot, folder=tekken)
    talk = [[("user", "Hi"), ("assistant", "Hello!")]]
    renderer = make_renderer(FormatConfig(template="mistral"), snapshot, folder=tekken)
    assert pieces(renderer.render(make_table(talk)).formatted) == [["Hello!</s>"]]

"""Compare trained answers with libraries that render conversations without Jinja.

`renderers` (six families), `openai-harmony` with OpenAI's vocabulary, and `mistral-common` with
Mistral's. Their authors wrote them from the models, not from the templates.
"""

import base64
import functools
import json
import struct
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.render import make_renderer
from packhouse.tokenize import load_snapshot, tokenize_table
from tests.templates.families import (
    SHAPES,
    Answer,
    Family,
    Messages,
    arguments_of,
    client_messages,
    family,
    outcome,
    render,
    tokenizer,
    tools_of,
)
from tests.templates.real_rows import FILES, Compared, real_rows, refusals
from tests.templates.toys import make_table, pieces

pytestmark = pytest.mark.usefixtures("shared")

RENDERERS = {
    "glm4moe": "GLM45RendererConfig",
    "nemotron_3_nano": "Nemotron3RendererConfig",
    "nemotron_3_super": "Nemotron3RendererConfig",
    "nemotron_3_ultra": "Nemotron3UltraRendererConfig",
    "nemotron_3_5_lightning": "Nemotron35RendererConfig",
    "qwen3": "Qwen3RendererConfig",
    "qwen3_5_think": "Qwen35RendererConfig",
    "qwen3_6": "Qwen36RendererConfig",
    "qwen3_8": "Qwen38RendererConfig",
}
"""TRL template -> the configuration of its counterpart in `renderers`."""

KEEPS_EMPTY_BLOCKS = ("qwen3", "qwen3_5_think", "qwen3_6")
"""Without thinking, `renderers` writes the empty block of the prompt into older turns of these
templates as well. Later answers without thinking are not compared.
"""


def arguments_used(of: Family, shape: str, answer: Answer) -> dict[str, bool]:
    """Arguments of the prompt before an answer."""
    messages = SHAPES[shape]
    for arguments in arguments_of(of, messages, answer.message):
        prompt = render(
            of, messages[: answer.message], tools_of(shape), is_prompt=True, **arguments
        )
        if prompt == answer.before:
            return arguments
    pytest.fail(f"{shape}: no prompt of inference: {answer.before[-200:]!r}")


@pytest.mark.parametrize("name", RENDERERS)
def test_answers_are_those_of_renderers(name):
    library = pytest.importorskip("renderers")
    of = family(f"{name}.jinja")
    num_compared = 0
    for shape, messages in SHAPES.items():
        for (answer,) in outcome(of, shape, "alone").records:
            k, arguments = answer.message, arguments_used(of, shape, answer)
            is_later = any(m["role"] == "assistant" for m in messages[:k])
            if name in KEEPS_EMPTY_BLOCKS and is_later and not any(arguments.values()):
                continue
            config = getattr(library, RENDERERS[name])(**arguments)
            theirs = library.create_renderer(tokenizer(), config)
            given = client_messages(of, messages)
            asked = theirs.render(given[:k], tools=tools_of(shape), add_generation_prompt=True)
            told = theirs.render(given[: k + 1], tools=tools_of(shape))
            prompt = tokenizer().decode(asked.token_ids)
            assert answer.before == prompt, shape
            # The library gives the last turn of GLM no stop token, and others a further line break.
            stop = next(s for s in of.stops if answer.completion.endswith(s))
            bare = prompt + answer.completion.removesuffix(stop)
            end = tokenizer().decode(told.token_ids)
            assert end.startswith(bare), shape
            assert end.removeprefix(bare).strip("\n") in ("", stop), shape
            num_compared += 1
    assert num_compared >= 17


def harmony_messages(library: Any, messages: Messages, tools: Any) -> list[Any]:
    """Return a conversation in the form of gpt-oss's template: one message per channel.

    The template writes `json` where harmony's examples have `<|constrain|>json`, and results of
    tools as JSON text.
    """
    message, role = library.Message.from_role_and_content, library.Role
    today = datetime.now().strftime("%Y-%m-%d")
    system = library.SystemContent.new().with_conversation_start_date(today)
    made = [message(role.SYSTEM, system)]
    if tools:
        described = [
            library.ToolDescription.new(f["name"], f["description"], parameters=f["parameters"])
            for f in (tool["function"] for tool in tools)
        ]
        developer = library.DeveloperContent.new().with_function_tools(described)
        made.append(message(role.DEVELOPER, developer))
    for turn in messages:
        if turn["role"] == "user":
            made.append(message(role.USER, turn["content"]))
        elif turn["role"] == "tool":
            author = library.Author.new(role.TOOL, f"functions.{turn['name']}")
            result = library.Message.from_author_and_content(author, json.dumps(turn["content"]))
            made.append(result.with_channel("commentary").with_recipient("assistant"))
        else:
            made += harmony_answer(library, turn)
    return made


def harmony_answer(library: Any, turn: dict[str, Any]) -> list[Any]:
    """Return the messages of an answer: its reasoning, its call or its text."""

    def channel(name: str, text: str) -> Any:
        made = library.Message.from_role_and_content(library.Role.ASSISTANT, text)
        return made.with_channel(name)

    made = [channel("analysis", turn["reasoning"])] if turn.get("reasoning") else []
    for call in json.loads(turn.get("tool_calls") or "[]"):
        function = call["function"]
        made.append(
            channel("commentary", json.dumps(function["arguments"]))
            .with_recipient(f"functions.{function['name']}")
            .with_content_type("json")
        )
    return made if "tool_calls" in turn else [*made, channel("final", turn["content"])]


@pytest.mark.parametrize("turns", ["exact", "alone"])
def test_ids_of_gpt_oss_are_those_of_harmony(turns, harmony, gptoss):
    """With the real vocabulary: harmony's prompt, and tokens that harmony can parse."""
    library = pytest.importorskip("openai_harmony")
    stops = harmony.stop_tokens_for_assistant_actions()
    num_compared = 0
    for shape in ("chat2", "think2", "mixed", "tools", "toolsthink", "callast", "lookthink"):
        messages, tools = SHAPES[shape], tools_of(shape)
        given = [json.dumps(tools)] if tools else None
        config = FormatConfig(turns=turns, stop_tokens=["<|return|>", "<|call|>"])
        done = make_renderer(config, gptoss).render(make_table([messages], tools=given))
        rows = tokenize_table(done.formatted, gptoss, TokenizeConfig()).tokenized.to_pylist()
        assert rows, (shape, done.quarantined.to_pylist())
        answers = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        spans = [(row["input_ids"], span) for row in rows for span in row["trained_ranges"]]
        for k, (ids, span) in zip(answers, spans, strict=True):
            before = library.Conversation.from_messages(
                harmony_messages(library, messages[:k], tools)
            )
            prompt = harmony.render_conversation_for_completion(before, library.Role.ASSISTANT)
            assert ids[: span["start"]] == prompt, shape
            parts = harmony_answer(library, messages[k])
            written = [token for part in parts for token in harmony.render(part)]
            sampled = ids[span["start"] : span["end"]]
            header = harmony.encode("<|start|>assistant", allowed_special="all")
            # Only the end of the last message may differ: `<|return|>` stops, `<|end|>` does not.
            assert [*header, *sampled[:-1]] == written[:-1], shape
            assert sampled[-1] in stops
            assert not set(sampled[:-1]) & set(stops)
            num_compared += 1
    assert num_compared == 13


MOVED = [{"role": "system", "content": "Be kind."}, *SHAPES["chat2"]]
"""Mistral writes the system prompt into the last user turn: history changes with each question."""


def test_ids_of_mistral_are_those_of_mistral_common(tmp_path):
    """With one of Mistral's real vocabularies, which mistral-common ships."""
    pytest.importorskip("mistral_common")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    file = tmp_path / "tekken.json"
    file.write_bytes((files("mistral_common") / "data" / "tekken_240911.json").read_bytes())
    snapshot = load_snapshot(tmp_path)
    renderer = make_renderer(FormatConfig(template="mistral"), snapshot, folder=tmp_path)
    asked, told = (
        MistralTokenizer.from_file(str(file), mode=mode)
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


@pytest.mark.slow
def test_harmony_writes_real_rows_as_its_library_does(gptoss, vocabulary, shared):
    from packhouse.addons.renderers import Harmony

    gpt_oss = vocabulary / "tokenizer"
    harmony = Harmony(gpt_oss)
    assert harmony.stop_tokens == tuple(
        reversed([harmony._encoding.decode([n]) for n in (200012, 200002)])
    )

    def write(messages: list[Any], tools: Any) -> str:
        return harmony.render(messages, tools, {}, False)

    def ids_of_prompt(messages: list[Any], tools: Any) -> list[int]:
        known = harmony._messages(messages[:-1], tools, {}, harmony._call_names(messages))
        conversation = harmony._library.Conversation.from_messages(known)
        role = harmony._library.Role.ASSISTANT
        return harmony._encoding.render_conversation_for_completion(conversation, role)

    for file, form, number in FILES:
        table = real_rows(shared, file, form, number)
        done = Compared(gpt_oss, table, write, template="harmony")
        assert len(done.ids) > number
        for ids, known in zip(done.ids, done.prompts, strict=True):
            prompt = ids_of_prompt(*known)
            assert ids[: len(prompt)] == prompt
        parallel = [
            row
            for row in table["messages"].to_pylist()
            if any(len(json.loads(message["tool_calls"] or "[]")) > 1 for message in row)
        ]
        said = refusals(done.rendered)
        assert all(refusal.startswith("stop_inside: ") for refusal in said)
        assert len(said) == len(parallel)


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
    common = pytest.importorskip("mistral_common", reason="mistral-common is not installed")
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    folder = tmp_path_factory.mktemp("tekken")
    (folder / "tekken.json").symlink_to(Path(common.__path__[0]) / "data" / "tekken_240718.json")
    with pytest.MonkeyPatch.context() as patch:  # reading a file takes 2 s, for each of two modes
        patch.setattr(MistralTokenizer, "from_file", functools.cache(MistralTokenizer.from_file))
        yield folder


def test_a_folder_with_tekken_names_the_renderer_for_it(tekken):
    snapshot = load_snapshot(tekken)
    with pytest.raises(TemplateError, match=r"Set format\.template to mistral"):
        make_renderer(FormatConfig(), snapshot, folder=tekken)
    talk = [[("user", "Hi"), ("assistant", "Hello!")]]
    renderer = make_renderer(FormatConfig(template="mistral"), snapshot, folder=tekken)
    assert pieces(renderer.render(make_table(talk)).formatted) == [["Hello!</s>"]]


@pytest.mark.slow
def test_mistral_writes_real_rows_with_the_ids_of_its_library(tekken, shared):
    from packhouse.addons.renderers import _KEYS, Mistral

    mistral = Mistral(tekken)

    def ids_of(messages: list[Any], tools: Any) -> list[int]:
        known = [{key: m[key] for key in _KEYS if key in m} for m in messages]
        request = mistral._request.from_openai(known, tools)
        return mistral._tokenizers["answer"].encode_chat_completion(request).tokens

    def write(messages: list[Any], tools: Any) -> str:
        return mistral.render(messages, tools, {}, False)

    for file, form, number in FILES:
        table = real_rows(shared, file, form, number)
        done = Compared(tekken, table, write, template="mistral", reasoning="strip")
        assert done.ids == [ids_of(*known) for known in done.prompts]
        assert len(done.ids) > number
        for said in refusals(done.rendered):
            assert "InvalidToolSchema" in said or "InvalidMessage" in said or "only_think" in said

"""TRL's training templates: generation blocks in whole renderings, and transformers' own mask.

TRL trains the whole block. packhouse trains what the model generates: from the end of the inference
prompt to the stop token. `BLOCKS` lists the parts of blocks that packhouse does not train.
"""

import copy
import re
from importlib.resources import files
from typing import Any

import pytest

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig
from packhouse.render import make_renderer
from packhouse.render.template_arguments import chat_messages, in_parts
from tests.templates.families import SHAPES
from tests.templates.toys import make_table, pieces, snapshot_of

pytest.importorskip("trl", reason="TRL is not installed")
FOLDER = files("trl") / "chat_templates"
SUFFIX = "_training.jinja"
NAMES = sorted(f.name.removesuffix(SUFFIX) for f in FOLDER.iterdir() if f.name.endswith(SUFFIX))
NEW_LINE, THINK = ("", "\n"), ("<think>\n", "\n")
BLOCKS = {
    # (before, after): a block is before + trained text + after.
    **{key: {("", "")} for key in ("cohere2", "glm4moe", "llama3")},
    # The line break after the stop token.
    **{key: {NEW_LINE} for key in ("gemma", "idefics3", "lfm2_v2", "qwen2_5_vl", "qwen3")},
    # The same, and EOS at the end of the conversation.
    "phi3_5": {NEW_LINE, ("", "\n<|im_end|>")},
    # The end of the prompt: a header, its line break, or the beginning of a thinking block.
    "deepseekv3": {("<\uff5cAssistant\uff5c>", "")},
    **{key: {("<|start|>assistant", "")} for key in ("gptoss", "muse_glimmer")},
    "qwen2_5": {("\n", "\n")},
    "qwen3_5_nothink": {THINK, ("<think>\n\n</think>\n\n", "\n")},
    "qwen3_8": {THINK},
}
"""One or two of the templates that have blocks of the same kind."""
STOP_TOKENS = {
    # From the models' generation_config.json, which the tokenizer here does not have.
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "phi3_5": ["<|end|>"],
}
REFUSE_CALLS = {
    # The template raises, or leaves out the call or its result.
    *("cohere2", "gemma", "idefics3", "llama3", "phi3_5", "qwen2_5_vl"),
    # The whole rendering lacks the prompt or stop token of a call; joined and exact find them.
    *("deepseekv3", "gptoss"),
}
OF_VISION_MODELS = {"idefics3"}
TALKS = {shape: SHAPES[shape] for shape in ("chat2", "sys", "tools", "think2")}
TOKEN = re.compile(r"<\|[^<>\s{}%/]{2,40}\|>|<\uff5c[^<>\s]{2,40}\uff5c>|<\|?/?\w+\|?>|\[/?INST\]")


def source_of(name):
    return (FOLDER / f"{name}{SUFFIX}").read_text("utf-8")


@pytest.fixture(scope="module")
def tokenizer(shared):
    """Qwen2.5's tokenizer, with every control token that one of the templates writes."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(
        shared / "tokenizers" / "qwen2.5-instruct", local_files_only=True
    )
    sources = list(map(source_of, NAMES))
    wanted = {token for source in sources for token in TOKEN.findall(source)}
    tags = {token for token in wanted if re.fullmatch(r"</?(\w*think|tool\w*|function\w*)>", token)}
    made.add_special_tokens({"bos_token": "<bos>", "extra_special_tokens": sorted(wanted - tags)})
    return made


def trained_by_transformers(
    tokenizer: Any, source: str, messages: list[dict[str, Any]]
) -> list[str]:
    given = {"conversation": messages, "chat_template": source}
    mask = tokenizer.apply_chat_template(
        **given, return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    text = tokenizer.apply_chat_template(**given, tokenize=False)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = []
    last = 0
    for (start, end), trained in zip(offsets["offset_mapping"], mask, strict=True):
        if trained and spans and last == start:
            spans[-1] += text[start:end]
        elif trained:
            spans.append(text[start:end])
        last = end if trained else -1
    return spans


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_trained_from_the_end_of_the_prompt_to_the_stop_token(name, tokenizer):
    source = source_of(name)
    snapshot = snapshot_of(tokenizer, chat_template=source)
    config = FormatConfig(turns="whole", stop_tokens=STOP_TOKENS.get(name, []))
    found, refused = set(), set()
    for label, talk in TALKS.items():
        rendered = make_renderer(config, snapshot).render(make_table([copy.deepcopy(talk)]))
        if rendered.quarantined.num_rows:
            refused.add(label)
            continue
        messages = chat_messages(copy.deepcopy(talk))
        if name in OF_VISION_MODELS:
            messages = [{**m, "content": in_parts(m["content"])} for m in messages]
        blocks = trained_by_transformers(tokenizer, source, messages)
        (ours,) = pieces(rendered.formatted)
        for own, block in zip(ours, blocks, strict=True):
            before, trained, after = block.partition(own)
            assert trained, (own, block)
            found.add((before, after))
    assert found == BLOCKS[name]
    expected = {"tools": REFUSE_CALLS, "sys": {"gemma"}}
    assert refused == {label for label, names in expected.items() if name in names}


def test_stop_tokens_that_differ_between_inner_and_last_answers_have_to_be_named(tokenizer):
    """gpt-oss ends the last answer with `<|return|>` and earlier ones with `<|end|>`."""
    snapshot = snapshot_of(tokenizer, chat_template=source_of("gptoss"))
    table = make_table([TALKS["chat2"]])
    said = r"the last answer with '<\|return\|>', but '<\|end\|>' follows .* format.stop_tokens"
    with pytest.raises(TemplateError, match=said):
        make_renderer(FormatConfig(), snapshot).render(table)

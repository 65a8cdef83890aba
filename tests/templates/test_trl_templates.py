"""TRL's training templates: its generation blocks, against transformers' assistant mask.

A template is equal where the trained texts are; it is cut where a block begins with what the prompt
of inference holds (`<|im_start|>assistant` or a line break): that much is given to the model.
"""

import copy
import json
import re
from importlib.resources import files
from typing import Any

import pytest

from packhouse.recipe import FormatConfig
from packhouse.templates import make_renderer
from packhouse.templates.chat_messages import chat_messages, in_parts
from tests.templates.toys import make_table, pieces, snapshot_of

pytest.importorskip("trl", reason="TRL is not installed")
FOLDER = files("trl") / "chat_templates"
NAMES = sorted(f.name for f in FOLDER.iterdir() if f.name.endswith("_training.jinja"))
CUT = {
    f"{name}_training.jinja"
    for name in (
        *("gptoss", "muse_glimmer", "qwen2_5", "qwen3_5_nothink", "qwen3_5_think"),
        *("qwen3_6", "qwen3_8", "deepseek_r1_distill", "deepseekv3"),
    )
}
OF_VISION_MODELS = {f"{name}_training.jinja" for name in ("idefics3", "llava_next", "smolvlm")}
TOKEN = re.compile(r"<\|[^<>\s{}%/]{2,40}\|>|<\uff5c[^<>\s]{2,40}\uff5c>|<\|?/?\w+\|?>|\[/?INST\]")
CALL = [{"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1}}}]
TALKS: dict[str, list[dict[str, Any]]] = {
    "two turns": [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello!"},
    ],
    "four turns": [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And more?"},
        {"role": "assistant", "content": "Yes, more."},
    ],
    "system": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello!"},
    ],
    "tools": [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": json.dumps(CALL)},
        {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "add"},
        {"role": "assistant", "content": "It is 3."},
    ],
    "thinking": [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "It is 3.", "reasoning": "1 and 2"},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4.", "reasoning": "2 and 2"},
    ],
}


@pytest.fixture(scope="module")
def tokenizer(shared):
    """Qwen2.5's, with every control token that one of the templates writes."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(
        shared / "tokenizers" / "qwen2.5-instruct", local_files_only=True
    )
    sources = [(FOLDER / name).read_text("utf-8") for name in NAMES]
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
    spans: list[str] = []
    last = 0
    for (start, end), trained in zip(offsets["offset_mapping"], mask, strict=True):
        if trained and spans and last == start:
            spans[-1] += text[start:end]
        elif trained:
            spans.append(text[start:end])
        last = end if trained else -1
    return spans


@pytest.mark.parametrize("name", NAMES)
def test_generation_blocks_of_trl_are_trained_as_they_say(name, tokenizer):
    source = (FOLDER / name).read_text("utf-8")
    snapshot = snapshot_of(tokenizer, chat_template=source)
    num_equal = num_cut = 0
    for talk in TALKS.values():
        rendered = make_renderer(FormatConfig(), snapshot).render(make_table([copy.deepcopy(talk)]))
        if rendered.quarantined.num_rows:  # the template refuses it, or leaves out text of it
            continue
        messages = chat_messages(copy.deepcopy(talk))
        if name in OF_VISION_MODELS:
            messages = [{**m, "content": in_parts(m["content"])} for m in messages]
        theirs = trained_by_transformers(tokenizer, source, messages)
        ours = pieces(rendered.formatted)[0]
        if "".join(ours) == "".join(theirs):
            num_equal += 1
            continue
        assert len(ours) == len(theirs)
        text = rendered.formatted.column("text")[0].as_py()
        for own, their in zip(ours, theirs, strict=True):
            assert their.endswith(own)
            num_cut += 1
            assert text.index(their) >= 0
    assert num_equal or num_cut
    assert (num_cut > 0) == (name in CUT)


def test_what_is_cut_is_what_the_prompt_of_inference_holds(tokenizer):
    source = (FOLDER / "gptoss_training.jinja").read_text("utf-8")
    snapshot = snapshot_of(tokenizer, chat_template=source)
    rendered = make_renderer(FormatConfig(), snapshot).render(make_table([TALKS["four turns"]]))
    text = rendered.formatted.column("text")[0].as_py()
    prompt = tokenizer.apply_chat_template(
        TALKS["two turns"][:1], chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert text.startswith(prompt + "<|channel|>final<|message|>Hello!<|end|>")
    assert pieces(rendered.formatted)[0] == [
        "<|channel|>final<|message|>Hello!<|end|>",
        "<|channel|>final<|message|>Yes, more.<|return|>",
    ]

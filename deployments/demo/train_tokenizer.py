"""Train the small tokenizer of the demo: a byte-level BPE of 4,096 tokens with a chat template.

    python deployments/demo/train_tokenizer.py [--out FOLDER]

It learns from the sample's sound rows and from more rows of the same generators with other seeds.
All 256 bytes are tokens, so every text of every script comes back exactly, only with more tokens
than a large vocabulary needs. The folder loads with `AutoTokenizer.from_pretrained`, without any
network. The same bytes come out on every run with the same version of `tokenizers`; a run takes
about a second. For the demo and for tests: no model was ever trained with it.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from make_sample import chats, good_chats, good_instructions, instructions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["main", "train"]

VOCAB_SIZE = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
EXTRA_SEEDS = range(100, 112)

CHAT_TEMPLATE = """\
{#- ChatML. Tools are listed in the system turn; results of tools are turns of the role `tool`. -#}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- if system or tools %}
    {{- '<|im_start|>system\\n' + system }}
    {%- if tools %}
        {{- '\\n\\n' if system }}
        {{- 'You can call these functions, one JSON object a line between <call> and </call>:' }}
        {%- for tool in tools %}
            {{- '\\n' + tool | tojson }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in turns %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {%- set function = call.function or call %}
        {{- '\\n' if message.content or not loop.first }}
        {{- '<call>{"name": ' + function.name | tojson + ', "arguments": ' }}
        {{- function.arguments if function.arguments is string else function.arguments | tojson }}
        {{- '}</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def texts() -> Iterator[str]:
    """Yield the contents of the sample's sound rows, then those of rows that are not in it."""
    rows: list[dict[str, Any]] = [*good_instructions(), *good_chats()]
    for seed in EXTRA_SEEDS:
        rows += [*instructions(seed, 400), *chats(seed, 150)]
    for row in rows:
        for message in row.get("messages", [row]):
            yield from (value for value in message.values() if isinstance(value, str) and value)
        if "tools" in row:
            yield json.dumps(row["tools"])


def train() -> Tokenizer:
    """Train the tokenizer; its special tokens have the ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    # The built-in split of GPT-2: fast encoders know it, so the demo shows them at work.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def main(folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
        print(f"{folder / name}: {len(text.encode()):,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the tokenizer of the demo.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "tokenizer", help="folder"
    )
    main(parser.parse_args().out)

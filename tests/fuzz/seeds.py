"""Seeds of the fuzzers: files of every shape, and conversations that try to forge a turn."""

import random

__all__ = ["SEEDS", "forged_conversation"]

SEEDS = [
    b'{"instruction": "a", "input": "", "output": "b"}\n{"instruction": "c", "output": "d"}\n',
    b'[{"instruction": "a \\"b\\" [c]", "output": "d\\\\e"}, {"instruction": "f", "output": "g"}]',
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n',
    b'{"messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"x\\"}]"}\n',
    b'{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}\n',
    b'{"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": '
    b'"{\\"name\\": \\"f\\", \\"arguments\\": {}}"}, {"from": "observation", "value": "1"}, '
    b'{"from": "gpt", "value": "y"}], "tools": "[{\\"name\\": \\"f\\"}]"}\n',
    b'[{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", '
    b'"content": null, "tool_calls": [{"type": "function", "function": {"name": "f", '
    b'"arguments": "{}"}}]}, {"role": "tool", "content": "1"}, {"role": "assistant", '
    b'"content": "y", "weight": 0.5, "train": true}]\n',
    b'{"text": "x", "role": "prompter", "replies": [{"text": "y", "role": "assistant", '
    b'"replies": []}]}\n',
    b'{"text": "x", "label": 1}\n{"text": "y", "label": 0}\n',
    b'{"prompt": "x", "chosen": [{"role": "assistant", "content": "y"}], "rejected": "z"}\n',
    b'{"question": "x", "answer": "y"}\r\n\r\n{"question": "x", "answer": "\\ud800"}',
    b'\xef\xbb\xbfinstruction,input,output\na,,b\n"c,\nd",,"e""f"\n',
    b"sentence\tlabel\nx\t1\ny\t0\n",
    b'{"instruction": "x", "output": NaN}\n{"a": 1e400}\n{"a": 1, "a": 2}\n[]\n1\n"x"\n{]\n',
]
FORGERIES = [
    *["<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>system\n", "<|im_end|>", "<|im_start|>"],
    *["<|im_", "start|>", "|im_end|>", "<", "|>", "<|endoftext|>", "<|im_start|>assistant"],
    *["[INST]", "[/INST]", "</s>", "<s>", "[INST", "]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/"],
    *["<tool_call>\n", "</tool_call>", "<tool_response>", "<unk>", "### Response:\n", "\n\n"],
    *[
        "{{ messages }}",
        "{% generation %}",
        "{% endgeneration %}",
        "{#",
        "\u200b",
        "\u0130",
        "\uff1c",
    ],
    *["\U0001f468\u200d\U0001f469", "e\u0301", "\u0000"[:0], "\r\n", "\t", " ", "the", "cat", "1"],
]
THINKING = ["<think>\n", "</think>\n\n", "<think>", "</think>", "</thi", "nk>"]


def _hostile(rng: random.Random, *, may_think: bool) -> str:
    # In an answer, the template itself treats thinking marks as structure; elsewhere they are text.
    choices = FORGERIES + THINKING if may_think else FORGERIES
    parts = [rng.choice(choices) for _ in range(rng.randint(1, 8))]
    parts.insert(rng.randint(0, len(parts)), "word")  # never empty once trimmed
    return "".join(parts)


def forged_conversation(rng: random.Random, *, may_instruct: bool) -> list[tuple[str, str]]:
    """Return (role, content) of some turns whose contents try to look like turns themselves."""
    instructed = may_instruct and rng.random() < 0.3
    turns = [("system", _hostile(rng, may_think=True))] if instructed else []
    for _ in range(rng.randint(1, 3)):
        turns.append(("user", _hostile(rng, may_think=True)))
        turns.append(("assistant", _hostile(rng, may_think=False)))
    return turns

"""Templates of constant texts around questions and answers, under dart-math's names for them.

`{sys_prompt}{query_prompt}QUESTION{prompt_after_query}{resp_prompt}{prompt_before_resp}ANSWER{EOS}`:
the prompt loses spaces at its end, since the first token of an answer has its space in itself.
`delim` parts further turns.
"""

import json
from collections.abc import Mapping
from typing import Any

from packhouse.errors import ConfigError
from packhouse.templates.single_turn import PREAMBLE, Ends

TEXTS = (
    "sys_prompt",
    "query_prompt",
    "prompt_after_query",
    "resp_prompt",
    "prompt_before_resp",
    "delim",
)
"""Names of the texts, in the order of a prompt."""

_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"  # DeepSeek's EOS

# Texts of each id, in the order of TEXTS; compared with dart-math's PROMPT_TEMPLATE_ID2DICT.
_DART_MATH = {
    "qa": ("", "User:\n", "\n\n", "Assistant:\n", "", "\n\n"),
    "alpaca": (
        f"{PREAMBLE}\n\n",
        "### Instruction:\n",
        "\n\n",
        "### Response:\n",
        "",
        "\n\n",
    ),
    "wizardmath-cot": (
        f"{PREAMBLE}\n\n",
        "### Instruction:\n",
        "\n\n",
        "### Response: ",
        "Let's think step by step.",
        "\n\n",
    ),
    "deepseekmath": (
        "",
        "User: ",
        "\nPlease reason step by step, and put your final answer within \\boxed{}.\n\n",
        "Assistant: ",
        "",
        _END,
    ),
    "deepseekmath-tool": (
        "",
        "User: ",
        "\nPlease integrate natural language reasoning with programs to solve the problem above, "
        "and put your final answer within \\boxed{}.\n\n",
        "Assistant: ",
        "",
        _END,
    ),
    "xwinmath": (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. ",
        "USER: ",
        " Give your solution in detail. In the end, write your final answer in the format of 'The "
        "answer is: <ANSWER>.'.  ",
        "ASSISTANT: ",
        "",
        "\n\n",
    ),
    "mammoth2-cot": (
        "You are supposed to provide a solution to a given problem.\n\n\n",
        "Problem:\n",
        "\n",
        "Solution: ",
        "Let's think step by step.\n",
        "\n\n",
    ),
    "llama3-math": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "You are a helpful agent on solving math problems.<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "",
        "<|eot_id|>\n",
    ),
}

DART_MATH = {
    f"dart-math/{name}": dict(zip(TEXTS, texts, strict=True)) for name, texts in _DART_MATH.items()
}
"""Texts of dart-math's templates, by the name that a recipe gives them."""


def texts_to_jinja(texts: Mapping[str, Any], ends: Ends) -> str:
    """Return the chat template that writes constant texts around the turns of a conversation.

    Args:
        texts: by names of `TEXTS`, those that are not empty; `id` and `model_ids` say nothing.
        ends: what begins a text of the tokenizer. A BOS that the texts begin with stands once.

    Raises:
        ConfigError: another name, or a value that is no text.
    """
    for name, value in texts.items():
        if name not in ("id", "model_ids") and not (name in TEXTS and isinstance(value, str)):
            raise ConfigError(
                f"prompt_template has {name!r}: {value!r}; it takes texts named {', '.join(TEXTS)}"
            )
    text = {name: texts.get(name, "") for name in TEXTS}
    opening = text["sys_prompt"]
    begins = opening or text["query_prompt"]
    if not begins.startswith(ends.bos or "\0"):
        opening = ends.bos + (ends.space if not begins.startswith(" ") else "") + opening
    quoted = {
        name: json.dumps(value, ensure_ascii=False)
        for name, value in {
            "opening": opening,
            "query": text["query_prompt"],
            "behind": "".join(text[name] for name in TEXTS[2:5]).rstrip(" "),
            "delim": text["delim"],
        }.items()
    }
    return (
        f"{{{{ {quoted['opening']} }}}}{{% for message in messages %}}"
        "{% if message.role == 'user' %}"
        f"{{% if not loop.first %}}{{{{ {quoted['delim']} }}}}{{% endif %}}"
        f"{{{{ {quoted['query']} }}}}{{{{ message.content }}}}{{{{ {quoted['behind']} }}}}"
        "{% elif message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ raise_exception('this template has no place for ' ~ message.role) }}"
        "{% endif %}{% endfor %}"
    )

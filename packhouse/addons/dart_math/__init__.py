"""Create templates from constant texts around questions and answers, with dart-math's names.

`{sys_prompt}{query_prompt}QUESTION{prompt_after_query}{resp_prompt}{prompt_before_resp}ANSWER{EOS}`

Spaces at the end of the prompt are removed, because the first token of an answer includes its
space. `delim` separates further turns.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from packhouse.errors import ConfigError
from packhouse.tokenize.encoders import Ends

TEXTS = (
    "sys_prompt",
    "query_prompt",
    "prompt_after_query",
    "resp_prompt",
    "prompt_before_resp",
    "delim",
)
"""Names of the texts, in the order of a prompt."""


@cache
def dart_math() -> dict[str, dict[str, str]]:
    """Return the texts of dart-math's templates (PROMPT_TEMPLATE_ID2DICT), by their recipe name."""
    file = resources.files(__name__).joinpath("dart_math.json")
    texts = json.loads(file.read_text(encoding="utf-8"))
    return {f"dart-math/{name}": own for name, own in texts.items()}


def dart_math_template(name: str, ends: Ends) -> str:
    """Return one of dart-math's templates as a chat template."""
    return texts_to_jinja(dart_math()[name], ends)


def texts_to_jinja(texts: Mapping[str, Any], ends: Ends) -> str:
    """Return a chat template that writes constant texts around the turns of a conversation.

    Args:
        texts: texts by name, from `TEXTS`; missing ones are empty. `id` and `model_ids` are
            ignored.
        ends: special tokens of the tokenizer. BOS is not repeated if the texts begin with it.

    Raises:
        ConfigError: a name is unknown, or a value is not a string.
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
    behind = "".join(text[name] for name in TEXTS[2:5]).rstrip(" ")
    constants = opening, text["query_prompt"], behind, text["delim"]
    opening, query, behind, delim = (json.dumps(own, ensure_ascii=False) for own in constants)
    return (
        f"{{{{ {opening} }}}}{{% for message in messages %}}"
        "{% if message.role == 'user' %}"
        f"{{% if not loop.first %}}{{{{ {delim} }}}}{{% endif %}}"
        f"{{{{ {query} }}}}{{{{ message.content }}}}{{{{ {behind} }}}}"
        "{% elif message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ raise_exception('this template has no place for ' ~ message.role) }}"
        "{% endif %}{% endfor %}"
    )

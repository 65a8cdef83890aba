"""The sections that decide what becomes of one row: `validate`, `format`, `tokenize`."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from packhouse.recipe.section import IN_A_FILE, Section
from packhouse.records.reasons import TurnOrder
from packhouse.system.plugins import RENDERERS, plugin_names

Role = Literal["system", "user", "assistant", "tool"]
PipelineChoice = Literal["file", "class"]


class ValidateConfig(Section):
    """What makes a row bad, and how many bad rows are too many."""

    max_quarantined: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of rows that may be quarantined before the run fails. One row always may, so that a
    small file does not fail by it, unless the share is 0."""

    max_row_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20
    """Bytes of one raw row; longer rows are quarantined unparsed. A file with a row that has not
    ended after 64 MiB, nor after this, is refused."""

    max_chars: Annotated[int, Field(gt=0)] = 1_000_000
    """Characters of one message; longer ones are quarantined before the tokenizer sees them."""

    allow_ends_on_user: bool = False
    """Keep conversations that end on a user turn (the open question is not trained)."""

    refused_orders: Annotated[list[TurnOrder], Field(max_length=4)] = []
    """Orders of turns that make a row bad: `system_not_first`, `starts_with_assistant`,
    `consecutive_user`, `consecutive_assistant`. By default any order passes that the template
    writes with every content."""

    @field_validator("refused_orders")
    @classmethod
    def _sorted(cls, orders: list[TurnOrder]) -> list[TurnOrder]:
        return sorted(set(orders))  # the same orders are the same recipe


CHAT_TEMPLATES = ("chat", "mistral_system", *RENDERERS)
"""Built-in templates that take `chat_template_kwargs`: Jinja, and renderers in Python."""
TEMPLATES = (
    *CHAT_TEMPLATES,
    "alpaca",
    "alpaca_newline",
    "completion",
    "classification",
    "sequence_classification",
    "text",
    "dart-math/qa",
    "dart-math/alpaca",
    "dart-math/wizardmath-cot",
    "dart-math/deepseekmath",
    "dart-math/deepseekmath-tool",
    "dart-math/xwinmath",
    "dart-math/mammoth2-cot",
    "dart-math/llama3-math",
)
"""Built-in templates; `packhouse.render` has them."""


def is_chat(template: str) -> bool:
    """Return True if a template renders conversations: all but those of constants around contents.

    Example:
        >>> is_chat("chat"), is_chat("mine.jinja"), is_chat("dart-math/qa"), is_chat("alpaca")
        (True, True, True, False)
    """
    return template not in TEMPLATES or template.startswith((*CHAT_TEMPLATES, "dart-math/"))


def is_renderer(template: str) -> bool:
    """Return True if a template is a renderer in Python: one of packhouse, or of a plug-in."""
    if template in TEMPLATES or template.endswith((".jinja", ".j2")):
        return template in RENDERERS
    return template in plugin_names("renderers")


_OWN_ARGUMENTS = {"messages", "add_generation_prompt", "continue_final_message"}
_MAX_ARGUMENTS = 2**16


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Refuse names that no chat template is given by a row or a recipe.

    Raises:
        ValueError: says which.
    """
    for name in arguments:
        if not name.isidentifier() or name in _OWN_ARGUMENTS or name.endswith("_token"):
            raise ValueError(f"'{name[:60]}' is no argument of a chat template")


class FormatConfig(Section):
    """How a conversation becomes text, and which of it is trained."""

    template: str = "chat"
    """`chat` (the tokenizer's own), `mistral_system` (Mistral v0.3's, with the system turn wherever
    a row has one), `alpaca`, `alpaca_newline`, `completion`, `classification`,
    `sequence_classification`, `text`, one of dart-math's (`dart-math/alpaca`, ...), a path to a
    Jinja file, or a renderer in Python: `harmony` (gpt-oss), `mistral` (tekken.json), or a
    plug-in's name."""

    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which turns are trained; `all` trains every token of the rendering. A message's own `weight`
    or `train` goes before."""

    never_train: Annotated[list[Role], Field(max_length=4)] = []
    """Roles left out of `train_on: all`: their turns, headers included, and no others."""

    reasoning: Literal["keep", "strip", "train_last"] = "keep"
    """Thinking in answers: what the template makes of it; taken out before rendering; or as the
    template has it, but trained only behind the last user turn."""

    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`; `tools` and `documents`
    are those of rows without any. A row's own (`chat_template_kwargs`, `documents`, `tools`) go
    before. Give them to `apply_chat_template` at inference as well."""

    turns: Literal["joined", "exact", "alone", "whole"] = "joined"
    """How the answers of a conversation become records. `joined`: an answer joins the record before
    it if its prompt at inference continues that record, text of the template aside; else it starts
    a new one. `exact`: it joins only if the prompt is that record, byte for byte. `alone`: one
    record per answer. `whole`: one rendering per row, whatever inference would send."""

    stop_tokens: Annotated[list[str], Field(max_length=16)] = []
    """Control tokens at which generation stops. By default those of `generation_config.json` and
    the tokenizer's EOS; if none follows an answer, the one that the template writes after each."""

    thought_end: str | None = None
    """Text between reasoning and answer, for templates that never write reasoning (DeepSeek R1:
    `"\\n</think>\\n\\n"`)."""

    call_ids: Literal["functions"] | None = None
    """`functions`: number tool calls as `functions.NAME:N`, the only ids that Kimi models write."""

    system: str | None = None
    """System prompt put before conversations that have none."""

    prompt: str | None = None
    """Classification: text with `{text}` that asks for the label."""

    @field_validator("template")
    @classmethod
    def _is_known(cls, template: str, info: ValidationInfo) -> str:
        """In a file, an unknown name is a mistake; in a run form it may be the name of a place."""
        is_file = info.context == IN_A_FILE
        is_path = template.endswith((".jinja", ".j2"))
        if is_file and template not in TEMPLATES and not is_path and not is_renderer(template):
            known = [*TEMPLATES, *plugin_names("renderers"), "a path to a .jinja or .j2 file"]
            raise PydanticCustomError("literal_error", "no such template", {"expected": str(known)})
        return template

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_json(cls, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Names that a template may have, and values that JSON has; in one order."""
        check_arguments(arguments)
        for name in ("tools", "documents"):
            items = arguments.get(name, [])
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise ValueError(f"'{name}' are no list of objects")
        try:
            text = json.dumps(dict(sorted(arguments.items())), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are no JSON: {error}") from None
        if len(text) > _MAX_ARGUMENTS:
            raise ValueError(f"the arguments have over {_MAX_ARGUMENTS:,} characters of JSON")
        ordered: dict[str, Any] = json.loads(text)
        return ordered

    @field_validator("never_train")
    @classmethod
    def _in_order(cls, roles: list[Role]) -> list[Role]:
        return sorted(set(roles))  # the same roles are the same recipe

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.chat_template_kwargs and self.template in set(TEMPLATES) - set(CHAT_TEMPLATES):
            raise ValueError(
                f"chat_template_kwargs are for chat templates, and template is {self.template}"
            )
        if self.never_train and self.train_on != "all":
            raise ValueError(
                f"never_train takes roles out of train_on: all, and train_on is {self.train_on}"
            )
        if len({*self.never_train, "tool", "system"}) == 4:
            raise ValueError("never_train leaves neither user nor assistant turns to train")
        if self.turns == "alone" and self.train_on == "all":
            raise ValueError("turns: alone trains one answer in each record: not train_on: all")
        if self.reasoning == "train_last" and self.train_on == "all":
            raise ValueError("reasoning: train_last leaves thinking out: not train_on: all")
        return self


class TokenizeConfig(Section):
    """How text becomes ids."""

    encoder: Literal["auto", "hf", "fast"] = "auto"
    """`auto` uses the fast encoder where it reproduced HF's ids, else HF. Never changes the ids."""

    pipeline: PipelineChoice | None = None
    """Which pipeline gives the ids if the tokenizer's class builds another one than tokenizer.json
    has: that of the `file`, or of the `class`, as `AutoTokenizer` loads it. By default, a tokenizer
    for which the two give different ids is refused: choose the one that inference uses."""

    control_text: Literal["text", "allow", "quarantine"] = "text"
    """Control-token text inside contents: keep as ordinary text, allow as control token, or bad."""

"""The sections that decide what becomes of one row: `validate`, `format`, `tokenize`."""

from typing import Annotated, Literal

from pydantic import Field

from packhouse.recipe.section import Section

__all__ = ["FormatConfig", "TokenizeConfig", "ValidateConfig"]


class ValidateConfig(Section):
    """What makes a row bad, and how many bad rows are too many."""

    max_quarantined: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of rows that may be quarantined before the run fails."""

    max_row_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20
    """Bytes of one raw row; longer rows are quarantined unparsed."""

    max_chars: Annotated[int, Field(gt=0)] = 1_000_000
    """Characters of one message; longer ones are quarantined before the tokenizer sees them."""

    allow_ends_on_user: bool = False
    """Keep conversations that end on a user turn (the open question is not trained)."""


class FormatConfig(Section):
    """How a conversation becomes text, and which of it is trained."""

    template: str = "chat"
    """`alpaca`, `chat` (the tokenizer's own), `completion`, `classification`,
    `sequence_classification`, `text`, or a path to a Jinja file."""

    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which turns are trained; `all` trains every token of the rendering."""

    system: str | None = None
    """System prompt put before conversations that have none."""

    prompt: str | None = None
    """Classification: text with `{text}` that asks for the label."""


class TokenizeConfig(Section):
    """How text becomes ids."""

    encoder: Literal["auto", "hf", "fast"] = "auto"
    """`auto` uses the fast encoder where it reproduced HF's ids, else HF. Never changes the ids."""

    control_text: Literal["text", "allow", "quarantine"] = "text"
    """Control-token text inside contents: keep as ordinary text, allow as control token, or bad."""

"""The `audit` section: what stops publication."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from packhouse.recipe.settings import Section, Share
from packhouse.recipe.source import SourceConfig
from packhouse.system.plugins import NameOf

OnMatch = Literal["stop", "drop", "same_side"]


QUALITY_COUNTERS = {
    "empty_answers": "have an answer that says nothing",
    "echoes": "have an answer that says the prompt again",
    "refusals": "have an answer that refuses, or speaks of itself as an AI",
    "repetition": "have an answer that repeats itself",
    "html": "hold HTML in prose",
    "mojibake": "hold text that was decoded with a wrong encoding",
    "invisible": "hold signs that are not shown, or turn the direction of text",
    "emails": "hold an e-mail address",
    "phones": "hold a phone number",
    "cards": "hold a payment card's number",
    "secrets": "hold a key or a token",
    "length_outliers": "are over 16 times as long as the median",
    "other_languages": "have answers in another language",
}
"""Counter -> what it says of rows. `docs/quality.md` defines each."""


class QualityConfig(Section):
    """What rows hold that they should not; what has a limit is a gate.

    See docs/quality.md for what each counter finds.
    """

    max_empty_answers: Share | None = None
    """Share of rows that may have an answer which says nothing: `...`, `N/A`."""

    max_echoes: Share | None = None
    """Share of rows that may have an answer which says the prompt again."""

    max_refusals: Share | None = None
    """Share of rows that may have an answer which refuses, or speaks of itself as an AI."""

    max_repetition: Share | None = None
    """Share of rows that may have an answer which repeats itself."""

    max_html: Share | None = None
    """Share of rows that may hold HTML in prose."""

    max_mojibake: Share | None = None
    """Share of rows that may hold text which was decoded with a wrong encoding."""

    max_invisible: Share | None = None
    """Share of rows that may hold signs that are not shown, or turn the direction of text."""

    max_emails: Share | None = None
    """Share of rows that may hold an e-mail address."""

    max_phones: Share | None = None
    """Share of rows that may hold a phone number."""

    max_cards: Share | None = None
    """Share of rows that may hold a payment card's number."""

    max_secrets: Share | None = None
    """Share of rows that may hold a key or a token."""

    max_length_outliers: Share | None = None
    """Share of rows that may be over 16 times as long as the median of their source."""

    languages: list[str] = []
    """Languages that answers may be in, such as `en`; they are looked at only if it names one."""

    max_other_languages: Share | None = None
    """Share of rows that may have answers in another language."""

    @model_validator(mode="after")
    def _other_than_which(self) -> Self:
        if self.max_other_languages is not None and not self.languages:
            raise ValueError("max_other_languages needs `languages`: those that answers may be in")
        return self


class AuditConfig(Section):
    """What stops publication: limits on what the tokens would teach, for each source and the whole.

    Limits decide no byte: they are part of no key, and hold at every run, cached or not.
    """

    min_answer_coverage: Share = 0.99
    """Share of the answers' bytes that must be trained (of turns that `train_on` trains)."""

    max_unterminated_turns: Share = 0.0
    """Share of trained turns without a trained end token: the model would not learn to stop."""

    max_leaked_headers: Share = 0.0
    """Share of trained turns that begin with their own header or with BOS."""

    max_missing_headers: Share = 0.0
    """Share of rows of format `tokenized` whose answer has no header before it, as others have, or
    that do not begin as the template's conversations do: the prompt was cut."""

    max_untrained_starts: Share = 0.0
    """Share of rows of format `tokenized` with an answer whose first tokens are not trained, as a
    mask that begins late leaves it. Thoughts may be left out."""

    max_leaks: Share = 0.0
    """Share of rows of format `tokenized` that read like several records and say nothing of where
    these begin, so that each would see those before it."""

    max_trained_prompts: Share = 0.0
    """Trained bytes of prompts, as a share of all trained content. Not with `train_on: all`."""

    max_untrained_rows: Share = 0.0
    """Share of rows without a trained token (rows for a classification head have none)."""

    max_untrained_packs: Share = 0.0
    """Share of packs without a trained token: their loss is NaN."""

    max_cut_sequences: Share = 0.0
    """Share of packed sequences that end on a trained token that is no end token."""

    max_double_bos: Share = 0.0
    """Share of rows with a BOS token right behind another one."""

    max_missing_bos: Share = 0.0
    """Share of rows that lack the BOS which the tokenizer itself would put."""

    max_double_ends: Share = 0.0
    """Share of rows with an end token right behind the same one."""

    max_unknown_tokens: Share = 0.01
    """Share of tokens that are unknown to the tokenizer."""

    max_duplicates: Share = 0.3
    """Share of rows that repeat an earlier one exactly."""

    benchmarks: list[SourceConfig] = []
    """Files of benchmarks that must not be trained; unlike the limits, part of the version."""

    benchmark_ngram: Annotated[int, Field(ge=5, le=100)] = 13
    """Words in a row that a row shares with a benchmark to count as contaminated."""

    on_match: OnMatch = "stop"
    """What becomes of contaminated rows: `stop` publishes none of the version if they are too many;
    `drop` leaves them out; `same_side` puts them, and all rows of their groups, into eval, which is
    the benchmark's side. Unlike the limits, part of the version."""

    max_contaminated: Share = 0.0
    """Share of rows that may be contaminated and trained."""

    quality: QualityConfig | None = None
    """Count what rows hold that they should not, and limit it; `quality: {}` counts all. Takes
    about a fifth of a run's time. That it counts is part of the version, its limits are not."""

    checks: list[Annotated[str, NameOf("checks")]] = []
    """Names of plug-ins that look at every sound row; like benchmarks, part of the version."""

    max_failed_checks: Share = 0.0
    """Share of rows that each check may find fault with."""

"""The `audit` section: limits that stop a version from being published."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from packhouse.recipe.sections import Section, Share, SourceConfig
from packhouse.system.plugins import NameOf

OnMatch = Literal["stop", "drop", "same_side"]


QUALITY_COUNTERS = {
    "empty_answers": "have an answer without content",
    "echoes": "have an answer that repeats the prompt",
    "refusals": "have an answer that refuses, or mentions being an AI",
    "repetition": "have an answer that repeats itself",
    "html": "contain HTML outside code",
    "mojibake": "contain text decoded with the wrong encoding",
    "invisible": "contain invisible characters, or characters that change the text direction",
    "emails": "contain an email address",
    "phones": "contain a phone number",
    "cards": "contain a payment card number",
    "secrets": "contain an API key or access token",
    "length_outliers": "are over 16 times as long as the median",
    "other_languages": "have answers in another language",
}
"""Counter -> description, to complete "rows that ...". `docs/quality.md` defines each counter."""


class QualityConfig(Section):
    """Limits on quality problems; the version is not published if one is exceeded.

    docs/quality.md defines each counter.
    """

    max_empty_answers: Share | None = None
    """Maximum share of rows with an empty answer, such as `...` or `N/A`."""

    max_echoes: Share | None = None
    """Maximum share of rows with an answer that repeats the prompt."""

    max_refusals: Share | None = None
    """Maximum share of rows with an answer that refuses, or mentions being an AI."""

    max_repetition: Share | None = None
    """Maximum share of rows with an answer that repeats itself."""

    max_html: Share | None = None
    """Maximum share of rows with HTML in prose."""

    max_mojibake: Share | None = None
    """Maximum share of rows with text decoded with the wrong encoding."""

    max_invisible: Share | None = None
    """Maximum share of rows with invisible characters, or characters that change the text
    direction."""

    max_emails: Share | None = None
    """Maximum share of rows with an email address."""

    max_phones: Share | None = None
    """Maximum share of rows with a phone number."""

    max_cards: Share | None = None
    """Maximum share of rows with a payment card number."""

    max_secrets: Share | None = None
    """Maximum share of rows with a key or a token."""

    max_length_outliers: Share | None = None
    """Maximum share of rows over 16 times as long as the median of their source."""

    languages: list[str] = []
    """Expected languages of answers, such as `en`. If empty, languages are not detected."""

    max_other_languages: Share | None = None
    """Maximum share of rows with answers in another language."""

    @model_validator(mode="after")
    def _other_than_which(self) -> Self:
        if self.max_other_languages is not None and not self.languages:
            fix = "List the languages that answers may be in"
            raise ValueError(f"max_other_languages is set without `languages`. {fix}")
        return self


class AuditConfig(Section):
    """Limits on token and mask errors, for each source and for the whole dataset.

    A version that exceeds a limit is not published. Limits do not affect the output or any cache
    key; they are checked in every run, even if all steps are cached.
    """

    min_answer_coverage: Share = 0.99
    """Minimum share of answer bytes that are trained, over the turns that `train_on` selects."""

    max_unterminated_turns: Share = 0.0
    """Maximum share of trained turns without a trained end token. Without it, the model does not
    learn to stop."""

    max_leaked_headers: Share = 0.0
    """Maximum share of trained turns whose trained part includes their header or BOS."""

    max_missing_headers: Share = 0.0
    """Maximum share of rows of format `tokenized` whose prompt was cut: the answer lacks the
    header that other answers have, or the row does not begin as the template's conversations
    do."""

    max_untrained_starts: Share = 0.0
    """Maximum share of rows of format `tokenized` with an answer whose first tokens are not
    trained, because the mask begins too late. Reasoning may be untrained."""

    max_leaks: Share = 0.0
    """Maximum share of rows of format `tokenized` that look like several records but do not mark
    where each begins, so that each record would attend to the ones before it."""

    max_trained_prompts: Share = 0.0
    """Maximum share of trained bytes that belong to prompts. Not checked with `train_on: all`."""

    max_untrained_rows: Share = 0.0
    """Maximum share of rows without a trained token. Not checked for sequence classification."""

    max_untrained_packs: Share = 0.0
    """Maximum share of packs without a trained token; their loss is NaN."""

    max_cut_sequences: Share = 0.0
    """Maximum share of packed sequences that end with a trained token other than an end token."""

    max_double_bos: Share = 0.0
    """Maximum share of rows with two consecutive BOS tokens."""

    max_missing_bos: Share = 0.0
    """Maximum share of rows without the BOS token that the tokenizer itself would add."""

    max_double_ends: Share = 0.0
    """Maximum share of rows with two consecutive identical end tokens."""

    max_unknown_tokens: Share = 0.01
    """Maximum share of tokens that are the tokenizer's unknown token."""

    max_duplicates: Share = 0.3
    """Maximum share of rows that repeat an earlier one exactly."""

    benchmarks: list[SourceConfig] = []
    """Benchmark files whose content must not be trained. Unlike the limits, this is part of the
    version."""

    # As many as for GPT-3. GSM8K's own train file has 10 rows that share 13 words with its test
    # file.
    benchmark_ngram: Annotated[int, Field(ge=5, le=100)] = 13
    """Number of consecutive words shared with a benchmark that make a row contaminated."""

    on_match: OnMatch = "stop"
    """How to handle contaminated rows. `stop`: publish nothing if there are more than
    `max_contaminated`. `drop`: leave them out. `same_side`: move them and all rows of their groups
    to eval, where the benchmark belongs. Unlike the limits, this is part of the version."""

    max_contaminated: Share = 0.0
    """Maximum share of rows that are contaminated and trained."""

    quality: QualityConfig | None = None
    """Count and limit quality problems; `quality: {}` counts all without limits. Takes about a
    fifth of a run's time. Turning it on changes the version; its limits do not."""

    checks: list[Annotated[str, NameOf("checks")]] = []
    """Names of plug-ins that check every valid row. Like benchmarks, this is part of the
    version."""

    max_failed_checks: Share = 0.0
    """Maximum share of rows that each check may reject."""

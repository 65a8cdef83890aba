"""tokenize: convert text to token ids with trained ranges."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow.compute as pc

from packhouse import tokenize
from packhouse.read import SourceShard
from packhouse.recipe import Recipe, TokenizeConfig
from packhouse.records.table_schemas import REFUSED, read_table
from packhouse.run.step import Job, JobContext, Step
from packhouse.run.steps.format import FORMAT, FormatParameters
from packhouse.run.steps.validate import VALIDATE, ShardCounts, write_quarantined
from packhouse.store.manifest import TokenizerFacts
from packhouse.tokenize import run_tokenizer, tokenize_shard
from packhouse.tokenize.tokenizer_loading import check_unchanged, tokenizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeParameters:
    """Parameters for tokenizing one shard."""

    shard: SourceShard
    """Source of the raw bytes of rejected rows; not in the key, since validate's key covers it."""
    tokenize: TokenizeConfig
    tokenizer: str
    """Fingerprint of the tokenizer."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key, without `encoder`: both give the same ids."""
        return {
            "tokenize": self.tokenize.model_dump(mode="json", exclude={"encoder"}),
            "tokenizer": self.tokenizer,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeFacts(ShardCounts):
    """Counts of a tokenized shard."""

    trained_tokens: int
    encoder: dict[str, object]
    """The encoder that was used, and why, as plain JSON."""
    tokenizer: TokenizerFacts


def job(
    recipe: Recipe, tokenizer: str, formatted: Job[FormatParameters]
) -> Job[TokenizeParameters]:
    """Return the job that tokenizes a rendered shard; `tokenizer` is a fingerprint."""
    parameters = formatted.parameters
    return TOKENIZE.job(
        TokenizeParameters(shard=parameters.shard, tokenize=recipe.tokenize, tokenizer=tokenizer),
        inputs=[formatted.ref],
        # Validate has its bad rows, and the ids of tokenized rows.
        also_reads=formatted.inputs,
        label=formatted.label,
        size=formatted.size,
    )


def compute(work: JobContext[TokenizeParameters], folder: Path) -> TokenizeFacts:
    """Write `tokenized.arrow`, and `quarantined.arrow` if nothing of a row is trained.

    Rows that came with ids keep them.
    """
    parameters, tokenizer = work.parameters, work.recipe.tokenizer
    validated, formatted = work.input(VALIDATE), work.input(FORMAT)
    path = formatted.path("formatted.arrow")
    tokens = None
    if parameters.shard.row_format == "tokenized":
        tokens = validated.path("tokens.arrow")
    call = partial(tokenize_shard, path, work.recipe, work.workspace.tokenizers, folder, tokens)
    reply = run_tokenizer(call, tokenizer, path.stat().st_size + tokenizer_bytes(tokenizer))
    # The worker read the tokenizer's files after their fingerprint became part of the key.
    check_unchanged(tokenizer, parameters.tokenizer)
    table = read_table(folder / "tokenized.arrow")
    refused = read_table(folder / REFUSED)
    return TokenizeFacts(
        rows_in=formatted.facts.rows_out,
        rows_out=table.num_rows,
        **write_quarantined(work, folder, refused, [validated, formatted]),
        notes=dict(sorted(reply["notes"].items())),
        tokens_out=pc.sum(table["num_tokens"]).as_py() or 0,
        trained_tokens=pc.sum(table["num_trained"]).as_py() or 0,
        encoder=reply["encoder"],
        tokenizer=TokenizerFacts(**reply["tokenizer"]),
    )


TOKENIZE = Step(
    name="tokenize",
    title="Convert text to token ids with trained ranges.",
    version=f"1.{tokenize.VERSION}",
    libraries=("numpy", "pyarrow"),
    facts=TokenizeFacts,
    compute=compute,
    contracts={"tokenized.arrow": "tokenized", "quarantined.arrow": "quarantined"},
)

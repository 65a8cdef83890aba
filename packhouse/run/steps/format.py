"""format: render conversations to text with trained spans.

If the recipe deduplicates, the side step `FINGERPRINTS` computes fingerprints of each shard's
conversations, and pack compares them. It has its own key, so fingerprints are shared by all
tokenizers and pack sizes, and appending to a file recomputes only the new shard.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from packhouse import render, tokenize
from packhouse.errors import ConfigError
from packhouse.pack import dedup
from packhouse.read import SourceShard
from packhouse.read.source_files import source_name
from packhouse.recipe import DedupConfig, FormatConfig, Recipe, TokenizeConfig
from packhouse.recipe.sections import TEMPLATES, is_renderer
from packhouse.records.preference_pairs import REJECTED, both_sides
from packhouse.records.record_ids import num_rows, rewrites
from packhouse.records.table_schemas import REFUSED, read_table, write_table
from packhouse.registry import function_of_addon
from packhouse.render.jinja_sandbox import pinned_date
from packhouse.render.renderer import cuts_windows, max_record_tokens, render_shard, run_template
from packhouse.run.step import AnyJob, Job, JobContext, Step
from packhouse.run.step_cache import Receipt
from packhouse.run.steps.validate import (
    VALIDATE,
    ShardCounts,
    ValidateFacts,
    ValidateParameters,
    write_quarantined,
)
from packhouse.system.plugins import plugin_key, plugin_names
from packhouse.system.wording import near_files, near_name
from packhouse.tokenize.tokenizer_loading import check_unchanged, tokenizer_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatParameters:
    """Parameters for rendering one shard."""

    shard: SourceShard
    """Source of the raw bytes of rejected rows; not in the key, since validate's key covers it."""
    format: FormatConfig
    template: str
    """Name of the template, or the sha256 of its file."""
    date: str | None
    """Date that the template may print, or None if it prints none. Text changes with the date."""
    label_names: list[str] | None
    tokenizer: str
    """Fingerprint of the tokenizer, including its chat template and control tokens."""
    seq_len: int | None
    """Window size in tokens; None if conversations are not cut into windows."""
    tokenize: TokenizeConfig
    """Used to count the tokens of windows. Its `pipeline` may decide whether BOS is added."""
    max_tokens: int | None
    """Result of `max_record_tokens`."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that goes into the key."""
        parts: dict[str, Any] = {
            "format": self.format.model_dump(mode="json", exclude={"template"}),
            "template": self.template,
            "date": self.date,
            "label_names": self.label_names,
            "tokenizer": self.tokenizer,
            "pipeline": self.tokenize.pipeline,
            # Rounded up to a power of two, at least 8,192, so that one format step serves many pack
            # sizes.
            "max_tokens": self.max_tokens,
        }
        if is_renderer(self.template):
            parts |= plugin_key("renderers", self.template, ())
        if self.seq_len is not None:
            parts["window"] = {
                "seq_len": self.seq_len,
                "tokenize": self.tokenize.model_dump(mode="json", exclude={"encoder"}),
                "engine": f"1.{tokenize.VERSION}",
            }
        return parts


def job(
    recipe: Recipe,
    tokenizer: str,
    validated: Job[ValidateParameters],
    benchmarks: Mapping[str, object],
) -> Job[FormatParameters]:
    """Return the job that renders a validated shard.

    Its side jobs, for pack, fingerprint the conversations if the recipe deduplicates, and search
    them for benchmarks if it names any.

    Args:
        recipe: recipe of the run.
        tokenizer: fingerprint of the tokenizer.
        validated: job that reads the shard.
        benchmarks: result of `benchmarks_of`.
    """
    parameters, template = validated.parameters, recipe.format.template
    folder = tokenizer_folder(recipe.tokenizer)
    is_file = template.endswith((".jinja", ".j2"))
    names = [Path(template)] if is_file else [folder / "chat_template.jinja"]
    if template == "chat":
        # Older versions of transformers write the template into this file.
        names.append(folder / "tokenizer_config.json")
    # Only templates that print the date depend on it: the others stay cached the next day.
    prints_date = any(name.is_file() and b"strftime_now" in name.read_bytes() for name in names)
    made = FORMAT.job(
        FormatParameters(
            shard=parameters.shard,
            format=recipe.format,
            template=_template_identity(template),
            date=pinned_date().date().isoformat() if prints_date else None,
            label_names=parameters.source.label_names,
            tokenizer=tokenizer,
            seq_len=recipe.pack.seq_len if cuts_windows(recipe) else None,
            tokenize=recipe.tokenize,
            max_tokens=max_record_tokens(recipe),
        ),
        inputs=[validated.ref],
        label=validated.label,
        size=validated.size,
    )
    side_jobs: list[AnyJob] = []
    if dedup.needs_fingerprints(recipe.dedup):
        # Rewritten conversations are in `examples.arrow` of format, so its key must decide;
        # otherwise validate's key does, and fingerprints are shared by all templates.
        is_rewritten = cuts_windows(recipe) or rewrites(recipe.format)
        decides, read = (made, validated) if is_rewritten else (validated, made)
        prints, label = FingerprintParameters(dedup=recipe.dedup), validated.label
        side_jobs.append(
            FINGERPRINTS.job(prints, [decides.ref], also_reads=[read.ref], label=label)
        )
    if benchmarks:
        search = function_of_addon("benchmark_job")
        side_jobs.append(search(benchmarks, validated.ref, validated.label, validated.size))
    return replace(made, side_jobs=tuple(side_jobs))


def _template_identity(template: str) -> str:
    if not template.endswith((".jinja", ".j2")):
        if template not in TEMPLATES and not is_renderer(template):
            known = (*TEMPLATES, *plugin_names("renderers"))
            raise ConfigError(
                f"format.template '{template}' does not exist{near_name(template, known) or '.'} "
                f"Use {', '.join(known)}, or a .jinja or .j2 file."
            )
        return template
    path = Path(template)
    if not path.is_file():
        near = near_files(template, ".jinja", ".j2")
        raise ConfigError(
            f"format.template: no file at '{template}'{near}{'' if near[-1:] == '?' else '.'} "
            f"Built-in templates are {', '.join(TEMPLATES)}."
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def compute(work: JobContext[FormatParameters], folder: Path) -> ShardCounts:
    """Write `formatted.arrow`, and `quarantined.arrow` if the template rejects a row.

    For pairs, `rejected.arrow` holds the texts of the rejected answers, row by row. If either side
    is bad, the whole pair is quarantined.

    If records differ from the validated rows (rows were split, or reasoning was stripped),
    `examples.arrow` holds the conversation of each record for the audit and deduplication.
    """
    parameters, recipe = work.parameters, work.recipe
    validated = work.input(VALIDATE)
    path = validated.path("validated.arrow")
    rows_in = validated.facts.rows_out
    if parameters.shard.row_format == "tokenized":  # the rows came with ids, so no template is used
        texts = function_of_addon("text_of_given")(read_table(path))
        write_table(folder / "formatted.arrow", texts)
        return ShardCounts(rows_in=rows_in, rows_out=rows_in, notes={})
    tokenizers = work.workspace.tokenizers
    call = partial(render_shard, path, recipe, parameters.label_names, tokenizers, folder)
    reply = run_template(call, recipe, max(work.job.size, path.stat().st_size))
    check_unchanged(recipe.tokenizer, parameters.tokenizer)
    if _template_identity(recipe.format.template) != parameters.template:
        raise ConfigError(
            f"format.template '{recipe.format.template}' changed during the run, so its output "
            "was discarded. Run again."
        )
    formatted = read_table(folder / "formatted.arrow")
    added, dropped = Counter(reply["added"]), dict[str, int]()
    if left_out := reply["notes"].get("answers_too_long", 0):
        added["turns"] += left_out
        dropped["over_seq_len"] = left_out
    return ShardCounts(
        rows_in=rows_in,
        rows_out=formatted.num_rows,
        added=dict(added),
        dropped=dropped,
        **write_quarantined(work, folder, read_table(folder / REFUSED), [validated]),
        notes=dict(sorted(reply["notes"].items())),
        stop_tokens=reply["stop_tokens"],
        rows_rendered=num_rows(formatted),
    )


FORMAT = Step(
    name="format",
    title="Render conversations to text with trained spans.",
    version=f"1.{render.VERSION}",
    libraries=("jinja2", "pyarrow"),
    facts=ShardCounts,
    compute=compute,
    contracts={
        "formatted.arrow": "formatted",
        "rejected.arrow": "formatted",
        "examples.arrow": "validated",
        "quarantined.arrow": "quarantined",
    },
)


def conversations(
    validated: Receipt[ValidateFacts], formatted: Receipt[ShardCounts], *, whole_pairs: bool = False
) -> pa.Table:
    """Return the conversations that a shard's texts were rendered from.

    For pairs, these are the chosen ones; with `whole_pairs`, each has the messages of both sides.
    """
    if "examples.arrow" in formatted.files:
        return read_table(formatted.path("examples.arrow"))
    table = read_table(validated.path("validated.arrow"))
    if whole_pairs and REJECTED in validated.files:
        return both_sides(table, read_table(validated.path(REJECTED)))
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class FingerprintParameters:
    """Parameters for fingerprinting conversations."""

    dedup: DedupConfig

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key, without the policies."""
        is_near = self.dedup.near != "ignore"
        names = {"near_unit", "near_ngram", "near_permutations"} if is_near else set()
        settings = {"is_near": is_near, **self.dedup.model_dump(mode="json", include=names)}
        return {"dedup": settings, **dedup.near_libraries(self.dedup)}


@dataclass(frozen=True, kw_only=True, slots=True)
class FingerprintFacts:
    """Number of fingerprinted conversations."""

    rows: int


def _describe(work: JobContext[FingerprintParameters], folder: Path) -> FingerprintFacts:
    """Write `fingerprints.arrow`, one row per conversation or pair."""
    rows = conversations(work.input(VALIDATE), work.input(FORMAT), whole_pairs=True)
    # A shard has one source; its settings are in validate's key.
    sources = rows["source"].unique().to_pylist()
    names = {source_name(source): source.label_names for source in work.recipe.sources}
    label_names = names.get(sources[0].partition("/")[0]) if sources else None
    table = dedup.fingerprint_table(rows, work.parameters.dedup, label_names)
    write_table(folder / "fingerprints.arrow", table)
    return FingerprintFacts(rows=rows.num_rows)


FINGERPRINTS = Step(
    name="fingerprints",
    title="Fingerprint conversations for deduplication.",
    version=f"1.{dedup.VERSION}",
    libraries=("numpy", "pyarrow"),
    facts=FingerprintFacts,
    compute=_describe,
)

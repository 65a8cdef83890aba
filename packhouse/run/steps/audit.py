"""audit: measure what the tokens of shards and all records would teach a model.

One job checks one aspect: a shard from its rows to its tokens, the prompts of its answers, the
quality of its texts, a plug-in's check, or repetition among all records. After an append only the
new shard is audited, and a new version of the audit does not tokenize anything again. The files
step audits packs. Publish adds up the results.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from packhouse import auditing
from packhouse.auditing import shard_audit
from packhouse.auditing.inference_prompts import check_prompts, combine_inference, has_prompts
from packhouse.auditing.token_checks import read_sides
from packhouse.recipe import Recipe
from packhouse.records.preference_pairs import REJECTED
from packhouse.records.table_schemas import read_table
from packhouse.registry import function_of_addon
from packhouse.render.renderer import run_template
from packhouse.run.moved_shards import Move, moved_places
from packhouse.run.packs_and_records import read_records
from packhouse.run.step import Job, JobContext, Step
from packhouse.run.steps.files import FILES
from packhouse.run.steps.format import FORMAT, FormatParameters
from packhouse.run.steps.pack import PACK, PackParameters
from packhouse.run.steps.tokenize import TOKENIZE, TokenizeParameters
from packhouse.run.steps.validate import VALIDATE, ValidateParameters
from packhouse.system.plugins import find_plugin, plugin_key

Of = Literal["shard", "inference", "quality", "records", "check"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditParameters:
    """Parameters of one audit job."""

    of: Of
    label_names: list[str] | None = None
    """Label names of the shard's source. Not in the key, because format's key covers them."""
    check: str | None = None
    """Name of the plug-in that checks the rows of a shard."""
    languages: Sequence[str] = ()
    """Languages that the recipe names; if there are any, the languages of answers are counted."""
    date: str | None = None
    """Date printed by the template, if any. Not in the key, because format's key covers it."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key."""
        plugin = {} if self.check is None else plugin_key("checks", self.check, ())
        return {"of": self.of, **plugin, **_language_key(self.languages)}


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditFacts:
    """Findings of one audit job."""

    of: Of
    found: dict[str, object]
    """Counts and worst rows, as plain JSON; see `packhouse.auditing`."""


def checks_of(recipe: Recipe) -> dict[str, object]:
    """Return the JSON of plug-in checks and quality counters for keys; empty if there are none."""
    names = sorted(set(recipe.audit.checks))
    checks = {"checks": [plugin_key("checks", name, ()) for name in names]} if names else {}
    quality = recipe.audit.quality
    return checks | ({"quality": True, **_language_key(quality.languages)} if quality else {})


def _language_key(languages: Sequence[str]) -> dict[str, Any]:
    """Return the JSON of the language counter for keys; empty if languages are not counted."""
    return function_of_addon("language_key")(languages) if languages else {}


def jobs(
    validate: Sequence[Job[ValidateParameters]],
    format_: Sequence[Job[FormatParameters]],
    tokenize: Sequence[Job[TokenizeParameters]],
    pack: Job[PackParameters],
    recipe: Recipe,
) -> Iterator[Job[AuditParameters]]:
    """Yield the jobs that audit shards and all records."""
    for validated, formatted, tokenized in zip(validate, format_, tokenize, strict=True):
        others, label, size = [validated.ref, formatted.ref], tokenized.label, validated.size
        audit = partial(AUDIT.job, inputs=[tokenized.ref], also_reads=others, size=size)
        names = validated.parameters.source.label_names
        yield audit(AuditParameters(of="shard", label_names=names), label=label)
        is_given = validated.parameters.shard.row_format == "tokenized"
        if has_prompts(recipe.format) and not is_given:
            date = formatted.parameters.date
            yield audit(AuditParameters(of="inference", date=date), label=f"prompts of {label}")
    config = recipe.audit
    if quality := config.quality:
        parameters = AuditParameters(of="quality", languages=quality.languages)
        for job in validate:
            yield AUDIT.job(parameters, [job.ref], label=f"quality of {job.label}", size=job.size)
    for name, job in product(sorted(set(config.checks)), validate):
        parameters = AuditParameters(of="check", check=name)
        yield AUDIT.job(parameters, [job.ref], label=f"{name} in {job.label}", size=job.size)
    yield AUDIT.job(AuditParameters(of="records"), [pack.ref], label="records")


def compute(work: JobContext[AuditParameters], folder: Path) -> AuditFacts:
    """Return the findings; no file is written."""
    parameters = work.parameters
    found: dict[str, Any]
    match parameters.of:
        case "shard" if "tokens.arrow" in work.input(VALIDATE).files:  # the rows came with ids
            tokens = read_table(work.input(TOKENIZE).path("tokenized.arrow"))
            given = work.recipe, work.load_tokenizer(), work.workspace.tokenizers
            found = function_of_addon("audit_given")(tokens, *given)
        case "shard":
            found = shard_audit.audit_shard(
                read_sides(*_rendered_files(work), _rejected_files(work)),
                work.load_tokenizer(),
                work.recipe.format,
                parameters.label_names,
                # Tokenize compared every token with the text, which takes as long as encoding (20
                # ns per token). If all were equal, the audit compares one slice of eight.
                are_exact="inexact_round_trip" not in work.input(TOKENIZE).facts.notes,
            )
        case "inference":
            call = partial(
                check_prompts,
                *_rendered_files(work),
                # If rows were rewritten, the conversations of the rejected answers are not stored.
                None if work.recipe.format.reasoning == "strip" else _rejected_files(work),
                work.recipe,
                parameters.date,
                work.workspace.tokenizers,
            )
            found = run_template(call, work.recipe, work.job.size)
            found["source"] = work.input(VALIDATE).facts.origin.source
        case "quality":
            count_quality = function_of_addon("count_quality")
            rows = read_table(work.input(VALIDATE).path("validated.arrow"))
            found = count_quality(rows, languages=bool(parameters.languages))
        case "check":
            assert parameters.check is not None
            rows = read_table(work.input(VALIDATE).path("validated.arrow"))
            found = shard_audit.run_check(find_plugin("checks", parameters.check), rows)
        case "records":
            packed, policy = work.input(PACK), work.recipe.dedup.near
            read, num_rows = partial(read_records, packed, work.workspace), packed.facts.rows_in
            found = shard_audit.audit_records(lambda names: read(columns=names), num_rows)
            if policy != "ignore":
                assert packed.facts.dedup is not None
                near = packed.facts.dedup.near
                found["near_duplicates"] = near.rows - near.dropped
                # With `keep`, the user wants near duplicates on both sides: they are not a leak.
                if policy != "keep":
                    found["both_sides"] += near.on_both_sides
    return AuditFacts(of=parameters.of, found=found)


def _rendered_files(work: JobContext[AuditParameters]) -> tuple[Path, Path, Path]:
    """Return the files of the rendered conversations, their texts and their tokens."""
    validated, formatted = work.input(VALIDATE), work.input(FORMAT)
    is_rewritten = "examples.arrow" in formatted.files
    return (
        formatted.path("examples.arrow") if is_rewritten else validated.path("validated.arrow"),
        formatted.path("formatted.arrow"),
        work.input(TOKENIZE).path("tokenized.arrow"),
    )


def _rejected_files(work: JobContext[AuditParameters]) -> tuple[Path, Path] | None:
    """Return the files of the rejected conversations of pairs and their texts."""
    validated, formatted = work.input(VALIDATE), work.input(FORMAT)
    if REJECTED not in formatted.files:
        return None
    return validated.path(REJECTED), formatted.path(REJECTED)


def _moved(facts: AuditFacts, move: Move) -> AuditFacts:
    return AuditFacts(of=facts.of, found=moved_places(facts.found, move.rows))


AUDIT = Step(
    name="audit",
    title="Measure what the tokens would teach a model.",
    version=f"1.{auditing.VERSION}",
    libraries=("numpy", "pyarrow"),
    facts=AuditFacts,
    compute=compute,
    move=_moved,
)


def combine_audits(work: JobContext[Any]) -> dict[str, object]:
    """Add up the audits that the publish job reads.

    Returns:
        Plain JSON: `dataset` and `sources` (counts), `packs`, `worst` (rows by finding).
    """
    found: dict[Of, list[dict[str, Any]]] = {of: [] for of in get_args(Of)}
    for receipt in work.inputs(AUDIT):
        found[receipt.facts.of].append(receipt.facts.found)
    shards = zip(work.inputs(VALIDATE), work.inputs(TOKENIZE), found["shard"], strict=True)
    combined = shard_audit.combine(
        [(old.facts.origin.source, audited, new.facts.notes) for old, new, audited in shards]
    )
    packs: Counter[str] = Counter()
    for written in work.inputs(FILES):
        packs.update(written.facts.audit)
    if work.recipe.pack.strategy == "concat" or work.recipe.format.train_on == "all":
        # `concat` cuts on purpose, and `train_on: all` trains the text after end tokens.
        packs["cut_sequences"] = 0
    combined["packs"] = dict(packs)
    (repetition,) = found["records"]  # a single job covers the records of all shards
    sources, worst = repetition.pop("sources"), repetition.pop("worst")
    combined["dataset"] |= repetition
    for source, number in sources.items():
        combined["sources"][source]["duplicates"] = number
    if worst:
        combined["worst"]["duplicates"] = worst
    if work.recipe.audit.benchmarks:
        combined["contamination"] = function_of_addon("contamination_of")(work)
    if found["inference"]:
        combined["inference"] = combine_inference(found["inference"])
    named = [receipt.facts.origin.source for receipt in work.inputs(VALIDATE)]
    if quality := work.recipe.audit.quality:
        combined["quality"] = function_of_addon("combine_quality")(
            list(zip(named, found["quality"], strict=True)), quality.languages
        )
    if found["check"]:
        combined["checks"] = shard_audit.combine_checks(found["check"])
    return combined
